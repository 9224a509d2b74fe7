"""The reference planner: the same promises as ``keylane.offsets.assignment``, in cubic time.

It tries one more piece at a time and looks at every task for every range. Tests compare plans of small apps with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.offsets.assignment import BUCKETS, AssignedRange, Assignment, Load
from keylane.offsets.slots import SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUCKET = SLOTS // BUCKETS
_IMBALANCE_MAX = 1.25
_IMPROVEMENT_MIN = 1.1


def reference_plan(
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
