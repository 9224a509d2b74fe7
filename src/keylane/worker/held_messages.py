"""Messages that a task holds, by partition: accepted, evicted, done."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from keylane.offsets.pieces import BUCKET, BUCKETS
from keylane.offsets.range_progress import RangeWatermark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.kafka.fetcher import FetchedBatch, PartitionFlow
    from keylane.message import Record
    from keylane.offsets.watermark import Watermark

_OFFSET, _RECORD = attrgetter("offset"), attrgetter("record")
_LOAD_SAMPLE_MESSAGES = 16
"""One of this many messages is counted for its partition's load."""


class HeldMessages:
    """Counts the accepted and the finished messages of every partition of a task, in one place.

    A message that is done moves its partition's watermark and makes room for the fetcher. With ``exactly_once`` these
    are two moments: there is room only when the transaction is committed. An evicted message makes room at once, and
    takes it again when it is fetched again; its offset stays pending.

    Used on the loop. The fetcher's thread reads ``done``, ``bytes_done`` and ``evicted`` of the flows.
    """

    def __init__(
        self,
        flows: Mapping[int, PartitionFlow],
        watermarks: Mapping[int, Watermark | RangeWatermark],
        restored: Mapping[int, int],
        *,
        slot_of: Callable[[bytes | None, int], int],
    ) -> None:
        self._flows = dict(flows)
        self._closed: dict[int, asyncio.Event] = {}  # partitions of which nothing is accepted any more
        self._watermarks = watermarks
        self._restored = restored  # the watermarks when the task started
        self._slot_of = slot_of
        self.load: dict[int, list[int]] = {p: [0] * BUCKETS for p in flows}
        """Messages accepted in this epoch, by partition and bucket of its ring; a sample, extrapolated."""

    def accept(self, engine: Engine, batch: FetchedBatch) -> None:
        """Hand fetched messages to the engine, without those of other ranges and those already done."""
        if batch.records:  # one call for all partitions: a call for each costs three times as much
            engine.skew.arrived(list(chain.from_iterable(batch.records.values())))
        closed = engine.draining  # what arrives then is left to the next epoch
        for partition in batch.removed:
            if partition in self._closed:
                self._closed[partition].set()
        for partition, fetched in batch.records.items():
            if partition in self._closed or partition not in self._flows:
                continue
            watermark, group = self._watermarks[partition], fetched
            if isinstance(watermark, RangeWatermark):
                group = watermark.own(fetched)
                self._skip(partition, len(fetched) - len(group), _size(fetched) - _size(group))
            if group and (watermark.restoring or group[0].offset() < self._restored[partition]):
                group = self._unfinished(engine, partition, group)
            if closed:
                continue
            if group:
                self._count_load(partition, group)
                watermark.deliver([record.offset() for record in group])
                engine.accept(group)
            watermark.reach(fetched[-1].offset() + 1)
        if not closed:
            for partition, end in batch.ends.items():
                if partition in self._closed or partition not in self._flows:
                    continue
                self._watermarks[partition].reach(end)

    def add(self, partition: int, flow: PartitionFlow) -> None:
        """Accept messages of this partition too; its watermark is there."""
        self._flows[partition] = flow
        self.load[partition] = [0] * BUCKETS

    def close(self, partition: int) -> asyncio.Event:
        """Accept nothing more of this partition. The event is set when nothing more comes from the fetcher."""
        return self._closed.setdefault(partition, asyncio.Event())

    def remove(self, partition: int) -> None:
        """Another worker has this partition. Nothing of it is held any more."""
        self._closed.pop(partition, None)
        self._flows.pop(partition, None)
        self.load.pop(partition, None)

    def _unfinished(self, engine: Engine, partition: int, group: list[Record]) -> list[Record]:
        """Return the messages that are not done, and tell the engine the event ids of the others."""
        watermark, restored = self._watermarks[partition], self._restored[partition]
        wanted: list[Record] = []
        done: list[Record] = []
        for record in group:
            offset = record.offset()
            (wanted if offset >= restored and watermark.wanted(offset) else done).append(record)
        engine.note_done_before(done)
        self._skip(partition, len(done), _size(done))
        return wanted

    def _skip(self, partition: int, count: int, size: int) -> None:
        """Count messages that were fetched and never accepted."""
        flow = self._flows[partition]
        flow.done += count
        flow.bytes_done += size

    def _count_load(self, partition: int, group: list[Record]) -> None:
        load = self.load[partition]
        for record in group[::_LOAD_SAMPLE_MESSAGES]:
            load[self._slot_of(record.key(), record.offset()) // BUCKET] += _LOAD_SAMPLE_MESSAGES

    def reset_load(self) -> None:
        """A new epoch begins."""
        self.load = {p: [0] * BUCKETS for p in self.load}

    def evicted(self, partition: int, count: int, size: int) -> None:
        """Count messages of which lanes keep only the offsets; negative numbers: they were fetched again."""
        flow = self._flows.get(partition)
        if flow is None:
            return
        flow.done += count
        flow.evicted += count
        flow.bytes_done += size

    def lost(self, partition: int, offsets: Collection[int]) -> None:
        """These evicted messages are no longer in the log."""
        if partition not in self._flows:
            return
        self._watermarks[partition].done(offsets)
        self._flows[partition].done += len(offsets)

    def done(self, deliveries: Iterable[Delivery], *, make_room: bool) -> None:
        """Everything that these messages caused is durable. ``make_room``: see :meth:`make_room`."""
        for partition, group in _by_partition(deliveries).items():
            self._watermarks[partition].done(list(map(_OFFSET, group)))
            if make_room:
                self._make_room(partition, group)

    def make_room(self, deliveries: Iterable[Delivery]) -> None:
        """Nothing needs these messages any more: the fetcher may fetch others."""
        for partition, group in _by_partition(deliveries).items():
            self._make_room(partition, group)

    def _make_room(self, partition: int, group: list[Delivery]) -> None:
        flow = self._flows[partition]
        flow.done += len(group)
        flow.bytes_done += _size(map(_RECORD, group))

    @property
    def pending(self) -> int:
        """Messages accepted and not done, in memory or evicted."""
        return sum(mark.pending for mark in self._watermarks.values())

    def reached(self, until: Mapping[int, int]) -> bool:
        """Whether every partition was read up to its offset in ``until``."""
        return all(mark.position >= until[p] for p, mark in self._watermarks.items())


def _by_partition(deliveries: Iterable[Delivery]) -> Mapping[int, list[Delivery]]:
    """The hot path: one step per message, all others are in C."""
    groups: defaultdict[int, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        groups[delivery.partition].append(delivery)
    return groups


def _size(records: Iterable[Record]) -> int:
    return sum(map(len, records))  # type: ignore[arg-type]  # the client's messages have a size
