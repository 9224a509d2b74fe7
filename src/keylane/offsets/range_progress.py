"""Range progress: the progress of a slot range, for partitions that several tasks share or have shared.

A range that was split from others starts with the progress of each of them, as *segments*: a segment is a run of slots
with progress of its own. The owner reads the partition once for all its segments, and merges them as soon as reading
has passed the position of each.

The state topic may contain several progress records for the same slots, from before and after a new split. The one with
the higher version counts; an owner whose range differs from its predecessors' takes the next version.

An operator may move the group's offset, or delete it. Then earlier progress no longer counts, for any range, whenever
its next owner starts: each move opens a new :class:`Generation`, and progress counts only in its own generation. The
moved offset stays unchanged until every slot has progress of the new generation. The offset that replaces it is
committed with its generation in one transaction, so that the next move is recognised as a new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from keylane import strict_json as wire
from keylane.offsets.metadata import BLOCK_BYTES_MAX, decode, encode
from keylane.offsets.offset_set import OffsetBlock, OffsetSet
from keylane.offsets.slots import ALL, Slots, slot_of
from keylane.offsets.watermark import PartitionProgress, Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from keylane.message import Record


_SEGMENTS_MAX = 1000
"""Segments in one record: one per previous owner, so there are few."""


@dataclass(frozen=True, slots=True)
class RangeSegment:
    """A run of slots with the same progress."""

    slots: Slots
    progress: PartitionProgress
    cut: bool = False
    """True if it is part of a longer segment: its pending offsets may be in others' slots, until they are read."""


class Generation(NamedTuple):
    """The move of the group's offset after which progress was written."""

    number: int
    """The number of moves that the app has followed, including this one."""
    moved: int | None
    """The offset that the group was moved to; None if its offset was deleted or never existed."""

    @classmethod
    def of(cls, found: Any) -> Generation:
        """From JSON. Raises MalformedRecordError."""
        number, moved = wire.row(found, 2)
        return cls(wire.integer(number), None if moved is None else wire.integer(moved))


NEVER_MOVED = Generation(0, None)


@dataclass(frozen=True, slots=True)
class RangeProgress:
    """The progress that an owner has persisted for its range."""

    slots: Slots
    version: int
    segments: tuple[RangeSegment, ...]
    generation: Generation = NEVER_MOVED
    """The group's generation when the owner started."""

    @property
    def watermark(self) -> int:
        """All offsets of the range below it are done."""
        return min(segment.progress.watermark for segment in self.segments)

    def encode(self, limit: int) -> bytes:
        """The value for the state topic, at most about ``limit`` bytes; the rest runs again after a restart."""
        room = limit // len(self.segments) - 100
        segments = [
            [str(segment.slots), segment.cut, segment.progress.watermark, encode(segment.progress, room)]
            for segment in self.segments
        ]
        return json.dumps([self.version, list(self.generation), segments]).encode()

    @classmethod
    @wire.decoder
    def decode(cls, slots: str, value: bytes) -> RangeProgress:
        """The reverse of :meth:`encode`. Raises MalformedRecordError."""
        version, generation, segments = wire.row(wire.loads(value), 3)
        found: list[RangeSegment] = []
        weight = 0
        for segment in wire.array(segments, _SEGMENTS_MAX):
            stretch, is_cut, watermark, text = wire.row(segment, 4)
            restored = decode(wire.integer(watermark), wire.text(text, wire.MAX_BYTES) or None)
            weight += sum(block.weight for block in restored.progress.pending.blocks)
            if weight > BLOCK_BYTES_MAX:
                raise wire.MalformedRecordError("it has more pending offsets than are ever written")
            found.append(
                RangeSegment(Slots.parse(wire.text(stretch, 20)), restored.progress, wire.boolean(is_cut))
            )
        if not found:
            raise wire.MalformedRecordError("expected at least one segment, got none")
        return cls(
            Slots.parse(slots),
            wire.integer(version),
            tuple(found),
            Generation.of(generation),
        )


def inherit(
    slots: Slots, range_progresses: Iterable[RangeProgress], otherwise: PartitionProgress
) -> tuple[RangeSegment, ...]:
    """The segments that these slots start with: for each slot the newest progress, or else ``otherwise``."""
    segments: list[RangeSegment] = []
    left = [slots]
    for record in _newest_first(range_progresses):
        for segment in record.segments:
            taken = [common for stretch in left if (common := stretch.common(segment.slots)) is not None]
            segments += [_piece(segment, stretch) for stretch in taken]
            left = [rest for stretch in left for rest in stretch.without(taken)]
    segments += [_piece(RangeSegment(ALL, otherwise), stretch) for stretch in left]
    return level(segments)


