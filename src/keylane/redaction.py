r"""Removes secrets from text: from logs, errors and JSON.

One pass over the text, in linear time: every part of it is inspected a fixed number of times, whatever it contains. A
line may quote a message that anybody wrote.

When in doubt it hides more rather than less. The value of a secret ends

* where its quotes do, if it is quoted, or where those of the whole ``'name=value'`` do. Quotes inside that are escaped
  (``\"``, also in JSON inside JSON) do not end it;
* where its brackets do, if it begins with one, or with a call: ``SecretStr('…')``;
* at the end of the line, for headers and JAAS settings, which have spaces in them;
* at the next space otherwise; closing brackets and commas before that are kept.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_NAMES = re.compile(
    r"pass(?:word|wd|phrase|code)|pwd|secret|credential|jaas|(?:api|access|private)[-_.]?key|keystore\.key|key\.pem"
    r"|token(?!s|i)|authorization|cookie"
)
"""Matches lower-case text. Any characters may follow in the same word, except for :data:`_HEADERS`."""
_HEADERS = ("authorization", "cookie")
"""A longer word with these in it is something else: ``TopicAuthorizationException``."""
_CORES = ("pass", "pwd", "secret", "credential", "jaas", "key", "token", "authorization", "cookie")
"""Every secret's name contains one of these. Most texts contain none and are not searched further."""
_WHOLE_LINE = ("jaas", *_HEADERS)

# Unbounded quantifiers are possessive, or cannot match what follows them, so there is no backtracking.
_SETTING = re.compile(
    rf"""(?P<word>{_NAMES.pattern})(?P<rest>[\w.-]*+)
         (?P<between>(?P<quote>\\*+["'])?+[\])]?+\s*+(?:=>|:=|==?|:)\s*+)?+""",
    re.VERBOSE,
)
_REST_OF_NAME = re.compile(r"[\w.-]*+")
_PAIR = re.compile(r"""\\*+["']\s*+,\s*+(?=[a-zA-Z]?\\*+["'])""")
"""Between name and value in ``('sasl.password', '…')``."""
_QUOTE = re.compile(r"""(?<!\\)(\\*+)(["'])""")
_QUOTE_BACKWARDS = re.compile(r"""(["'])(\\*+)""")
_OPENS = re.compile(r"""(?:[bB][rR]?|[rR][bB]?|[uUfF])?(\\*+)(["'])""")
_TAIL = re.compile(r"""[^\s"',;)\]}\\]\S*+|""")
"""Text directly behind a closing quote or bracket: ``"a"b``."""
_BRACKET = re.compile(r"[\w.]{0,64}[(\[{]")
_INSIDE = re.compile(r"""([(\[{])|([)\]}])|(?<!\\)(\\*+)(["'])""")
_PLAIN = re.compile(r"\S++")
_LINE = re.compile(r"[^\n]*+")
_QUOTES = ("'", '"', "\\")
_CLOSES = "\"'\\,;)]}"
_LOOK_BACK_CHARACTERS = 200
"""Characters of a name before the word that makes it a secret's name."""

_BEARER = re.compile(r"\b(Bearer|Basic)\s++[A-Za-z0-9._~+/=-]{8,}+", re.IGNORECASE)
_ADDRESS = re.compile(r"(://[^\s/:@]*+):[^\s/]*@")
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----")
_PEM_HIDDEN = f"{HIDDEN}PRIVATE-KEY{HIDDEN}"


def is_secret(name: str) -> bool:
    """True if a setting of this name must not be printed.

    >>> is_secret("sasl.password"), is_secret("sasl.username")
    (True, False)
    """
    return _NAMES.search(_lower(name)) is not None


def redact(text: str) -> str:
    """The text without the values of secrets: settings by their name, passwords in addresses, private keys.

    >>> redact("sasl.password=hunter2, sasl.username=ann")
    'sasl.password=***, sasl.username=ann'
    >>> redact("postgres://ann:hunter2@db/shop")
    'postgres://ann:***@db/shop'
    """
    if "PRIVATE KEY" in text:
        text = _without_keys(text)
    if "://" in text:
        text = _ADDRESS.sub(rf"\1:{HIDDEN}@", text)
    lower = _lower(text)
    if any(core in lower for core in _CORES):
        text = _without_values(text, lower)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def _lower(text: str) -> str:
    """Lower case of the same length: one letter's lower case has two characters."""
    return text.replace("\u0130", "i").lower()


