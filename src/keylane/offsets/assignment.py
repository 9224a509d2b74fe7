"""Assignment: which task owns which slots of which partitions.

A partition stays whole where possible, because every task that owns a part of it reads all of it. It is split if there
are more tasks than partitions, or if one partition is too busy for a single task.
A new plan changes the previous one as little as possible: splits stay, and ranges stay with their tasks, as long as the
load is balanced enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.offsets.slots import ALL, SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUCKETS = 64
"""Equal parts of a partition's ring, whose load is counted separately."""
BUCKET = SLOTS // BUCKETS
"""Slots in each bucket."""
_IMBALANCE_MAX = 1.25
"""A task's load relative to its fair share, above which ranges are moved."""

_IMPROVEMENT_MIN = 1.1
"""The factor by which moving ranges must reduce the largest load."""

Load = tuple[float, ...]
"""The load of one partition, by bucket of its ring."""


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


@dataclass(frozen=True, slots=True)
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
        """Whether every slot of these partitions, and of no others, has an owner."""
        named = {one.partition for task in self.tasks for one in task}
        return named == set(partitions) and not any(ALL.without(self.cuts(p)) for p in partitions)

    def cuts(self, partition: int) -> list[Slots]:
        """How this partition's ring is split."""
        return sorted(one.slots for task in self.tasks for one in task if one.partition == partition)


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
    pieces = dict.fromkeys(partitions, 1)
    if split:
        for partition in partitions:  # as long as one piece of it is more than a task's fair share
            while (
                weights[partition] / pieces[partition] > _IMBALANCE_MAX * fair and pieces[partition] < tasks
            ):
                pieces[partition] += 1
        while sum(pieces.values()) < tasks:
            pieces[max(partitions, key=lambda p: (weights[p] / pieces[p], -p))] += 1
    best: tuple[float, Assignment] | None = None
    while True:
        ranges: dict[AssignedRange, float] = {}
        for partition in partitions:
            known = before.cuts(partition) if before is not None else []
            for slots in _cut(loads[partition], pieces[partition], known):
                ranges[AssignedRange(partition, slots)] = _weight(loads[partition], slots)
        plan = _share_out(ranges, tasks, fair, before)
        heaviest = max(sum(ranges[one] for one in task) for task in plan.tasks)
        if best is None or heaviest < best[0] * 0.99:
            best = heaviest, plan
        # Two partitions for three tasks: halves cannot be balanced, thirds can.
        finer = [p for p in partitions if 1 < pieces[p] < tasks]
        if heaviest <= _IMBALANCE_MAX * fair or not finer:
            break
        pieces[max(finer, key=lambda p: (weights[p] / pieces[p], -p))] += 1
    if before is not None and len(before.tasks) == len(best[1].tasks) and before.covers(partitions):
        heaviest = max(sum(_weight(loads[one.partition], one.slots) for one in task) for task in before.tasks)
        if heaviest <= max(_IMBALANCE_MAX * fair, _IMPROVEMENT_MIN * best[0]):
            return before
    return best[1]


def _whole(partitions: Sequence[int], loads: Mapping[int, Load]) -> dict[int, Load]:
    """A load for each partition, nowhere zero: an idle part may become busy."""
    seen = [sum(loads[p]) for p in partitions if p in loads]
    average = sum(seen) / len(seen) if seen and sum(seen) > 0 else 1.0
    floor = average / 100 / BUCKETS
    usual = (average / BUCKETS,) * BUCKETS
    return {p: tuple(max(part, floor) for part in loads.get(p, usual)) for p in partitions}


def _weight(load: Load, slots: Slots) -> float:
    first, last = slots.first // BUCKET, slots.last // BUCKET
    before, behind = slots.first - first * BUCKET, (last + 1) * BUCKET - 1 - slots.last
    return sum(load[first : last + 1]) - (load[first] * before + load[last] * behind) / BUCKET


def _cut(load: Load, pieces: int, known: Sequence[Slots]) -> Sequence[Slots]:
    """Split into ``pieces`` of the same weight; the known split is kept if it is balanced enough."""
    if len(known) == pieces and not Slots(0, SLOTS - 1).without(known):
        weights = [_weight(load, slots) for slots in known]
        if max(weights) <= _IMBALANCE_MAX * sum(weights) / pieces:
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


def _share_out(
    ranges: Mapping[AssignedRange, float], tasks: int, fair: float, before: Assignment | None
) -> Assignment:
    """Assign each range to its previous task if that has room, then the heaviest ranges to the least loaded tasks."""
    shares: list[list[AssignedRange]] = [[] for _ in range(tasks)]
    filled = [0.0] * tasks
    homes: dict[AssignedRange, int] = {}
    for number, task in enumerate(before.tasks if before is not None else ()):
        if number < tasks:
            homes |= dict.fromkeys(task, number)
    for at_home in (True, False):
        for one in sorted(ranges, key=lambda one: (-ranges[one], one)):
            if at_home:
                home = homes.pop(one, None)
                if home is None or (shares[home] and filled[home] + ranges[one] > _IMBALANCE_MAX * fair):
                    continue
            elif any(one in share for share in shares):
                continue
            else:
                free = [n for n in range(tasks) if all(own.partition != one.partition for own in shares[n])]
                home = min(free, key=lambda number: (filled[number], number))
            shares[home].append(one)
            filled[home] += ranges[one]
    return Assignment(tuple(tuple(sorted(share)) for share in shares if share))