def next_version(slots: Slots, range_progresses: Iterable[RangeProgress]) -> int:
    """The version for the owner of these slots: above all that it replaces, or the same if the split is unchanged."""
    found = [record for record in range_progresses if record.slots.overlaps(slots)]
    newest = max((record.version for record in found), default=0)
    return newest if [s.slots for s in found if s.version == newest] == [slots] else newest + 1


def level(segments: Iterable[RangeSegment]) -> tuple[RangeSegment, ...]:
    """Merge neighbours with the same position, unless their pending offsets cannot be told apart."""
    found: list[RangeSegment] = []
    for segment in sorted(segments, key=lambda segment: segment.slots):
        before = found[-1] if found else None
        if before is None or before.progress.position != segment.progress.position:
            found.append(segment)
        elif before.progress == segment.progress:
            slots = Slots(before.slots.first, segment.slots.last)
            found[-1] = RangeSegment(slots, segment.progress, (before.cut or segment.cut) and slots != ALL)
        elif before.cut or segment.cut:
            found.append(segment)
        else:
            pending = _union(before.progress.pending, segment.progress.pending)
            position = segment.progress.position
            watermark = pending.blocks[0].first if len(pending) else position
            progress = PartitionProgress(watermark=watermark, position=position, pending=pending)
            found[-1] = RangeSegment(Slots(before.slots.first, segment.slots.last), progress)
    return tuple(found)


def _piece(segment: RangeSegment, slots: Slots) -> RangeSegment:
    return RangeSegment(
        slots, segment.progress, bool(segment.progress.pending) and (segment.cut or slots != segment.slots)
    )


def in_common(segments: Iterable[RangeSegment]) -> PartitionProgress:
    """The offsets that are done in all of them."""
    found = [segment.progress for segment in segments]
    pending = reduce(_union, (progress.pending for progress in found))
    return PartitionProgress(
        watermark=min(progress.watermark for progress in found),
        position=min(progress.position for progress in found),
        pending=pending,
    )


def group_watermark(range_progresses: Collection[RangeProgress]) -> int | None:
    """The offset below which every slot is done; None while there are slots without progress."""
    left, found = [ALL], []
    for record in _newest_first(range_progresses):
        for segment in record.segments:
            taken = [common for stretch in left if (common := stretch.common(segment.slots)) is not None]
            if taken:
                found.append(segment.progress.watermark)
                left = [rest for stretch in left for rest in stretch.without(taken)]
    return None if left else min(found)


def outdated(range_progresses: Collection[RangeProgress]) -> list[RangeProgress]:
    """The records that newer ones cover."""
    left, found = [ALL], []
    for record in _newest_first(range_progresses):
        if not any(stretch.overlaps(record.slots) for stretch in left):
            found.append(record)
        left = [rest for stretch in left for rest in stretch.without([record.slots])]
    return found


@dataclass(frozen=True, slots=True)
class SharedPartition:
    """One owner's part of a partition that tasks share or have shared."""

    slots: Slots
    generation: Generation
    version: int

    @classmethod
    def begin(
        cls,
        slots: Slots,
        range_progresses: Iterable[RangeProgress],
        grouped: Generation,
        *,
        ours: bool,
        offset: int | None,
    ) -> SharedPartition:
        """The part of a new owner of these slots. ``grouped`` is the generation of the app's last committed offset.

        ``offset`` is the group's current offset; ``ours`` tells whether the app committed it. If not, all owners that
        start before the app replaces it get the same generation.
        """
        generation = grouped if ours else Generation(grouped.number + 1, offset)
        counted = [record for record in range_progresses if record.generation == generation]
        return cls(slots, generation, next_version(slots, counted))

    def counted(self, range_progresses: Iterable[RangeProgress]) -> list[RangeProgress]:
        """The records written since the last move of the group."""
        return [record for record in range_progresses if record.generation == self.generation]

    def inherit(
        self, range_progresses: Iterable[RangeProgress], group: PartitionProgress
    ) -> tuple[RangeSegment, ...]:
        """The segments that the slots start with: their owners' progress in this generation, else the group's."""
        return inherit(self.slots, self.counted(range_progresses), group)

    def range_progress(self, segments: tuple[RangeSegment, ...]) -> RangeProgress:
        """The record to persist for these segments."""
        return RangeProgress(self.slots, self.version, segments, self.generation)

    def group_watermark(self, range_progresses: Iterable[RangeProgress]) -> int | None:
        """The offset to commit for the group; None while there are slots whose owner has not followed its last move."""
        return group_watermark(self.counted(range_progresses))

    def superseded(self, range_progresses: Collection[RangeProgress]) -> list[RangeProgress]:
        """The records that no longer count once the group's offset is of this generation."""
        counted = self.counted(range_progresses)
        return outdated(counted) + [record for record in range_progresses if record not in counted]


