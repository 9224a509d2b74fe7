"""A dead letter, as it is read from ``<app>.dlq``, and as the message that it was."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.core.letter import Failed

_CREATE_TIME = 1  # Kafka's number for a timestamp that the producer has set


class Kind(StrEnum):
    """What became of the message's lane."""

    DEAD = "dead"
    """It went on."""
    ARCHIVED = "archived"
    """It stands still at this message, which is not done."""
    PARKED = "parked"
    """It was put aside: this message and all that stood or came behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter as it was read. ``partition`` and ``offset`` are its place in the dead-letter topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    """The message's own."""
    headers_unreadable: str | None
    topic: str
    source_partition: int
    source_offset: int
    timestamp: int | None
    kind: Kind
    stage: str | None
    """None, as are error, message and traceback, when it was parked behind the one that failed."""
    error: str | None
    message: str | None
    traceback: str | None
    attempts: int
    failures: tuple[Failed, ...]
    failed_at: float | None
    park: int | None
    redrives: int
    app: str
    app_version: str | None

    @property
    def position(self) -> str:
        """``partition/offset`` in the dead-letter topic."""
        return f"{self.partition}/{self.offset}"

    @property
    def source(self) -> str:
        """``partition/offset`` in the source."""
        return f"{self.source_partition}/{self.source_offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """What lies in a dead-letter topic and is no dead letter. ``headers`` is None when not even they can be read."""

    partition: int
    offset: int
    reason: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None

    @property
    def position(self) -> str:
        """``partition/offset`` in the dead-letter topic."""
        return f"{self.partition}/{self.offset}"


class LetterRecord:
    """A letter's message as it lay in the source: a :class:`keylane.message.Record`, to be run again."""

    __slots__ = ("letter",)

    def __init__(self, letter: Letter) -> None:
        self.letter = letter

    def topic(self) -> str:
        """The source topic."""
        return self.letter.topic

    def partition(self) -> int:
        """Its partition there."""
        return self.letter.source_partition

    def offset(self) -> int:
        """Its place there."""
        return self.letter.source_offset

    def key(self) -> bytes | None:
        """The key, None for a keyless message."""
        return self.letter.key

    def value(self) -> bytes | None:
        """The value, None for a tombstone."""
        return self.letter.value

    def headers(self) -> Sequence[tuple[str, bytes | None]] | None:
        """The message's own, without the failure's context; None when it has none."""
        return list(self.letter.headers) or None

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds; ``(0, 0)`` when it had none."""
        at = self.letter.timestamp
        return (0, 0) if at is None else (_CREATE_TIME, at)
