"""Lanes: the order inside a key.

A lane is a queue of entries with at most one of them running. It knows three places in that queue::

    first ──▶ … ──▶ head ──▶ … ──▶ tail
    │               │              └ the newest entry
    │               └ the entry that runs now or next
    └ the oldest entry that is not done

From ``first`` up to ``head`` lie entries whose results were handed over and are not all acknowledged.
Entries become done in lane order, even when acknowledgements arrive in another: what runs again after a
crash is therefore always the end of a lane, never a message in the middle of it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable


class LaneState(Enum):
    """What a lane is doing. A lane that has nothing left to do is not in the table at all."""

    IDLE = "idle"
    """Nothing to run; results may still be waiting for their acknowledgement."""
    READY = "ready"
    """Its head can run and waits for its turn."""
    RUNNING = "running"
    """Its head is being processed."""
    RETRYING = "retrying"
    """Its head failed and waits for its backoff, then for its turn."""


class Entry(Protocol):
    """What a lane queues. The three fields belong to the lane table; nobody else writes them."""

    next: Any
    lane: Any
    settled: bool


E = TypeVar("E", bound=Entry)


class Lane(Generic[E]):
    """One key's queue. Written by :class:`LaneTable` only."""

    __slots__ = ("due", "first", "head", "key", "state", "tail")

    def __init__(self, key: Hashable, entry: E) -> None:
        self.key = key
        self.first: E | None = entry
        self.head: E | None = entry
        self.tail: E = entry
        self.state = LaneState.READY
        self.due = 0.0

    def __lt__(self, other: Lane[E]) -> bool:
        return self.due < other.due


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """A snapshot of the lane table."""

    lanes: int
    ready: int
    running: int
    retrying: int


class LaneTable(Generic[E]):
    """All lanes of a task that have something to do.

    ``arrive`` → ``take`` → (``passed`` | ``retry`` → ``wake`` → ``take`` …) → ``settle``. The table decides what may
    run; it never runs anything. An entry without a key gets a lane of its own.
    """

    def __init__(self) -> None:
        self.lanes: dict[Hashable, Lane[E]] = {}
        self.ready: deque[Lane[E]] = deque()
        self.running = 0
        self.unsettled = 0  # entries that have passed and wait for their acknowledgement
        self.closed = False
        self._anonymous = 0
        self._sleeping: list[Lane[E]] = []

    def arrive(self, key: Hashable, entry: E) -> None:
        """Queue an entry behind everything its lane holds. ``None`` as the key: no order, a lane of its own."""
        if key is None:
            lane = Lane(None, entry)
            entry.lane = lane
            self._anonymous += 1
            self.ready.append(lane)
            return
        found = self.lanes.get(key)
        if found is None:
            found = self.lanes[key] = Lane(key, entry)
            self.ready.append(found)
        else:
            found.tail.next = entry
            found.tail = entry
            if found.head is None:
                found.head = entry
                found.state = LaneState.READY
                self.ready.append(found)
        entry.lane = found

    def take(self) -> Lane[E] | None:
        """The next lane to run, now RUNNING, or None. Its ``head`` is the entry to process."""
        if not self.ready:
            return None
        lane = self.ready.popleft()
        lane.state = LaneState.RUNNING
        self.running += 1
        return lane

    def passed(self, lane: Lane[E]) -> None:
        """The head's processing is over and what it caused was handed over: the next entry may run.

        The entry is done only when it was also settled.
        """
        self.running -= 1
        self.unsettled += 1
        head: E | None = lane.head.next  # type: ignore[union-attr]  # a lane that runs has a head
        lane.head = head
        if head is None or self.closed:
            lane.state = LaneState.IDLE
        else:
            lane.state = LaneState.READY
            self.ready.append(lane)

    def retry(self, lane: Lane[E], due: float) -> None:
        """The head failed; the lane waits until ``due`` and nothing in it moves before."""
        self.running -= 1
        lane.state = LaneState.RETRYING
        lane.due = due
        heapq.heappush(self._sleeping, lane)

    def wake(self, now: float) -> int:
        """Make the lanes whose backoff is over ready; returns how many."""
        count = 0
        sleeping = self._sleeping
        while sleeping and sleeping[0].due <= now:
            self.ready.append(heapq.heappop(sleeping))
            count += 1
        return count

    def next_due(self) -> float | None:
        """When the next backoff ends, or None."""
        return self._sleeping[0].due if self._sleeping else None

    def settle(self, entry: E, done: list[E]) -> None:
        """What the entry caused is durable. Appends the entries that are done now to ``done``, in lane order."""
        self.unsettled -= 1
        entry.settled = True
        lane: Lane[E] = entry.lane
        if lane.first is not entry:
            return
        current: E | None = entry
        head = lane.head
        while current is not None and current is not head and current.settled:
            done.append(current)
            current.lane = None  # no cycle is left behind: the collector need not run for it
            current = current.next
        lane.first = current
        if current is None:
            if lane.key is None:
                self._anonymous -= 1
            else:
                del self.lanes[lane.key]

    def close(self) -> None:
        """For the drain: start nothing new. What has been started goes on, its retries included."""
        self.closed = True
        self.ready = deque(lane for lane in self.ready if lane.state is LaneState.RETRYING)

    @property
    def quiet(self) -> bool:
        """Nothing runs, waits for its turn or for its backoff. Acknowledgements may still be due."""
        return not (self.running or self.ready or self._sleeping)

    def statistics(self) -> LaneStatistics:
        """How many lanes there are and what they do."""
        return LaneStatistics(
            lanes=len(self.lanes) + self._anonymous,
            ready=len(self.ready),
            running=self.running,
            retrying=len(self._sleeping),
        )
