"""Assignment: which task owns which slots of which partitions.

A partition stays whole where possible, because every task that owns a part of it reads all of it. It is split if there
are more tasks than partitions, or if one partition is too busy for a single task.
A new plan changes the previous one as little as possible: splits stay, and ranges stay with their tasks, as long as the
load is balanced enough. If tasks have left, their ranges are divided among the others.

The time is nearly linear in the number of ranges, so that large apps are planned within seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

from keylane.offsets.pieces import (
    BUCKETS,
    IMBALANCE_MAX,
    Cutter,
    Load,
    Piece,
    PieceCounts,
    is_whole_ring,
    weight_of,
)
from keylane.offsets.slots import ALL, Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["BUCKETS", "AssignedRange", "Assignment", "Load", "make_plan"]

_IMPROVEMENT_MIN = 1.1
"""The factor by which moving ranges must reduce the largest load."""
_FILL_MAX = 1.2
"""A task's load relative to its fair share, up to which it takes ranges of others. Leaves room for changing loads."""
_RANGES_MAX = 1.5
"""How many times the ranges of a new plan a previous one may have; else it is not adjusted any more."""
_STEPWISE_RANGES = 10_000
"""Ranges distributed in all attempts, above which no more attempts with one more piece are made."""


@dataclass(frozen=True, slots=True, order=True)
class AssignedRange:
    """Slots of a partition."""

    partition: int
    slots: Slots = ALL

    def __str__(self) -> str:
        return str(self.partition) if self.slots == ALL else f"{self.partition}:{self.slots}"

    @classmethod
    def parse(cls, text: str) -> AssignedRange:
        """The reverse of ``str``. Raises ValueError."""
        partition, _, slots = text.partition(":")
        return cls(int(partition), Slots.parse(slots) if slots else ALL)


@dataclass(frozen=True)
class Assignment:
    """The ranges of each task, ascending. No task has two ranges of the same partition."""

    tasks: tuple[tuple[AssignedRange, ...], ...]

    def encode(self) -> list[list[str]]:
        """The assignment as JSON values."""
        return [[str(one) for one in task] for task in self.tasks]

    @classmethod
    def decode(cls, value: Any) -> Assignment:
        """The reverse of :meth:`encode`. Raises ValueError, TypeError."""
        return cls(tuple(tuple(sorted(AssignedRange.parse(text) for text in task)) for task in value))

    def covers(self, partitions: Sequence[int]) -> bool:
        """Whether every slot of these partitions, and of no others, has one owner."""
        return self._cuts.keys() == set(partitions) and all(map(is_whole_ring, self._cuts.values()))

    def cuts(self, partition: int) -> list[Slots]:
        """How this partition's ring is split."""
        return list(self._cuts.get(partition, ()))

    @cached_property
    def _cuts(self) -> dict[int, list[Slots]]:
        """How the ring of each partition is split, ascending."""
        found: dict[int, list[Slots]] = defaultdict(list)
        for task in self.tasks:
            for one in task:
                found[one.partition].append(one.slots)
        for cuts in found.values():
            cuts.sort(key=lambda slots: (slots.first, slots.last))
        return dict(found)


def make_plan(
    partitions: Sequence[int],
    tasks: int,
    *,
    loads: Mapping[int, Load] | None = None,
    before: Assignment | None = None,
    split: bool = True,
) -> Assignment:
    """Distribute these partitions over tasks. The same arguments give the same plan.

    ``loads`` are the observed loads; a partition without one counts as an average one. Without ``split`` no partition
    is split, and there are at most as many tasks as partitions.
    """
    loads = _whole(partitions, loads or {})
    weights = {p: sum(load) for p, load in loads.items()}
    tasks = max(1, tasks if split else min(tasks, len(partitions)))
    fair = sum(weights.values()) / tasks
    planner = _Planner(loads, tasks, fair, before)
    best = planner.plan(PieceCounts(weights, tasks, fair, split=split))
    if before is not None and len(before.tasks) == best.busy and before.covers(partitions):
        heaviest = max(
            sum(weight_of(loads[one.partition], one.slots) for one in task) for task in before.tasks
        )
        if heaviest <= max(IMBALANCE_MAX * fair, _IMPROVEMENT_MIN * best.heaviest):
            return before
    return best.assignment()


def _whole(partitions: Sequence[int], loads: Mapping[int, Load]) -> dict[int, Load]:
    """A load for each partition, nowhere zero: an idle part may become busy."""
    seen = [sum(loads[p]) for p in partitions if p in loads]
    average = sum(seen) / len(seen) if seen and sum(seen) > 0 else 1.0
    floor = average / 100 / BUCKETS
    usual = (average / BUCKETS,) * BUCKETS
    found: dict[int, Load] = {}
    for p in partitions:
        load = loads.get(p, usual)
        found[p] = load if min(load) >= floor else tuple(max(part, floor) for part in load)
    return found


