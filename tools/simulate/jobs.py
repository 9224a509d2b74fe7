"""Spark's own time per task: a job whose tasks do nothing, in Python workers that are reused."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from simulate.table import Row


def measure(counts: Sequence[int], kilobytes: int) -> list[Row]:
    """One job for each number of tasks, twice; the second counts. Each task gets this many KB of its own."""
    spark = session("local[2]", "simulate")
    rows: list[Row] = []
    try:
        for tasks in counts:
            for again in (False, True):
                data = [bytes(kilobytes * 1000)] * tasks
                begin = time.perf_counter()
                found = spark.sparkContext.parallelize(data, tasks).mapPartitions(_nothing).count()
                seconds = time.perf_counter() - begin
                assert found == tasks
                if again:
                    rows.append({"tasks": tasks, "seconds": seconds, "ms per task": seconds / tasks * 1000})
    finally:
        spark.stop()
    return rows


def _nothing(rows: Iterable[bytes]) -> Iterator[int]:
    yield sum(1 for _ in rows)
