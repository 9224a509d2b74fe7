"""How far a range is, when a partition's slots are shared out between tasks, or were.

A range that was cut out of others begins with what each of them had reached: its *strips*. Each strip is a stretch of
slots with progress of its own. The owner reads the partition once for all of them, and as soon as reading has passed
the position of each, they are one again.

Standings of the same slots may lie beside each other in the state topic, from before and after a re-cut. Of these the
one with the higher version counts; a new owner that cuts otherwise than its predecessors takes the next version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from keylane.core.pending import Block, Pending
from keylane.core.progress import decode, encode
from keylane.core.ring import ALL, Slots, slot_of
from keylane.core.watermark import Progress, Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from keylane.message import Record


@dataclass(frozen=True, slots=True)
class Strip:
    """A stretch of slots that has come to the same point."""

    slots: Slots
    progress: Progress
    cut: bool = False
    """It was cut out of a longer one: what is pending may be in the slots of others, until it is read."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What an owner has written down of its range."""

    slots: Slots
    version: int
    strips: tuple[Strip, ...]
    moved: int | None = None
    """The offset that somebody had moved the group to, when this was begun after that."""

    @property
    def watermark(self) -> int:
        """Everything in the range below it is done."""
        return min(strip.progress.watermark for strip in self.strips)

    def encode(self, limit: int) -> bytes:
        """For the state topic, in about ``limit`` bytes at most; what does not fit runs again after a restart."""
        room = limit // len(self.strips) - 100
        strips = [
            [str(strip.slots), strip.cut, strip.progress.watermark, encode(strip.progress, room)]
            for strip in self.strips
        ]
        return json.dumps([self.version, self.moved, strips]).encode()

    @classmethod
    def decode(cls, slots: str, value: bytes) -> Standing:
        """The reverse. Raises ValueError, TypeError."""
        version, moved, strips = json.loads(value)
        found = []
        for stretch, is_cut, watermark, text in strips:
            restored = decode(watermark, text or None)
            found.append(Strip(Slots.parse(stretch), restored.progress, bool(is_cut)))
        return cls(Slots.parse(slots), int(version), tuple(found), moved)


def inherit(slots: Slots, standings: Iterable[Standing], otherwise: Progress) -> tuple[Strip, ...]:
    """What these slots begin with: of each slot what the newest standing says, or else ``otherwise``."""
    strips: list[Strip] = []
    left = [slots]
    for standing in _newest_first(standings):
        for strip in standing.strips:
            taken = [common for stretch in left if (common := stretch.common(strip.slots)) is not None]
            strips += [_piece(strip, stretch) for stretch in taken]
            left = [rest for stretch in left for rest in stretch.without(taken)]
    strips += [_piece(Strip(ALL, otherwise), stretch) for stretch in left]
    return level(strips)


def next_version(slots: Slots, standings: Iterable[Standing]) -> int:
    """For the owner of these slots: above all that it replaces, or the same when nothing was cut otherwise."""
    found = [standing for standing in standings if standing.slots.overlaps(slots)]
    newest = max((standing.version for standing in found), default=0)
    return newest if [s.slots for s in found if s.version == newest] == [slots] else newest + 1


def level(strips: Iterable[Strip]) -> tuple[Strip, ...]:
    """Neighbours that have come to the same position are one strip, where it is known what is whose."""
    found: list[Strip] = []
    for strip in sorted(strips, key=lambda strip: strip.slots):
        before = found[-1] if found else None
        if before is None or before.progress.position != strip.progress.position:
            found.append(strip)
        elif before.progress == strip.progress:
            slots = Slots(before.slots.first, strip.slots.last)
            found[-1] = Strip(slots, strip.progress, (before.cut or strip.cut) and slots != ALL)
        elif before.cut or strip.cut:
            found.append(strip)
        else:
            pending = _union(before.progress.pending, strip.progress.pending)
            position = strip.progress.position
            watermark = pending.blocks[0].first if len(pending) else position
            progress = Progress(watermark=watermark, position=position, pending=pending)
            found[-1] = Strip(Slots(before.slots.first, strip.slots.last), progress)
    return tuple(found)


def _piece(strip: Strip, slots: Slots) -> Strip:
    return Strip(slots, strip.progress, bool(strip.progress.pending) and (strip.cut or slots != strip.slots))