class _Shares:
    """The pieces of each task."""

    def __init__(self, tasks: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(tasks)]
        self._filled = [0.0] * tasks
        # For finding the least loaded task; made when all previous owners have their pieces.
        self._owned: set[tuple[int, int]] = set()
        self._queue: list[tuple[float, int]] = []
        # Not in the queue now, because they have a piece of the current partition.
        self._aside: list[tuple[float, int]] = []
        self._partition: int | None = None

    def has_room(self, task: int, weight: float, limit: float) -> bool:
        """Whether the task stays within the limit with this weight too, or has nothing else."""
        return not self.pieces[task] or self._filled[task] + weight <= limit

    def keep(self, task: int, piece: Piece) -> None:
        """The task owned this piece before, and still does. Only before the first :meth:`least`."""
        self.pieces[task].append(piece)
        self._filled[task] += piece.weight

    def least(self, partition: int) -> tuple[float, int] | None:
        """The load and number of the least loaded task without a piece of this partition; None if all have one."""
        if self._partition is None:
            self._owned = {(piece.partition, n) for n, share in enumerate(self.pieces) for piece in share}
            self._queue = [(load, n) for n, load in enumerate(self._filled)]
            heapify(self._queue)
        if partition != self._partition:
            for entry in self._aside:
                heappush(self._queue, entry)
            self._aside.clear()
            self._partition = partition
        while self._queue and (partition, self._queue[0][1]) in self._owned:
            self._aside.append(heappop(self._queue))
        return self._queue[0] if self._queue else None

    def give(self, piece: Piece) -> None:
        """The task that :meth:`least` has just found takes this piece."""
        load, task = heappop(self._queue)
        self.pieces[task].append(piece)
        self._owned.add((piece.partition, task))
        self._aside.append((load + piece.weight, task))

    def make_room(self, piece: Piece, most: float) -> list[Piece] | None:
        """Take lighter pieces from the task that :meth:`least` has just found. None if that does not make room."""
        load, task = self._queue[0]
        kept, taken = [], []
        for one in sorted(self.pieces[task]):
            if load + piece.weight > most and one.weight < piece.weight / 2:
                taken.append(one)
                load -= one.weight
            else:
                kept.append(one)
        if load + piece.weight > most:
            return None
        self.pieces[task] = kept
        self._owned.difference_update((one.partition, task) for one in taken)
        heapreplace(self._queue, (load, task))
        return taken

    def heaviest(self) -> float:
        """The load of the busiest task."""
        for share in self.pieces:
            share.sort(key=lambda piece: piece.partition)
        return max(sum([piece.weight for piece in share]) for share in self.pieces)


class _Plan:
    """A plan that the planner compares with others."""

    def __init__(self, shares: _Shares) -> None:
        self.heaviest = shares.heaviest()
        self.ranges = sum(map(len, shares.pieces))
        self._shares = [share for share in shares.pieces if share]

    @property
    def busy(self) -> int:
        """How many tasks have something to do."""
        return len(self._shares)

    def assignment(self) -> Assignment:
        """The ranges of the tasks that have any."""
        return Assignment(
            tuple(tuple([AssignedRange(one.partition, one.slots) for one in share]) for share in self._shares)
        )


