"""Contiguous watermark of one partition, over its delivered offsets.

Kafka's offsets have holes (compaction, transaction markers), so nothing here assumes that offsets are consecutive.
The watermark is the lowest delivered offset that is not done; if all are done, it is the next offset to read.
The done offsets above it are stored as their complement: every offset from the watermark to the reading position is
done unless it is *pending*. An offset in a hole has no message, so it can count as done.

A stuck lane may have a million offsets pending for days, so offsets that are pending for long move to compressed
blocks of one bit or two bytes per offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.offsets.offset_set import BLOCK_SHIFT_BITS, OffsetBlock, OffsetSet, blocks_of, joined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_RECENT_OFFSETS_MIN = 16_384
_RECENT_OFFSETS_MAX = 65_536
"""Offsets by which the set of recent offsets grows before the next search for stuck ones: the least and the most."""


_NONE = OffsetSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """A partition's progress, which survives a restart.

    All offsets below ``watermark`` are done. From there to ``position`` all are done except ``pending`` (the first of
    them is the watermark). None from ``position`` on is done.
    """

    watermark: int
    position: int
    pending: OffsetSet = _NONE

    def is_done(self, offset: int) -> bool:
        """Whether this offset must not run again."""
        return offset < self.watermark or (offset < self.position and offset not in self.pending)


class Watermark:
    """The watermark of one partition, from delivered and done offsets.

    Offsets are delivered in ascending order and done in any order, each once. Both calls take batches, so that the
    work per message happens in C code. When the set grows, offsets that have been in it for long count as stuck and
    move to blocks; all others cost nothing extra.

    After a restart, reading starts at the restored watermark, and offsets that were done before come again:
    :meth:`wanted` tells which to run. Until reading has passed the restored position, :meth:`progress` still includes
    the restored offsets ahead, so that a second crash loses nothing.
    """

    def __init__(self, restored: PartitionProgress) -> None:
        self._restored = restored
        self._position = restored.watermark
        self._recent: set[int] = set()
        self._growth = self._search_above = _RECENT_OFFSETS_MIN
        self._searched_at = restored.watermark  # the position at the last search for stuck offsets
        self._stuck: dict[int, OffsetBlock] = {}  # by number, ascending; all below the recent ones
        self._stuck_count = 0

    @property
    def restoring(self) -> bool:
        """Whether offsets that were done before the restart can still come: only then ask :meth:`wanted`."""
        return self._position < self._restored.position

    def wanted(self, offset: int) -> bool:
        """False if the offset was already done before the restart and must be skipped."""
        return offset >= self._restored.position or offset in self._restored.pending

    def deliver(self, offsets: Sequence[int]) -> None:
        """These offsets, ascending and not empty, were handed to their lanes."""
        recent = self._recent
        recent.update(offsets)
        self._position = offsets[-1] + 1
        if len(recent) > self._search_above:
            self._move_stuck()

    def reach(self, offset: int) -> None:
        """Reading has reached ``offset``: offsets below it that were not delivered were skipped, or are holes."""
        self._position = max(self._position, offset)

    def done(self, offsets: Collection[int]) -> None:
        """The results of these offsets are durable."""
        recent = self._recent
        before = len(recent)
        recent.difference_update(offsets)
        if self._stuck and before - len(recent) < len(offsets):
            self._done_stuck(offsets)

    @property
    def pending(self) -> int:
        """How many delivered offsets are not done."""
        return len(self._recent) + self._stuck_count

    @property
    def position(self) -> int:
        """The next offset to read."""
        return self._position

    @property
    def value(self) -> int:
        """The watermark: every delivered offset below it is done."""
        if self._stuck:
            return next(iter(self._stuck.values())).first
        if self._recent:
            return min(self._recent)
        ahead = self._ahead()
        return ahead[0].first if ahead else max(self._position, self._restored.position)

    def progress(self) -> PartitionProgress:
        """The progress to persist, so that no done offset runs again and no other is skipped."""
        blocks = joined(joined(list(self._stuck.values()), blocks_of(sorted(self._recent))), self._ahead())
        position = max(self._position, self._restored.position)
        return PartitionProgress(
            watermark=blocks[0].first if blocks else position, position=position, pending=OffsetSet(blocks)
        )

    def _ahead(self) -> list[OffsetBlock]:
        """Restored pending offsets that reading has not reached yet."""
        restored = self._restored
        if restored.pending and not self.restoring:
            # All were delivered, or have left the log: no need to keep them twice.
            self._restored = PartitionProgress(watermark=restored.position, position=restored.position)
        return self._restored.pending.since(self._position)

    def _move_stuck(self) -> None:
        """Move the offsets that were recent at the last search already to blocks; only newer ones are left."""
        stuck = sorted(offset for offset in self._recent if offset < self._searched_at)
        for block in blocks_of(stuck):
            known = self._stuck.get(block.number)
            self._stuck[block.number] = known.plus(block.lows()) if known else block
        if stuck:
            self._stuck_count += len(stuck)
            self._recent = self._recent.difference(stuck)
        self._searched_at = self._position
        # An offset that leaves its block soon costs more than a larger set; one that stays in it earns that back.
        self._growth = max(_RECENT_OFFSETS_MIN, self._growth - len(stuck) // 2)
        self._search_above = len(self._recent) + self._growth

    def _done_stuck(self, offsets: Iterable[int]) -> None:
        by_number: dict[int, list[int]] = {}
        for offset in offsets:
            number = offset >> BLOCK_SHIFT_BITS
            if number in self._stuck:
                by_number.setdefault(number, []).append(offset)
        for number, group in by_number.items():
            block = self._stuck[number]
            left = block.without(group)
            moved = block.count - (left.count if left else 0)
            self._stuck_count -= moved
            self._growth = min(self._growth + moved, _RECENT_OFFSETS_MAX)
            if left:
                self._stuck[number] = left
            else:
                del self._stuck[number]
