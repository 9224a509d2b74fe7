"""The lane table: one queue of entries per key, and the order in which they run.

A lane is a queue of entries, of which at most one runs. It has three positions::

    first ──▶ … ──▶ head ──▶ … ──▶ tail
    │               │              └ the newest entry
    │               └ the entry that runs now or next
    └ the oldest entry that is not done

The entries from ``first`` up to ``head`` have been processed, and not all of their results are acknowledged.
Entries become done in lane order, even if acknowledgements arrive in another order: what runs again after a crash is
therefore always the end of a lane, never a message in the middle of it.

A lane evicts entries when it has been stuck for a while, or when it buffers far more than it will soon process while
others need the room. It then keeps a few entries behind its head, and only the offsets of the rest, eight bytes each,
which are fetched again later: ``head ──▶ … ──▶ tail ┄┄▶ away``.

Ready lanes take turns, one entry each: a lane with most of the messages gets no more turns than another.
Lanes whose head is retried have a queue of their own and at most a fixed share of the turns while others are ready, so
a burst of retries does not delay other lanes.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


class LaneState(Enum):
    """What a lane is doing. A lane without entries is not in the table."""

    IDLE = "idle"
    """Nothing to run; results may still wait for their acknowledgement."""
    READY = "ready"
    """Its head waits for its turn."""
    RUNNING = "running"
    """Its head is being processed."""
    RETRYING = "retrying"
    """Its head failed and waits for its backoff, then for its turn."""
    WAITING = "waiting"
    """Its head needs a stage whose breaker is open, whose rate is used up, or that is paused."""
    STOPPED = "stopped"
    """Nothing in it runs until it is resumed: by an operator, or when a record is durable."""
    RETURNING = "returning"
    """Its next entries are being fetched again."""


# Used for every message: a global name is faster than an enum attribute.
_IDLE, _READY, _RUNNING = LaneState.IDLE, LaneState.READY, LaneState.RUNNING
_NOT_MOVING = (LaneState.RETRYING, LaneState.WAITING, LaneState.STOPPED)

STUCK_LANE_ENTRIES_MAX = 64
"""Entries that a stuck lane keeps behind its head, at most."""
LANE_STUCK_AFTER_SECONDS = 1.0
"""Time without progress after which a lane is stuck."""
REFETCH_ENTRIES_MAX = 1000
"""Entries of a lane that are fetched again at once, at most."""
REFETCH_ROOM_DIVISOR = 8
"""One in this many buffered entries may be a refetched one, and one may be behind a stuck head."""
_UNLIMITED_ROOM = 1 << 30
EVICTED_ENTRIES_MAX = 4_000_000
"""Evicted entries of a table. At this limit a stuck lane keeps its entries, and fetching pauses."""


class Entry(Protocol):
    """What a lane queues. Only the lane table writes ``next``, ``lane`` and ``settled``."""

    next: Any
    lane: Any
    settled: bool
    key: Any
    """The message's, which is not the lane's with every ordering."""
    partition: int
    offset: int
    failure_state: Any
    """Not None if it has state that cannot be fetched again: such an entry is never evicted."""

    @property
    def begun(self) -> bool:
        """Whether it has run before, with any result."""


E = TypeVar("E", bound=Entry)


class Lane(Generic[E]):
    """One key's queue. Only :class:`LaneTable` writes it."""

    __slots__ = ("away", "due", "first", "head", "key", "since", "slow", "state", "tail")

    def __init__(self, key: Hashable, entry: E) -> None:
        self.key = key
        self.first: E | None = entry
        self.head: E | None = entry
        self.tail: E = entry
        self.state = _READY
        self.due = 0.0
        self.slow = False  # stuck, or with evicted entries: arrivals need a check
        self.since = 0.0  # when its head first stopped
        self.away: deque[tuple[int, array[int]]] | None = None  # evicted: partitions and offsets, in order

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
    """Evicted entries: only their offsets are kept."""


Holds = Callable[[int, Any, int], bool]
"""Whether a message with this partition, key and offset is in a range."""


