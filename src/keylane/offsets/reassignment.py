"""Reassignment: what changes hands between the ranges that workers own and the ranges of a new plan.

:func:`match` chooses the plan item of each live owner, so that as few slots as possible move. :func:`moves` compares
what one owner has with its item. A slot that is in both stays where it is, also when its range grows or shrinks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.offsets.assignment import AssignedRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keylane.offsets.slots import Slots


@dataclass(frozen=True, slots=True)
class Moves:
    """What one owner keeps, releases and takes, each ascending. No slot is in two of them."""

    keep: tuple[AssignedRange, ...]
    """Owned and wanted: not touched. At most one range of each partition."""
    release: tuple[AssignedRange, ...]
    """Owned and not wanted: one or both ends of a range that shrinks, or all of it."""
    take: tuple[AssignedRange, ...]
    """Wanted and not owned: one or both ends of a range that grows, or all of it."""

    def __bool__(self) -> bool:
        """Whether anything changes hands."""
        return bool(self.release or self.take)


def moves(owned: Mapping[int, Slots], wanted: Mapping[int, Slots]) -> Moves:
    """How an owner gets from the slots it owns to those that it should own, by partition."""
    keep, release, take = [], [], []
    for partition in sorted(owned.keys() | wanted.keys()):
        now, then = owned.get(partition), wanted.get(partition)
        common = None if now is None or then is None else now.common(then)
        both = [] if common is None else [common]
        keep += [AssignedRange(partition, slots) for slots in both]
        release += [AssignedRange(partition, slots) for slots in (now.without(both) if now else ())]
        take += [AssignedRange(partition, slots) for slots in (then.without(both) if then else ())]
    return Moves(tuple(keep), tuple(release), tuple(take))


def match(
    items: Sequence[Sequence[AssignedRange]], owners: Mapping[str, Sequence[AssignedRange]]
) -> dict[str, int]:
    """The number of the plan item that each owner takes. No slot may be in two items.

    The owner and item with the most slots in common are matched first, and so on. Owners that have nothing in common
    with a free item get the remaining items. If there are more owners than items, some owners get none.
    """
    overlaps = _overlaps(items, owners)
    matched: dict[str, int] = {}
    free = dict.fromkeys(range(len(items)))
    for owner, item in sorted(overlaps, key=lambda pair: (-overlaps[pair], pair)):
        if owner not in matched and item in free:
            matched[owner] = item
            del free[item]
    idle = [owner for owner in sorted(owners) if owner not in matched]
    return matched | dict(zip(idle, free, strict=False))


def _overlaps(
    items: Sequence[Sequence[AssignedRange]], owners: Mapping[str, Sequence[AssignedRange]]
) -> Counter[tuple[str, int]]:
    """How many slots each owner and item have in common, where they have any."""
    cuts: dict[int, list[tuple[Slots, int]]] = defaultdict(list)
    for number, item in enumerate(items):
        for one in item:
            cuts[one.partition].append((one.slots, number))
    for found in cuts.values():
        found.sort()
    common: Counter[tuple[str, int]] = Counter()
    for owner, ranges in owners.items():
        for one in ranges:
            found = cuts.get(one.partition, [])
            at = bisect_left(found, one.slots.first, key=lambda cut: cut[0].last)
            while at < len(found) and found[at][0].overlaps(one.slots):
                slots, number = found[at]
                common[owner, number] += len(slots.common(one.slots) or ())
                at += 1
    return common
