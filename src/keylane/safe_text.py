"""Text from elsewhere, made fit to be written: keys, values and errors of others in logs, records and on terminals."""

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


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters of the text, and how long it was when that is not all.

    >>> cut("abcdefgh", 3)
    'abc… (8 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def cut_bytes(content: bytes, limit: int) -> str:
    """As :func:`show_bytes`, of at most ``limit`` bytes, and how many there were when that is not all."""
    if len(content) <= limit:
        return show_bytes(content)
    head = content[:limit]
    for end in range(limit, limit - 4, -1):  # not in the middle of a character
        try:
            head[:end].decode()
        except UnicodeDecodeError:
            continue
        head = head[:end]
        break
    return f"{show_bytes(head)}… ({len(content):,} bytes)"


def valid(text: str, limit: int | None = None) -> str:
    r"""The text as UTF-8 can hold it, at most ``limit`` characters: lone surrogates become ``\udNNN``.

    JSON may hold such halves of a character, and so may whatever quotes a value.
    """
    text = text[:limit]
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()[:limit]
    return text


def printable(text: str) -> str:
    r"""The text on one line, without anything that a terminal obeys: such characters become ``\xNN``.

    That is line breaks, escape codes, also of one byte, marks that turn the direction of writing, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str, indent: str = "  ") -> str:
    """As :func:`printable`, but a text of several lines stays one; all but the first are indented.

    So what is quoted in a text never looks like a line of its own.
    """
    return f"\n{indent}".join(printable(line.expandtabs()) for line in text.split("\n"))
