"""Offset ranges of partitions, and a reader that reads each from start to end."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition

from keylane.denial import broker_error
from keylane.errors import DataLossError
from keylane.kafka.cluster import REQUEST_SECONDS, load_metadata
from keylane.kafka.partition_reader import ErrorKind, PartitionReader, classify
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from confluent_kafka import Consumer

    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.topic")

BATCH_MESSAGES = 8_192
"""Messages in one list of :meth:`RangeReader.read`, at most."""
BATCH_BYTES = 16 * 1024 * 1024
"""Bytes of keys and values in one list, about."""
SILENCE_SECONDS = 120.0
"""Reading fails after this time without progress."""
SHORT_LOG_SECONDS = 10.0
"""A log that ends before the range counts as truncated after this time."""
_POLL_SECONDS = 0.1
_POLL_MESSAGES = 1_000


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets from ``start`` up to, but not including, ``end``. Some of them may have no message."""

    topic: str
    partition: int
    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} from offset {self.start} to {self.end}"


def split_ranges(ranges: Sequence[OffsetRange], parts: int) -> list[OffsetRange]:
    """The same offsets in about ``parts`` ranges, at least one for each range. Long ranges get more pieces."""
    total = sum(map(len, ranges))
    found: list[OffsetRange] = []
    for each in ranges:
        pieces = min(max(1, round(len(each) * parts / total)), len(each)) if total else 1
        cuts = [each.start + len(each) * piece // pieces for piece in range(pieces + 1)]
        found += [OffsetRange(each.topic, each.partition, start, end) for start, end in pairwise(cuts)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReaderSettings:
    """How ranges are read. ``committed``: leave out messages of open and aborted transactions.

    ``fail_on_loss``: whether missing messages are an error or only logged.
    """

    kafka: KafkaSettings
    group: str
    committed: bool = True
    fail_on_loss: bool = True


class RangeReader:
    """Reads ranges one after another. Used by one thread at a time."""

    def __init__(self, settings: RangeReaderSettings) -> None:
        self._settings = settings
        self._consumer: Consumer = settings.kafka.consumer(
            settings.group,
            **{
                "isolation.level": "read_committed" if settings.committed else "read_uncommitted",
                "auto.offset.reset": "error",  # so that no missing message goes unnoticed
                "fetch.wait.max.ms": 20,  # at the end of a log the broker waits this long for more
            },
        )

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def read(self, wanted: OffsetRange) -> Iterator[list[Any]]:
        """The range's messages in order, in lists of bounded size.

        Raises :class:`DataLossError` if messages are missing, :class:`BrokerError` if the topic cannot be read.
        """
        if not len(wanted):
            return
        load_metadata(self._consumer, wanted.topic)
        reading = _Reading(wanted, PartitionReader(self._consumer, wanted.topic))
        reading.assign()
        try:
            batch: list[Any] = []
            size = 0
            while reading.position < wanted.end:
                messages = reading.reader.read(_POLL_SECONDS, _POLL_MESSAGES)
                if not messages:
                    self._check_silence(reading)
                    continue
                found = self._in_range(reading, messages)
                batch += found
                size += sum(map(len, found))
                reading.note_progress()
                if len(batch) >= BATCH_MESSAGES or size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
            if batch:
                yield batch
        finally:
            self._consumer.unassign()

    def _in_range(self, reading: _Reading, messages: list[Any]) -> list[Any]:
        """The messages that are in the range. Updates the position, and handles the client's reports."""
        end = reading.wanted.end
        last = messages[-1]
        # Almost always all of them are messages of the range.
        if not any([message.error() for message in messages]) and last.offset() < end:  # noqa: C419 - a list is faster
            reading.position = last.offset() + 1
            return messages
        found = []
        for message in messages:
            if message.error() is not None:
                self._handle_report(reading, message)
                continue
            reading.position = message.offset() + 1
            if reading.position > end:
                break
            found.append(message)
        return found

    def _check_silence(self, reading: _Reading) -> None:
        now, wanted, reader = time.monotonic(), reading.wanted, reading.reader
        if reading.position <= reading.short_end and now - reading.short_since > SHORT_LOG_SECONDS:
            self._report_loss(
                f"{wanted.topic}/{wanted.partition} ends at offset {reading.short_end}, not at {wanted.end}"
            )
            reading.position = wanted.end
        else:
            reader.check_silence(
                SILENCE_SECONDS,
                f"{wanted} was not read to its end, only to offset {reading.position}",
                reader.errors.last or "is the broker there?",
            )

    def _handle_report(self, reading: _Reading, message: Any) -> None:
        """An end of the partition, or an offset out of range."""
        if classify(message.error()) is ErrorKind.END:
            reading.position = max(reading.position, message.offset())  # the last offsets may have no message
            if reading.position < reading.wanted.end:
                reading.short_since, reading.short_end = time.monotonic(), message.offset()
        else:
            self._out_of_range(reading)

    def _out_of_range(self, reading: _Reading) -> None:
        """The log does not contain the position: it begins later or ends earlier."""
        wanted = reading.wanted
        place = TopicPartition(wanted.topic, wanted.partition)
        try:
            begin, end = self._consumer.get_watermark_offsets(place, timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise broker_error(str(wanted), error.args[0], on_topic(wanted.topic, Operation.READ)) from error
        if reading.position < begin:
            gone = min(begin, wanted.end)
            self._report_loss(
                f"{wanted.topic}/{wanted.partition}: offsets {reading.position} to {gone - 1} are gone"
            )
            reading.position = gone
        elif reading.position > end:
            self._report_loss(
                f"{wanted.topic}/{wanted.partition} ends at offset {end}, before {reading.position}"
            )
            reading.position = wanted.end
        if reading.position < wanted.end:
            reading.assign()

    def _report_loss(self, what: str) -> None:
        report_loss(what, fail=self._settings.fail_on_loss)


_idle: dict[RangeReaderSettings, RangeReader] = {}
"""At most one idle reader, so that a process that reads again need not connect again."""


@contextmanager
def range_reader(settings: RangeReaderSettings) -> Iterator[RangeReader]:
    """A reader for one thread. It is kept for the next call unless an exception left it in an unknown state."""
    reader = _idle.pop(settings, None) or RangeReader(settings)
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    while _idle:
        _idle.popitem()[1].close()
    _idle[settings] = reader


def report_loss(what: str, *, fail: bool) -> None:
    """Messages are missing: raise :class:`DataLossError`, or log it if ``fail`` is false."""
    if fail:
        raise DataLossError(
            f"{what}: retention deleted them, or the topic was deleted and created again. "
            "With the option failOnDataLoss=false, reading continues with what is there"
        )
    log.warning("%s; continuing with what is there (failOnDataLoss=false)", what)


class _Reading:
    """How far the reading of a range is."""

    __slots__ = ("_noted", "position", "reader", "short_end", "short_since", "wanted")

    def __init__(self, wanted: OffsetRange, reader: PartitionReader) -> None:
        self.wanted = wanted
        self.reader = reader
        self.position = wanted.start
        self.short_end = -1  # the end of the log, if that is before the end of the range
        self.short_since = 0.0
        self._noted = wanted.start

    def note_progress(self) -> None:
        """Tell the reader if the position has moved."""
        if self.position > self._noted:
            self._noted = self.position
            self.reader.progressed()

    def assign(self) -> None:
        """Assign the partition at the current position."""
        self.reader.assign({self.wanted.partition: self.position})
