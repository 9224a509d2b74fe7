"""Epochs in the test's own process: tasks in threads, against a real broker, without Spark."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from keylane import App, Message
from keylane.kafka.cluster import Cluster
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.reassignment import match
from keylane.offsets.slots import ALL
from keylane.testing import EventKind, HistoryWriter, Sent, read_history
from keylane.worker.epoch_plan import EpochPlan
from keylane.worker.lane_worker import LaneWorker, LocalWorkers
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan
from support.tasks import note_plan
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import HistoryEvent

KEEP_ALIVE = 30.0
WHOLE = Assignment(((AssignedRange(0), AssignedRange(1)),))


class Epochs:
    """Runs the tasks of successive epochs in threads. What runs of an earlier epoch stays, as in Spark's workers."""

    def __init__(
        self, log: Log, app: App, keep_alive: float = KEEP_ALIVE, *, partitions: int = 2, run: str = "r1"
    ) -> None:
        self.log, self.app = log, app
        self.partitions, self.name = partitions, run
        self.keep_alive = keep_alive
        self.number = 0
        self.processes: list[LocalWorkers] = []
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.owners: dict[int, list[str]] = {}
        self._topics = Cluster(log.settings).prepare(app.spec)
        note_plan(log, app)

    def plan(
        self, task: int = 0, *, seconds: float = 1.0, assignment: Assignment = WHOLE, **more: Any
    ) -> TaskPlan:
        app, log = self.app, self.log
        ranges = assignment.tasks[task]
        given: dict[str, Any] = {
            "run": self.name,
            "epoch": self.number,
            "task": task,
            "spark_task": task,
            "settings": log.settings,
            "identity": log.cluster.identity(app.source, app.dlq),
            "starts": {one.partition: 0 for one in ranges},
            "cuts": {one.partition: one.slots for one in ranges if one.slots != ALL},
            "until": None,
            "seconds": seconds,
            "sink_limit": self._topics.sink_limit,
            "partitions": self.partitions,
            "keep_alive": self.keep_alive,
        }
        return TaskPlan(**given | more)

    def run(
        self,
        *,
        seconds: float = 1.0,
        assignment: Assignment = WHOLE,
        fresh: int = 0,
        known: bool = True,
        **more: Any,
    ) -> None:
        """One epoch, of as many tasks as the assignment has parts, in any process that is free.

        The first ``fresh`` tasks are in processes of their own. ``known``: the planner knows who has which part.
        """
        self.number += 1
        owned = (
            {worker.id: dict(worker._progress.slots) for worker in self.workers()}
            if known
            else {"nobody": {0: ALL}}
        )
        homes = match(
            assignment.tasks,
            {one: [AssignedRange(*found) for found in slots.items()] for one, slots in owned.items()},
        )
        self.processes = [LocalWorkers() for _ in range(fresh)] + self.processes
        self.processes += [LocalWorkers() for _ in range(len(assignment.tasks) - len(self.processes))]
        shared = EpochPlan(
            assignment=assignment, starts=dict.fromkeys(range(self.partitions), 0), homes=homes
        )
        tasks = [
            Task(
                self.app.spec,
                self.plan(n, seconds=seconds, assignment=assignment, **more),
                shared=shared,
                local=self.processes[n],
            )
            for n in range(len(assignment.tasks))
        ]
        number, found = self.number, list[tuple[int, int]]()
        with ThreadPoolExecutor(len(tasks)) as pool:
            batches = list(pool.map(lambda task: list(task.outcomes()), tasks))
        found += [(one.partition, one.offset) for task in batches for batch in task for one in batch]
        self.rows[number] = found
        self.owners[number] = [task.owner for task in tasks]

    def workers(self) -> list[LaneWorker]:
        """Those that run without a task."""
        return [worker for process in self.processes for worker in process.idle(self.app.spec, self.plan())]

    def end(self) -> None:
        """As at the end of a run."""
        for worker in self.workers():
            with suppress(Exception):
                list(worker.retire())
            worker.detach()


def slow_app(name: str, folder: Path, *, slow: float = 3.0, **options: Any) -> App:
    """Keys that begin with ``slow`` take three seconds, all others five milliseconds."""
    app = App(
        name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(folder / "history"), **options
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(slow if (msg.key or b"").startswith(b"slow") else 0.005)
        return bytes(msg.value)

    return app


class Load:
    """Sends messages of 20 keys evenly until it is stopped."""

    def __init__(self, log: Log, topic: str, rate: float = 200.0, *, partitions: int = 0) -> None:
        self.sent: list[Any] = []
        self._partitions = partitions  # 0: the client's choice
        self._name = uuid4().hex.encode()
        self._writer, self._topic, self._rate = Log(log.bootstrap), topic, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        number = 0
        while not self._over.wait(0.02):
            batch = [self._message(n) for n in range(number, number + int(self._rate * 0.02))]
            number += len(batch)
            self.sent += self._writer.send(self._topic, batch)

    def _message(self, n: int) -> dict[str, Any]:
        if self._partitions:
            partition = n % self._partitions
            key = b"p%d-%d" % (partition, n // self._partitions % 5)
            headers = [("event-id", b"%s %d" % (self._name, n))]
            return {"key": key, "value": b"%d" % n, "partition": partition, "headers": headers}
        return {"key": b"k%d" % (n % 20), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def largest_gap(
    history: Path,
    *,
    since: float,
    until: float = inf,
    where: Callable[[HistoryEvent], bool] = lambda _event: True,
) -> float:
    """The longest time in which no message began, of those that are not slow."""
    starts = sorted(
        event.seq / 1e9
        for event in read_history(history).events
        if event.kind is EventKind.START
        and not (event.key or b"").startswith(b"slow")
        and since < event.at < until
        and where(event)
    )
    assert len(starts) > 100, "too few messages to say anything"
    return max(later - earlier for earlier, later in pairwise(starts))


def slow_calls(log: Log, name: str, partitions: int = 4) -> list[Sent]:
    """One long call in each partition."""
    return log.send(
        f"{name}.in",
        [
            {
                "key": b"slow-%d" % p,
                "value": b"slow",
                "partition": p,
                "headers": [("event-id", uuid4().bytes)],
            }
            for p in range(partitions)
        ],
    )
