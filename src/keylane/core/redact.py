"""Secrets are not printed: not in logs, not in errors, not in JSON."""

from __future__ import annotations

import re

HIDDEN = "***"
_WORDS = (
    r"password|passwd|passphrase|secret|credential|jaas|api[-_.]?key|access[-_.]?key|key\.pem|token(?!s|i)"
)
_NAME = re.compile(_WORDS, re.IGNORECASE)
_SETTING = re.compile(
    rf"""(?P<name>[\w.-]*(?:{_WORDS})[\w.-]*)        # sasl.password, client_secret
         (?P<between>\\?["']?\s*(?:=>|=|:)\s*)       # also "sasl.password": in JSON
         (?P<value>\\?"(?:[^"\\]|\\[^"])*\\?"?|'(?:[^'\\]|\\.)*'?|[^\s,;&)\]}}]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@", re.IGNORECASE)
_PEM = re.compile(
    r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL | re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a setting of this name is not to be printed.

    >>> is_secret("sasl.password"), is_secret("sasl.username")
    (True, False)
    """
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """The text without the values of secrets: settings by their name, passwords in addresses, private keys.

    >>> redact("sasl.password=hunter2, sasl.username=ann")
    'sasl.password=***, sasl.username=ann'
    >>> redact("postgres://ann:hunter2@db/shop")
    'postgres://ann:***@db/shop'
    """
    if "PRIVATE KEY" in text:
        text = _PEM.sub(rf"-----BEGIN \1-----{HIDDEN}", text)
    if "://" in text:
        text = _ADDRESS.sub(rf"\1:{HIDDEN}@", text)
    if _NAME.search(text) is not None:
        text = _SETTING.sub(_hide, text)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def _hide(found: re.Match[str]) -> str:
    value = found["value"]
    quote = re.match(r"\\?[\"']", value)
    shown = f"{quote[0]}{HIDDEN}{quote[0]}" if quote else HIDDEN
    return found["name"] + found["between"] + shown
