"""Keys on the command line: text, or ``hex:…`` for bytes that are none."""

from __future__ import annotations

import shlex

from keylane.core.text import HEX as _HEX
from keylane.core.text import show_bytes
from keylane.errors import SettingsError

KEYLESS = "-"


def parse_key(text: str) -> bytes:
    """The key that is meant: ``hex:`` and hex digits, or the text itself. Raises SettingsError for other digits."""
    if not text.startswith(_HEX):
        return text.encode("utf-8", "surrogateescape")  # as the shell handed it over
    try:
        return bytes.fromhex(text.removeprefix(_HEX))
    except ValueError:
        raise SettingsError(
            f"key {text!r}: after 'hex:' come hex digits, two for each byte, such as hex:00ff"
        ) from None


def show_key(key: bytes | None) -> str:
    """As :func:`parse_key` takes it: text, or ``hex:…`` when that would not look like what it is; ``-`` for no key."""
    if key is None:
        return KEYLESS
    text = show_bytes(key)
    return _HEX + key.hex() if text == KEYLESS else text


def printable(text: str) -> str:
    r"""The text without anything that would move a terminal's cursor: such characters become ``\xNN``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_argument(key: bytes) -> str:
    """The key as it is typed into a shell."""
    text = show_key(key)
    return shlex.quote(_HEX + key.hex() if text.startswith("-") else text)  # a dash would begin an option
