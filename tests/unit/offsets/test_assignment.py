from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.assignment import BUCKETS, AssignedRange, Assignment, make_plan
from keylane.offsets.slots import ALL, SLOTS, Slots
from keylane.state.topic import LOAD, REDRIVEN, REST, part_of, stale_parts

load = st.one_of(
    st.just((1.0,) * BUCKETS),
    st.lists(st.floats(0, 1000), min_size=BUCKETS, max_size=BUCKETS).map(tuple),
    st.integers(0, BUCKETS - 1).map(lambda hot: tuple(1000.0 * (n == hot) for n in range(BUCKETS))),
)


def weights(plan: Assignment, loads: dict[int, tuple[float, ...]]) -> list[float]:
    width = SLOTS // BUCKETS
    return [
        sum(
            loads[one.partition][n]
            * len(one.slots.common(Slots(n * width, (n + 1) * width - 1)) or ())
            / width
            for one in task
            for n in range(BUCKETS)
        )
        for task in plan.tasks
    ]


@given(
    partitions=st.integers(1, 12),
    counts=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    loads=st.dictionaries(st.integers(0, 11), load),
    split=st.booleans(),
)
def test_every_slot_has_one_owner_over_all_plans(
    partitions: int, counts: list[int], loads: dict[int, tuple[float, ...]], split: bool
) -> None:
    before = None
    for tasks in counts:
        plan = make_plan(range(partitions), tasks, loads=loads, before=before, split=split)
        assert len(plan.tasks) <= tasks
        for partition in range(partitions):
            cuts = plan.cuts(partition)
            assert sum(map(len, cuts)) == SLOTS
            assert not ALL.without(cuts)
            assert split or cuts == [ALL]
        for task in plan.tasks:
            owned = [one.partition for one in task]
            assert len(set(owned)) == len(owned) > 0
        assert plan == make_plan(range(partitions), tasks, loads=loads, before=before, split=split)
        again = make_plan(range(partitions), tasks, loads=loads, before=plan, split=split)
        if again != plan:  # what is even enough stays where it is
            every = {p: loads.get(p, (1.0,) * BUCKETS) for p in range(partitions)}
            assert max(weights(again, every)) < max(weights(plan, every))
        assert Assignment.decode(json.loads(json.dumps(plan.encode()))) == plan
        before = plan


@pytest.mark.parametrize("partitions", [1, 3, 8])
@pytest.mark.parametrize("tasks", [1, 2, 3, 4, 8, 13])
def test_shares_are_even(partitions: int, tasks: int) -> None:
    plan = make_plan(range(partitions), tasks)
    shares = weights(plan, dict.fromkeys(range(partitions), (1.0,) * BUCKETS))
    assert len(shares) == tasks if tasks >= partitions else len(shares) <= tasks
    # Whole partitions where that is possible: then the shares differ by one of them at most.
    assert max(shares) - min(shares) <= BUCKETS


def test_a_partition_that_is_busier_than_the_rest_is_cut() -> None:
    loads = {p: (100.0 if p == 2 else 1.0,) * BUCKETS for p in range(4)}
    plan = make_plan(range(4), 4, loads=loads)
    shares = weights(plan, loads)
    assert len(plan.cuts(2)) >= 3
    assert max(shares) <= 1.4 * sum(shares) / 4


def test_two_partitions_are_shared_evenly_by_three_tasks() -> None:
    plan = make_plan(range(2), 3)
    shares = weights(plan, dict.fromkeys(range(2), (1.0,) * BUCKETS))
    assert max(shares) <= 1.25 * sum(shares) / 3


def test_a_hot_range_is_cut_where_it_is_hot() -> None:
    hot = tuple(100.0 if n < 4 else 1.0 for n in range(BUCKETS))
    plan = make_plan([0], 2, loads={0: hot})
    low, high = plan.cuts(0)
    assert len(low) < SLOTS // 10 < len(high)


def test_without_a_load_partitions_stay_whole() -> None:
    assert make_plan(range(4), 2).tasks == (
        (AssignedRange(0), AssignedRange(2)),
        (AssignedRange(1), AssignedRange(3)),
    )
    assert make_plan(range(2), 2).tasks == ((AssignedRange(0),), (AssignedRange(1),))
    assert make_plan(range(2), 4).tasks == tuple(
        (AssignedRange(p, slots),) for p in (0, 1) for slots in (Slots(0, 32767), Slots(32768, SLOTS - 1))
    )


def test_a_task_more_moves_little() -> None:
    """Of twelve partitions on three tasks a fourth task gets its three, and nothing else changes hands."""
    before = make_plan(range(12), 3)
    after = make_plan(range(12), 4, before=before)
    moved = [
        one for number, task in enumerate(before.tasks) for one in task if one not in after.tasks[number]
    ]
    assert len(moved) == 3 == len(after.tasks[3])


def test_removing_a_task_moves_only_its_ranges() -> None:
    before = make_plan(range(12), 4)
    after = make_plan(range(12), 3, before=before)
    for number, task in enumerate(after.tasks):
        assert set(before.tasks[number]) <= set(task)


def test_records_of_ranges_do_not_pile_up() -> None:
    """A day of epochs of five minutes, each cut by another load."""
    rng = random.Random(1)
    partitions, tasks = [0, 1], 8
    load = {p: [rng.random() for _ in range(BUCKETS)] for p in partitions}
    topic: dict[int, set[bytes]] = {p: set() for p in partitions}
    marks: dict[tuple[int, bytes], set[int]] = {}  # of redriven letters
    every: dict[int, set[int]] = {p: set() for p in partitions}
    plan = None
    for epoch in range(288):
        for p in partitions:
            load[p] = [max(0.01, one * rng.lognormvariate(0, 0.3)) for one in load[p]]
        loads = {p: tuple(int(one * 1000) for one in load[p]) for p in partitions}
        plan = make_plan(partitions, tasks, loads=loads, before=plan)
        ranges = [one for task in plan.tasks for one in task]
        for one in ranges:  # what its task knows when it begins
            known = set[int]().union(*(marks[key] for key in marks if key[0] == one.partition))
            if rng.random() < 0.3:
                known.add(epoch)
                every[one.partition].add(epoch)
            names = topic[one.partition]
            for record in (LOAD, REST, REDRIVEN):
                old = stale_parts(names, record, one.slots)
                if record != REDRIVEN or old or epoch in known:
                    names.add(part_of(record, one.slots))
                    if record == REDRIVEN:
                        marks[one.partition, part_of(record, one.slots)] = known
                for name in old:
                    names.discard(name)
                    marks.pop((one.partition, name), None)
        for p in partitions:
            assert len(topic[p]) <= 3 * sum(one.partition == p for one in ranges)
            assert set[int]().union(*(marks[key] for key in marks if key[0] == p)) == every[p]
