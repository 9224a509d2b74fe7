from __future__ import annotations

import random
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.assignment import AssignedRange, make_plan
from keylane.offsets.reassignment import Moves, match, moves
from keylane.offsets.slots import ALL, SLOTS, Slots

slots = st.tuples(st.integers(0, 19), st.integers(0, 19)).map(lambda ends: Slots(min(ends), max(ends)))
by_partition = st.dictionaries(st.integers(0, 3), slots)


@st.composite
def splits(draw: st.DrawFn) -> list[list[AssignedRange]]:
    """Groups of ranges without a slot in common, at most one range of a partition in each."""
    groups: list[list[AssignedRange]] = [[] for _ in range(draw(st.integers(0, 6)))]
    for partition in range(3):
        ends = sorted(draw(st.sets(st.integers(1, 30), max_size=len(groups))))
        places = draw(st.permutations(range(len(groups))))
        for (first, end), place in zip(pairwise([0, *ends]), places, strict=False):
            if draw(st.booleans()):
                groups[place].append(AssignedRange(partition, Slots(first, end - 1)))
    return groups


def each_slot(ranges: tuple[AssignedRange, ...]) -> list[tuple[int, int]]:
    return [(one.partition, slot) for one in ranges for slot in range(one.slots.first, one.slots.last + 1)]


def in_common(one: list[AssignedRange], other: list[AssignedRange]) -> int:
    return len(set(each_slot(tuple(one))) & set(each_slot(tuple(other))))


def test_moves_of_a_range_that_shrinks_and_grows() -> None:
    assert moves({0: Slots(10, 19)}, {0: Slots(5, 14)}) == Moves(
        keep=(AssignedRange(0, Slots(10, 14)),),
        release=(AssignedRange(0, Slots(15, 19)),),
        take=(AssignedRange(0, Slots(5, 9)),),
    )


def test_moves_of_a_range_that_shrinks_at_both_ends() -> None:
    assert moves({0: ALL}, {0: Slots(10, 19)}) == Moves(
        keep=(AssignedRange(0, Slots(10, 19)),),
        release=(AssignedRange(0, Slots(0, 9)), AssignedRange(0, Slots(20, SLOTS - 1))),
        take=(),
    )


def test_moves_nothing_when_nothing_changes() -> None:
    found = moves({0: ALL, 1: Slots(0, 9)}, {1: Slots(0, 9), 0: ALL})
    assert not found
    assert found.keep == (AssignedRange(0), AssignedRange(1, Slots(0, 9)))


@given(owned=by_partition, wanted=by_partition)
def test_moves_lead_from_owned_to_wanted(owned: dict[int, Slots], wanted: dict[int, Slots]) -> None:
    found = moves(owned, wanted)
    now, then = (
        set(each_slot(tuple(AssignedRange(*one) for one in given.items()))) for given in (owned, wanted)
    )
    for ranges, expected in ((found.keep, now & then), (found.release, now - then), (found.take, then - now)):
        assert sorted(ranges) == list(ranges)
        assert len(each_slot(ranges)) == len(expected)
        assert set(each_slot(ranges)) == expected
    assert len({one.partition for one in found.keep}) == len(found.keep)
    assert bool(found) == (owned != wanted)


def test_match_keeps_owners_of_an_unchanged_plan() -> None:
    plan = make_plan(range(4), 6)
    owners = {f"worker-{number}": task for number, task in enumerate(reversed(plan.tasks))}
    assert match(plan.tasks, owners) == {f"worker-{number}": 5 - number for number in range(6)}


def test_match_gives_new_owners_the_items_left() -> None:
    plan = make_plan(range(3), 3)
    owners = {"new": (), "old": (AssignedRange(1),)}
    assert match(plan.tasks, owners) == {"old": 1, "new": 0}


def test_match_leaves_out_owners_when_items_run_out() -> None:
    owners = {"a": (AssignedRange(0, Slots(0, 9)),), "b": (AssignedRange(0, Slots(10, SLOTS - 1)),)}
    assert match([[AssignedRange(0)]], owners) == {"b": 0}


@given(items=splits(), owned=splits(), stale=splits())
def test_match_takes_the_largest_overlap_first(
    items: list[list[AssignedRange]], owned: list[list[AssignedRange]], stale: list[list[AssignedRange]]
) -> None:
    """Also when owners, such as a suspended worker, still count slots that others own by now."""
    owners = {f"w{number}": ranges for number, ranges in enumerate([*owned, *stale])}
    found = match(items, owners)
    assert found == match(items, dict(reversed(owners.items())))
    assert len(set(found.values())) == len(found) == min(len(items), len(owners))
    free, waiting = set(range(len(items))), set(owners)
    while free and waiting:
        size, owner, item = min(
            (-in_common(owners[owner], items[item]), owner, item) for owner in waiting for item in free
        )
        if size == 0:
            break
        assert found[owner] == item
        free.remove(item)
        waiting.remove(owner)


def test_match_of_20_000_items_is_quick() -> None:
    plan = make_plan(range(200), 200)
    items = [
        [AssignedRange(partition * 1000 + one.partition, one.slots) for one in task]
        for partition in range(100)
        for task in plan.tasks
    ]
    rng = random.Random(1)
    owners = {f"worker-{number}": item for number, item in enumerate(rng.sample(items, len(items) - 500))}
    begin = time.perf_counter()
    found = match(items, owners)
    assert time.perf_counter() - begin < 5  # 0.1 s on two busy cores
    assert all(items[found[owner]] == item for owner, item in owners.items())
