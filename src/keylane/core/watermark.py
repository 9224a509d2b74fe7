"""The contiguous watermark of one partition, over the offsets that were delivered.

Kafka's offsets have holes (compaction, transaction markers), so nothing here counts ``+ 1`` from one offset to the
next. The watermark is the lowest delivered offset that is not done; when all are done it is where reading goes on.
What is done above it, the sparse set, is kept as its complement: every offset from the watermark to the reading
position is done unless it is *pending*. An offset in a hole belongs to nobody, so counting it as done harms nobody.

A lane that is stuck may have a million offsets pending behind it for days, so what is pending for long is
kept in blocks, of a bit or two bytes for each offset; where nothing is pending there is no block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.core.pending import SHIFT, Block, Pending, blocks_of, joined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_PATIENCE = 16_384
_PATIENCE_MAX = 65_536
"""By so many the set of recent offsets grows, at least and at most, before it is looked through for what is stuck."""


_NONE = Pending()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a partition is: what survives a restart.

    Everything below ``watermark`` is done. From there to ``position`` everything is done but ``pending``
    (the first of them is the watermark). From ``position`` on nothing is.
    """

    watermark: int
    position: int
    pending: Pending = _NONE

    def is_done(self, offset: int) -> bool:
        """Whether this offset must not run again."""
        return offset < self.watermark or (offset < self.position and offset not in self.pending)


class Watermark:
    """Follows one partition: delivered, done, and the watermark in between.

    Offsets are delivered in ascending order and done in any order, each once. Both calls take batches, so that the
    work per message happens inside a set's own C code. When the set grows, what has been in it for long is stuck and
    moves to blocks; what passes it by never does, and pays nothing for it.

    After a restart reading begins at the restored watermark, and offsets that were done before come again:
    :meth:`wanted` says which to run. Until reading has passed the restored position, :meth:`progress` still holds
    what lies ahead, so a second crash forgets nothing.
    """

    def __init__(self, restored: Progress) -> None:
        self._restored = restored
        self._position = restored.watermark
        self._recent: set[int] = set()
        self._patience = self._crowd = _PATIENCE
        self._looked = restored.watermark  # the position when it was looked for what is stuck
        self._stuck: dict[int, Block] = {}  # by number, ascending; all below whatever is recent
        self._stuck_count = 0

    @property
    def restoring(self) -> bool:
        """Whether offsets that were done before the restart can still come: only then ask :meth:`wanted`."""
        return self._position < self._restored.position

    def wanted(self, offset: int) -> bool:
        """False when the offset was already done before the restart and must be skipped."""
        return offset >= self._restored.position or offset in self._restored.pending

    def deliver(self, offsets: Sequence[int]) -> None:
        """These offsets, ascending and not empty, were handed to their lanes."""
        recent = self._recent
        recent.update(offsets)
        self._position = offsets[-1] + 1
        if len(recent) > self._crowd:
            self._look_for_stuck()

    def reach(self, offset: int) -> None:
        """Reading has come to ``offset``: what was not delivered below it was skipped or is a hole in the log."""
        self._position = max(self._position, offset)

    def done(self, offsets: Collection[int]) -> None:
        """Everything these offsets caused is durable."""
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
        """Where reading goes on."""
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

    def progress(self) -> Progress:
        """What to write down so that nothing done runs again and nothing else is skipped."""
        blocks = joined(joined(list(self._stuck.values()), blocks_of(sorted(self._recent))), self._ahead())
        position = max(self._position, self._restored.position)
        return Progress(
            watermark=blocks[0].first if blocks else position, position=position, pending=Pending(blocks)
        )

    def _ahead(self) -> list[Block]:
        """Restored pending offsets that reading has not come to yet."""
        restored = self._restored
        if restored.pending and not self.restoring:
            # All were delivered, or have left the log: they need not be held twice.
            self._restored = Progress(watermark=restored.position, position=restored.position)
        return self._restored.pending.since(self._position)

    def _look_for_stuck(self) -> None:
        """Move what was there already when this was called last: all that is left has been delivered since."""
        stuck = sorted(offset for offset in self._recent if offset < self._looked)
        for block in blocks_of(stuck):
            known = self._stuck.get(block.number)
            self._stuck[block.number] = known.plus(block.lows()) if known else block
        if stuck:
            self._stuck_count += len(stuck)
            self._recent = self._recent.difference(stuck)
        self._looked = self._position
        # What is taken for stuck and soon done after all costs more than a larger set; what stays gives that back.
        self._patience = max(_PATIENCE, self._patience - len(stuck) // 2)
        self._crowd = len(self._recent) + self._patience

    def _done_stuck(self, offsets: Iterable[int]) -> None:
        by_number: dict[int, list[int]] = {}
        for offset in offsets:
            number = offset >> SHIFT
            if number in self._stuck:
                by_number.setdefault(number, []).append(offset)
        for number, group in by_number.items():
            block = self._stuck[number]
            left = block.without(group)
            moved = block.count - (left.count if left else 0)
            self._stuck_count -= moved
            self._patience = min(self._patience + moved, _PATIENCE_MAX)
            if left:
                self._stuck[number] = left
            else:
                del self._stuck[number]