def _without_keys(text: str) -> str:
    """Private keys, from their first line to their last; without a last one, everything that follows."""
    parts: list[str] = []
    at = 0
    while (begin := _PEM.search(text, at)) is not None:
        parts += text[at : begin.start()], _PEM_HIDDEN
        end = _PEM_END.search(text, begin.end())
        at = len(text) if end is None else end.end()
    return "".join([*parts, text[at:]])


def _without_values(text: str, lower: str) -> str:
    """Find each name once: the search continues behind its word, or behind its value."""
    parts: list[str] = []
    at = shown = 0
    while (found := _SETTING.search(lower, at)) is not None:
        word, start, begin = found["word"], found.start(), found.end()
        quotes: tuple[str, int] | None = None  # those around name and value
        named = found["between"] is not None and not (found["rest"] and word in _HEADERS)
        if not named and text[begin : begin + 1] in _QUOTES and _before(text, at, start)[0] == "(":
            pair = _PAIR.match(text, begin)
            named, begin = pair is not None, begin if pair is None else pair.end()
        elif named and found["quote"] is None:
            quotes = _before(text, at, start)[1]
        at = begin
        if named:
            value, at = _value(text, begin, quotes, whole_line=word in _WHOLE_LINE)
            parts += text[shown:begin], value
            shown = at
    return "".join([*parts, text[shown:]])


def _before(text: str, since: int, word: int) -> tuple[str, tuple[str, int] | None]:
    """The text before a name's quotes, and the quotes: which kind, behind how many backslashes."""
    before = text[max(since, word - _LOOK_BACK_CHARACTERS) : word][::-1]
    quotes = _QUOTE_BACKWARDS.match(before, _end(_REST_OF_NAME.match(before)))
    if quotes is None:
        return "", None
    return before[quotes.end() : quotes.end() + 1], (quotes[1], len(quotes[2]))


def _value(text: str, begin: int, quotes: tuple[str, int] | None, *, whole_line: bool) -> tuple[str, int]:
    """The replacement for the value that begins here, and where the text continues."""
    if quotes is not None:
        return HIDDEN, _closing(text, begin, *quotes)[0]
    opened = _OPENS.match(text, begin)
    if opened is not None:
        quote = opened[1] + opened[2]
        end = _closing(text, opened.end(), opened[2], len(opened[1]))[1]
        return f"{quote}{HIDDEN}{quote}", _end(_TAIL.match(text, end))
    if _BRACKET.match(text, begin) is not None:
        return HIDDEN, _end(_TAIL.match(text, _bracket_end(text, begin)))
    plain = (_LINE if whole_line else _PLAIN).match(text, begin)
    if plain is None or not plain[0]:
        return "", begin
    value = plain[0].rstrip(_CLOSES)
    return (HIDDEN if value else ""), begin + len(value)


def _closing(text: str, begin: int, quote: str, escapes: int) -> tuple[int, int]:
    """Where the quoted text ends, and where the text behind its quotes begins; the end of the text if they never close.

    Quotes that open behind n backslashes close behind n. An escaped quote inside has 2n + 1 of them. With fewer, it
    closes the text around.
    """
    at = begin
    while (found := _QUOTE.search(text, at)) is not None:
        at = found.end()
        slashes = len(found[1])
        if found[2] == quote and slashes >= escapes and (slashes - escapes) // (escapes + 1) % 2 == 0:
            return at - 1 - escapes, at
        if found[2] == quote and slashes < escapes:
            return found.start(), found.start()
    return len(text), len(text)


def _bracket_end(text: str, begin: int) -> int:
    """The position behind the matching closing bracket; the end of the text if there is none."""
    depth, at = 0, begin
    while (found := _INSIDE.search(text, at)) is not None:
        at = found.end()
        if found[1]:
            depth += 1
        elif found[2]:
            depth -= 1
            if depth <= 0:
                return at
        else:
            at = _closing(text, at, found[4], len(found[3]))[1]
    return len(text)


def _end(found: re.Match[str] | None) -> int:
    assert found is not None  # noqa: S101 - it matches the empty text
    return found.end()
