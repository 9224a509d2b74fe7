"""Eviction: picks the lanes that buffer more than they will soon process, while room is scarce.

A lane runs one message at a time. A key that gets more than that fills the buffer with messages that will not run for
minutes, while the messages of all other keys wait in the log. Such a lane differs from a busy one by its speed: how
many of its entries passed between two looks.

An evicted message is fetched twice, so a lane evicts only for one of two reasons:

* **Another lane is starving.** It had work at an earlier look and has none now. This does not happen among lanes that
  are all equally behind: the next message of an empty lane is fetched within about the time of a stage.
* **It buffers more than** :data:`EXCESS_WORK_SECONDS` **of work.** Keys not seen yet may be behind it.

Neither depends on new arrivals: a full task that fetches nothing comes to the same decision. So while there is no room,
either everything buffered is processed within :data:`EXCESS_WORK_SECONDS`, or the next look makes room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from keylane.lanes.lane_table import (
    LANE_STUCK_AFTER_SECONDS,
    REFETCH_ENTRIES_MAX,
    REFETCH_ROOM_DIVISOR,
    STUCK_LANE_ENTRIES_MAX,
    Entry,
    Lane,
    LaneState,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

KEPT_WORK_SECONDS = 1.0
"""Work that a lane keeps when it evicts; it evicts when it buffers twice as much."""
EXCESS_WORK_SECONDS = 8.0
"""Work above which a lane evicts even if no other lane is known to need the room."""
LOOK_MIN_SECONDS = 0.25
LOOK_MAX_SECONDS = 2.0
"""Seconds between two looks: at first, and after several looks that found nothing."""
STARVING_AFTER_SECONDS = 1.0
"""Time without work after which a single lane is starving; less if one in :data:`STARVING_SHARE_DIVISOR` is idle."""
STARVING_SHARE_DIVISOR = 10
LANE_MEMORY_SECONDS = 10.0
"""How long a lane is remembered after it was seen."""
_REMEMBERED_LANES_MAX = 100_000

E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class Eviction(Generic[E]):
    """A lane that buffers too much."""

    lane: Lane[E]
    keep: int
    """Entries behind its head that it keeps."""
    portion: int
    """Entries that it fetches again at once: four times ``keep``, so that it seldom has to wait for them."""


class LaneEvictor(Generic[E]):
    """Looks at the lanes from time to time while room is scarce; ``wait`` is the seconds until the next look.

    A look goes through all entries: there is no cost per message, and none at all while there is room.
    """

    def __init__(self) -> None:
        self.wait = LOOK_MIN_SECONDS
        # Of each long lane at the last look: its newest entry, its length, and the time.
        self._marks: dict[Lane[E], tuple[E, int, float]] = {}
        self._seen: dict[Hashable, float] = {}  # lane key: the last look that found work in it

    @property
    def watching(self) -> bool:
        """Whether there are long lanes whose speed the next look will show."""
        return bool(self._marks)

    def forget(self) -> None:
        """Reset: there is room again."""
        self._marks = {}
        self.wait = LOOK_MIN_SECONDS

    def check(self, lanes: Iterable[Lane[E]], now: float, room: int) -> list[Eviction[E]]:
        """The lanes that must evict. ``room`` is how many entries may be buffered.

        The longest lanes first, until three sixteenths of the room are in use: fetching again is cheap for a lane that
        has most of the log, and expensive for one that has little of it.
        """
        lanes = [lane for lane in lanes if lane.head is not None]
        starving = self._starving(lanes, now)
        before, self._marks = self._marks, {}
        fair = room // 4 // max(1, len(lanes))
        floor = max(1, min(STUCK_LANE_ENTRIES_MAX, room // 64, fair))
        most = max(floor, min(REFETCH_ENTRIES_MAX, room // 16))
        stuck = sum(1 for lane in lanes if lane.since and now - lane.since >= LANE_STUCK_AFTER_SECONDS)
        kept = min(STUCK_LANE_ENTRIES_MAX, room // REFETCH_ROOM_DIVISOR // max(1, stuck))
        held = 0
        found: list[tuple[int, Eviction[E]]] = []
        for lane in lanes:
            if lane.state is LaneState.READY or lane.state is LaneState.RETURNING:
                # It waits for its turn: other lanes hold it up, not its own work. In a drain this is true of all
                # lanes, and nothing is counted.
                if lane in before:
                    self._marks[lane] = before[lane]
                continue
            if lane.since and now - lane.since >= LANE_STUCK_AFTER_SECONDS:
                if kept < STUCK_LANE_ENTRIES_MAX and (length := _lengths(lane, None)[0]) > kept + 1:
                    found.append((length, Eviction(lane, kept, most)))
                continue
            if lane.away:
                continue  # it has evicted already
            tail, count, at = before.get(lane, (None, 0, now))
            length, left = _lengths(lane, tail)
            held += length
            if length <= 2 * floor:
                continue
            speed = (count - left) / max(now - at, 1e-3)
            keep = max(floor, min(most, fair, int(KEPT_WORK_SECONDS * speed)))
            if tail is not None and length > 2 * keep and (starving or length > EXCESS_WORK_SECONDS * speed):
                found.append((length, Eviction(lane, keep, max(floor, min(most, 4 * keep)))))
            else:
                self._marks[lane] = lane.tail, length, now
        found.sort(key=lambda one: -one[0])
        chosen = []
        for length, excess in found:
            if held <= room * 3 // 16 and not excess.lane.since:
                self._marks[excess.lane] = excess.lane.tail, length, now
                continue
            chosen.append(excess)
            held -= length - excess.keep
        self.wait = (
            LOOK_MIN_SECONDS
            if chosen or self._marks.keys() - before.keys()
            else min(2 * self.wait, LOOK_MAX_SECONDS)
        )
        return chosen

    def _starving(self, lanes: list[Lane[E]], now: float) -> bool:
        """Whether lanes that recently had work have none now."""
        self._seen = {key: at for key, at in self._seen.items() if now - at < LANE_MEMORY_SECONDS}
        if len(self._seen) < _REMEMBERED_LANES_MAX:
            self._seen.update(dict.fromkeys([lane.key for lane in lanes], now))
        idle = [at for at in self._seen.values() if at < now]
        return bool(idle) and (
            len(idle) * STARVING_SHARE_DIVISOR >= len(self._seen) or now - min(idle) >= STARVING_AFTER_SECONDS
        )


def _lengths(lane: Lane[E], tail: E | None) -> tuple[int, int]:
    """The number of entries that have not passed, and how many of them are not newer than ``tail``."""
    length = left = 0
    entry: E | None = lane.head
    while entry is not None:
        length += 1
        if entry is tail:
            left = length
        entry = entry.next
    return length, left
