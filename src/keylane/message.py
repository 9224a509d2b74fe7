"""The message that a stage gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import TypeVar

    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")  # Python 3.11 has no defaults; only type checkers ask

Headers = list[tuple[str, bytes | None]]

EVENT_ID = "event-id"
EVENT_TYPE = "event-type"
EVENT_VERSION = "event-version"
ORIGIN_TIME = "origin-time"
TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
"""The trace context of W3C."""
CREATE_TIME = 1
"""Kafka's code for a timestamp that the producer has set."""


class Record(Protocol):
    """A record of a log, in the shape of confluent-kafka's ``Message``, which the in-memory log shares."""

    def topic(self) -> str:
        """The topic it is in."""

    def partition(self) -> int:
        """The partition it is in."""

    def offset(self) -> int:
        """Its offset in the partition."""

    def key(self) -> bytes | None:
        """The key, None for a keyless record."""

    def value(self) -> bytes | None:
        """The value, None for a tombstone."""

    def headers(self) -> Sequence[tuple[str, bytes | None]] | None:
        """Names and values in their order, or None."""

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds; kind 0 when there is none."""


class PlainRecord:
    """A record made of given values."""

    __slots__ = ("_headers", "_key", "_offset", "_partition", "_timestamp", "_topic", "_value")

    def __init__(
        self,
        *,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp: int | None = None,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._key = key
        self._value = value
        self._headers = headers
        self._timestamp = timestamp

    def topic(self) -> str:
        """The topic it is in."""
        return self._topic

    def partition(self) -> int:
        """The partition it is in."""
        return self._partition

    def offset(self) -> int:
        """Its offset in the partition."""
        return self._offset

    def key(self) -> bytes | None:
        """The key, None for a keyless record."""
        return self._key

    def value(self) -> bytes | None:
        """The value, None for a tombstone."""
        return self._value

    def headers(self) -> Sequence[tuple[str, bytes | None]] | None:
        """Names and values in their order, or None."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds; ``(0, 0)`` without a timestamp."""
        return (0, 0) if self._timestamp is None else (CREATE_TIME, self._timestamp)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._topic}/{self._partition}@{self._offset} key={self._key!r}>"


def last(headers: Sequence[tuple[str, bytes | None]], name: str) -> bytes | None:
    """The value of the last header of this name that has one, or None."""
    for found, value in reversed(headers):
        if found == name and value is not None:
            return value
    return None


def with_origin(message: Message, headers: Headers) -> Headers:
    """The headers of a result, and the origin time of its message where they do not have it."""
    if last(headers, ORIGIN_TIME) is not None or (at := message.origin_time) is None:
        return headers
    return [*headers, (ORIGIN_TIME, b"%d" % at)]


class Message(Generic[V]):
    """One message on its way through the stages.

    ``Message[Order]`` says to type checkers that ``value`` is an ``Order``; nothing is checked at run time.

    ``value`` is what the stage before returned; for the first stage it is the output of the app's ``decode``, or the
    bytes themselves. ``attempt`` counts the attempts of this stage at this message, from 1. Everything else is as it
    was in the source topic and is read only on access.
    """

    __slots__ = ("_headers", "_record", "attempt", "key", "offset", "partition", "value")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._headers: Headers | None = None
        self.key = record.key()
        self.value: V = record.value()  # type: ignore[assignment]  # the bytes, until they are decoded
        self.partition = record.partition()
        self.offset = record.offset()
        self.attempt = 1

    @property
    def topic(self) -> str:
        """The source topic."""
        return self._record.topic()

    @property
    def headers(self) -> Headers:
        """Names and values in their order; a name may occur more than once, a value may be None.

        Raises UnicodeDecodeError when a header's *name* is not UTF-8: the client library cannot represent it. Such a
        message becomes a dead letter at the latest when its result is written.
        """
        headers = self._headers
        if headers is None:
            headers = self._headers = list(self._record.headers() or ())
        return headers

    @property
    def timestamp(self) -> int | None:
        """Milliseconds since 1970, set by the producer or the broker; None when the record carries none."""
        kind, milliseconds = self._record.timestamp()
        return milliseconds if kind else None

    @property
    def origin_time(self) -> int | None:
        """Milliseconds since 1970: when the first message of the chain of apps that led to this one was written.

        The header ``origin-time``, or the message's own timestamp, which results take over from their message.
        """
        found = last(self.headers, ORIGIN_TIME)
        return int(found) if found is not None and found.isdigit() else self.timestamp

    @property
    def trace(self) -> dict[str, str]:
        """The headers ``traceparent`` and ``tracestate`` of W3C, for calls to other services; empty without a trace."""
        parents = [value for name, value in self.headers if name == TRACE_PARENT and value is not None]
        if len(parents) != 1:  # several are as useless as none
            return {}
        found = {TRACE_PARENT: parents[0].decode("ascii", "replace")}
        states = [value for name, value in self.headers if name == TRACE_STATE and value]
        if states:
            found[TRACE_STATE] = b",".join(states).decode("ascii", "replace")
        return found

    @property
    def event_id(self) -> str:
        """The header ``event-id``; when missing or empty, ``topic/partition/offset`` of the message."""
        return self.header(EVENT_ID) or self.default_event_id

    @property
    def type(self) -> str | None:
        """The header ``event-type``."""
        return self.header(EVENT_TYPE)

    @property
    def version(self) -> int | None:
        """The header ``event-version`` as a number. Raises ValueError if it is not a number."""
        found = self.header(EVENT_VERSION)
        return None if found is None else int(found)

    @property
    def position(self) -> str:
        """``topic/partition@offset``, as commands and logs write it: unique, and the same in every attempt."""
        return f"{self._record.topic()}/{self.partition}@{self.offset}"

    @property
    def default_event_id(self) -> str:
        """``topic/partition/offset``. It is stored in other topics: unlike :attr:`position`, its form never changes."""
        return f"{self._record.topic()}/{self.partition}/{self.offset}"

    @property
    def request_id(self) -> str:
        """32 hex digits from key and event id, the same in every attempt: for calls that must not count twice."""
        key = b"\x00" if self.key is None else b"\x01" + self.key
        return str(blake3(len(key).to_bytes(4, "little") + key + self.event_id.encode()).hexdigest(length=16))

    def header(self, name: str) -> str | None:
        r"""The last header of this name as text, or None. Invalid UTF-8 becomes ``\xNN``, so ids stay different."""
        value = last(self.headers, name)
        return None if value is None else value.decode("utf-8", "backslashreplace")

    def __repr__(self) -> str:
        return f"<Message {self.position} key={self.key!r} attempt={self.attempt}>"
