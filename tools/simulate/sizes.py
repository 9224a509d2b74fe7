"""Sizes of what the planner writes for every epoch, and the time to make it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from pyspark import cloudpickle as untyped

from keylane.kafka.settings import KafkaSettings
from keylane.offsets.assignment import Assignment, make_plan
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.offsets.slots import ALL
from keylane.spark.source import TaskPartition
from keylane.worker.epoch_plan import EpochPlan
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from simulate.table import Row

_OFFSET = 1_234_567_890
_IDENTITY = AppIdentity(
    source=TopicIdentity(cluster="Lq0yq8b2T4uS0pX6b2cYVw", topic="orders", id="m2b3ZrT6R8qkq3Xo9b1pYg"),
    dlq=TopicIdentity(cluster="Lq0yq8b2T4uS0pX6b2cYVw", topic="shop.dlq", id="r6f1VnM7QZuE5aG0c8dLhw"),
)


def measure(partitions: int, tasks: int) -> list[Row]:
    """The offset log entry, the plan's record, and the pickled plans of all tasks."""
    plan = make_plan(range(partitions), tasks)
    encoded = plan.encode()
    rows: list[Row] = []

    def add(name: str, make: Callable[[], int]) -> None:
        begin = time.perf_counter()
        size = make()
        rows.append({"what": name, "KB": size / 1000, "ms": (time.perf_counter() - begin) * 1000})

    starts = {str(p): _OFFSET + p for p in range(partitions)}
    offset = {
        "epoch": 1000, "starts": starts, "source": str(_IDENTITY.source), "plan": encoded, "of": partitions,
        "replan": 0, "former": [],
    }  # fmt: skip
    record = {"run": "0" * 32, "epoch": 1000, "at": time.time(), "tasks": encoded, "source": "orders"}
    text = json.dumps(offset)
    add("an epoch's entry in Spark's offset log", lambda: len(json.dumps(offset)))
    add(
        "  read back, with its plan",
        lambda: len(Assignment.decode(json.loads(text)["plan"]).tasks) and len(text),
    )
    add("the plan's record in the state topic", lambda: len(json.dumps(record)))
    add("all tasks' plans, pickled", lambda: _pickled(_partitions(plan)))
    add("  with the whole plan in each", lambda: _pickled(_partitions(plan, shared=True)))
    return rows


def _pickled(partitions: list[TaskPartition]) -> int:
    cloudpickle: Any = untyped
    return sum(len(cloudpickle.dumps(one)) for one in partitions)


def _partitions(plan: Assignment, *, shared: bool = False) -> list[TaskPartition]:
    offsets = {one.partition: _OFFSET + 7919 * one.partition for task in plan.tasks for one in task}
    plans = [
        TaskPlan(
            run="0" * 32, epoch=1000, task=number, settings=KafkaSettings("broker:9092"), identity=_IDENTITY,
            starts={one.partition: offsets[one.partition] for one in task},
            since={one.partition: offsets[one.partition] for one in task},
            cuts={one.partition: one.slots for one in task if one.slots != ALL},
            until=None, seconds=300.0, planned=time.time(), sink_limit=1_048_576, partitions=len(offsets),
        )
        for number, task in enumerate(plan.tasks)
    ]  # fmt: skip
    whole = EpochPlan(assignment=plan, starts=offsets, since=offsets).encode() if shared else None
    return [TaskPartition(one, whole) for one in plans]
