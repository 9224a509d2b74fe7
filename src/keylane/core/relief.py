"""Relief: which lanes hold more than they will soon work off, while there is little room.

A lane runs one message at a time, so a key that gets more than that fills whatever room there is with messages that
will not run for minutes, and the messages of all other keys wait outside. Such a lane is told apart from one that is
merely busy by its speed: between two looks it is seen how many of its entries have passed.

Room is of use only to lanes that are idle. In a backlog whose keys are all behind, what is read further ahead is for
lanes that have enough to do, and what they let go of for it would have to be read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from keylane.core.lane import KEEP, RETURN, Entry, Lane, LaneState

if TYPE_CHECKING:
    from collections.abc import Iterable

SOON = 1.0
"""Seconds of work that a lane keeps when it has to let go; it has to when it holds twice as much."""
EVERY = 0.25
SELDOM = 2.0
"""Seconds between two looks: at first, and when a few in a row have found nothing."""

_ENOUGH, _FEW = 50, 0.001
"""Of so many entries or more that arrived since a look, more than this part must have found their lane idle: else room
is of no use, until the next look at as many."""

E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class Excess(Generic[E]):
    """A lane that holds too much."""

    lane: Lane[E]
    keep: int
    """Entries behind its head that it keeps."""
    portion: int
    """Entries that it takes back at once: four times as many, so that it seldom has to wait for them."""


class Relief(Generic[E]):
    """Looks at the lanes now and then, as long as there is little room; ``wait`` is when to look again.

    A look goes through all entries, so nothing is paid per message, and nothing at all while there is room.
    """

    def __init__(self) -> None:
        self.wait = EVERY
        self._marks: dict[Lane[E], tuple[E, int]] = {}  # the newest entry of a long lane then, and how many
        self._at = 0.0
        self._arrived = self._found_idle = 0
        self._of_use = True

    def arrived(self, count: int, idle: int) -> None:
        """So many entries have come, and so many of them have found their lane idle."""
        self._arrived += count
        self._found_idle += idle

    @property
    def watching(self) -> bool:
        """Whether there are long lanes, whose speed the next look will show."""
        return bool(self._marks)

    def forget(self) -> None:
        """There is room again."""
        self._marks = {}
        self.wait = EVERY

    def look(self, lanes: Iterable[Lane[E]], now: float, room: int) -> list[Excess[E]]:
        """The lanes that hold more than they will soon work off. ``room`` is how many entries there is room for."""
        if self._arrived >= _ENOUGH:
            self._of_use = self._found_idle > _FEW * self._arrived
            self._arrived = self._found_idle = 0
        if not self._of_use:
            self.forget()
            return []
        before, self._marks = self._marks, {}
        seconds, self._at = max(now - self._at, 1e-3), now
        floor = max(1, min(KEEP, room // 64))
        most = max(floor, min(RETURN, room // 16))
        found = []
        for lane in lanes:
            if lane.state is LaneState.READY:
                # It waits for its turn: held up by others, not by what it does, it would be quick without them. In a
                # drain that is true of all of them, and nothing is counted.
                continue
            if lane.away or lane.head is None or lane.state is LaneState.RETURNING:
                continue  # it has let go already, or has nothing
            tail, count = before.get(lane, (None, 0))
            length, left = _lengths(lane, tail)
            if length <= 2 * floor:
                continue
            keep = max(floor, int(SOON * (count - left) / seconds))
            if tail is not None and length > 2 * keep:
                found.append(Excess(lane, keep, max(floor, min(most, 4 * keep))))
            else:
                self._marks[lane] = lane.tail, length
        self.wait = EVERY if found or self._marks.keys() - before.keys() else min(2 * self.wait, SELDOM)
        return found


def _lengths(lane: Lane[E], tail: E | None) -> tuple[int, int]:
    """How many entries have not passed, and how many of them are not newer than ``tail``."""
    length = left = 0
    entry: E | None = lane.head
    while entry is not None:
        length += 1
        if entry is tail:
            left = length
        entry = entry.next
    return length, left
