"""Times of the real planner."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from keylane.offsets.assignment import BUCKETS, Assignment, Load, make_plan
from keylane.offsets.pieces import Cutter
from keylane.offsets.reassignment import match, moves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keylane.offsets.assignment import AssignedRange
    from keylane.offsets.slots import Slots
    from simulate.table import Row

_ROUNDS = 3


def measure(partitions: int, tasks: int) -> list[Row]:
    """Of a first plan and of plans that follow it: processor time (median of three), ranges, balance and moves."""
    rng = random.Random(1)
    loads: dict[int, Load] = {
        p: tuple(rng.uniform(0.5, 1.5) for _ in range(BUCKETS)) for p in range(partitions)
    }
    factors = {p: rng.lognormvariate(0, 1) for p in loads}
    skewed = {p: tuple(one * factors[p] for one in load) for p, load in loads.items()}
    noisy: dict[int, Load] = {
        p: tuple(one * rng.lognormvariate(0, 0.3) for one in load) for p, load in loads.items()
    }
    total = sum(map(sum, loads.values()))
    hot = loads | {7 % partitions: (total / BUCKETS / 10,) * BUCKETS}
    rows: list[Row] = []

    def timed(name: str, count: int, loads: Mapping[int, Load], before: Assignment | None) -> Assignment:
        found = []
        for _ in range(_ROUNDS):
            begin = time.process_time()
            plan = make_plan(range(partitions), count, loads=loads, before=before)
            found.append(time.process_time() - begin)
        seconds = sorted(found)[_ROUNDS // 2]
        rows.append({"plan": name, "ms": seconds * 1000, **_figures(plan, loads, before)})
        return plan

    few = max(1, tasks // 400)
    cold = timed("first", tasks, {}, None)
    loaded = timed("first, loads known", tasks, loads, None)
    timed(f"{few} tasks more", tasks + few, loads, loaded)
    timed(f"{few} tasks fewer", tasks - few, loads, loaded)
    timed("half as many tasks", tasks // 2, loads, loaded)
    timed("loads changed a little", tasks, noisy, loaded)
    timed("loads changed a lot", tasks, skewed, loaded)
    timed("first, one hot partition", tasks, hot, None)
    timed("one partition became hot", tasks, hot, loaded)
    begin = time.process_time()
    owners = {f"owner-{number}": task for number, task in enumerate(cold.tasks)}
    matched = match(loaded.tasks, owners)
    seconds = time.process_time() - begin
    rows.append({"plan": "match owners to the plan", "ms": seconds * 1000, **dict.fromkeys(_COLUMNS, "")})
    begin = time.process_time()
    for owner, item in matched.items():
        moves(_by_partition(owners[owner]), _by_partition(loaded.tasks[item]))
    seconds = time.process_time() - begin
    rows.append({"plan": "moves of all owners", "ms": seconds * 1000, **dict.fromkeys(_COLUMNS, "")})
    return rows


_COLUMNS = ("ranges", "busiest", "moved %")


def _by_partition(task: Sequence[AssignedRange]) -> dict[int, Slots]:
    return {one.partition: one.slots for one in task}


def _figures(plan: Assignment, known: Mapping[int, Load], before: Assignment | None) -> Row:
    """How many ranges there are, the busiest task's load relative to the average, and the share of moved slots."""
    loads = {
        p: known.get(p, (1.0,) * BUCKETS) for task in plan.tasks for p in (one.partition for one in task)
    }
    cutter = Cutter(loads, {})
    found = [sum(cutter.piece(one.partition, one.slots).weight for one in task) for task in plan.tasks]
    row: Row = {"ranges": sum(map(len, plan.tasks)), "busiest": max(found) / sum(found) * len(found)}
    if before is None:
        return row | {"moved %": ""}
    stay = total = 0
    for number, task in enumerate(plan.tasks):
        had = {one.partition: one.slots for one in before.tasks[number]} if number < len(before.tasks) else {}
        for one in task:
            total += len(one.slots)
            kept = had[one.partition].common(one.slots) if one.partition in had else None
            stay += len(kept) if kept else 0
    return row | {"moved %": 100 * (1 - stay / total)}
