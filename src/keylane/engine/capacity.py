"""Buffer capacity of one engine: how full it is, and regular looks at which lanes must evict while room is scarce."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from keylane.lanes.eviction import LaneEvictor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from keylane.engine.clock import Clock
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import LaneTable


class BufferCapacity:
    """Watches the buffer of one engine. Used only on its loop.

    ``room()`` is how many messages there is room for. Without ``evicts`` no lane ever has to evict.
    """

    def __init__(
        self,
        table: LaneTable[Delivery],
        counters: MessageCounters,
        clock: Clock,
        *,
        room: Callable[[], int],
        evicts: bool,
    ) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock
        self._room = room
        self._evictor: LaneEvictor[Delivery] = LaneEvictor()
        self._timer: asyncio.TimerHandle | None = None  # written by _check(): runs while room is scarce
        self._look_after = 0.0 if evicts else inf  # written by _check(): time of the loop

    @property
    def buffered(self) -> int:
        """Messages in memory."""
        return self._counters.pending - self._table.away

    @property
    def crowded(self) -> bool:
        """True above a quarter of the room: long lanes evict. The fetcher stops at half."""
        return 4 * self.buffered > self._room()

    @property
    def behind(self) -> bool:
        """True above a third of the room: in spite of eviction the buffer fills."""
        return 3 * self.buffered > self._room()

    def arrived(self, now: float) -> None:
        """Messages have arrived: start to look at the lanes if room is scarce."""
        if now >= self._look_after and self._timer is None and self.crowded:
            self._check()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Evict what single lanes will not run soon, and look again later, until there is room."""
        self._timer = None
        evictor, now = self._evictor, self._clock.now()
        if self._table.closed or not self.crowded:
            evictor.forget()
            return
        for eviction in evictor.check(self._table.lanes.values(), now, self._room()):
            self._table.evict(eviction.lane, eviction.keep, eviction.portion)
        self._look_after = now + evictor.wait
        # By a timer, because nothing arrives while there is no room.
        self._timer = self._clock.at(self._look_after, self._check)
