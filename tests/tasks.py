"""Tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from keylane import App, Message, Poison, Transient
from keylane.core.plan import Plan, Range
from keylane.core.ring import ALL
from keylane.kafka.cluster import Cluster
from keylane.kafka.task import Task, TaskPlan
from keylane.testing import HistoryWriter

if TYPE_CHECKING:
    from pathlib import Path

    from support import Log


class Runner:
    """Runs an app's tasks in this process, over everything that is there.

    ``fails``: one in so many messages fails at first. ``slow``: seconds that each takes. ``app``: the caller's,
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
        """The positions that were done: of all that is there, or of what comes in so many seconds."""
        whole = Plan((tuple(map(Range, starts or self.positions())),))
        return self.run_plan(whole, run, starts, sink_limit, seconds)

    def run_plan(
        self,
        plan: Plan,
        run: str = "r1",
        starts: dict[int, int] | None = None,
        sink_limit: int = 0,
        seconds: float | None = None,
    ) -> list[tuple[int, int]]:
        """The same, by as many tasks as the plan has, at the same time."""
        count = self.log.cluster.partitions(self.source)
        topics = Cluster(self.log.settings).prepare(self.app)
        starts = starts or self.positions()
        ends = self.log.cluster.ends(self.source, range(count)) if seconds is None else None
        self.epoch += 1
        tasks = [
            Task(
                self.app,
                TaskPlan(
                    run=run,
                    epoch=self.epoch,
                    task=number,
                    settings=self.log.settings,
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
        found = self.log.cluster.committed(self.name, self.source, partitions)
        return {p: found.get(p, (0, None))[0] for p in partitions}

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
