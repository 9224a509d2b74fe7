"""Lanes that share little room, in virtual time: how long cold keys wait beside hot ones.

The lane table, the evictor and the fetcher are the real ones. Only the log, the stage and the clock are made up:
reading takes :data:`READ_SECONDS` seconds a message, a stage waits, and a lane that reads again waits for a pass over
that part of the log. A second of it costs a few milliseconds, so that many distributions can be tried.

The optimum is the best that a reader of the log can do: a message starts when it has been read and the
one before it in its lane is done. Whatever is not next in its lane costs no memory and no second reading; the heads of
lanes take as much memory as reading may fill, half of the capacity. Then reading waits.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from keylane.kafka import fetcher as fetching
from keylane.kafka.fetcher import FetchedBatch, Fetcher
from keylane.lanes.eviction import LaneEvictor
from keylane.lanes.lane_table import Lane, LaneTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

READ_SECONDS = 20e-6
"""Seconds that it takes to read a message and to put it into its lane."""
COLD_KEY_SHARE_MAX = 0.01
"""Share of the messages below which a key is cold."""
WORSE, REACTION = 1.5, 1.5
"""Cold keys may take this many times the optimum, plus these seconds: lanes are checked four times a second."""
READS_PER_MESSAGE_MAX = 3.0
"""How often a message is read at most, on average."""
_PASS, _SKIM, _LEAP = 0.02, 2e-6, 20_000
"""Seconds until a pass over the log begins, and that it takes for a message; longer holes are skipped."""
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load and one app."""

    zipf: float
    keys: int
    stage: float
    """Seconds."""
    capacity: int
    messages: int = 20_000
    live: float = 0.0
    """Seconds over which they arrive; 0 for a backlog."""
    seed: int = 3

    def log(self) -> list[int]:
        """The keys of the messages, in order."""
        weights = list(accumulate(rank**-self.zipf for rank in range(1, self.keys + 1)))
        return random.Random(self.seed).choices(range(self.keys), cum_weights=weights, k=self.messages)

    def arrival(self, offset: int) -> float:
        """When this message is there."""
        return self.live * offset / self.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a case."""

    case: Case
    cold: int
    """Messages of cold keys."""
    took: float
    """Seconds from the arrival of a cold message until it was done, at most."""
    optimum: float
    most: int
    """Messages in memory, at most."""
    read: float
    """How often a message was read, on average."""
    skimmed: float
    """How many messages passes over the log went over, for each message."""

    @property
    def sound(self) -> bool:
        """Whether all promises are kept."""
        return (
            self.took <= WORSE * self.optimum + REACTION
            and self.most <= self.case.capacity
            and self.read <= READS_PER_MESSAGE_MAX
        )


class _Item:
    """A message in its lane."""

    __slots__ = ("begun", "failure_state", "key", "lane", "next", "offset", "partition", "settled")

    def __init__(self, key: int, offset: int) -> None:
        self.key, self.offset, self.partition = key, offset, 0
        self.next: Any = None
        self.lane: Any = None
        self.settled = self.begun = False
        self.failure_state: Any = None


class _Record:
    """A message as the client hands it out."""

    __slots__ = ("item",)

    def __init__(self, key: int, offset: int) -> None:
        self.item = _Item(key, offset)

    def __len__(self) -> int:
        return 100

    def error(self) -> None:
        """There is none."""

    def partition(self) -> int:
        """The only one."""
        return 0

    def offset(self) -> int:
        """Its place."""
        return self.item.offset


class _Client:
    """A consumer of one partition."""

    def __init__(self, case: Case, log: Sequence[int]) -> None:
        self._case, self._log, self._next, self.now = case, log, 0, 0.0

    def poll(self, _timeout: float) -> _Record | None:
        """The next message, if it is there."""
        found = self.consume(1, 0)
        return found[0] if found else None

    def consume(self, most: int, _timeout: float) -> list[_Record]:
        """The next messages that are there."""
        found: list[_Record] = []
        while len(found) < most and self._next < len(self._log):
            if self._case.arrival(self._next) > self.now:
                break
            found.append(_Record(self._log[self._next], self._next))
            self._next += 1
        return found

    def pause(self, _places: object) -> None:
        """Nothing to do: the fetcher does not ask."""

    resume = pause


class _World:
    """One case, from its first message to its last."""

    def __init__(self, case: Case) -> None:
        self.case, self.log = case, case.log()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self.client = _Client(case, self.log)
        consumer: Any = self.client
        self.fetcher = Fetcher(
            consumer, "t", {0: 0}, capacity=case.capacity, deliver=self._accept, fail=print
        )
        self.table: LaneTable[Any] = LaneTable(
            on_evicted=self._evicted,
            fetch=self._read_again,
            room=lambda: self.fetcher.room,
            used=lambda: self.fetcher.buffered,
        )
        self._evictor: LaneEvictor[Any] = LaneEvictor()
        self._look_after, self._looking = 0.0, False
        self._held = self._coming = 0
        self.most = self.again = self.skimmed = 0
        self.ended = [0.0] * len(self.log)

    def run(self) -> None:
        """All of it."""
        left = len(self.log)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _seconds: None)
        with mock.patch.object(fetching, "time", clock):
            self._at(0.0, self._fetch)
            while left:
                self.now, _, what, given = heappop(self._events)
                what(*given)
                if what == self._end:
                    left -= 1
                while (lane := self.table.take()) is not None:
                    self._at(self.now + self.case.stage, self._end, lane)

    def _at(self, when: float, what: Callable[..., None], *given: Any) -> None:
        heappush(self._events, (when, next(self._numbers), what, given))

    def _count(self, more: int) -> None:
        self._held += more
        self.most = max(self.most, self._held + self._coming)

    # The fetcher.

    def _fetch(self) -> None:
        self.client.now, before = self.now, self.fetcher.flows[0].position
        if self.fetcher._may_fetch():  # noqa: SLF001 - its thread, without one
            self.fetcher._fetch()  # noqa: SLF001
        took = (self.fetcher.flows[0].position - before) * READ_SECONDS
        if self.fetcher.flows[0].position < len(self.log):
            self._at(self.now + (took or _POLL_SECONDS), self._fetch)

    def _accept(self, batch: FetchedBatch) -> None:
        items = [record.item for record in batch.records[0]]  # type: ignore[attr-defined]
        self._count(len(items))
        self.table.arrive_all([item.key for item in items], items, self.now)
        if self.now >= self._look_after and not self._looking and self._crowded:
            self._look()

    # The engine.

    @property
    def _crowded(self) -> bool:
        return 4 * self._held > self.fetcher.room

    def _look(self) -> None:
        self._looking = False
        if not self._crowded:
            self._evictor.forget()
            return
        for excess in self._evictor.check(self.table.lanes.values(), self.now, self.fetcher.room):
            self.table.evict(excess.lane, excess.keep, excess.portion)
        self._look_after = self.now + self._evictor.wait
        self._looking = True
        self._at(self._look_after, self._look)

    def _end(self, lane: Lane[Any]) -> None:
        item: Any = lane.head
        self.table.passed(lane)
        self.table.settle([item])
        self.ended[item.offset] = self.now
        self.fetcher.flows[0].done += 1
        self._count(-1)

    # What is read again.

    def _evicted(self, _item: object) -> None:
        self.fetcher.flows[0].done += 1
        self._count(-1)

    def _read_again(self, lane: Lane[Any], _partition: int, offsets: Sequence[int]) -> None:
        self.fetcher.flows[0].done -= len(offsets)
        self._coming += len(offsets)
        self._count(0)
        self.again += len(offsets)
        leaps = (after - before for before, after in pairwise(offsets))
        passed = 1 + sum(gap for gap in leaps if gap < _LEAP)
        self.skimmed += passed
        self._at(self.now + _PASS + passed * _SKIM, self._returned, lane, list(offsets))

    def _returned(self, lane: Lane[Any], offsets: Sequence[int]) -> None:
        self._coming -= len(offsets)
        self._count(len(offsets))
        self.table.returned(lane, [_Item(self.log[offset], offset) for offset in offsets], 0)


def optimum(case: Case, log: Sequence[int]) -> list[float]:
    """When each message is done at best."""
    room = max(1, (case.capacity - max(1, case.capacity // 8)) // 2)
    free: dict[int, float] = {}  # when busy lanes will have finished the messages read so far
    busy: list[tuple[float, int]] = []
    ended, now = [], 0.0
    for offset, key in enumerate(log):
        now = max(now + READ_SECONDS, case.arrival(offset))
        while busy and (busy[0][0] <= now or (key not in free and len(free) >= room)):
            at, other = heappop(busy)
            if free.get(other) == at:
                del free[other]
                now = max(now, at)
        begin = max(now, free.get(key, 0.0))
        free[key] = begin + case.stage
        heappush(busy, (free[key], key))
        ended.append(free[key])
    return ended


def run(case: Case) -> Outcome:
    """One case."""
    world = _World(case)
    world.run()
    log, best = world.log, optimum(case, world.log)
    shares = Counter(log)
    cold = [offset for offset, key in enumerate(log) if shares[key] < COLD_KEY_SHARE_MAX * len(log)]
    return Outcome(
        case=case,
        cold=len(cold),
        took=max((world.ended[offset] - case.arrival(offset) for offset in cold), default=0.0),
        optimum=max((best[offset] - case.arrival(offset) for offset in cold), default=0.0),
        most=world.most,
        read=1 + world.again / len(log),
        skimmed=world.skimmed / len(log),
    )


def grid(messages: int = 20_000) -> Iterator[Case]:
    """All cases: how uneven, how many keys, how slow a stage, how much room, lying there or arriving."""
    for zipf in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        for keys in (5, 50, 500, 5_000):
            for stage in (0.001, 0.01, 0.1):
                for capacity in (200, 2_048, 16_384, 65_536):
                    for live in (0.0, 20.0):
                        yield Case(
                            zipf=zipf,
                            keys=keys,
                            stage=stage,
                            capacity=capacity,
                            messages=messages,
                            live=live,
                        )
