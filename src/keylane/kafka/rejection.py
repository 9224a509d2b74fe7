"""Rejected records: what a topic never takes, whatever happens to others."""

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

RECORD_OVERHEAD = 128
"""Bytes a record takes in its batch besides key, value and headers, rounded up."""

_BATCH_HEAD = 61
CAREFUL_SECONDS = 10.0
"""For so long after a rejection every result is sent alone."""

_OF_RECORDS = frozenset(
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
    """What a topic takes, by its settings. A rule that could not be read excludes nothing."""

    limit: int = 0
    """``max.message.bytes``: of a record, and of a batch; 0 when it is not known."""
    before: float = inf
    """``message.timestamp.before.max.ms``: how much older than now a record may be."""
    after: float = inf
    """``message.timestamp.after.max.ms``: how much newer."""

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record that the client is to send, uncompressed; 0 when it is not known."""
        return max(1, self.limit - _BATCH_HEAD) if self.limit else 0


ANYTHING = TopicRules()


def smallest_limit(*rules: TopicRules) -> int:
    """The smallest limit of those that are known, or 0."""
    return min((one.limit for one in rules if one.limit), default=0)


def record_size(key: bytes | None, value: bytes | None, headers: Headers | None) -> int:
    """Bytes that a record takes in a batch of its own, uncompressed, at most: what ``max.message.bytes`` is about."""
    size = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    for name, content in headers or ():
        size += len(name) + len(content or b"") + 8
    return size


def is_rejection(error: Any) -> bool:
    """Whether it is about the record, or one that was in a batch with it: sent again it is rejected again.

    Anything else, such as a missing right or topic, is trouble of all records, and no fault of a message.
    """
    return error.code() in _OF_RECORDS


class RejectedError(AbortedError):
    """The broker rejected a record, and with it what was in its batch or transaction."""


class Rejections:
    """Results that the sink has rejected, remembered by a task that begins again. Used on the loop's thread.

    The client reports a whole batch as failed when the broker rejects one of its records. ``suspects`` are the messages
    whose results were in such a batch: their results are sent alone from then on, so that the next answer is about one
    message. ``reasons`` are those of which it is known, with ``delivery="exactly_once"``, and ``letters`` those whose
    dead letters were refused in a transaction.
    """

    def __init__(self) -> None:
        self.suspects: set[tuple[int, int]] = set()
        self.reasons: dict[tuple[int, int], str] = {}
        self.letters: dict[tuple[int, int], str] = {}
        self.alone = False
        """With ``exactly_once``: every record of the transaction is a batch of its own."""
        self._given: set[tuple[int, int]] = set()  # whose reasons were given in the open transaction
        self._collected: set[tuple[int, int]] = set()  # in the one that is being committed
        self._until = 0.0
        self._news = False

    def careful(self, now: float) -> bool:
        """Whether every result is sent alone: there was a rejection lately, and there may be others."""
        return now < self._until

    def rejected(self, now: float) -> None:
        """The sink rejected a result that was sent alone."""
        self._until = now + CAREFUL_SECONDS

    def suspect(self, refusals: Iterable[tuple[Delivery, Any]], now: float) -> bool:
        """Results that were not written, with the client's errors. Whether one of them was rejected."""
        found = {(each.partition, each.offset) for each, error in refusals if is_rejection(error)}
        if found - self.suspects:
            self._news = True
        self.suspects |= found
        if found:
            self.rejected(now)
        return bool(found)

    def name(self, position: tuple[int, int], reason: str) -> None:
        """This one was rejected, and no other: it was alone in its batch."""
        if position not in self.reasons:
            self.reasons[position] = reason
            self._news = True

    def name_letter(self, position: tuple[int, int], reason: str) -> None:
        """Its dead letter was refused."""
        self._news = self._news or position not in self.letters
        self.letters[position] = reason

    def reason(self, partition: int, offset: int) -> str | None:
        """Why this one was rejected, if it was."""
        reason = self.reasons.get((partition, offset))
        if reason is not None:
            self._given.add((partition, offset))
        return reason

    def collect(self, _batch: object, /) -> None:
        """A transaction collects its progress: it has the failures whose reasons were given until now."""
        self._collected |= self._given
        self._given = set()

    def committed(self) -> None:
        """Their failures are written down. When such a message runs again, the broker is asked again."""
        for position in self._collected:
            self.reasons.pop(position, None)
        self._collected = set()

    def aborted(self) -> None:
        """Their failures are in the next transaction."""
        self._given |= self._collected
        self._collected = set()

    def begin_again(self) -> bool:
        """Send everything alone from now on. Whether something new is known, so that beginning again makes sense."""
        news, self._news = self._news or not self.alone, False
        self.alone, self._given, self._collected = True, set(), set()
        return news