class _Planner:
    """Finds a plan that is balanced enough, close to the previous one."""

    def __init__(self, loads: Mapping[int, Load], tasks: int, fair: float, before: Assignment | None) -> None:
        self._tasks = tasks
        self._fair = fair
        self._limit = IMBALANCE_MAX * fair
        known = {} if before is None else {p: cuts for p in loads if (cuts := before.cuts(p))}
        self._cutter = Cutter(loads, known)
        self._before = () if before is None else before.tasks
        self._new = [p for p in loads if p not in known]
        self._adjustable = all(map(is_whole_ring, known.values()))
        self._owners: dict[int, list[tuple[Slots, int]]] = defaultdict(list)
        for number, task in enumerate(self._before[:tasks]):
            for one in task:
                self._owners[one.partition].append((one.slots, number))
        for owners in self._owners.values():
            owners.sort(key=lambda owner: owner[0].first)

    def plan(self, counts: PieceCounts) -> _Plan:
        """The plan with the fewest pieces, if that is balanced; else the previous one, adjusted; else one with more.

        Two partitions for three tasks: halves cannot be balanced, thirds can. One extra piece is tried at a time, as
        long as that takes little time; then pieces are cut where they do not fit. If no plan is balanced, the best one
        counts.
        """
        fewest = counts.counts()
        if self._before:
            nearby = self._share_out(fewest, nearby=True)
            if nearby.heaviest <= self._limit and nearby.busy == min(self._tasks, nearby.ranges):
                return nearby
            if counts.heaviest > 0 and self._adjustable:
                adjusted = self._adjust(fewest)
                if adjusted is not None and adjusted.ranges <= _RANGES_MAX * nearby.ranges:
                    return adjusted
        best = last = self._share_out(fewest)
        extra, tried = 1, last.ranges
        while last.heaviest > self._limit and counts.extend(extra) == extra:
            if tried > _STEPWISE_RANGES:
                fitting = (self._cut_to_fit(counts, best.ranges * more // 16) for more in (0, 1, 2, 4, 8, 16))
                return next(filter(None, fitting), best)
            last = self._share_out(counts.counts(extra))
            extra, tried = extra + 1, tried + last.ranges
            if last.heaviest < best.heaviest * 0.99:
                best = last
        return best

    def _share_out(self, counts: Mapping[int, int], *, nearby: bool = False) -> _Plan:
        """Give each piece to its previous task if that has room, then the heaviest pieces to the least loaded tasks.

        ``nearby``: a piece that was cut otherwise before is given to the task that had most of its slots.
        """
        shares, left = self._at_home(counts, nearby=nearby)
        for piece in left:
            shares.least(piece.partition)
            shares.give(piece)
        return _Plan(shares)

    def _cut_to_fit(self, pieces: PieceCounts, extra: int) -> _Plan | None:
        """The same, but pieces of partitions that are split anyway are cut where they are too heavy for a task."""
        pieces.extend(extra)
        counts = pieces.counts(extra)
        shares, left = self._at_home(counts, nearby=True)
        return self._fit(left, shares, counts)

    def _at_home(self, counts: Mapping[int, int], *, nearby: bool) -> tuple[_Shares, list[Piece]]:
        """The pieces that stay with their previous tasks, and the others, the heaviest first."""
        shares = _Shares(self._tasks)
        left: list[Piece] = []
        had_most: list[tuple[int, Piece, int]] = []
        taken: set[tuple[int, int]] = set()

        def settle(piece: Piece, home: int) -> None:
            if (piece.partition, home) in taken or not shares.has_room(home, piece.weight, self._limit):
                left.append(piece)
            else:
                shares.keep(home, piece)
                taken.add((piece.partition, home))

        for piece in sorted(self._cutter.pieces(counts)):
            slots, number = self._previous_owner(piece)
            if slots == piece.slots:
                settle(piece, number)
            elif slots is not None and nearby:
                had_most.append((-len(slots.common(piece.slots) or ()), piece, number))
            else:
                left.append(piece)
        for _, piece, number in sorted(had_most):
            settle(piece, number)
        return shares, sorted(left)

    def _previous_owner(self, piece: Piece) -> tuple[Slots | None, int]:
        """The range that had the most of this piece, and its task; None if nobody had anything of it."""
        owners = self._owners.get(piece.partition, [])
        at = bisect_left(owners, piece.first, key=lambda owner: owner[0].last)
        found: tuple[Slots | None, int] = (None, -1)
        most = 0
        while at < len(owners) and (common := owners[at][0].common(piece.slots)) is not None:
            if len(common) > most:
                found, most = owners[at], len(common)
            at += 1
        return found

    def _adjust(self, counts: Mapping[int, int]) -> _Plan | None:
        """The previous plan, of which only that moves which has no task, or is too much for its task."""
        shares, left = _Shares(self._tasks), [self._cutter.piece(p, ALL) for p in self._new]
        for number, task in enumerate(self._before):
            pieces = [self._cutter.piece(one.partition, one.slots) for one in task if one.partition in counts]
            if number < self._tasks:
                kept, excess = self._relieve(pieces, counts)
                left += excess
                for piece in kept:
                    shares.keep(number, piece)
            else:
                left += pieces
        return self._fit(left, shares, counts)

    def _relieve(self, pieces: Iterable[Piece], counts: Mapping[int, int]) -> tuple[list[Piece], list[Piece]]:
        """What a task keeps of its pieces, and what it gives away to have its fair share if it has too much."""
        pieces = sorted(pieces)
        filled = sum(piece.weight for piece in pieces)
        if filled <= self._limit:
            return pieces, []
        kept, excess = [], []
        for piece in pieces:
            parts = None
            if filled > _FILL_MAX * self._fair:
                if piece.weight <= filled - self._fair:
                    excess.append(piece)
                    filled -= piece.weight
                    continue
                if counts[piece.partition] > 1:
                    parts = self._cutter.divide(piece, piece.weight - (filled - self._fair))
            if parts is not None:
                kept.append(parts[0])
                excess.append(parts[1])
                filled -= parts[1].weight
            else:
                kept.append(piece)
        return kept, excess

    def _fit(self, left: Iterable[Piece], shares: _Shares, counts: Mapping[int, int]) -> _Plan | None:
        """Cut these pieces to fit into the room of the least loaded tasks. None if the plan is not balanced then.

        Partitions that need no split are not cut.
        """
        waiting = [(counts[piece.partition] > 1, piece) for piece in left]  # first those that are not cut
        heapify(waiting)
        most = _FILL_MAX * self._fair
        while waiting:
            may_cut, piece = heappop(waiting)
            found = shares.least(piece.partition)
            if found is None:
                return None
            room = most - found[0]
            if piece.weight > room and (found[0] > 0 or piece.weight > self._limit):
                rest: Sequence[Piece] | None
                if may_cut and room > 0 and (parts := self._cutter.divide(piece, room)) is not None:
                    piece, rest = parts[0], parts[1:]
                else:
                    rest = shares.make_room(piece, max(most, piece.weight))
                if rest is None:
                    return None
                for one in rest:
                    heappush(waiting, (counts[one.partition] > 1, one))
            shares.give(piece)
        plan = _Plan(shares)
        return plan if plan.busy == self._tasks and plan.heaviest <= self._limit else None