def _newest_first(range_progresses: Iterable[RangeProgress]) -> list[RangeProgress]:
    return sorted(range_progresses, key=lambda record: -record.version)


def _union(one: OffsetSet, other: OffsetSet) -> OffsetSet:
    if not one or not other or one == other:
        return one or other
    blocks = {block.number: block for block in one.blocks}
    for block in other.blocks:
        known = blocks.get(block.number)
        blocks[block.number] = (
            block if known is None else OffsetBlock.of(block.number, sorted({*known.lows(), *block.lows()}))
        )
    return OffsetSet(blocks[number] for number in sorted(blocks))


class RangeWatermark:
    """Like :class:`keylane.offsets.watermark.Watermark`, for a slot range of a partition.

    Pass every batch to :meth:`own` first, which returns the records of the range.
    """

    def __init__(
        self,
        slots: Slots,
        segments: Sequence[RangeSegment],
        slot_of: Callable[[bytes | None, int], int] = slot_of,
    ) -> None:
        self.slots = slots
        self._slot_of = slot_of
        self._cut = {segment.slots for segment in segments if segment.cut}
        self._marks = [(segment.slots, Watermark(segment.progress)) for segment in segments]
        self._ahead = max(segment.progress.position for segment in segments)  # the highest restored position
        self._batch: dict[int, int] = {}  # slots by offset, of the range's records in the last batch

    def own(self, records: Iterable[Record]) -> list[Record]:
        """The records of this batch that are in the range."""
        slot_of, first, last = self._slot_of, self.slots.first, self.slots.last
        self._batch = batch = {}
        own = []
        for record in records:
            slot = slot_of(record.key(), record.offset())
            if first <= slot <= last:
                batch[record.offset()] = slot
                own.append(record)
        return own

    @property
    def restoring(self) -> bool:
        """Whether offsets that were done before the restart can still come."""
        return self.position < self._ahead

    def wanted(self, offset: int) -> bool:
        """False if the offset, which is in the last batch, was already done and must be skipped."""
        return self._at(self._batch[offset]).wanted(offset)

    def deliver(self, offsets: Sequence[int]) -> None:
        """These offsets of the last batch were handed to their lanes."""
        if len(self._marks) == 1:
            self._marks[0][1].deliver(offsets)
            return
        for slots, mark in self._marks:
            if mine := [offset for offset in offsets if self._batch[offset] in slots]:
                mark.deliver(mine)

    def reach(self, offset: int) -> None:
        """Reading has reached ``offset``."""
        for _, mark in self._marks:
            mark.reach(offset)

    def done(self, offsets: Collection[int]) -> None:
        """The results of these offsets are durable."""
        for _, mark in self._marks:
            mark.done(offsets)

    @property
    def pending(self) -> int:
        """How many delivered offsets are not done."""
        return sum(mark.pending for _, mark in self._marks)

    @property
    def position(self) -> int:
        """The next offset to read."""
        return min(mark.position for _, mark in self._marks)

    @property
    def value(self) -> int:
        """The watermark: all offsets of the range below it are done."""
        return min(mark.value for _, mark in self._marks)

    def segments(self) -> tuple[RangeSegment, ...]:
        """The segments to persist."""
        return level(
            RangeSegment(slots, mark.progress(), slots in self._cut and mark.restoring)
            for slots, mark in self._marks
        )

    def progress(self) -> PartitionProgress:
        """The offsets that are done whatever their slot."""
        return in_common(self.segments())

    def is_done(self, slot: int, offset: int) -> bool:
        """Whether this offset, in this slot, was done before the restart."""
        return not self._at(slot).wanted(offset)

    def _at(self, slot: int) -> Watermark:
        return next(mark for slots, mark in self._marks if slot in slots)
