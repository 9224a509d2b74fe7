"""An event as it goes into a topic: key, value and headers in the form that apps read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from keylane.handlers.encoding import as_bytes
from keylane.message import EVENT_ID, EVENT_TYPE, EVENT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from keylane.message import Headers

    MoreHeaders = Iterable[tuple[str, str | bytes | None]] | Mapping[str, str | bytes | None]

BY_FUNCTION: Any = object()
"""Marks a key that was not given; None means a message without a key."""
KeyLike = str | bytes | int | UUID
_OWN = {EVENT_ID: "event_id", EVENT_TYPE: "type", EVENT_VERSION: "version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Ready to be sent."""

    event_id: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int
    """Milliseconds; 0: now."""

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        carried = sum(len(name) + len(content or b"") + 8 for name, content in self.headers)
        return len(self.value or b"") + len(self.key or b"") + carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a publisher makes events of values. What the functions take out of a value, a call may give instead."""

    topic: str
    key: Callable[[Any], KeyLike | None] | None
    event_id: Callable[[Any], str] | None
    type: str | Callable[[Any], str | None] | None
    version: int | Callable[[Any], int | None] | None
    encode: Callable[[Any], bytes | None]
    keyless: bool
    limit: int
    """Bytes that an event may have."""

    def event(
        self,
        value: Any,
        key: KeyLike | None,
        event_id: str | None,
        kind: str | None,
        version: int | None,
        headers: MoreHeaders,
        timestamp: int | None,
    ) -> Event:
        """Raises TypeError or ValueError for what can never be sent."""
        if key is BY_FUNCTION:
            key = self.key(value) if self.key is not None else None
        if key is None and not self.keyless:
            raise ValueError(
                f"a message for topic {self.topic!r} has no key, so nothing keeps its order: give it one with "
                "send(value, key=…) or Publisher(…, key=function); or say that none is meant: "
                "Publisher(…, keyless=True)"
            )
        if event_id is None:
            event_id = self.event_id(value) if self.event_id is not None else new_event_id()
        if kind is None:
            kind = self.type(value) if callable(self.type) else self.type
        if version is None:
            version = self.version(value) if callable(self.version) else self.version
        encoded = self.encode(value)
        if encoded is not None and not isinstance(encoded, bytes):
            raise TypeError(
                f"encode of Publisher({self.topic!r}) returned {encoded!r}; it has to be bytes, or None for a null "
                "value"
            )
        event = Event(
            event_id=event_id,
            key=None if key is None else encode_key(key),
            value=encoded,
            headers=event_headers(event_id, kind, version, headers),
            timestamp=0 if timestamp is None else int(timestamp),
        )
        if event.size > self.limit:
            raise ValueError(
                f"event {event_id} of {event.size:,} bytes is larger than topic {self.topic!r} takes "
                f"(max.message.bytes less overhead: {self.limit:,})"
            )
        return event


def new_event_id() -> str:
    """A UUID of version 7: milliseconds first, so ids sort by their time; the rest is random."""
    milliseconds = time.time_ns() // 1_000_000 & (1 << 48) - 1
    # From the operating system: a program that seeds Python's generator, as tests and training jobs do, would get the
    # same ids again, and their events would be dropped as duplicates.
    drawn = int.from_bytes(os.urandom(10), "big")
    return str(
        UUID(int=milliseconds << 80 | 7 << 76 | (drawn >> 68) << 64 | 0b10 << 62 | drawn & (1 << 62) - 1)
    )


def encode_key(key: object) -> bytes:
    """Text as UTF-8, numbers and UUIDs as their text. Raises TypeError for anything else.

    Every writer has to make the same bytes of the same key, whatever language it is written in: text is what they
    agree on.
    """
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int | UUID) and not isinstance(key, bool):
        return str(key).encode()
    raise TypeError(
        f"a key is text, bytes, a whole number or a UUID, not {key!r} ({type(key).__name__}): make one of these of it"
    )


def encode_value(value: Any) -> bytes | None:
    """None as a null value, anything else by :mod:`keylane.handlers.encoding`. Raises TypeError or ValueError."""
    if value is None:
        return None
    try:
        return as_bytes(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"a value of {type(value).__name__} is neither bytes, nor text, nor JSON: {error}. "
            "Publisher(…, encode=function) makes bytes of it your way"
        ) from error


def event_headers(
    event_id: object,
    kind: object,
    version: object,
    more: MoreHeaders,
) -> Headers:
    """The event's own headers, then the others. Raises TypeError or ValueError for what they cannot be."""
    if not isinstance(event_id, str) or not event_id:
        raise TypeError(f"an event id is text and not empty, not {event_id!r}")
    headers: Headers = [(EVENT_ID, event_id.encode())]
    if kind is not None:
        if not isinstance(kind, str) or not kind:
            raise TypeError(f"an event's type is text and not empty, not {kind!r}")
        headers.append((EVENT_TYPE, kind.encode()))
    if version is not None:
        if not isinstance(version, int) or isinstance(version, bool):
            raise TypeError(f"an event's version is a whole number, not {version!r}")
        headers.append((EVENT_VERSION, b"%d" % version))
    for name, content in more.items() if isinstance(more, Mapping) else more:
        headers.append(_header(name, content))
    return headers


def _header(name: object, content: object) -> tuple[str, bytes | None]:
    if not isinstance(name, str) or not (content is None or isinstance(content, str | bytes)):
        raise TypeError(f"a header is a name and text, bytes or None, not {name!r}: {content!r}")
    if name in _OWN:
        raise ValueError(f"the header {name!r} is the event's own: give it as {_OWN[name]}=…")
    return name, content.encode() if isinstance(content, str) else content
