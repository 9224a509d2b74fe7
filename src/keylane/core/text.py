"""Bytes for people: text where they are text."""

from __future__ import annotations

HEX = "hex:"


def show_bytes(content: bytes) -> str:
    """Text when it is UTF-8, can be printed and read back; otherwise ``hex:…``."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return HEX + content.hex()
    plain = text.isprintable() and text == text.strip() and text and not text.startswith(HEX)
    return text if plain else HEX + content.hex()
