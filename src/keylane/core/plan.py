"""The plan: which task owns which slots of which partitions.

A partition is left whole where that is fair, because every task that has a part of it reads all of it. It is cut where
there are more tasks than partitions, and where one partition is so busy that a task could not keep up with it alone.
A new plan keeps to the one before: a cut stays where it is, and a range with its task, as long as the shares are even
enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.core.ring import ALL, SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUCKETS = 64
"""Parts of a partition's ring whose load is counted."""
BUCKET = SLOTS // BUCKETS
"""Slots in each."""
_UNEVEN = 1.25
"""By how much a share may be larger than its fair size before something is moved for it."""

_WORTH_IT = 1.1
"""By how much the largest share must shrink for it, at least."""

Load = tuple[float, ...]
"""Of one partition, by bucket of its ring."""


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Slots of a partition."""

    partition: int
    slots: Slots = ALL

    def __str__(self) -> str:
        return str(self.partition) if self.slots == ALL else f"{self.partition}:{self.slots}"

    @classmethod
    def parse(cls, text: str) -> Range:
        """The reverse of ``str``. Raises ValueError."""
        partition, _, slots = text.partition(":")
        return cls(int(partition), Slots.parse(slots) if slots else ALL)


@dataclass(frozen=True, slots=True)
class Plan:
    """By task: its ranges, ascending. No task has two of the same partition."""

    tasks: tuple[tuple[Range, ...], ...]

    def encode(self) -> list[list[str]]:
        """As JSON can hold it."""
        return [[str(one) for one in task] for task in self.tasks]

    @classmethod
    def decode(cls, value: Any) -> Plan:
        """The reverse. Raises ValueError, TypeError."""
        return cls(tuple(tuple(sorted(Range.parse(text) for text in task)) for task in value))

    def covers(self, partitions: Sequence[int]) -> bool:
        """Whether every slot of these, and of no others, has an owner."""
        named = {one.partition for task in self.tasks for one in task}
        return named == set(partitions) and not any(ALL.without(self.cuts(p)) for p in partitions)

    def cuts(self, partition: int) -> list[Slots]:
        """How this partition's ring is cut."""
        return sorted(one.slots for task in self.tasks for one in task if one.partition == partition)


def make_plan(
    partitions: Sequence[int],
    tasks: int,
    *,
    loads: Mapping[int, Load] | None = None,
    before: Plan | None = None,
    split: bool = True,
) -> Plan:
    """Share these partitions out. The same arguments give the same plan.

    ``loads`` is what was seen of each partition; one that is not named counts as much as an average one. Without
    ``split`` no partition is cut, and there are no more tasks than partitions.
    """
    loads = _whole(partitions, loads or {})
    weights = {p: sum(load) for p, load in loads.items()}
    tasks = max(1, tasks if split else min(tasks, len(partitions)))
    fair = sum(weights.values()) / tasks
    pieces = dict.fromkeys(partitions, 1)
    if split:
        for partition in partitions:  # as long as one piece of it is more than a task's fair share
            while weights[partition] / pieces[partition] > _UNEVEN * fair and pieces[partition] < tasks:
                pieces[partition] += 1
        while sum(pieces.values()) < tasks:
            pieces[max(partitions, key=lambda p: (weights[p] / pieces[p], -p))] += 1
    best: tuple[float, Plan] | None = None
    while True:
        ranges: dict[Range, float] = {}
        for partition in partitions:
            known = before.cuts(partition) if before is not None else []
            for slots in _cut(loads[partition], pieces[partition], known):
                ranges[Range(partition, slots)] = _weight(loads[partition], slots)
        plan = _share_out(ranges, tasks, fair, before)
        heaviest = max(sum(ranges[one] for one in task) for task in plan.tasks)
        if best is None or heaviest < best[0] * 0.99:
            best = heaviest, plan
        # Two partitions for three tasks: halves do not come out even, thirds do.
        finer = [p for p in partitions if 1 < pieces[p] < tasks]
        if heaviest <= _UNEVEN * fair or not finer:
            break
        pieces[max(finer, key=lambda p: (weights[p] / pieces[p], -p))] += 1
    if before is not None and len(before.tasks) == len(best[1].tasks) and before.covers(partitions):
        heaviest = max(sum(_weight(loads[one.partition], one.slots) for one in task) for task in before.tasks)
        if heaviest <= max(_UNEVEN * fair, _WORTH_IT * best[0]):
            return before
    return best[1]


def _whole(partitions: Sequence[int], loads: Mapping[int, Load]) -> dict[int, Load]:
    """A load for each, none of it zero: what was idle till now may wake up."""
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
    """Into so many pieces of the same weight; as it is cut already, if that is even enough."""
    if len(known) == pieces and not Slots(0, SLOTS - 1).without(known):
        weights = [_weight(load, slots) for slots in known]
        if max(weights) <= _UNEVEN * sum(weights) / pieces:
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
    while len(found) < pieces - 1:  # what rounding has left over
        found.append(Slots(begin, begin))
        begin += 1
    return [*found, Slots(begin, SLOTS - 1)]


def _share_out(ranges: Mapping[Range, float], tasks: int, fair: float, before: Plan | None) -> Plan:
    """Each range to its old task while that has room for it, then the heaviest to whoever has least."""
    shares: list[list[Range]] = [[] for _ in range(tasks)]
    filled = [0.0] * tasks
    homes: dict[Range, int] = {}
    for number, task in enumerate(before.tasks if before is not None else ()):
        if number < tasks:
            homes |= dict.fromkeys(task, number)
    for at_home in (True, False):
        for one in sorted(ranges, key=lambda one: (-ranges[one], one)):
            if at_home:
                home = homes.pop(one, None)
                if home is None or (shares[home] and filled[home] + ranges[one] > _UNEVEN * fair):
                    continue
            elif any(one in share for share in shares):
                continue
            else:
                free = [n for n in range(tasks) if all(own.partition != one.partition for own in shares[n])]
                home = min(free, key=lambda number: (filled[number], number))
            shares[home].append(one)
            filled[home] += ranges[one]
    return Plan(tuple(tuple(sorted(share)) for share in shares if share))
