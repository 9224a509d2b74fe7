"""Rejected records: records that a topic never accepts, and what a task remembers about them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError

from keylane.errors import AbortedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.engine.delivery import Delivery
    from keylane.message import Headers

RECORD_OVERHEAD_BYTES = 128
"""Bytes of a record in its batch besides key, value and headers, rounded up."""
SEND_ALONE_SECONDS = 10.0
"""For this time after a rejection every result is sent alone."""

_BATCH_HEADER_BYTES = 61
_RECORD_ERRORS = frozenset(
    (
        ClientError.MSG_SIZE_TOO_LARGE,
        ClientError.RECORD_LIST_TOO_LARGE,
        ClientError.INVALID_MSG_SIZE,
        ClientError.INVALID_MSG,
        ClientError.INVALID_RECORD,
        ClientError.INVALID_TIMESTAMP,
        ClientError.POLICY_VIOLATION,
        ClientError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRules:
    """Which records a topic accepts, by its settings. A rule that could not be read accepts everything."""

    limit: int = 0
    """``max.message.bytes``, which applies to a record and to a batch; 0 if unknown."""
    max_age_ms: float = inf
    """``message.timestamp.before.max.ms``: how far a record's timestamp may be in the past."""
    max_ahead_ms: float = inf
    """``message.timestamp.after.max.ms``: how far it may be in the future."""
    stamps: bool = False
    """Whether the topic replaces the timestamps of records with its own."""

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record that the client may send, uncompressed; 0 if unknown."""
        return max(1, self.limit - _BATCH_HEADER_BYTES) if self.limit else 0


NO_RULES = TopicRules()


def smallest_limit(*rules: TopicRules) -> int:
    """The smallest of the known limits, or 0."""
    return min((each.limit for each in rules if each.limit), default=0)


def record_size(key: bytes | None, value: bytes | None, headers: Headers | None) -> int:
    """Upper bound of a record's size in a batch of its own, uncompressed; compare it with ``max.message.bytes``."""
    size = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers or ():
        size += len(name) + len(content or b"") + 8
    return size


def is_rejection(error: Any) -> bool:
    """Whether the error is about the record or another one in its batch, so that a retry fails as well.

    Other errors, such as a missing permission or topic, concern all records and say nothing about a message.
    """
    return error.code() in _RECORD_ERRORS


class RejectedError(AbortedError):
    """The broker rejected a record, and with it the whole batch or transaction."""


class Rejections:
    """Results that the sink has rejected, remembered by a task that starts over. Used on the loop's thread.

    The client reports a whole batch as failed if the broker rejects one of its records. The messages of such a batch
    are ``suspects``: their results are sent alone from then on, so that the next rejection names one message. With
    ``delivery="exactly_once"``, ``reasons`` are the messages known to be rejected, and ``letters`` those whose dead
    letters were rejected in a transaction.
    """

    def __init__(self) -> None:
        self.suspects: set[tuple[int, int]] = set()
        self.reasons: dict[tuple[int, int], str] = {}
        self.letters: dict[tuple[int, int], str] = {}
        self.alone = False
        """With ``exactly_once``: every record of the transaction is a batch of its own."""
        self._used: set[tuple[int, int]] = set()  # their reasons failed a message in the open transaction
        self._collected: set[tuple[int, int]] = set()  # the same in the transaction that is being committed
        self._alone_until = 0.0
        self._learned = False  # something new since the task last started over

    def sends_alone(self, now: float) -> bool:
        """Whether every result is sent alone: after a rejection others may follow."""
        return now < self._alone_until

    def record_rejection(self, now: float) -> None:
        """The sink rejected a result that was sent alone."""
        self._alone_until = now + SEND_ALONE_SECONDS

    def add_suspects(self, refusals: Iterable[tuple[Delivery, Any]], now: float) -> bool:
        """Add the messages of rejected results, from failed results and their errors. True if there were any."""
        found = {(each.partition, each.offset) for each, error in refusals if is_rejection(error)}
        if found - self.suspects:
            self._learned = True
        self.suspects |= found
        if found:
            self.record_rejection(now)
        return bool(found)

    def set_reason(self, position: tuple[int, int], reason: str) -> None:
        """The result of this message was rejected, and no other: it was alone in its batch."""
        if position not in self.reasons:
            self.reasons[position] = reason
            self._learned = True

    def set_letter_reason(self, position: tuple[int, int], reason: str) -> None:
        """The dead letter of this message was rejected."""
        self._learned = self._learned or position not in self.letters
        self.letters[position] = reason

    def reason(self, partition: int, offset: int) -> str | None:
        """Why the message's result was rejected, or None. The caller fails the message with this reason."""
        reason = self.reasons.get((partition, offset))
        if reason is not None:
            self._used.add((partition, offset))
        return reason

    def collect(self, _batch: object, /) -> None:
        """A transaction collects its progress: it contains the failures whose reasons were used until now."""
        self._collected |= self._used
        self._used = set()

    def committed(self) -> None:
        """The failures are durable. If such a message runs again, the broker decides again."""
        for position in self._collected:
            self.reasons.pop(position, None)
        self._collected = set()

    def aborted(self) -> None:
        """The next transaction contains the failures."""
        self._used |= self._collected
        self._collected = set()

    def start_over(self) -> bool:
        """Send everything alone from now on. False if nothing new is known, so that starting over cannot help."""
        learned, self._learned = self._learned or not self.alone, False
        self.alone, self._used, self._collected = True, set(), set()
        return learned
