"""Tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from keylane import App, Message, Poison
from keylane.kafka.cluster import Cluster
from keylane.kafka.task import Task, TaskPlan
from keylane.testing import HistoryWriter

if TYPE_CHECKING:
    from pathlib import Path

    from support import Log


class Runner:
    """Runs an app's tasks in this process, over everything that is there."""

    def __init__(self, log: Log, name: str, folder: Path, app: App | None = None, **settings: Any) -> None:
        """``app`` is one whose source is ``<name>.in``, in place of the usual one."""
        self.log, self.name = log, name
        self.source = f"{name}.in"
        self.epoch = 0
        self.outcomes: list[str] = []
        self.became: dict[tuple[int, int], str] = {}
        if app is not None:
            self.app = app
            return
        self.app = App(name, source=self.source, observer=HistoryWriter(folder / "history"), **settings)

        @self.app.stage
        async def work(msg: Message) -> bytes:
            if msg.value.endswith(b"!"):
                raise Poison("stuck")
            return bytes(msg.value)

    def run(
        self,
        run: str = "r1",
        starts: dict[int, int] | None = None,
        sink_limit: int = 0,
        seconds: float = 30,
        to_the_end: bool = True,
    ) -> list[tuple[int, int]]:
        """The positions that were done, in an epoch of so many seconds that ends earlier when all is done."""
        count = self.log.cluster.partitions(self.source)
        topics = Cluster(self.log.settings).prepare(self.app)
        self.epoch += 1
        plan = TaskPlan(
            run=run,
            epoch=self.epoch,
            task=0,
            settings=self.log.settings,
            starts=starts or self.positions(),
            until=self.log.cluster.ends(self.source, range(count)) if to_the_end else None,
            seconds=seconds,
            sink_limit=sink_limit or topics.sink_limit,
        )
        done = [delivery for batch in Task(self.app, plan).outcomes() for delivery in batch]
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
