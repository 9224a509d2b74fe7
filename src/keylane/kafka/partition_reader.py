"""Reader of topic partitions, with the table of client errors that all readers share."""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition

from keylane.denial import GROUP_DENIED, broker_error, is_denied
from keylane.errors import BrokerError
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Consumer

log = logging.getLogger("keylane.kafka")

MISSING_SECONDS = 30.0
"""Seconds after which a topic that the broker does not know counts as deleted."""
_WARN_EVERY_SECONDS = 10.0


class ErrorKind(Enum):
    """What an error of the client means to a reader."""

    END = "end"
    """Not an error: the end of the partition. For a ``read_committed`` reader that is the last stable offset."""
    OUT_OF_RANGE = "out_of_range"
    """The next offset is not in the log. Only clients with ``auto.offset.reset=error`` report it."""
    MISSING = "missing"
    """No answer yet: the broker does not know the topic or partition. A broker that has just restarted says so too."""
    LASTING = "lasting"
    """Ends the read at once: it needs a change of permissions or settings."""
    HARMLESS = "harmless"
    """Nothing to a reader: its group is denied, which it does not use. It assigns partitions, and commits nothing."""
    PASSING = "passing"
    """The client retries by itself: a moved leader, a lost connection, and all codes not in the table."""


_KINDS = {
    ClientError._PARTITION_EOF: ErrorKind.END,  # noqa: SLF001 - the client's public constants
    ClientError._AUTO_OFFSET_RESET: ErrorKind.OUT_OF_RANGE,  # noqa: SLF001
    ClientError.UNKNOWN_TOPIC_OR_PART: ErrorKind.MISSING,
    ClientError._UNKNOWN_TOPIC: ErrorKind.MISSING,  # noqa: SLF001
    ClientError._UNKNOWN_PARTITION: ErrorKind.MISSING,  # noqa: SLF001
}


def classify(error: Any) -> ErrorKind:
    """The kind of an error that the client reports while it reads. A fatal error is lasting, whatever its code."""
    if error.fatal():
        return ErrorKind.LASTING
    if is_denied(error):
        return ErrorKind.HARMLESS if error.code() == GROUP_DENIED else ErrorKind.LASTING
    return _KINDS.get(error.code(), ErrorKind.PASSING)


class ReadErrors:
    """Decides for each error of one topic's reader whether to raise or to wait. Used by one thread.

    Lasting errors raise :class:`BrokerError` at once, missing partitions after ``missing_seconds``. Others are logged,
    at most one in ten seconds; ``last`` is the text of the latest. With ``raises=False`` all are only logged.
    ``what`` follows the topic's name in the message of the exception.
    """

    def __init__(
        self,
        topic: str,
        *,
        missing_seconds: float = MISSING_SECONDS,
        what: str = "cannot be read",
        raises: bool = True,
    ) -> None:
        self.last = ""
        self.missing: dict[int, tuple[float, Any]] = {}
        """By partition: the time of the first report that it is missing, and the error."""
        self._topic = topic
        self._missing_seconds = missing_seconds
        self._what = what
        self._raises = raises
        self._warned = -_WARN_EVERY_SECONDS

    def handle(self, partition: int, error: Any) -> None:
        """Raise or log a missing, lasting or passing error."""
        kind, now = classify(error), time.monotonic()
        if kind is ErrorKind.HARMLESS:
            return
        self.last = error.str()
        if kind is ErrorKind.MISSING:
            self.missing.setdefault(partition, (now, error))
            if self._raises:
                self.check_missing(self._missing_seconds)
        elif kind is ErrorKind.LASTING and self._raises:
            raise self._unreadable(error)
        else:
            self.missing.pop(partition, None)
        if now - self._warned >= _WARN_EVERY_SECONDS:
            self._warned = now
            log.warning("reading continues after an error topic=%s: %s", self._topic, error.str())

    def check_missing(self, seconds: float) -> None:
        """Raise BrokerError if a partition has been missing for this time."""
        now = time.monotonic()
        for since, error in self.missing.values():
            if now - since >= seconds:
                raise self._unreadable(error)

    def answered(self, partitions: Iterable[int | None]) -> None:
        """The client returned something for these partitions, so they are not missing."""
        for partition in partitions:
            if partition is not None:
                self.missing.pop(partition, None)

    def _unreadable(self, error: Any) -> BrokerError:
        return broker_error(
            f"topic {self._topic!r} {self._what}", error, on_topic(self._topic, Operation.READ)
        )


class PartitionReader:
    """Reads partitions of one topic through a consumer that the caller creates and closes. Used by one thread.

    It does not know where a read ends; that is up to the caller. The arguments are those of :class:`ReadErrors`.
    """

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        *,
        missing_seconds: float = MISSING_SECONDS,
        what: str = "cannot be read",
        raises: bool = True,
    ) -> None:
        self.errors = ReadErrors(topic, missing_seconds=missing_seconds, what=what, raises=raises)
        self._consumer = consumer
        self._topic = topic
        self._progressed = time.monotonic()

    def assign(self, starts: Mapping[int, int]) -> None:
        """Read only these partitions, from these offsets."""
        self._consumer.assign([TopicPartition(self._topic, p, offset) for p, offset in starts.items()])
        self.progressed()

    def add(self, starts: Mapping[int, int]) -> None:
        """Read these partitions too, from these offsets."""
        self._consumer.incremental_assign(
            [TopicPartition(self._topic, p, offset) for p, offset in starts.items()]
        )

    def remove(self, partitions: Iterable[int]) -> None:
        """Do not read these partitions any more. Messages that were fetched before may still be returned."""
        self._consumer.incremental_unassign([TopicPartition(self._topic, p) for p in partitions])

    def read(self, timeout: float, max_messages: int = 1000) -> list[Any]:
        """Messages and reports of an end or an offset out of range, in the client's order; empty after the timeout.

        Raises :class:`BrokerError` for an error that ends the read.
        """
        first = self._consumer.poll(timeout)
        if first is None:
            return []
        # poll() blocks for the first message only. consume(n, timeout) would wait the whole timeout for n messages.
        found = [first, *self._consumer.consume(max_messages - 1, 0)]
        if any([message.error() for message in found]):  # noqa: C419 - a list is faster
            found = [message for message in found if message.error() is None or self._is_report(message)]
        if self.errors.missing:
            self.errors.answered([message.partition() for message in found])
        return found

    def progressed(self) -> None:
        """The read came closer to its end."""
        self._progressed = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._progressed

    def check_silence(self, seconds: float, unread: str, reason: str = "") -> None:
        """Raise BrokerError if there was no progress for this time. ``unread`` says what was not read."""
        if self.silent_seconds > seconds:
            raise BrokerError(
                f"{unread}: nothing came for {seconds:g} s ({reason or self.errors.last or 'no answer'})"
            )

    def _is_report(self, message: Any) -> bool:
        error = message.error()
        if classify(error) in {ErrorKind.END, ErrorKind.OUT_OF_RANGE}:
            return True
        self.errors.handle(message.partition(), error)
        return False
