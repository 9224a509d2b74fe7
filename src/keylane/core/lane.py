"""Lanes: the order inside a key.

A lane is a queue of entries with at most one of them running. It knows three places in that queue::

    first ──▶ … ──▶ head ──▶ … ──▶ tail
    │               │              └ the newest entry
    │               └ the entry that runs now or next
    └ the oldest entry that is not done

From ``first`` up to ``head`` lie entries whose results were handed over and are not all acknowledged.
Entries become done in lane order, even when acknowledgements arrive in another: what runs again after a
crash is therefore always the end of a lane, never a message in the middle of it.

A lane that has been stuck for a while, or that holds far more than it will soon work off while others need the room,
keeps only a few entries behind its head. Of the rest it keeps the places, eight bytes each, to be read again when it
comes to them: ``head ──▶ … ──▶ tail ┄┄▶ away``.

Lanes that are ready take turns, one entry each: a lane that gets most of the messages gets no more turns than another.
Those whose head runs again after a failure have a queue of their own and at most a set share of the turns, as long as
others are ready: a burst of retries holds up nobody.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence


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
    WAITING = "waiting"
    """Its head needs a stage whose breaker is open."""
    STOPPED = "stopped"
    """Nothing in it moves until somebody says so: an operator, or a record that has to be durable first."""
    RETURNING = "returning"
    """What comes next is being read again."""


# Looked up for every message: a name is found sooner than a member of an enum.
_IDLE, _READY, _RUNNING = LaneState.IDLE, LaneState.READY, LaneState.RUNNING

KEEP = 64
"""Entries that a stuck lane keeps behind its head."""
PATIENCE = 1.0
"""Seconds after which a lane that does not move is called stuck."""
RETURN = 1000
"""Entries of a lane that are read again at once, at most."""
AWAY_MAX = 4_000_000
"""Places a table keeps in all. When they are used up a stuck lane keeps its entries, and reading comes to a stop."""


class Entry(Protocol):
    """What a lane queues. ``next``, ``lane`` and ``settled`` belong to the lane table; nobody else writes them."""

    next: Any
    lane: Any
    settled: bool
    partition: int
    offset: int
    trouble: Any
    """Not None when more is known of it than can be read again: then it is never let go of."""

    @property
    def begun(self) -> bool:
        """Whether it was run before, to whatever end."""


E = TypeVar("E", bound=Entry)


class Lane(Generic[E]):
    """One key's queue. Written by :class:`LaneTable` only."""

    __slots__ = ("away", "due", "first", "head", "key", "since", "slow", "state", "tail")

    def __init__(self, key: Hashable, entry: E) -> None:
        self.key = key
        self.first: E | None = entry
        self.head: E | None = entry
        self.tail: E = entry
        self.state = _READY
        self.due = 0.0
        self.slow = False  # stuck, or with entries away: what arrives is looked at
        self.since = 0.0  # when its head came to a stop first
        self.away: deque[tuple[int, array[int]]] | None = None  # partitions and offsets, in order

    def __lt__(self, other: Lane[E]) -> bool:
        return self.due < other.due


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """A snapshot of the lane table."""

    lanes: int
    ready: int
    running: int
    retrying: int
    waiting: int
    stopped: int
    away: int
    """Entries of which only the places are kept."""


