"""A stretch of a partition, read once from its beginning to its end: how a topic becomes a table."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicPartition

from keylane.errors import DataLossError, KafkaError
from keylane.kafka.cluster import TIMEOUT, introduce
from keylane.kafka.fetcher import GONE, LASTING, MISSING

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
class Span:
    """The offsets from ``start`` up to, not including, ``end``. Not every one of them need be a message."""

    topic: str
    partition: int
    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} from offset {self.start} to {self.end}"


def divide(spans: Sequence[Span], parts: int) -> list[Span]:
    """The same offsets in about so many spans, at least; long ones are cut, in proportion to their lengths."""
    total = sum(map(len, spans))
    found: list[Span] = []
    for span in spans:
        pieces = min(max(1, round(len(span) * parts / total)), len(span)) if total else 1
        cuts = [span.start + len(span) * piece // pieces for piece in range(pieces + 1)]
        found += [Span(span.topic, span.partition, start, end) for start, end in pairwise(cuts)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSettings:
    """How spans are read. ``committed``: only messages of committed transactions, and those of none.

    ``fail_on_loss``: whether messages that are no longer there are an error, or only a line in the log.
    """

    kafka: KafkaSettings
    group: str
    committed: bool = True
    fail_on_loss: bool = True


class SpanReader:
    """Reads spans one after another, each with :meth:`read`; not for several threads."""

    def __init__(self, settings: SpanSettings) -> None:
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

    def read(self, span: Span) -> Iterator[list[Any]]:
        """The span's messages in their order, in lists of bounded size.

        Raises :class:`DataLossError` when messages are gone, :class:`KafkaError` when the topic cannot be read.
        """
        if not len(span):
            return
        reading = _Reading(span)
        introduce(self._consumer, span.topic)
        self._assign(span, span.start)
        try:
            rows: list[Any] = []
            size = 0
            while reading.next < span.end:
                first = self._consumer.poll(_POLL)
                if first is None:
                    self._silent(reading)
                    continue
                # Blocking for the first only: consume(n, timeout) would wait out its time-out for the rest.
                found = self._sorted_out(reading, [first, *self._consumer.consume(_PART, 0)])
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

    def _assign(self, span: Span, offset: int) -> None:
        self._consumer.assign([TopicPartition(span.topic, span.partition, offset)])

    def _silent(self, reading: _Reading) -> None:
        """Nothing came for a moment."""
        now, span = time.monotonic(), reading.span
        if reading.next <= reading.short_at and now - reading.short_since > SHORT:
            self._lost(f"{span.topic}/{span.partition} ends at offset {reading.short_at}, not at {span.end}")
            reading.next = span.end
        elif now - reading.moved > SILENCE:
            raise KafkaError(
                f"{span}: nothing came for {SILENCE:g} s, at offset {reading.next}. Is the broker there?"
            )

    def _heard(self, reading: _Reading, message: Any) -> None:
        """What the client has to say that is not a message."""
        error, span, now = message.error(), reading.span, time.monotonic()
        if error.code() == ClientError._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
            reading.next = max(reading.next, message.offset())  # the last offsets may be no messages
            if reading.next < span.end:
                reading.short_since, reading.short_at = now, message.offset()
        elif error.code() == ClientError._AUTO_OFFSET_RESET:  # noqa: SLF001
            self._out_of_range(reading)
        elif error.code() in MISSING:
            reading.missing_since = reading.missing_since or now
            if now - reading.missing_since > GONE:
                raise KafkaError(f"topic {span.topic!r} is gone: {error.str()}")
        elif error.fatal() or error.code() in LASTING:
            raise KafkaError(f"topic {span.topic!r} cannot be read: {error.str()}")

    def _out_of_range(self, reading: _Reading) -> None:
        """The log does not reach from where reading stands: it begins later, or ends before."""
        span = reading.span
        place = TopicPartition(span.topic, span.partition)
        try:
            begin, end = self._consumer.get_watermark_offsets(place, timeout=TIMEOUT)
        except KafkaException as error:
            raise KafkaError(f"{span}: {error.args[0].str()}") from error
        if reading.next < begin:
            gone = min(begin, span.end)
            self._lost(f"{span.topic}/{span.partition}: offsets {reading.next} to {gone - 1} are gone")
            reading.next = gone
        elif reading.next > end:
            self._lost(f"{span.topic}/{span.partition} ends at offset {end}, before {reading.next}")
            reading.next = span.end
        if reading.next < span.end:
            self._assign(span, reading.next)

    def _lost(self, what: str) -> None:
        lost(what, fail=self._settings.fail_on_loss)


_spare: dict[SpanSettings, SpanReader] = {}
"""At most one, that nobody uses: a process that is used again need not connect again."""


@contextmanager
def span_reader(settings: SpanSettings) -> Iterator[SpanReader]:
    """A reader, to be used by one thread at a time; kept for the next one when nothing went wrong."""
    reader = _spare.pop(settings, None) or SpanReader(settings)
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

    __slots__ = ("_seen", "missing_since", "moved", "next", "short_at", "short_since", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.next = span.start
        self.moved = time.monotonic()
        self.short_at = -1  # where the log's end was met before the span's
        self.short_since = 0.0
        self.missing_since = 0.0
        self._seen = span.start

    def look(self) -> None:
        """Note whether it has moved."""
        if self.next > self._seen:
            self._seen, self.moved, self.missing_since = self.next, time.monotonic(), 0.0
