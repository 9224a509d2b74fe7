"""A dead letter as it was read from ``<app>.dlq``, and the message that it contains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from keylane.message import CREATE_TIME
from keylane.offsets.identity import TopicIdentity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.policies.failure_info import FailedAttempt


class DeadLetterKind(StrEnum):
    """What the failure did to the message's lane."""

    DEAD = "dead"
    """The lane continued."""
    ARCHIVED = "archived"
    """The lane is blocked at this message, which is not done."""
    PARKED = "parked"
    """The lane is parked: this message and all later ones became dead letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter. ``partition`` and ``offset`` are its own in the dead-letter topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    """The message's own headers."""
    headers_unreadable: str | None
    """Why the message's own headers are missing; None if they are not."""
    topic: str
    topic_id: str
    """Kafka's id of the message's source topic; empty if unknown."""
    cluster: str
    """The id of its cluster; empty if unknown."""
    source_partition: int
    source_offset: int
    timestamp: int | None
    kind: DeadLetterKind
    stage: str | None
    """None, like error, message and traceback, if it was parked behind the message that failed."""
    error: str | None
    message: str | None
    traceback: str | None
    attempts: int
    failures: tuple[FailedAttempt, ...]
    failed_at: float | None
    park: int | None
    """Parked only: the source offset of the message that failed."""
    redrives: int
    app: str
    app_version: str | None

    @property
    def position(self) -> str:
        """``partition@offset`` in the dead-letter topic."""
        return f"{self.partition}@{self.offset}"

    @property
    def identity(self) -> TopicIdentity:
        """The message's source topic. Its offset is only valid there."""
        return TopicIdentity(cluster=self.cluster, topic=self.topic, id=self.topic_id)

    @property
    def source(self) -> str:
        """``topic/partition@offset`` of the message in the source."""
        return f"{self.topic}/{self.source_partition}@{self.source_offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableDeadLetter:
    """A record of a dead-letter topic that is not a valid dead letter. ``headers`` is None if they cannot be read."""

    partition: int
    offset: int
    reason: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None

    @property
    def position(self) -> str:
        """``partition@offset`` in the dead-letter topic."""
        return f"{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedOrigin:
    """The origin that the dead letters of an app's topic must have: the app and its current source topic.

    Anybody with the right to write into the dead-letter topic can write a dead letter about any message. A valid one
    names the app, the source topic, and the partition that it is in itself. Others are foreign: they are listed with
    the reason and never redriven. Dead letters about a former source, which was deleted, created again or renamed, are
    only redriven if an operator names each of them (``former``). They run before everything else in their lane.
    """

    app: str
    source: TopicIdentity
    """Unknown if it has no name: then any topic is accepted."""

    def check(
        self, found: DeadLetter | UnreadableDeadLetter, *, former: bool = False
    ) -> DeadLetter | UnreadableDeadLetter:
        """The dead letter if its origin is the expected one, otherwise what is wrong with it.

        ``former``: accept a former source topic too.
        """
        if not isinstance(found, DeadLetter):
            return found
        reason = self._foreign(found) or ("" if former else self._former(found))
        if not reason:
            return found
        return UnreadableDeadLetter(
            partition=found.partition,
            offset=found.offset,
            reason=f"foreign: {reason}",
            key=found.key,
            value=found.value,
            headers=found.headers,
        )

    def _foreign(self, letter: DeadLetter) -> str:
        if letter.app != self.app:
            return f"expected a dead letter of app {self.app!r}, found one of app {letter.app!r}"
        if letter.source_partition != letter.partition:
            return (
                f"expected a message of partition {letter.partition}, found one of {letter.source_partition}"
            )
        return ""

    def _former(self, letter: DeadLetter) -> str:
        source = self.source
        for what, known, its in (
            ("topic", source.topic, letter.topic),
            ("cluster", source.cluster, letter.cluster),
            ("topic id", source.id, letter.topic_id),
        ):
            if known and its and known != its:
                return (
                    f"expected a message of {what} {known!r}, found one of {its!r}: the source has changed since. Name "
                    "the dead letter by its position to redrive it anyway"
                )
        return ""


class DeadLetterMessage:
    """The message of a dead letter as it was in the source, to be run again: a :class:`keylane.message.Record`."""

    __slots__ = ("letter",)

    def __init__(self, letter: DeadLetter) -> None:
        self.letter = letter

    def topic(self) -> str:
        """The source topic."""
        return self.letter.topic

    def partition(self) -> int:
        """The partition in the source topic."""
        return self.letter.source_partition

    def offset(self) -> int:
        """The offset in the source topic."""
        return self.letter.source_offset

    def key(self) -> bytes | None:
        """The key, None for a keyless message."""
        return self.letter.key

    def value(self) -> bytes | None:
        """The value, None for a tombstone."""
        return self.letter.value

    def headers(self) -> Sequence[tuple[str, bytes | None]] | None:
        """The message's own headers, without the failure's context; None if it has none."""
        return list(self.letter.headers) or None

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds; ``(0, 0)`` if the message had no timestamp."""
        at = self.letter.timestamp
        return (0, 0) if at is None else (CREATE_TIME, at)
