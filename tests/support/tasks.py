"""Tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

import asyncio
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from keylane import App, Message, Poison, Transient
from keylane.kafka.cluster import Cluster
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.slots import ALL
from keylane.state.topic import PLAN
from keylane.testing import HistoryWriter
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from pathlib import Path

    from support.topics import Log


def note_plan(log: Log, app: App) -> None:
    """Record which topic the app reads, as the planner does: operators' tools look there."""
    plan = {"run": "r", "epoch": 1, "at": 1.7e9, "tasks": [["0"]], "source": app.source}
    log.send(app.spec.state, [{"partition": 0, "key": PLAN, "value": json.dumps(plan).encode()}])


class Runner:
    """Runs an app's tasks in this process, over everything that is there.

    ``fails``: one in this many messages fails at first. ``slow``: seconds that each takes. ``app``: the caller's,
    in place of the usual one.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        folder: Path,
        app: App | None = None,
        source: str = "",
        fails: int = 0,
        slow: float = 0,
        **settings: Any,
    ) -> None:
        self.log, self.name = log, name
        self.source = source or f"{name}.in"
        self.epoch = 0
        self.outcomes: list[str] = []
        self.became: dict[tuple[int, int], str] = {}
        if app is not None:
            self.app = app
            return
        self.app = App(name, source=self.source, observer=HistoryWriter(folder / "history"), **settings)

        @self.app.stage
        async def work(msg: Message) -> bytes:
            if slow:
                await asyncio.sleep(slow)
            if fails and msg.attempt == 1 and zlib.crc32(msg.value) % fails == 0:
                raise Transient("not yet")
            if msg.value.endswith(b"!"):
                raise Poison("stuck")
            return bytes(msg.value)

    def run(
        self,
        run: str = "r1",
        starts: dict[int, int] | None = None,
        sink_limit: int = 0,
        seconds: float | None = None,
    ) -> list[tuple[int, int]]:
        """The positions that were done: of everything in the topic, or of what comes in these seconds."""
        whole = Assignment((tuple(map(AssignedRange, starts or self.positions())),))
        return self.run_plan(whole, run, starts, sink_limit, seconds)

    def run_plan(
        self,
        plan: Assignment,
        run: str = "r1",
        starts: dict[int, int] | None = None,
        sink_limit: int = 0,
        seconds: float | None = None,
    ) -> list[tuple[int, int]]:
        """The same, by as many tasks as the plan has, at the same time."""
        count = self.log.cluster.partitions(self.source)
        topics = Cluster(self.log.settings).prepare(self.app.spec)
        identity = self.log.cluster.identity(self.source, self.app.dlq)
        note_plan(self.log, self.app)
        starts = starts or self.positions()
        ends = self.log.cluster.ends(self.source, range(count)) if seconds is None else None
        self.epoch += 1
        tasks = [
            Task(
                self.app.spec,
                TaskPlan(
                    run=run,
                    epoch=self.epoch,
                    task=number,
                    settings=self.log.settings,
                    identity=identity,
                    starts={one.partition: starts[one.partition] for one in ranges},
                    cuts={one.partition: one.slots for one in ranges if one.slots != ALL},
                    until=ends and {one.partition: ends[one.partition] for one in ranges},
                    seconds=seconds or 30,
                    sink_limit=sink_limit or topics.sink_limit,
                    sink_stamps=topics.sink_stamps,
                    partitions=count,
                ),
            )
            for number, ranges in enumerate(plan.tasks)
        ]
        with ThreadPoolExecutor(len(tasks)) as pool:
            batches = list(pool.map(lambda task: list(task.outcomes()), tasks))
        done = [delivery for task in batches for batch in task for delivery in batch]
        self.outcomes += [delivery.outcome for delivery in done]
        self.became |= {(delivery.partition, delivery.offset): delivery.outcome for delivery in done}
        return [(delivery.partition, delivery.offset) for delivery in done]

    def positions(self) -> dict[int, int]:
        partitions = range(self.log.cluster.partitions(self.source))
        source = self.log.cluster.identity(self.source).source
        found = self.log.cluster.progress(self.name, source, partitions)
        return {p: found[p].offset if p in found else 0 for p in partitions}

    def committed(self) -> tuple[int, str | None]:
        return self.log.cluster.committed(self.name, self.source, [0])[0]

    def move(self, offset: int, metadata: str = "") -> None:
        """As an operator does, or another program."""
        consumer = Consumer({"bootstrap.servers": self.log.bootstrap, "group.id": self.name})
        try:
            consumer.commit(
                offsets=[TopicPartition(self.source, 0, offset, metadata=metadata)], asynchronous=False
            )
        finally:
            consumer.close()

    def forget(self) -> None:
        """Delete the group."""
        for future in self.log.cluster._admin.delete_consumer_groups([self.name]).values():
            future.result(10)
