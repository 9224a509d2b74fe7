"""Log in memory: topics, partitions and records in the form of Kafka's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.message import PlainRecord
from keylane.offsets.murmur2 import murmur2, partition_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MemoryLog", "MemoryRecord", "murmur2", "partition_of"]


class MemoryRecord(PlainRecord):
    """One record; a :class:`keylane.message.Record`. Made by :meth:`MemoryLog.append`."""

    __slots__ = ()

    def headers(self) -> Sequence[tuple[str, bytes | None]] | None:
        """A new list of the headers; None without headers, as in confluent-kafka."""
        return list(self._headers or ()) or None


class MemoryLog:
    """Topics with ``partitions`` partitions each; a topic exists from its first use on.

    A record with a key goes to the partition that Java clients choose; keyless records go to each partition in turn.

    >>> log = MemoryLog(partitions=3)
    >>> log.append("chat.in", key=b"anna", value=b"hello")
    <MemoryRecord chat.in/1@0 key=b'anna'>
    """

    def __init__(self, *, partitions: int = 1) -> None:
        if partitions < 1:
            raise ValueError(f"partitions must be at least 1, got {partitions}")
        self.partitions = partitions
        self._topics: dict[str, list[list[MemoryRecord]]] = {}
        self._ends: dict[tuple[str, int], int] = {}
        self._turns: dict[str, int] = {}

    def append(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | None = None,
        partition: int | None = None,
    ) -> MemoryRecord:
        """Append a record and return it. ``timestamp`` is in milliseconds; ``partition`` overrules the key.

        Raises ValueError for a partition that does not exist.
        """
        if partition is None:
            partition = self.choose(topic, key)
        lane = self._partition(topic, partition)
        record = MemoryRecord(
            topic=topic,
            partition=partition,
            offset=self.end(topic, partition),
            key=key,
            value=value,
            headers=tuple(headers),
            timestamp=timestamp,
        )
        lane.append(record)
        self._ends[topic, partition] = record.offset() + 1
        return record

    def choose(self, topic: str, key: bytes | None) -> int:
        """The partition for the next record with this key."""
        if key is not None:
            return partition_of(key, self.partitions)
        turn = self._turns.get(topic, 0)
        self._turns[topic] = turn + 1
        return turn % self.partitions

    def grow(self, partitions: int) -> None:
        """Raise the number of partitions of every topic. Raises ValueError for a lower number."""
        if partitions < self.partitions:
            raise ValueError(f"partitions must be at least {self.partitions}, as now, got {partitions}")
        self.partitions = partitions
        for topic in self._topics.values():
            topic += [[] for _ in range(partitions - len(topic))]

    def skip(self, topic: str, partition: int, offsets: int = 1) -> None:
        """Leave a gap in the offsets before the next record, as compaction and transaction markers do."""
        self._partition(topic, partition)
        self._ends[topic, partition] = self.end(topic, partition) + offsets

    def recreate(self, topic: str) -> None:
        """Delete the topic and create it again: it is empty, and offsets begin at 0."""
        self._topics.pop(topic, None)
        for partition in range(self.partitions):
            self._ends.pop((topic, partition), None)

    def records(self, topic: str, partition: int | None = None, *, start: int = 0) -> list[MemoryRecord]:
        """The records of one partition, or of all partitions in turn, from offset ``start`` on."""
        if partition is not None:
            return [record for record in self._partition(topic, partition) if record.offset() >= start]
        return [
            record for each in range(self.partitions) for record in self.records(topic, each, start=start)
        ]

    def end(self, topic: str, partition: int) -> int:
        """The offset of the next record."""
        return self._ends.get((topic, partition), 0)

    def _partition(self, topic: str, partition: int) -> list[MemoryRecord]:
        if not 0 <= partition < self.partitions:
            raise ValueError(
                f"partition must be 0 to {self.partitions - 1} in topic {topic!r}, got {partition}"
            )
        return self._topics.setdefault(topic, [[] for _ in range(self.partitions)])[partition]
