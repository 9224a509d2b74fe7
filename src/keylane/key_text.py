"""Keys on the command line: text, or ``hex:…`` for bytes that are not text."""

from __future__ import annotations

import shlex

from keylane.errors import SettingsError
from keylane.safe_text import HEX as _HEX
from keylane.safe_text import printable, show_bytes

__all__ = ["KEYLESS", "key_argument", "parse_key", "printable", "show_key"]

KEYLESS = "-"


def parse_key(text: str) -> bytes:
    """Parse a key: ``hex:`` and hex digits, or text. Raises SettingsError for invalid digits."""
    if not text.startswith(_HEX):
        return text.encode("utf-8", "surrogateescape")  # the bytes that the shell passed
    try:
        return bytes.fromhex(text.removeprefix(_HEX))
    except ValueError:
        raise SettingsError(
            f"expected hex digits after 'hex:', two per byte, such as hex:00ff, got {text!r}"
        ) from None


def show_key(key: bytes | None) -> str:
    """Format a key for :func:`parse_key`: text, or ``hex:…`` where text would be ambiguous; ``-`` for no key."""
    if key is None:
        return KEYLESS
    text = show_bytes(key)
    return _HEX + key.hex() if text == KEYLESS else text


def key_argument(key: bytes) -> str:
    """Quote the key for a shell."""
    text = show_key(key)
    return shlex.quote(
        _HEX + key.hex() if text.startswith("-") else text
    )  # a leading dash would start an option
