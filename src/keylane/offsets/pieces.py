"""Pieces: parts of partitions with about the same load, which a plan distributes over tasks."""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from keylane.offsets.slots import ALL, SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BUCKETS = 64
"""Equal parts of a partition's ring, whose load is counted separately."""
BUCKET = SLOTS // BUCKETS
"""Slots in each bucket."""
IMBALANCE_MAX = 1.25
"""A task's load relative to its fair share, above which ranges are moved."""

Load = tuple[float, ...]
"""The load of one partition, by bucket of its ring."""


class Piece(NamedTuple):
    """Slots of a partition and their load. Sorted, the heaviest pieces come first."""

    order: float
    """The negative weight."""
    partition: int
    first: int
    """The first of the slots."""
    weight: float
    slots: Slots


class PieceCounts:
    """Into how many pieces each partition is cut: first as few as possible, then more of the heaviest ones."""

    def __init__(self, weights: Mapping[int, float], tasks: int, fair: float, *, split: bool) -> None:
        self._weights = weights
        self._tasks = tasks
        self._fewest = dict.fromkeys(weights, 1)
        if split:
            self._split(fair)
        self._known = self._fewest.copy()  # with the extra pieces
        self._extra: list[int] = []  # the partition of each extra piece, in the order in which they are added
        # A partition that is whole stays whole: each of its pieces would need a reader of its own.
        self._finer = [(-w / n, p) for p, w in weights.items() if 1 < (n := self._fewest[p]) < tasks]
        heapify(self._finer)

    def _split(self, fair: float) -> None:
        """No piece is too heavy for a task, and there is a piece for every task."""
        counts, weights, tasks = self._fewest, self._weights, self._tasks
        for p, weight in weights.items():
            while weight / counts[p] > IMBALANCE_MAX * fair and counts[p] < tasks:
                counts[p] += 1
        heaviest = [(-weight / counts[p], p) for p, weight in weights.items()]
        heapify(heaviest)
        for _ in range(tasks - sum(counts.values())):
            p = heaviest[0][1]
            counts[p] += 1
            heapreplace(heaviest, (-weights[p] / counts[p], p))

    @property
    def heaviest(self) -> float:
        """The weight of the heaviest piece, with all extra pieces, that can be cut again; 0 if there is none."""
        return -self._finer[0][0] if self._finer else 0.0

    def extend(self, extra: int) -> int:
        """Add extra pieces, each to the partition with the heaviest, up to a number. Returns how many there are."""
        while self._finer and len(self._extra) < extra:
            p = self._finer[0][1]
            self._extra.append(p)
            self._known[p] += 1
            if self._known[p] < self._tasks:
                heapreplace(self._finer, (-self._weights[p] / self._known[p], p))
            else:
                heappop(self._finer)
        return len(self._extra)

    def counts(self, extra: int = 0) -> dict[int, int]:
        """The number of pieces of each partition, with the first ``extra`` extra pieces."""
        counts = self._fewest.copy()
        for p, more in Counter(self._extra[:extra]).items():
            counts[p] += more
        return counts


class Cutter:
    """Cuts partitions by their load. Keeps known cuts where they are balanced enough."""

    def __init__(self, loads: Mapping[int, Load], known: Mapping[int, Sequence[Slots]]) -> None:
        self._loads = loads
        self._known = known
        self._made: dict[tuple[int, int], list[Piece]] = {}

    def pieces(self, counts: Mapping[int, int]) -> Iterable[Piece]:
        """All partitions, each in this number of pieces."""
        for partition, count in counts.items():
            made = self._made.get((partition, count))
            if made is None:
                cuts = _cut(self._loads[partition], count, self._known.get(partition, ()))
                made = self._made[partition, count] = [self.piece(partition, slots) for slots in cuts]
            yield from made

    def piece(self, partition: int, slots: Slots) -> Piece:
        """These slots as a piece."""
        weight = weight_of(self._loads[partition], slots)
        return Piece(-weight, partition, slots.first, weight, slots)

    def divide(self, piece: Piece, weight: float) -> tuple[Piece, Piece] | None:
        """Two parts of this piece, of which the first has at most this weight; None if that is not possible."""
        load, (first, last) = self._loads[piece.partition], (piece.slots.first, piece.slots.last)
        begin = first  # of the second part
        while begin <= last:
            bucket = begin // BUCKET
            slots = min((bucket + 1) * BUCKET, last + 1) - begin
            fitting = min(slots, int(weight / load[bucket] * BUCKET))
            weight -= load[bucket] * fitting / BUCKET
            begin += fitting
            if fitting < slots:
                break
        if not first < begin <= last:
            return None
        return (
            self.piece(piece.partition, Slots(first, begin - 1)),
            self.piece(piece.partition, Slots(begin, last)),
        )


def weight_of(load: Load, slots: Slots) -> float:
    """The load of these slots."""
    first, last = slots.first // BUCKET, slots.last // BUCKET
    before, behind = slots.first - first * BUCKET, (last + 1) * BUCKET - 1 - slots.last
    return sum(load[first : last + 1]) - (load[first] * before + load[last] * behind) / BUCKET


def is_whole_ring(cuts: Sequence[Slots]) -> bool:
    """Whether these slots, ascending, are the whole ring without a gap or an overlap."""
    return (
        bool(cuts)
        and cuts[0].first == 0
        and cuts[-1].last == SLOTS - 1
        and all(one.last + 1 == following.first for one, following in pairwise(cuts))
    )


def _cut(load: Load, pieces: int, known: Sequence[Slots]) -> Sequence[Slots]:
    """Split into ``pieces`` of the same weight; the known split is kept if it is balanced enough."""
    if pieces == 1:
        return [ALL]
    if len(known) == pieces and is_whole_ring(known):
        weights = [weight_of(load, slots) for slots in known]
        if max(weights) <= IMBALANCE_MAX * sum(weights) / pieces:
            return known
    share = sum(load) / pieces
    found: list[Slots] = []
    begin, filled = 0, 0.0
    for bucket, part in enumerate(load):
        used = 0.0
        while len(found) < pieces - 1 and filled + (part - used) >= share:
            used += share - filled
            end = min(bucket * BUCKET + round(used / part * BUCKET), (bucket + 1) * BUCKET)
            end = max(begin + 1, min(end, SLOTS - (pieces - len(found) - 1)))
            found.append(Slots(begin, end - 1))
            begin, filled = end, 0.0
        filled += part - used
    while len(found) < pieces - 1:  # pieces lost to rounding
        found.append(Slots(begin, begin))
        begin += 1
    return [*found, Slots(begin, SLOTS - 1)]
