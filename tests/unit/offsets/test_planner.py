"""The planner against the reference planner on small apps, and its time on large ones."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.assignment import BUCKETS, Assignment, Load, make_plan
from keylane.offsets.pieces import Cutter, Piece
from keylane.offsets.slots import ALL, SLOTS, Slots
from support.reference_planner import reference_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

BALANCED = 1.25
"""The load of the busiest task, relative to its fair share, that the planner leaves as it is."""
ROUNDING = 1.001


def loads_of(rng: random.Random, partitions: int) -> dict[int, Load]:
    """Even, uneven and with one busy bucket; some partitions are busier than others."""
    shapes = [
        lambda: (1.0,) * BUCKETS,
        lambda: tuple(rng.uniform(0.1, 1000) for _ in range(BUCKETS)),
        lambda: tuple(1000.0 if n == 3 else 10.0 for n in range(BUCKETS)),
        lambda: (rng.lognormvariate(0, 2),) * BUCKETS,
    ]
    return {p: rng.choice(shapes)() for p in range(partitions)}


def weight(loads: Mapping[int, Load], partition: int, slots: Slots) -> float:
    return Cutter(loads, {}).piece(partition, slots).weight


def task_loads(plan: Assignment, loads: Mapping[int, Load]) -> list[float]:
    return [sum(weight(loads, one.partition, one.slots) for one in task) for task in plan.tasks]


def moved(before: Assignment, plan: Assignment, loads: Mapping[int, Load]) -> float:
    """The load that is at another task than before."""
    found = 0.0
    for number, task in enumerate(plan.tasks):
        had = {one.partition: one.slots for one in before.tasks[number]} if number < len(before.tasks) else {}
        for one in task:
            stays = had[one.partition].common(one.slots) if one.partition in had else None
            found += weight(loads, one.partition, one.slots)
            found -= weight(loads, one.partition, stays) if stays else 0
    return found


def assert_sound(plan: Assignment, partitions: int) -> None:
    assert plan.covers(range(partitions))
    for partition in range(partitions):
        cuts = plan.cuts(partition)
        assert sum(map(len, cuts)) == SLOTS
        assert not ALL.without(cuts)
    for task in plan.tasks:
        assert len({one.partition for one in task}) == len(task) > 0


small = {"seed": st.integers(0, 10**6), "partitions": st.integers(1, 12)}


@given(**small, tasks=st.integers(1, 24), known=st.booleans(), split=st.booleans())
def test_first_plan_is_the_reference_plan(
    seed: int, partitions: int, tasks: int, known: bool, split: bool
) -> None:
    loads = loads_of(random.Random(seed), partitions) if known else {}
    plan = make_plan(range(partitions), tasks, loads=loads, split=split)
    assert plan == reference_plan(range(partitions), tasks, loads=loads, split=split)


@given(**small, counts=st.lists(st.integers(1, 24), min_size=2, max_size=4))
def test_next_plans_are_as_balanced_as_the_reference(seed: int, partitions: int, counts: list[int]) -> None:
    """The busiest task has no more load than there, or not so much that the planner would move anything."""
    rng = random.Random(seed)
    plan: Assignment | None = None
    for tasks in counts:
        loads = loads_of(rng, partitions)
        before, plan = plan, make_plan(range(partitions), tasks, loads=loads, before=plan)
        assert_sound(plan, partitions)
        reference = reference_plan(range(partitions), tasks, loads=loads, before=before)
        if before is None or plan == reference:
            continue
        fair, heaviest = sum(map(sum, loads.values())) / tasks, max(task_loads(reference, loads))
        assert max(task_loads(plan, loads)) <= max(heaviest, BALANCED * fair) * ROUNDING


def test_fewer_slots_move_than_by_the_reference() -> None:
    """In total. A single plan rarely moves more: the reference gives a piece to the least loaded task, which may have
    owned it."""
    reference_moves = moves = 0.0
    for seed in range(100):
        rng = random.Random(seed)
        partitions, tasks = rng.randint(1, 14), rng.randint(1, 26)
        each_slot = dict.fromkeys(range(partitions), (1.0,) * BUCKETS)
        loads = loads_of(rng, partitions)
        plan: Assignment | None = None
        for _ in range(5):
            before, plan = plan, make_plan(range(partitions), tasks, loads=loads, before=plan)
            if before is not None:
                reference = reference_plan(range(partitions), tasks, loads=loads, before=before)
                reference_moves += moved(before, reference, each_slot)
                moves += moved(before, plan, each_slot)
            tasks = max(1, tasks + rng.choice((-2, -1, 1, 2)))
            if rng.random() < 0.3:
                loads = loads_of(rng, partitions)
    assert moves < 0.8 * reference_moves


def test_a_lost_task_moves_little_when_partitions_are_split() -> None:
    before = make_plan(range(100), 200)
    plan = make_plan(range(100), 199, before=before)
    assert plan.tasks[:150] != before.tasks[:150]  # somebody has to take the 200th half
    even = dict.fromkeys(range(100), (1.0,) * BUCKETS)
    assert moved(before, plan, even) == pytest.approx(BUCKETS / 2)
    assert max(task_loads(plan, even)) <= BALANCED * 100 * BUCKETS / 199


def test_a_piece_that_is_cut_otherwise_stays_with_its_owner() -> None:
    before = make_plan(range(2), 4)
    plan = make_plan(range(2), 6, before=before)
    even = dict.fromkeys(range(2), (1.0,) * BUCKETS)
    assert moved(before, plan, even) == pytest.approx(2 * BUCKETS / 3, rel=0.01)


def test_ranges_do_not_pile_up_over_many_plans() -> None:
    rng = random.Random(2)
    plan = make_plan(range(20), 40)
    for _ in range(300):
        tasks = rng.randint(30, 50)
        plan = make_plan(range(20), tasks, before=plan)
        assert sum(map(len, plan.tasks)) <= 2 * max(tasks, 2 * 20)
        even = dict.fromkeys(range(20), (1.0,) * BUCKETS)
        assert max(task_loads(plan, even)) <= BALANCED * 20 * BUCKETS / tasks * ROUNDING


def test_new_partitions_join_a_plan_that_is_adjusted() -> None:
    before = make_plan(range(10), 20)
    plan = make_plan(range(11), 19, before=before)
    assert_sound(plan, 11)


@given(seed=st.integers(0, 10**6), first=st.integers(0, SLOTS - 1), size=st.integers(0, SLOTS))
def test_a_piece_is_divided_by_its_load(seed: int, first: int, size: int) -> None:
    rng = random.Random(seed)
    loads = loads_of(rng, 1)
    cutter = Cutter(loads, {})
    piece: Piece = cutter.piece(0, Slots(first, min(first + size, SLOTS - 1)))
    weight = piece.weight * rng.uniform(0, 1.1)
    parts = cutter.divide(piece, weight)
    if parts is None:
        assert (
            len(piece.slots) == 1
            or weight < max(loads[0]) * BUCKETS / SLOTS
            or piece.weight <= weight * ROUNDING
        )
        return
    low, high = parts
    assert low.weight <= weight * ROUNDING
    assert low.weight + high.weight == pytest.approx(piece.weight)
    assert (low.slots.first, low.slots.last + 1, high.slots.last) == (
        piece.slots.first,
        high.slots.first,
        piece.slots.last,
    )


@pytest.mark.parametrize(("partitions", "tasks", "seconds"), [(1000, 2000, 2), (10_000, 20_000, 30)])
def test_planning_of_a_large_app_is_quick(partitions: int, tasks: int, seconds: float) -> None:
    """Two idle cores need a tenth of this; the reference takes more than five minutes for the smaller one."""
    rng = random.Random(1)
    loads: dict[int, Load] = {
        p: tuple(rng.uniform(0.5, 1.5) for _ in range(BUCKETS)) for p in range(partitions)
    }
    changed: dict[int, Load] = {
        p: tuple(one * factor for one in load)
        for p, load in loads.items()
        for factor in [rng.lognormvariate(0, 1)]
    }
    begin = time.perf_counter()
    cold = make_plan(range(partitions), tasks)
    plans = [
        make_plan(range(partitions), tasks + 5, before=cold),
        make_plan(range(partitions), tasks - 5, before=cold),
        make_plan(range(partitions), tasks, loads=changed, before=cold),
        make_plan(range(partitions), tasks, loads=loads | {7: (partitions * 20.0,) * BUCKETS}, before=cold),
    ]
    assert time.perf_counter() - begin < seconds
    for plan in [cold, *plans]:
        assert plan.covers(range(partitions))
    assert [len(plan.tasks) for plan in plans] == [tasks + 5, tasks - 5, tasks, tasks]
