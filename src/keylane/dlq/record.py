"""A dead letter, as it is read from ``<app>.dlq``, and as the message that it was."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from keylane.offsets.identity import TopicIdentity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.policies.failure_info import FailedAttempt

_CREATE_TIME = 1  # Kafka's number for a timestamp that the producer has set


class DeadLetterKind(StrEnum):
    """What became of the message's lane."""

    DEAD = "dead"
    """It went on."""
    ARCHIVED = "archived"
    """It stands still at this message, which is not done."""
    PARKED = "parked"
    """It was put aside: this message and all that stood or came behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter as it was read. ``partition`` and ``offset`` are its place in the dead-letter topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    """The message's own."""
    headers_unreadable: str | None
    topic: str
    topic_id: str
    """Kafka's id of the source topic that the message lay in; empty when it is not known."""
    cluster: str
    """The id of the cluster that it lay in; empty when it is not known."""
    source_partition: int
    source_offset: int
    timestamp: int | None
    kind: DeadLetterKind
    stage: str | None
    """None, as are error, message and traceback, when it was parked behind the one that failed."""
    error: str | None
    message: str | None
    traceback: str | None
    attempts: int
    failures: tuple[FailedAttempt, ...]
    failed_at: float | None
    park: int | None
    redrives: int
    app: str
    app_version: str | None

    @property
    def position(self) -> str:
        """``partition@offset`` in the dead-letter topic."""
        return f"{self.partition}@{self.offset}"

    @property
    def identity(self) -> TopicIdentity:
        """The topic that the message lay in: its offset means something only there."""
        return TopicIdentity(cluster=self.cluster, topic=self.topic, id=self.topic_id)

    @property
    def source(self) -> str:
        """``topic/partition@offset`` of the message in the source."""
        return f"{self.topic}/{self.source_partition}@{self.source_offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableDeadLetter:
    """What lies in a dead-letter topic and is no dead letter. ``headers`` is None when not even they can be read."""

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
class Home:
    """Whose letters a dead-letter topic holds: those of an app, about its source topic as it is now.

    Who may write into that topic may write a letter about anything. A letter counts when it is the app's, its message
    lay in the source, and in the partition that the letter lies in. Others are foreign: they are listed, with the
    reason, and never redriven. Letters about a former source, which was deleted, created again or renamed since, are
    redriven only when an operator names them one by one (``former``): they run before all that the lane has.
    """

    app: str
    source: TopicIdentity
    """Without a name it is not known: then any topic will do."""

    def check(
        self, found: DeadLetter | UnreadableDeadLetter, *, former: bool = False
    ) -> DeadLetter | UnreadableDeadLetter:
        """The letter, when it counts; else what is wrong with it."""
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
            return f"expected a letter of app {self.app!r}, found one of app {letter.app!r}"
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
                    f"expected a message of {what} {known!r}, found one of {its!r}: the source as it was before. Name "
                    "the letter by its place to redrive it all the same"
                )
        return ""


class DeadLetterMessage:
    """A letter's message as it lay in the source: a :class:`keylane.message.Record`, to be run again."""

    __slots__ = ("letter",)

    def __init__(self, letter: DeadLetter) -> None:
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
