"""Reader of an app's dead letters in ``<app>.dlq``. Their format: :mod:`keylane.dlq.headers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.dlq.disk_table import DiskTable
from keylane.dlq.headers import dead_letter_headers, parse
from keylane.dlq.record import (
    DeadLetter,
    DeadLetterKind,
    DeadLetterMessage,
    ExpectedOrigin,
    UnreadableDeadLetter,
)
from keylane.errors import BrokerError
from keylane.kafka.client import TopicPartition
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster, load_metadata
from keylane.kafka.partition_reader import PartitionReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from keylane.kafka.settings import KafkaSettings

__all__ = [
    "DeadLetter",
    "DeadLetterKind",
    "DeadLetterMessage",
    "ExpectedOrigin",
    "NewestDeadLetters",
    "SeenDeadLetters",
    "UnreadableDeadLetter",
    "dead_letter_headers",
    "parse",
    "read_all_dead_letters",
    "read_dead_letters",
    "read_dead_letters_at",
]

SILENCE_SECONDS = 3 * REQUEST_SECONDS
"""Reading fails after this time without progress."""
_SEEK_OFFSETS = 20_000
"""Fewer offsets than these are read and dropped, because a new consumer takes longer."""


class SeenDeadLetters:
    """Recognises copies of a dead letter: a crash between writing it and committing its offset writes it again.

    A message that is redriven and fails again has another dead letter. So has one that was archived first.
    """

    def __init__(self) -> None:
        self._seen = DiskTable()

    def seen(self, letter: DeadLetter) -> bool:
        """Whether this is a copy of a dead letter that was given before."""
        return not self._seen.add(*_message(letter), letter.redrives, letter.kind.value)


class NewestDeadLetters:
    """Recognises dead letters of messages that have a newer one: they were redriven, and failed again.

    A crash between writing the newer one and recording the redrive leaves both to be redriven.
    """

    def __init__(self) -> None:
        self._redrives = DiskTable()

    def add(self, letter: DeadLetter) -> None:
        """Take note of a dead letter."""
        if letter.redrives > self._of_newest(letter):
            self._redrives.put(*_message(letter), text=str(letter.redrives))

    def replaced(self, letter: DeadLetter) -> bool:
        """Whether its message has a newer dead letter."""
        return letter.redrives < self._of_newest(letter)

    def _of_newest(self, letter: DeadLetter) -> int:
        return int(self._redrives.get(*_message(letter)) or 0)


def _message(letter: DeadLetter) -> tuple[object, ...]:
    return letter.cluster, letter.topic, letter.topic_id, letter.source_partition, letter.source_offset


def read_dead_letters(
    settings: KafkaSettings,
    topic: str,
    *,
    partitions: Iterable[int] | None = None,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    """The dead letters that are in the topic now, in order within each partition, with interleaved partitions.

    ``start``, ``end``: limit a partition to the offsets from ``start`` up to, but not including, ``end``. Commits
    nothing. Buffers 16 MB at most. The consumer is closed when the iterator is exhausted or garbage-collected.
    Raises BrokerError at once if the topic or a partition does not exist, and if the cluster does not answer.
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
            raise BrokerError(f"topic {topic!r} has no partition {partition}: the last one is {count - 1}")
    if not chosen:
        return iter(())
    start, end = start or {}, end or {}
    begins, ends = cluster.ends(topic, chosen, earliest=True), cluster.ends(topic, chosen)
    offsets = {p: range(max(begins[p], start.get(p, 0)), min(ends[p], end.get(p, ends[p]))) for p in begins}
    return _read(settings, topic, {p: wanted for p, wanted in offsets.items() if wanted}, wait=False)


def read_all_dead_letters(
    settings: KafkaSettings, topic: str, partition: int
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    """All dead letters of a partition, including those behind the start of an open transaction, which hides them.

    Waits until the transaction ends. Raises BrokerError after :data:`SILENCE_SECONDS`, and as
    :func:`read_dead_letters` does.
    """
    cluster = Cluster(settings)
    (begin,) = cluster.ends(topic, [partition], earliest=True).values()
    (end,) = cluster.ends(topic, [partition]).values()
    return _read(settings, topic, {partition: range(begin, end)} if begin < end else {}, wait=True)


def read_dead_letters_at(
    settings: KafkaSettings, topic: str, partition: int, offsets: Sequence[int]
) -> list[DeadLetter]:
    """The dead letters at these offsets of a partition, in the order of ``offsets``. Missing ones are left out."""
    wanted = sorted(offsets)
    found: dict[int, DeadLetter | None] = dict.fromkeys(offsets)
    begin = 0
    for end in range(1, len(wanted) + 1):
        if end < len(wanted) and wanted[end] - wanted[end - 1] < _SEEK_OFFSETS:
            continue
        for letter in _read(
            settings, topic, {partition: range(wanted[begin], wanted[end - 1] + 1)}, wait=False
        ):
            if letter.offset in found and isinstance(letter, DeadLetter):
                found[letter.offset] = letter
        begin = end
    return [letter for letter in found.values() if letter is not None]


def _read(
    settings: KafkaSettings, topic: str, offsets: Mapping[int, range], *, wait: bool
) -> Iterator[DeadLetter | UnreadableDeadLetter]:
    """``wait``: read to the end of the offsets, and wait for transactions that are open there."""
    if not offsets:
        return
    limits = {"queued.min.messages": 1000, "queued.max.messages.kbytes": 16_384}
    consumer = settings.consumer(topic.removesuffix(".dlq"), **limits)  # a group that the app may use
    try:
        load_metadata(consumer, topic)
        reader = PartitionReader(consumer, topic)
        reader.assign({p: wanted.start for p, wanted in offsets.items()})
        left = {p: wanted.stop for p, wanted in offsets.items()}
        hidden = ""
        while left:
            reader.check_silence(SILENCE_SECONDS, f"topic {topic!r} was not read to its end", hidden)
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
                reader.progressed()  # after the yields: the caller may have taken long
    finally:
        consumer.close()
