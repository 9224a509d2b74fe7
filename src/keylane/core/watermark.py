"""The contiguous watermark of one partition, over the offsets that were delivered.

Kafka's offsets have holes (compaction, transaction markers), so nothing here counts ``+ 1`` from one offset to the
next. The watermark is the lowest delivered offset that is not done; when all are done it is where reading goes on.
What is done above it, the sparse set, is kept as its complement: every offset from the watermark to the reading
position is done unless it is *pending*. An offset in a hole belongs to nobody, so counting it as done harms nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a partition is: what survives a restart.

    Everything below ``watermark`` is done. From there to ``position`` everything is done but ``pending``
    (ascending; the first of them is the watermark). From ``position`` on nothing is.
    """

    watermark: int
    position: int
    pending: tuple[int, ...] = ()

    def is_done(self, offset: int) -> bool:
        """Whether this offset must not run again."""
        return offset < self.watermark or (offset < self.position and offset not in self.pending)


class Watermark:
    """Follows one partition: delivered, done, and the watermark in between.

    Offsets are delivered in ascending order and done in any order, each once. Both calls take batches, so that the
    work per message happens inside the set's and the deque's own C code.

    After a restart reading begins at the restored watermark, and offsets that were done before come again:
    :meth:`wanted` says which to run. Until reading has passed the restored position, :meth:`progress` still holds
    what lies ahead, so a second crash forgets nothing.
    """

    def __init__(self, restored: Progress) -> None:
        self._restored = restored
        self._restored_pending = frozenset(restored.pending)
        self._position = restored.watermark
        # Delivered offsets, ascending; those that are done are dropped lazily.
        self._order: deque[int] = deque()
        self._pending: set[int] = set()

    @property
    def restoring(self) -> bool:
        """Whether offsets that were done before the restart can still come: only then ask :meth:`wanted`."""
        return self._position < self._restored.position

    def wanted(self, offset: int) -> bool:
        """False when the offset was already done before the restart and must be skipped."""
        return offset >= self._restored.position or offset in self._restored_pending

    def deliver(self, offsets: Sequence[int]) -> None:
        """These offsets, ascending and not empty, were handed to their lanes."""
        self._order.extend(offsets)
        self._pending.update(offsets)
        self._position = offsets[-1] + 1

    def reach(self, offset: int) -> None:
        """Reading has come to ``offset``: what was not delivered below it was skipped or is a hole in the log."""
        self._position = max(self._position, offset)

    def done(self, offsets: Collection[int]) -> None:
        """Everything these offsets caused is durable."""
        self._pending.difference_update(offsets)

    @property
    def pending(self) -> int:
        """How many delivered offsets are not done."""
        return len(self._pending)

    @property
    def position(self) -> int:
        """Where reading goes on."""
        return self._position

    @property
    def value(self) -> int:
        """The watermark: every delivered offset below it is done."""
        order, pending = self._order, self._pending
        while order and order[0] not in pending:
            order.popleft()
        if len(order) > 2 * len(pending) + 1024:  # a stuck lane: keep what is pending, not what passed it by
            self._order = order = deque(sorted(pending))
        if order:
            return order[0]
        ahead = self._ahead()
        return ahead[0] if ahead else max(self._position, self._restored.position)

    def progress(self) -> Progress:
        """What to write down so that nothing done runs again and nothing else is skipped."""
        return Progress(
            watermark=self.value,
            position=max(self._position, self._restored.position),
            pending=(*sorted(self._pending), *self._ahead()),
        )

    def _ahead(self) -> tuple[int, ...]:
        """Restored pending offsets that reading has not come to yet."""
        if not self.restoring:
            return ()
        pending = self._restored.pending
        return pending[bisect_left(pending, self._position) :]
