"""The dead letters of an app, read back from ``<app>.dlq``. How one lies there: :mod:`keylane.dlq.headers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.dlq.disk_table import DiskTable
from keylane.dlq.headers import dead_letter_headers, parse
from keylane.dlq.record import DeadLetter, DeadLetterKind, DeadLetterMessage, Home, UnreadableDeadLetter
from keylane.errors import BrokerError
from keylane.kafka.client import TopicPartition
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster, load_metadata
from keylane.kafka.partition_reader import PartitionReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from keylane.kafka.settings import KafkaSettings

__all__ = [
    "DeadLetter",
    "DeadLetterKind",
    "DeadLetterMessage",
    "Home",
    "SeenDeadLetters",
    "UnreadableDeadLetter",
    "dead_letter_headers",
    "parse",
    "read_dead_letters",
]

PATIENCE = 3 * REQUEST_SECONDS
"""Seconds without an answer until a reader gives up."""


class SeenDeadLetters:
    """Recognises letters that stand in the topic more than once: a crash after the letter, before its offset is done.

    A message that was redriven and died again has another letter, and so has one that was archived before it died.
    """

    def __init__(self) -> None:
        self._seen = DiskTable()

    def seen(self, letter: DeadLetter) -> bool:
        """Whether it was asked about this letter before."""
        source = letter.topic, letter.source_partition, letter.source_offset
        return not self._seen.add(*source, letter.redrives, letter.kind.value)


def read_dead_letters(
    settings: KafkaSettings,
    topic: str,
    *,
    partitions: Iterable[int] | None = None,
    start: Mapping[int, int] | None = None,
    upto: Mapping[int, int] | None = None,
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    """Dead letters that are in the topic now, in order within each partition, partitions interleaved.

    ``start`` and ``upto`` narrow a partition down to the offsets from the one, up to and without the other. Commits
    nothing. Holds some 16 MB however much is there; an iterator that is dropped lets go of its consumer.
    Raises BrokerError at once when the topic or a partition does not exist, and when there is no answer.
    """
    cluster = Cluster(settings)
    count = cluster.topics().get(topic)
    if count is None:
        owner = topic.removesuffix(".dlq")
        whose = f"app {owner!r} has no dead letters: " if owner != topic else ""
        raise BrokerError(f"{whose}topic {topic!r} does not exist at {settings.bootstrap}")
    chosen = list(range(count) if partitions is None else partitions)
    for partition in chosen:
        if not 0 <= partition < count:
            raise BrokerError(f"topic {topic!r} has no partition {partition}: its last is {count - 1}")
    if not chosen:
        return iter(())
    start, upto = start or {}, upto or {}
    begins, ends = cluster.ends(topic, chosen, earliest=True), cluster.ends(topic, chosen)
    spans = {p: range(max(begins[p], start.get(p, 0)), min(ends[p], upto.get(p, ends[p]))) for p in begins}
    return _read(settings, topic, {p: span for p, span in spans.items() if span}, wait=False)


def read_all_letters(
    settings: KafkaSettings, topic: str, partition: int
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    """Every letter in this partition now, also behind the beginning of an open transaction, which hides it.

    Waits for the transaction to end. Raises BrokerError after :data:`PATIENCE` seconds, and as
    :func:`read_dead_letters`.
    """
    cluster = Cluster(settings)
    (begin,) = cluster.ends(topic, [partition], earliest=True).values()
    (end,) = cluster.ends(topic, [partition]).values()
    return _read(settings, topic, {partition: range(begin, end)} if begin < end else {}, wait=True)


def _read(
    settings: KafkaSettings, topic: str, spans: Mapping[int, range], *, wait: bool
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    if not spans:
        return
    limits = {"queued.min.messages": 1000, "queued.max.messages.kbytes": 16_384}
    consumer = settings.consumer(topic.removesuffix(".dlq"), **limits)  # a group that the app has rights on
    try:
        load_metadata(consumer, topic)
        reader = PartitionReader(consumer, topic)
        reader.assign({p: span.start for p, span in spans.items()})
        left = {p: span.stop for p, span in spans.items()}
        hidden = ""
        while left:
            reader.check_silence(PATIENCE, f"topic {topic!r} was not read to its end", hidden)
            progressed = False
            for message in reader.read(0.5, 500):
                partition, is_end = message.partition(), message.error() is not None
                end = left.get(partition)
                if wait and is_end and end is not None and message.offset() < end:
                    hidden = f"partition {partition}: an open transaction begins at {message.offset()}"
                    continue
                progressed = True
                if end is None:
                    continue
                if is_end or message.offset() + 1 >= end:
                    del left[partition]
                    consumer.pause([TopicPartition(topic, partition)])
                if not is_end and message.offset() < end:
                    yield parse(message)
            if progressed:
                reader.progressed()  # here: the caller may have taken its time
    finally:
        consumer.close()