class LaneTable(Generic[E]):
    """All lanes of a task that have entries.

    ``arrive_all`` → ``take`` → (``passed`` | ``retry`` → ``wake`` | ``suspend`` or ``stop`` → ``resume``) → ``settle``,
    or ``take`` → ``set_aside`` → ``insert``. The table decides what may run; it never runs anything. An entry without a
    key gets a lane of its own.

    ``on_evicted`` is called for every evicted entry. ``fetch`` is called for a lane that needs entries back; the answer
    comes later, with :meth:`returned`.
    ``room`` returns how many entries may be buffered, ``used`` how many are buffered or on their way. Refetched entries
    may use an eighth of the room, or what is left of half of it; lanes that need it wait for their turn and share it
    evenly.
    ``retry_share`` is the largest share of turns for retries while others are ready; 1 treats all lanes alike.
    """

    def __init__(
        self,
        *,
        retry_share: float = 1.0,
        on_evicted: Callable[[E], None] = lambda _entry: None,
        fetch: Callable[[Lane[E], int, Sequence[int]], None] | None = None,
        room: Callable[[], int] = lambda: _UNLIMITED_ROOM,
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        self.lanes: dict[Hashable, Lane[E]] = {}
        self.ready: deque[Lane[E]] = deque()
        self.again: deque[Lane[E]] = deque()  # ready for a retry: their backoff is over
        self.running = 0
        self.unsettled = 0  # entries that have passed and wait for their acknowledgement
        self.waiting = 0
        self.stopped = 0
        self.returning = 0
        self.away = 0
        self.closed = False
        self._anonymous: set[Lane[E]] = set()  # lanes without a key
        self._sleeping: list[Lane[E]] = []
        # Each turn of another lane earns the retries this fraction of a turn; a full credit is used first.
        self._earns = retry_share / (1 - retry_share) if retry_share < 1 else 0.0
        self._credit = 0.0
        self._woken = self.again if retry_share < 1 else self.ready
        self._portions: dict[Lane[E], int] = {}  # entries fetched again at once, unless REFETCH_ENTRIES_MAX
        self._on_evicted = on_evicted
        self._fetch = fetch
        self._room = room
        self._used = used
        self.back = 0
        """Entries that are being fetched again, or were and have not passed."""
        self._back: dict[Lane[E], int] = {}  # of each lane, until the lane has processed them
        self._halted: dict[Lane[E], None] = {}  # lanes of these that may not be moving
        self._queue: deque[Lane[E]] = deque()  # RETURNING, and there is no room yet
        self._far = 0  # lanes with evicted entries
        self._batched: dict[Lane[E], E] = {}  # the last entry of each batch of one lane that runs

    def arrive(self, key: Hashable, entry: E, now: float = 0.0) -> None:
        """Queue an entry at the end of its key's lane. ``None`` as the key: no order, a lane of its own."""
        self.arrive_all((key,), (entry,), now)

    def arrive_all(self, keys: Iterable[Hashable], entries: Iterable[E], now: float = 0.0) -> None:
        """Queue entries, each at the end of its key's lane. The hot path: one call for many."""
        lanes, ready = self.lanes, self.ready
        for key, entry in zip(keys, entries, strict=True):
            if key is None:
                lane = entry.lane = Lane(None, entry)
                self._anonymous.add(lane)
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
        """The next lane when there are retries: a retry if no other lane is ready, or if retries have earned a turn."""
        if not self.ready:
            return self.again.popleft()
        if self._credit >= 1.0:
            self._credit -= 1.0
            return self.again.popleft()
        self._credit += self._earns
        return self.ready.popleft()

    def passed(self, lane: Lane[E]) -> None:
        """The head has been processed and its results were handed over: the next entry may run.

        The entry is done only once it is also settled.
        """
        self.running -= 1
        self.unsettled += 1
        head: E | None = lane.head.next  # type: ignore[union-attr]  # a running lane has a head
        lane.head = head
        if lane.slow and self._moved(lane):
            return
        if head is None or self.closed:
            lane.state = _IDLE
        else:
            lane.state = _READY
            self.ready.append(lane)

    def turn(self, lane: Lane[E]) -> Lane[E] | None:
        """:meth:`passed`, then :meth:`take`, in one step: the hot path after almost every message."""
        head = lane.head.next  # type: ignore[union-attr]  # a running lane has a head
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

    def begin_batch(self, lane: Lane[E], last: E) -> None:
        """The entries from the head to ``last`` run together: none is inserted between them, and none is evicted."""
        self._batched[lane] = last

    def advance(self, lane: Lane[E]) -> None:
        """The head of a running batch has passed; the next entry is the head, and runs already."""
        self.unsettled += 1
        lane.head = lane.head.next  # type: ignore[union-attr]  # as in turn()

    def end_batch(self, lane: Lane[E]) -> None:
        """What is behind the head does not run any more."""
        self._batched.pop(lane, None)

    def retry(self, lane: Lane[E], due: float, now: float = 0.0) -> None:
        """The head failed: nothing in the lane runs until ``due``."""
        self.running -= 1
        lane.state = LaneState.RETRYING
        lane.due = due
        heapq.heappush(self._sleeping, lane)
        self._stuck(lane, now, until=due)

    def suspend(self, lane: Lane[E], now: float) -> None:
        """The head waits for its stage, which may not be called now, until :meth:`resume`."""
        self.running -= 1
        self.waiting += 1
        lane.state = LaneState.WAITING
        self._stuck(lane, now, until=now)

    def stop(self, lane: Lane[E], now: float) -> None:
        """Neither the head nor anything behind it runs until :meth:`resume`."""
        self.running -= 1
        self.stopped += 1
        lane.state = LaneState.STOPPED
        self._stuck(lane, now, until=now)

    def resume(self, lane: Lane[E]) -> None:
        """The lane may run its head again; in a closed table nothing starts."""
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
        """Remove the head, which has not run; the next entry may run. The caller inserts the head again later."""
        self.running -= 1
        entry: E = lane.head  # type: ignore[assignment]  # a running lane has a head
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
        if lane.slow and self._moved(lane):
            return
        if following is None or self.closed:
            lane.state = _IDLE
            if lane.first is None and not lane.slow:
                del self.lanes[lane.key]
        else:
            lane.state = _READY
            self.ready.append(lane)

    def insert(self, key: Hashable, entries: Sequence[E]) -> Lane[E]:
        """Insert entries, in their order, before everything in the lane that has not begun: a redrive.

        A head that has begun stays the head, whatever it waits for, unless the lane is stopped.
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
                self._anonymous.add(lane)
            else:
                self.lanes[key] = lane
        elif lane.head is None:
            if lane.first is None:  # all of it is done, and more of it is being fetched again
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
            running = self._batched.get(lane, lane.head)
            last.next = running.next
            running.next = first
            if lane.tail is running:
                lane.tail = last
        for entry in entries:
            entry.lane = lane
        return lane

    def wake(self, now: float) -> int:
        """Make lanes ready whose backoff is over; returns how many."""
        count = 0
        sleeping = self._sleeping
        while sleeping and sleeping[0].due <= now:
            self._woken.append(heapq.heappop(sleeping))
            count += 1
        return count

    def next_due(self) -> float | None:
        """The time at which the next backoff ends, or None."""
        return self._sleeping[0].due if self._sleeping else None

    def settle(self, entries: Sequence[E]) -> list[E]:
        """The results of these entries are durable. Returns the entries that are done now, in lane order."""
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
                current.lane = None  # leaves no reference cycle for the garbage collector
                current = current.next
            lane.first = current
            if current is None and not lane.slow:
                if lane.key is None:
                    self._anonymous.discard(lane)
                else:
                    del self.lanes[lane.key]
        return done

    def close(self) -> None:
        """For the drain: start nothing new. Started entries continue, including their retries."""
        self.closed = True
        left = [lane for lane in self.ready if lane.state is LaneState.RETRYING]
        self.ready.clear()
        self.ready.extend(left)

    @property
    def startable(self) -> bool:
        """Whether :meth:`take` would return a lane."""
        return bool(self.ready or self.again)

    @property
    def quiet(self) -> bool:
        """True if nothing runs, waits for its turn, its backoff or its stage, or is being fetched again.

        Lanes may be stopped, and acknowledgements may be outstanding.
        """
        return not (self.running or self.startable or self._sleeping or self.waiting or self.returning)

    @property
    def drained(self) -> bool:
        """True if nothing that was started continues by itself. Acknowledgements may be outstanding."""
        return not (self.running or self.startable or self._sleeping)

    def statistics(self) -> LaneStatistics:
        """The number of lanes by what they are doing."""
        return LaneStatistics(
            lanes=len(self.lanes) + len(self._anonymous),
            ready=len(self.ready) + len(self.again),
            running=self.running,
            retrying=len(self._sleeping),
            waiting=self.waiting,
            stopped=self.stopped,
            away=self.away,
        )

    def backlog(self, key: Hashable) -> int:
        """Entries of this lane that have not passed, including evicted ones."""
        lane = self.lanes.get(key)
        if lane is None:
            return 0
        count = sum(len(offsets) for _, offsets in lane.away or ())
        entry: E | None = lane.head
        while entry is not None:
            count += 1
            entry = entry.next
        return count

    # A range that is released to another owner.

    def shed(
        self, holds: Holds, is_pinned: Callable[[Hashable], bool], among: Iterable[Lane[E]] | None = None
    ) -> tuple[int, list[Lane[E]]]:
        """Remove all entries of a range that do not run and have not passed.

        Heads that wait for a retry or a breaker, or are stopped, are removed too. ``is_pinned(key)``: whether a
        stopped lane waits for a record, so that its head must stay. ``among``: the lanes to look at, by default all.

        Returns how many entries were removed, and the lanes that still have entries of the range. They become done
        or fail, and are then to be passed to this method again.
        """
        removed, left, halted = 0, list[Lane[E]](), set[Lane[E]]()
        for lane in list(chain(self.lanes.values(), self._anonymous) if among is None else among):
            removed += self._shed_away(lane, holds)
            fixed = lane.state is _RUNNING or (lane.state is LaneState.STOPPED and is_pinned(lane.key))
            removed += self._shed_queued(lane, holds, halted, fixed=fixed)
            entry = lane.first
            while entry is not None and not holds(entry.partition, entry.key, entry.offset):
                entry = entry.next
            if entry is not None:
                left.append(lane)
            elif lane.first is None and lane.state is _IDLE and not lane.slow:
                self._forget(lane)
        if halted:
            self._unqueue(halted)
        self._serve()
        return removed, left

    def _shed_queued(self, lane: Lane[E], holds: Holds, halted: set[Lane[E]], *, fixed: bool) -> int:
        """Remove the lane's entries from its head on, or behind it if that is ``fixed``; returns how many."""
        head = lane.head
        if head is None:
            return 0
        running: E = self._batched.get(lane, head)  # the last one that runs
        before: E | None = running if fixed else None
        if not fixed and lane.first is not head:
            before = lane.first
            while before is not None and before.next is not head:
                before = before.next
        entry: E | None = running.next if fixed else head
        kept, removed = list[E](), 0
        while entry is not None:
            following: E | None = entry.next
            if holds(entry.partition, entry.key, entry.offset):
                entry.next = entry.lane = None
                removed += 1
            else:
                kept.append(entry)
            entry = following
        if not removed:
            return 0
        if before is None:
            lane.first = kept[0] if kept else None
        for one, then in pairwise([*([] if before is None else [before]), *kept]):
            one.next = then
        last = kept[-1] if kept else before
        if last is not None:
            last.next = None
            lane.tail = last
        if not fixed and (not kept or kept[0] is not head):
            lane.head = kept[0] if kept else None
            self._lost_head(lane, halted)
        return removed

    def _lost_head(self, lane: Lane[E], halted: set[Lane[E]]) -> None:
        """The head was removed: what the lane waited for does not count any more."""
        state = lane.state
        if state is LaneState.RETURNING:
            return
        if state is LaneState.WAITING:
            self.waiting -= 1
        elif state is LaneState.STOPPED:
            self.stopped -= 1
        lane.since = 0.0
        self._give_up(lane)
        if state is LaneState.RETRYING or (state is _READY and lane.head is None):
            halted.add(lane)
        if lane.head is None:
            lane.state = _IDLE
            lane.slow = bool(lane.away)
            if lane.away and not self.closed:
                self._ask_back(lane)
        elif state is not _READY:
            lane.state = _READY
            if state is not LaneState.RETRYING and not self.closed:
                self.ready.append(lane)

    def _shed_away(self, lane: Lane[E], holds: Holds) -> int:
        """Forget evicted entries of the range; returns how many. Those that are being fetched again come back."""
        if not lane.away:
            return 0
        kept = deque(
            (partition, offsets)
            for partition, offsets in lane.away
            if not holds(partition, lane.key, offsets[0])
        )
        removed = sum(len(offsets) for _, offsets in lane.away) - sum(len(offsets) for _, offsets in kept)
        if not removed:
            return 0
        self.away -= removed
        lane.away = kept
        if kept:
            return removed
        self._far -= 1
        self._portions.pop(lane, None)
        if lane in self._queue:  # it waits for its turn, and needs nothing any more
            self._queue.remove(lane)
            self.returning -= 1
            lane.state = _IDLE
            if lane.head is not None:
                lane.state = _READY
                self.ready.append(lane)
        if lane.state is not LaneState.RETURNING:
            lane.slow = lane in self._back or bool(lane.since)
        return removed

    def _forget(self, lane: Lane[E]) -> None:
        if lane.key is None:
            self._anonymous.discard(lane)
        elif self.lanes.get(lane.key) is lane:
            del self.lanes[lane.key]

    def _unqueue(self, halted: set[Lane[E]]) -> None:
        """Take these lanes out of all queues. Those that have a head left are ready."""
        for queue in (self.ready, self.again):
            rest = [lane for lane in queue if lane not in halted]
            queue.clear()
            queue.extend(rest)
        self._sleeping = [lane for lane in self._sleeping if lane not in halted]
        heapq.heapify(self._sleeping)
        if not self.closed:
            self.ready.extend(lane for lane in halted if lane.head is not None)

    # Evicted entries: only their offsets are kept.

    def evict(self, lane: Lane[E], keep: int, portion: int) -> None:
        """Keep only ``keep`` entries behind the lane's head; later fetch ``portion`` entries again at once."""
        if self._fetch is None or lane.key is None:
            return
        self._trim(lane, keep)
        if lane.away:
            lane.slow = True
            self._portions[lane] = portion
        self._serve()

    def returned(self, lane: Lane[E], entries: Sequence[E], gone: int) -> None:
        """The next entries of a lane that asked for them, in order; ``gone`` of them no longer exist in the log."""
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
        if lane.head is not None:
            lane.slow = True  # until it has processed the refetched entries
            lane.state = _READY
            if not self.closed:
                self.ready.append(lane)
            return
        lane.slow = bool(lane.away)
        self._give_up(lane)
        if lane.away:
            if not self.closed:
                self._ask_back(lane)
        elif lane.first is None:
            del self.lanes[lane.key]
        self._serve()

    def _moved(self, lane: Lane[E]) -> bool:
        """Follow up on a slow lane whose head has passed; True if the lane now waits for refetched entries."""
        lane.since = 0.0
        if lane.head is not None:
            lane.slow = bool(lane.away) or lane in self._back
            return False
        lane.slow = bool(lane.away)
        self._give_up(lane)
        waits = lane.slow and not self.closed
        if waits:
            self._ask_back(lane)
        else:
            self._serve()
        return waits

    def _stuck(self, lane: Lane[E], now: float, *, until: float) -> None:
        if lane.key is None or self._fetch is None:
            return
        lane.slow = True
        lane.since = lane.since or now
        if lane.state is LaneState.STOPPED or max(now, until) - lane.since >= LANE_STUCK_AFTER_SECONDS:
            self._trim(lane, self.keep)
        elif lane in self._back:
            self._halted[lane] = None
        if self._queue:
            self._serve()

    @property
    def keep(self) -> int:
        """Entries that a stuck lane keeps behind its head: fewer, the more lanes are stuck."""
        stuck = len(self._sleeping) + self.waiting + self.stopped
        return min(STUCK_LANE_ENTRIES_MAX, self._room() // REFETCH_ROOM_DIVISOR // max(1, stuck))

    @property
    def stuck_entries(self) -> int:
        """The approximate number of entries in stuck lanes: as many as they keep. From any thread."""
        return (len(self._sleeping) + self.waiting + self.stopped) * (1 + self.keep)

    def _trim(self, lane: Lane[E], keep: int) -> None:
        """Keep ``keep`` entries behind the head, and only the offsets of the rest."""
        last: E = self._batched.get(lane, lane.head)  # type: ignore[assignment]  # a stuck lane has a head
        came_back = lane in self._back  # evicted before: may be evicted again, even at the limit
        self._give_up(lane)
        for _ in range(keep):
            if last.next is None:
                return
            last = last.next
        entry: E | None = last.next
        if entry is None or (self.away >= EVICTED_ENTRIES_MAX and not came_back):
            return
        while entry is not None:
            if entry.failure_state is not None:
                last = entry
            entry = entry.next
        entry = last.next
        if entry is None:
            return
        self._far += not lane.away
        places: deque[tuple[int, array[int]]] = deque()
        while entry is not None:
            _put(places, entry.partition, entry.offset)
            self._on_evicted(entry)
            self.away += 1
            entry.lane = None
            entry = entry.next
        last.next = None
        lane.tail = last
        lane.away = places + lane.away if lane.away else places

    def _send_away(self, lane: Lane[E], entry: E, now: float) -> bool:
        """Evict an entry that has just arrived, if its lane is far behind; True if it was evicted."""
        if not lane.away:
            if lane.state is not LaneState.RETURNING:
                if (
                    not lane.since
                    or now - lane.since < LANE_STUCK_AFTER_SECONDS
                    or self.away >= EVICTED_ENTRIES_MAX
                ):
                    return False
                behind = lane.head
                for _ in range(self.keep):
                    if behind is None:
                        return False
                    behind = behind.next
            lane.away = deque()
            self._far += 1
        _put(lane.away, entry.partition, entry.offset)
        self.away += 1
        self._on_evicted(entry)
        return True

    def _ask_back(self, lane: Lane[E]) -> None:
        """Queue the lane to get its evicted entries back, in its turn, when there is room."""
        lane.state = LaneState.RETURNING
        lane.slow = True
        self.returning += 1
        self._queue.append(lane)
        self._serve()

    def _serve(self) -> None:
        """Fetch evicted entries of the queued lanes, as far as there is room. Every lane gets an equal share."""
        while self._queue and not self.closed:
            lane, room = self._queue[0], self._room()
            most = max(1, room // REFETCH_ROOM_DIVISOR, room // 2 - self._used() + self.back)
            portion = min(self._portions.get(lane, REFETCH_ENTRIES_MAX), max(1, most // max(1, self._far)))
            if self.back and self.back + portion > most:
                if not self._reclaim():
                    return
                continue
            self._queue.popleft()
            away: deque[tuple[int, array[int]]] = lane.away  # type: ignore[assignment]
            partition, offsets = away[0]
            asked = offsets[:portion]
            del offsets[:portion]
            if not offsets:
                away.popleft()
                if not away:
                    self._far -= 1
                    self._portions.pop(lane, None)
            self._back[lane] = len(asked)
            self.back += len(asked)
            self._fetch(lane, partition, asked)  # type: ignore[misc]  # nothing is evicted without it

    def _give_up(self, lane: Lane[E]) -> None:
        """Free the lane's share of the room for refetched entries."""
        self._halted.pop(lane, None)
        self.back -= self._back.pop(lane, 0)

    def _reclaim(self) -> bool:
        """Evict the refetched entries of a lane that is not moving; False if there is none."""
        while self._halted:
            lane, _ = self._halted.popitem()
            if lane.state in _NOT_MOVING:
                self._trim(lane, self.keep)
                return True
        return False


def _put(places: deque[tuple[int, array[int]]], partition: int, offset: int) -> None:
    """Append an offset. Runs of one partition share an array, short enough that removal at its front is cheap."""
    if not places or places[-1][0] != partition or len(places[-1][1]) >= 8 * REFETCH_ENTRIES_MAX:
        places.append((partition, array("q")))
    places[-1][1].append(offset)
