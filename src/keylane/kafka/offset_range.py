"""A stretch of a partition, read once from its beginning to its end: how a topic becomes a table."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition

from keylane.errors import BrokerError, DataLossError
from keylane.kafka.cluster import REQUEST_SECONDS, load_metadata
from keylane.kafka.partition_reader import ErrorKind, PartitionReader, classify

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from confluent_kafka import Consumer

    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.topic")

ROWS = 8_192
"""Messages handed out at once, at most."""
BYTES = 16 * 1024 * 1024
"""Bytes of keys and values handed out at once, about."""
SILENCE = 120.0
"""Seconds without a message, or a word of the client, after which reading is given up."""
SHORT = 10.0
"""Seconds after which a log that ends before the span is believed to be shorter than it was."""
_POLL = 0.1
_PART = 1_000


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets from ``start`` up to, not including, ``end``. Not every one of them need be a message."""

    topic: str
    partition: int
    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} from offset {self.start} to {self.end}"


def split(spans: Sequence[OffsetRange], parts: int) -> list[OffsetRange]:
    """The same offsets in about so many spans, at least; long ones are cut, in proportion to their lengths."""
    total = sum(map(len, spans))
    found: list[OffsetRange] = []
    for span in spans:
        pieces = min(max(1, round(len(span) * parts / total)), len(span)) if total else 1
        cuts = [span.start + len(span) * piece // pieces for piece in range(pieces + 1)]
        found += [OffsetRange(span.topic, span.partition, start, end) for start, end in pairwise(cuts)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReaderSettings:
    """How spans are read. ``committed``: only messages of committed transactions, and those of none.

    ``fail_on_loss``: whether messages that are no longer there are an error, or only a line in the log.
    """

    kafka: KafkaSettings
    group: str
    committed: bool = True
    fail_on_loss: bool = True


class RangeReader:
    """Reads spans one after another, each with :meth:`read`; not for several threads."""

    def __init__(self, settings: RangeReaderSettings) -> None:
        self._settings = settings
        self._consumer: Consumer = settings.kafka.consumer(
            settings.group,
            **{
                "isolation.level": "read_committed" if settings.committed else "read_uncommitted",
                "auto.offset.reset": "error",  # nothing is skipped without a word
                "fetch.wait.max.ms": 20,  # whoever reads to the end of a log asks for more than there is
            },
        )

    def close(self) -> None:
        """Let go of the client."""
        self._consumer.close()

    def read(self, span: OffsetRange) -> Iterator[list[Any]]:
        """The span's messages in their order, in lists of bounded size.

        Raises :class:`DataLossError` when messages are gone, :class:`BrokerError` when the topic cannot be read.
        """
        if not len(span):
            return
        load_metadata(self._consumer, span.topic)
        reading = _Reading(span, PartitionReader(self._consumer, span.topic))
        reading.assign()
        try:
            rows: list[Any] = []
            size = 0
            while reading.next < span.end:
                messages = reading.reader.read(_POLL, _PART)
                if not messages:
                    self._silent(reading)
                    continue
                found = self._sorted_out(reading, messages)
                rows += found
                size += sum(map(len, found))
                reading.look()
                if len(rows) >= ROWS or size >= BYTES:
                    yield rows
                    rows, size = [], 0
            if rows:
                yield rows
        finally:
            self._consumer.unassign()

    def _sorted_out(self, reading: _Reading, messages: list[Any]) -> list[Any]:
        """The span's messages among what came, all of which is noted."""
        end = reading.span.end
        last = messages[-1]
        # Almost always there are nothing but messages of the span, and no look at each is needed.
        if not any([message.error() for message in messages]) and last.offset() < end:  # noqa: C419 - faster
            reading.next = last.offset() + 1
            return messages
        found = []
        for message in messages:
            if message.error() is not None:
                self._heard(reading, message)
                continue
            reading.next = message.offset() + 1
            if reading.next > end:
                break
            found.append(message)
        return found

    def _silent(self, reading: _Reading) -> None:
        """Nothing came for a moment."""
        now, span, reader = time.monotonic(), reading.span, reading.reader
        if reading.next <= reading.short_at and now - reading.short_since > SHORT:
            self._lost(f"{span.topic}/{span.partition} ends at offset {reading.short_at}, not at {span.end}")
            reading.next = span.end
        else:
            reader.check_silence(
                SILENCE,
                f"{span} was not read to its end, only to offset {reading.next}",
                reader.errors.last or "is the broker there?",
            )

    def _heard(self, reading: _Reading, message: Any) -> None:
        """A report of an end, or of an offset out of range."""
        if classify(message.error()) is ErrorKind.END:
            reading.next = max(reading.next, message.offset())  # the last offsets may be no messages
            if reading.next < reading.span.end:
                reading.short_since, reading.short_at = time.monotonic(), message.offset()
        else:
            self._out_of_range(reading)

    def _out_of_range(self, reading: _Reading) -> None:
        """The log does not reach from where reading stands: it begins later, or ends before."""
        span = reading.span
        place = TopicPartition(span.topic, span.partition)
        try:
            begin, end = self._consumer.get_watermark_offsets(place, timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise BrokerError(f"{span}: {error.args[0].str()}") from error
        if reading.next < begin:
            gone = min(begin, span.end)
            self._lost(f"{span.topic}/{span.partition}: offsets {reading.next} to {gone - 1} are gone")
            reading.next = gone
        elif reading.next > end:
            self._lost(f"{span.topic}/{span.partition} ends at offset {end}, before {reading.next}")
            reading.next = span.end
        if reading.next < span.end:
            reading.assign()

    def _lost(self, what: str) -> None:
        lost(what, fail=self._settings.fail_on_loss)


_spare: dict[RangeReaderSettings, RangeReader] = {}
"""At most one, that nobody uses: a process that is used again need not connect again."""


@contextmanager
def span_reader(settings: RangeReaderSettings) -> Iterator[RangeReader]:
    """A reader, to be used by one thread at a time; kept for the next one when nothing went wrong."""
    reader = _spare.pop(settings, None) or RangeReader(settings)
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    while _spare:
        _spare.popitem()[1].close()
    _spare[settings] = reader


def lost(what: str, *, fail: bool) -> None:
    """Messages are gone. Raises :class:`DataLossError`, or says so in the log and goes on."""
    if fail:
        raise DataLossError(
            f"{what}: retention took them, or the topic was made anew. "
            "With the option failOnDataLoss=false reading goes on with what is there"
        )
    log.warning("%s; going on with what is there (failOnDataLoss=false)", what)


class _Reading:
    """How far the reading of a span is."""

    __slots__ = ("_seen", "next", "reader", "short_at", "short_since", "span")

    def __init__(self, span: OffsetRange, reader: PartitionReader) -> None:
        self.span = span
        self.reader = reader
        self.next = span.start
        self.short_at = -1  # where the log's end was met before the span's
        self.short_since = 0.0
        self._seen = span.start

    def look(self) -> None:
        """Note whether it has moved."""
        if self.next > self._seen:
            self._seen = self.next
            self.reader.progressed()

    def assign(self) -> None:
        """Read from where it is."""
        self.reader.assign({self.span.partition: self.next})
