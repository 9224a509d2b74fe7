"""How much telemetry one reader can take."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from keylane.histogram import Histogram
from keylane.outcome import Outcome
from keylane.telemetry.aggregate import Totals
from keylane.telemetry.snapshot import LaneFigures, PartitionFigures, Snapshot, decode

if TYPE_CHECKING:
    from simulate.table import Row


def measure(tasks: int, partitions_per_task: int, seconds: int = 5) -> list[Row]:
    """Encode, decode and add up the records of this many tasks, one a second."""
    made = [
        _snapshot(task, second, partitions_per_task)
        for second in range(1, seconds + 1)
        for task in range(tasks)
    ]
    rows: list[Row] = []
    begin = time.perf_counter()
    values = [one.encode() for one in made]
    _add(rows, "encode, in a task", len(made), begin)
    begin = time.perf_counter()
    found = [decode(value) for value in values]
    _add(rows, "decode, in a reader", len(made), begin)
    totals = Totals(0.0)
    begin = time.perf_counter()
    for second in range(seconds):
        totals.take(found[second * tasks : (second + 1) * tasks])
        totals.running(1000.0 + second)
    _add(rows, "add up, in a reader", len(made), begin)
    size = sum(map(len, values)) / len(values)
    for row in rows:
        row["bytes"] = size
        row["tasks it can follow"] = row["records/s"]
    expected = tasks * seconds * 500
    if totals.counters["done"] != expected:
        print(f"wrong total: expected {expected} messages done, got {totals.counters['done']}")
    return rows


def _add(rows: list[Row], what: str, count: int, begin: float) -> None:
    rows.append({"what": what, "records/s": count / (time.perf_counter() - begin)})


def _snapshot(task: int, second: int, partitions: int) -> Snapshot:
    rng = random.Random(task)
    latency, processing = Histogram(), Histogram()
    for _ in range(50 * second):
        latency.add(rng.lognormvariate(-4, 1))
        processing.add(rng.lognormvariate(-5, 1))
    done = 500 * second
    return Snapshot(
        app="shop", source="orders", run="0" * 32, shard="1/1", epoch=3, task=task, plan=0, order="key",
        owner=f"host:{task}/0", life=f"{task}", began=1000.0, at=1000.0 + second, interval=1.0, final=False,
        progressed=1000.0 + second, done=done, outcomes=Counter({Outcome.OK: done}), retries=0, dropped=0,
        lanes=LaneFigures(all=500, running=20), held=700, early=0, capacity=10_000,
        partitions={
            task * partitions + number: PartitionFigures(
                watermark=10**9, position=10**9 + 100, end=10**9 + 200, held=100, away=0, paused=False, moved=1000.0
            )
            for number in range(partitions)
        },
        latency=latency, processing=processing,
    )  # fmt: skip