class LaneTable(Generic[E]):
    """All lanes of a task that have something to do.

    ``arrive_all`` → ``take`` → (``passed`` | ``retry`` → ``wake`` | ``hold`` or ``stop`` → ``resume``) → ``settle``, or
    ``take`` → ``set_aside`` → ``insert``. The table decides what may run; it never runs anything. An entry without a
    key gets a lane of its own.

    ``let_go`` is told of partitions and numbers of entries of which only the places are kept from now on,
    ``fetch`` of a lane that needs entries back: it answers, later, with :meth:`returned`.
    ``retry_share`` is how much of the turns goes to retries at most, while others are ready; with 1 all are alike.
    """

    def __init__(
        self,
        *,
        retry_share: float = 1.0,
        let_go: Callable[[int, int], None] = lambda _partition, _count: None,
        fetch: Callable[[Lane[E], int, Sequence[int]], None] | None = None,
    ) -> None:
        self.lanes: dict[Hashable, Lane[E]] = {}
        self.ready: deque[Lane[E]] = deque()
        self.again: deque[Lane[E]] = deque()  # woken from their backoff
        self.running = 0
        self.unsettled = 0  # entries that have passed and wait for their acknowledgement
        self.waiting = 0
        self.stopped = 0
        self.returning = 0
        self.away = 0
        self.closed = False
        self._anonymous = 0
        self._sleeping: list[Lane[E]] = []
        # A turn of another earns retries so much of one; what they have earned they take before others.
        self._earns = retry_share / (1 - retry_share) if retry_share < 1 else 0.0
        self._credit = 0.0
        self._woken = self.again if retry_share < 1 else self.ready
        self._portions: dict[Lane[E], int] = {}  # entries that a lane takes back at once, if not RETURN
        self._let_go = let_go
        self._fetch = fetch

    def arrive(self, key: Hashable, entry: E, now: float = 0.0) -> None:
        """Queue an entry behind everything its lane holds. ``None`` as the key: no order, a lane of its own."""
        self.arrive_all((key,), (entry,), now)

    def arrive_all(self, keys: Iterable[Hashable], entries: Iterable[E], now: float = 0.0) -> None:
        """Queue entries, each behind everything that the lane of its key holds. The hot path: one call for many."""
        lanes, ready = self.lanes, self.ready
        for key, entry in zip(keys, entries, strict=True):
            if key is None:
                lane = entry.lane = Lane(None, entry)
                self._anonymous += 1
                ready.append(lane)
                continue
            found = lanes.get(key)
            if found is None:
                found = lanes[key] = Lane(key, entry)
                ready.append(found)
            elif found.slow and self._send_away(found, entry, now):
                continue
            else:
                found.tail.next = entry
                found.tail = entry
                if found.head is None:
                    found.head = entry
                    found.state = _READY
                    ready.append(found)
            entry.lane = found

    def take(self) -> Lane[E] | None:
        """The next lane to run, now RUNNING, or None. Its ``head`` is the entry to process."""
        if self.again:
            lane = self._fairly()
        elif self.ready:
            lane = self.ready.popleft()
        else:
            return None
        lane.state = _RUNNING
        self.running += 1
        return lane

    def _fairly(self) -> Lane[E]:
        """The next lane when there are retries: theirs if nobody else is ready, or if others have had their turns."""
        if not self.ready:
            return self.again.popleft()
        if self._credit >= 1.0:
            self._credit -= 1.0
            return self.again.popleft()
        self._credit += self._earns
        return self.ready.popleft()

    def passed(self, lane: Lane[E]) -> None:
        """The head's processing is over and what it caused was handed over: the next entry may run.

        The entry is done only when it was also settled.
        """
        self.running -= 1
        self.unsettled += 1
        head: E | None = lane.head.next  # type: ignore[union-attr]  # a lane that runs has a head
        lane.head = head
        if lane.slow:
            lane.since = 0.0
            lane.slow = bool(lane.away)
            if head is None and lane.away and not self.closed:
                self._ask_back(lane)
                return
        if head is None or self.closed:
            lane.state = _IDLE
        else:
            lane.state = _READY
            self.ready.append(lane)

    def turn(self, lane: Lane[E]) -> Lane[E] | None:
        """:meth:`passed`, then :meth:`take`: what follows almost every message, in one step."""
        head = lane.head.next  # type: ignore[union-attr]  # a lane that runs has a head
        if lane.slow or self.again or self.closed:
            self.passed(lane)
            return self.take()
        self.unsettled += 1
        lane.head = head
        ready = self.ready
        if head is None:
            lane.state = _IDLE
            if not ready:
                self.running -= 1
                return None
        else:
            lane.state = _READY
            ready.append(lane)
        following = ready.popleft()
        following.state = _RUNNING
        return following

    def retry(self, lane: Lane[E], due: float, now: float = 0.0) -> None:
        """The head failed; the lane waits until ``due`` and nothing in it moves before."""
        self.running -= 1
        lane.state = LaneState.RETRYING
        lane.due = due
        heapq.heappush(self._sleeping, lane)
        self._stuck(lane, now, until=due)

    def hold(self, lane: Lane[E], now: float) -> None:
        """The head waits for its stage, together with others; :meth:`resume` lets it go on."""
        self.running -= 1
        self.waiting += 1
        lane.state = LaneState.WAITING
        self._stuck(lane, now, until=now)

    def stop(self, lane: Lane[E], now: float) -> None:
        """The head does not run, nor anything behind it, until :meth:`resume`."""
        self.running -= 1
        self.stopped += 1
        lane.state = LaneState.STOPPED
        self._stuck(lane, now, until=now)

    def resume(self, lane: Lane[E]) -> None:
        """The lane may go on with its head; in a table that is closed it stays where it is."""
        if lane.state is LaneState.WAITING:
            self.waiting -= 1
        elif lane.state is LaneState.STOPPED:
            self.stopped -= 1
        else:
            return
        lane.state = _READY
        if not self.closed:
            self.ready.append(lane)

    def set_aside(self, lane: Lane[E]) -> None:
        """The head leaves its lane without having run, and the next entry may run. The caller inserts it again."""
        self.running -= 1
        entry: E = lane.head  # type: ignore[assignment]  # a lane that runs has a head
        following: E | None = entry.next
        if lane.first is entry:
            lane.first = following
        else:
            before: E = lane.first  # type: ignore[assignment]  # a lane with a head has a first
            while before.next is not entry:
                before = before.next
            before.next = following
            if following is None:
                lane.tail = before
        entry.next = entry.lane = None
        lane.head = following
        if lane.slow:
            lane.since = 0.0
            lane.slow = bool(lane.away)
        if following is None and lane.away and not self.closed:
            self._ask_back(lane)
        elif following is None or self.closed:
            lane.state = _IDLE
            if lane.first is None and not lane.slow:
                del self.lanes[lane.key]
        else:
            lane.state = _READY
            self.ready.append(lane)

    def insert(self, key: Hashable, entries: Sequence[E]) -> Lane[E]:
        """Put entries, in their order, before everything in the lane that has not begun: a redrive.

        A head that has begun stays the head, whatever it waits for, unless it has stopped.
        """
        for entry, then in pairwise(entries):
            entry.next = then
        first, last = entries[0], entries[-1]
        lane = self.lanes.get(key) if key is not None else None
        if lane is None:
            lane = Lane(key, first)
            lane.tail = last
            self.ready.append(lane)
            if key is None:
                self._anonymous += 1
            else:
                self.lanes[key] = lane
        elif lane.head is None:
            if lane.first is None:  # all of it is done, and more of it is being read again
                lane.first = first
            else:
                lane.tail.next = first
            lane.tail = last
            lane.head = first
            if lane.state is not LaneState.RETURNING:
                lane.state = _READY
                self.ready.append(lane)
        elif lane.state is LaneState.STOPPED or (lane.state is not _RUNNING and not lane.head.begun):
            last.next = lane.head
            if lane.first is lane.head:
                lane.first = first
            else:
                before: E = lane.first  # type: ignore[assignment]  # a lane with a head has a first
                while before.next is not lane.head:
                    before = before.next
                before.next = first
            lane.head = first
        else:
            last.next = lane.head.next
            lane.head.next = first
            if lane.tail is lane.head:
                lane.tail = last
        for entry in entries:
            entry.lane = lane
        return lane

    def wake(self, now: float) -> int:
        """Make the lanes whose backoff is over ready; returns how many."""
        count = 0
        sleeping = self._sleeping
        while sleeping and sleeping[0].due <= now:
            self._woken.append(heapq.heappop(sleeping))
            count += 1
        return count

    def next_due(self) -> float | None:
        """When the next backoff ends, or None."""
        return self._sleeping[0].due if self._sleeping else None

    def settle(self, entries: Sequence[E]) -> list[E]:
        """What these entries caused is durable. Returns the entries that are done now, those of a lane in its order."""
        done: list[E] = []
        self.unsettled -= len(entries)
        for entry in entries:
            entry.settled = True
            lane: Lane[E] = entry.lane
            if lane.first is not entry:
                continue
            current: E | None = entry
            head = lane.head
            while current is not None and current is not head and current.settled:
                done.append(current)
                current.lane = None  # no cycle is left behind: the collector need not run for it
                current = current.next
            lane.first = current
            if current is None and not lane.slow:
                if lane.key is None:
                    self._anonymous -= 1
                else:
                    del self.lanes[lane.key]
        return done

    def close(self) -> None:
        """For the drain: start nothing new. What has been started goes on, its retries included."""
        self.closed = True
        left = [lane for lane in self.ready if lane.state is LaneState.RETRYING]
        self.ready.clear()
        self.ready.extend(left)

    @property
    def startable(self) -> bool:
        """Whether :meth:`take` has a lane to give."""
        return bool(self.ready or self.again)

    @property
    def quiet(self) -> bool:
        """Nothing runs, waits for its turn, its backoff or its stage, or is being read again.

        Lanes may be stopped, and acknowledgements due.
        """
        return not (self.running or self.startable or self._sleeping or self.waiting or self.returning)

    @property
    def drained(self) -> bool:
        """Of what was started nothing goes on by itself any more. Acknowledgements may still be due."""
        return not (self.running or self.startable or self._sleeping)

    def statistics(self) -> LaneStatistics:
        """How many lanes there are and what they do."""
        return LaneStatistics(
            lanes=len(self.lanes) + self._anonymous,
            ready=len(self.ready) + len(self.again),
            running=self.running,
            retrying=len(self._sleeping),
            waiting=self.waiting,
            stopped=self.stopped,
            away=self.away,
        )

    def backlog(self, key: Hashable) -> int:
        """Entries of this lane that have not passed, those of which only the places are kept included."""
        lane = self.lanes.get(key)
        if lane is None:
            return 0
        count = sum(len(offsets) for _, offsets in lane.away or ())
        entry: E | None = lane.head
        while entry is not None:
            count += 1
            entry = entry.next
        return count

    # Entries of which only the places are kept.

    def relieve(self, lane: Lane[E], keep: int, portion: int) -> None:
        """Keep so many entries behind the head of a lane that holds too many, and take back so many at once later."""
        if self._fetch is None or lane.key is None:
            return
        self._trim(lane, keep)
        if lane.away:
            lane.slow = True
            self._portions[lane] = portion

    def returned(self, lane: Lane[E], entries: Sequence[E], gone: int) -> None:
        """The next entries of a lane that asked for them, in order; ``gone`` of those asked for exist no more."""
        self.returning -= 1
        self.away -= len(entries) + gone
        lane.state = _IDLE
        for entry in entries:
            entry.lane = lane
            if lane.head is None:
                lane.head = entry
                if lane.first is None:
                    lane.first = entry
                else:
                    lane.tail.next = entry
            else:
                lane.tail.next = entry
            lane.tail = entry
        lane.slow = bool(lane.away)
        if lane.head is not None:
            lane.state = _READY
            if not self.closed:
                self.ready.append(lane)
        elif lane.away:
            if not self.closed:
                self._ask_back(lane)
        elif lane.first is None:
            del self.lanes[lane.key]

    def _stuck(self, lane: Lane[E], now: float, *, until: float) -> None:
        if lane.key is None or self._fetch is None:
            return
        lane.slow = True
        lane.since = lane.since or now
        if lane.state is LaneState.STOPPED or max(now, until) - lane.since >= PATIENCE:
            self._trim(lane, KEEP)

    def _trim(self, lane: Lane[E], keep: int) -> None:
        """Keep a few entries behind the head; of the rest the places."""
        last: E = lane.head  # type: ignore[assignment]  # a stuck lane has a head
        for _ in range(keep):
            if last.next is None:
                return
            last = last.next
        entry: E | None = last.next
        if entry is None or self.away >= AWAY_MAX:
            return
        while entry is not None:
            if entry.trouble is not None:
                last = entry
            entry = entry.next
        entry = last.next
        places: deque[tuple[int, array[int]]] = deque()
        while entry is not None:
            _put(places, entry.partition, entry.offset)
            self._let_go(entry.partition, 1)
            self.away += 1
            entry.lane = None
            entry = entry.next
        last.next = None
        lane.tail = last
        lane.away = places + lane.away if lane.away else places

    def _send_away(self, lane: Lane[E], entry: E, now: float) -> bool:
        """Whether only the place of an entry that has just arrived is kept."""
        if not lane.away:
            if lane.state is not LaneState.RETURNING:
                if now - lane.since < PATIENCE or self.away >= AWAY_MAX:
                    return False
                behind = lane.head
                for _ in range(KEEP):
                    if behind is None:
                        return False
                    behind = behind.next
            lane.away = deque()
        _put(lane.away, entry.partition, entry.offset)
        self.away += 1
        self._let_go(entry.partition, 1)
        return True

    def _ask_back(self, lane: Lane[E]) -> None:
        away: deque[tuple[int, array[int]]] = lane.away  # type: ignore[assignment]
        partition, offsets = away[0]
        portion = self._portions.get(lane, RETURN)
        asked = offsets[:portion]
        del offsets[:portion]
        if not offsets:
            away.popleft()
            if not away:
                self._portions.pop(lane, None)
        lane.state = LaneState.RETURNING
        lane.slow = True
        self.returning += 1
        self._fetch(lane, partition, asked)  # type: ignore[misc]  # nothing is away without it


def _put(places: deque[tuple[int, array[int]]], partition: int, offset: int) -> None:
    """Runs of one partition share an array; it is cut so that taking from its front stays cheap."""
    if not places or places[-1][0] != partition or len(places[-1][1]) >= 8 * RETURN:
        places.append((partition, array("q")))
    places[-1][1].append(offset)