def in_common(strips: Iterable[Strip]) -> Progress:
    """What is done in all of them."""
    found = [strip.progress for strip in strips]
    pending = reduce(_union, (progress.pending for progress in found))
    return Progress(
        watermark=min(progress.watermark for progress in found),
        position=min(progress.position for progress in found),
        pending=pending,
    )


def group_watermark(standings: Collection[Standing]) -> int | None:
    """Below it everything is done, in every slot; None while there are slots of which nobody has written."""
    left, found = [ALL], []
    for standing in _newest_first(standings):
        for strip in standing.strips:
            taken = [common for stretch in left if (common := stretch.common(strip.slots)) is not None]
            if taken:
                found.append(strip.progress.watermark)
                left = [rest for stretch in left for rest in stretch.without(taken)]
    return None if left else min(found)


def outdated(standings: Collection[Standing]) -> list[Standing]:
    """Those that newer ones cover."""
    left, found = [ALL], []
    for standing in _newest_first(standings):
        if not any(stretch.overlaps(standing.slots) for stretch in left):
            found.append(standing)
        left = [rest for stretch in left for rest in stretch.without([standing.slots])]
    return found


def _newest_first(standings: Iterable[Standing]) -> list[Standing]:
    return sorted(standings, key=lambda standing: -standing.version)


def _union(one: Pending, other: Pending) -> Pending:
    if not one or not other or one == other:
        return one or other
    blocks = {block.number: block for block in one.blocks}
    for block in other.blocks:
        known = blocks.get(block.number)
        blocks[block.number] = (
            block if known is None else Block.of(block.number, sorted({*known.lows(), *block.lows()}))
        )
    return Pending(blocks[number] for number in sorted(blocks))


class RangeMark:
    """What :class:`keylane.core.watermark.Watermark` is to a partition, for a range of one.

    Whoever calls it shows it every batch first: :meth:`own` says which records are the range's.
    """

    def __init__(
        self, slots: Slots, strips: Sequence[Strip], slot_of: Callable[[bytes | None, int], int] = slot_of
    ) -> None:
        self.slots = slots
        self._slot_of = slot_of
        self._cut = {strip.slots for strip in strips if strip.cut}
        self._marks = [(strip.slots, Watermark(strip.progress)) for strip in strips]
        self._ahead = max(strip.progress.position for strip in strips)  # of the one that has come furthest
        self._batch: dict[int, int] = {}  # the slots of the records that own() was shown last, by offset

    def own(self, records: Iterable[Record]) -> list[Record]:
        """Those that are in the range."""
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
        """Whether offsets that were done before the restart can still come: reading begins with the last strip."""
        return self.position < self._ahead

    def wanted(self, offset: int) -> bool:
        """False when the offset, of the batch that was shown last, was already done and must be skipped."""
        return self._at(self._batch[offset]).wanted(offset)

    def deliver(self, offsets: Sequence[int]) -> None:
        """These offsets of the batch that was shown last were handed to their lanes."""
        if len(self._marks) == 1:
            self._marks[0][1].deliver(offsets)
            return
        for slots, mark in self._marks:
            if mine := [offset for offset in offsets if self._batch[offset] in slots]:
                mark.deliver(mine)

    def reach(self, offset: int) -> None:
        """Reading has come to ``offset``."""
        for _, mark in self._marks:
            mark.reach(offset)

    def done(self, offsets: Collection[int]) -> None:
        """Everything these offsets caused is durable."""
        for _, mark in self._marks:
            mark.done(offsets)

    @property
    def pending(self) -> int:
        """How many delivered offsets are not done."""
        return sum(mark.pending for _, mark in self._marks)

    @property
    def position(self) -> int:
        """Where reading goes on."""
        return min(mark.position for _, mark in self._marks)

    @property
    def value(self) -> int:
        """The watermark: everything in the range below it is done."""
        return min(mark.value for _, mark in self._marks)

    def strips(self) -> tuple[Strip, ...]:
        """What to write down."""
        return level(
            Strip(slots, mark.progress(), slots in self._cut and mark.restoring)
            for slots, mark in self._marks
        )

    def progress(self) -> Progress:
        """What is done whatever its slot: of an offset that this says is done, it is true."""
        return in_common(self.strips())

    def is_done(self, slot: int, offset: int) -> bool:
        """Whether this offset, in this slot, was done before the restart."""
        return not self._at(slot).wanted(offset)

    def _at(self, slot: int) -> Watermark:
        return next(mark for slots, mark in self._marks if slot in slots)
