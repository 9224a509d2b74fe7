"""Lanes that outlive the Spark task: tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import pytest

from keylane import App, Message
from keylane.kafka.cluster import Cluster
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.reassignment import match
from keylane.offsets.slots import ALL, SLOTS, Slots
from keylane.state.topic import order_stop
from keylane.testing import EventKind, HistoryWriter, read_history
from keylane.worker.commit import Contributor
from keylane.worker.epoch_plan import EpochPlan
from keylane.worker.lane_worker import LaneWorker, LocalWorkers
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan
from support.tasks import note_plan
from support.topics import Log, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keylane.testing import Verdict

KEEP_ALIVE = 30.0
LOW, HIGH = Slots(0, SLOTS // 2 - 1), Slots(SLOTS // 2, SLOTS - 1)
WHOLE = Assignment(((AssignedRange(0), AssignedRange(1)),))
EACH = Assignment(((AssignedRange(0),), (AssignedRange(1),)))


class Epochs:
    """Runs the tasks of successive epochs in threads. What runs of an earlier epoch stays, as in Spark's workers."""

    def __init__(self, log: Log, app: App, keep_alive: float = KEEP_ALIVE) -> None:
        self.log, self.app = log, app
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
            "run": "r1",
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
            "partitions": 2,
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
        shared = EpochPlan(assignment=assignment, starts={0: 0, 1: 0}, homes=homes)
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


@pytest.fixture
def begun() -> Iterator[list[Epochs]]:
    epochs: list[Epochs] = []
    yield epochs
    for one in epochs:
        one.end()


def slow_app(name: str, folder: Path, **options: Any) -> App:
    """Key ``slow`` takes three seconds, all others five milliseconds."""
    app = App(
        name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(folder / "history"), **options
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(3.0 if msg.key == b"slow" else 0.005)
        return bytes(msg.value)

    return app


class Load:
    """Sends messages of 20 keys evenly until it is stopped."""

    def __init__(self, log: Log, topic: str, rate: float = 200.0) -> None:
        self.sent: list[Any] = []
        self._writer, self._topic, self._rate = Log(log.bootstrap), topic, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        number = 0
        while not self._over.wait(0.02):
            batch = [self._message(n) for n in range(number, number + int(self._rate * 0.02))]
            number += len(batch)
            self.sent += self._writer.send(self._topic, batch)

    @staticmethod
    def _message(n: int) -> dict[str, Any]:
        return {"key": b"k%d" % (n % 20), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def largest_gap(history: Path, *, since: float) -> float:
    """The longest time in which no message began, of those that are not slow."""
    starts = sorted(
        event.seq / 1e9
        for event in read_history(history).events
        if event.kind is EventKind.START and event.key != b"slow" and event.at > since
    )
    assert len(starts) > 200, "too few messages to say anything"
    return max(later - earlier for earlier, later in pairwise(starts))


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_lanes_run_on_over_epochs_while_a_key_is_slow(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    app = slow_app(name, tmp_path, delivery=delivery)
    epochs = Epochs(log, app)
    begun.append(epochs)
    slow = log.send(f"{name}.in", [{"key": b"slow", "value": b"%d" % n} for n in range(3)])
    began = time.time()
    with Load(log, f"{name}.in") as load:
        for _ in range(8):
            epochs.run(seconds=1.0)
    epochs.run(seconds=5.0)
    assert largest_gap(tmp_path / "history", since=began + 1) < 0.3
    assert len({owner for owners in epochs.owners.values() for owner in owners}) == 1
    rows = [row for found in epochs.rows.values() for row in found]
    assert len(rows) == len(set(rows)), "a row belongs to one epoch"
    epochs.end()
    assert judge([*slow, *load.sent]).repeats == 0


def test_lanes_without_a_task_are_released(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path), keep_alive=1.0)
    sent = log.send(f"{name}.in", [{"key": b"k%d" % (n % 9), "value": b"%d" % n} for n in range(50)])
    epochs.run(seconds=1.0)
    (worker,) = epochs.workers()
    more = log.send(f"{name}.in", [{"key": b"slow", "value": b"last"}])
    wait_until(lambda: not worker._thread.is_alive(), 10, "the lanes have ended")
    assert log.lag(name, f"{name}.in") == 0
    assert judge([*sent, *more]).repeats == 0
    epochs.end()
    assert epochs.workers() == []


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_lanes_move_to_another_worker_with_the_task(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs], delivery: str
) -> None:
    """The first worker's lanes are running: it finishes what has begun, and the second one waits for that."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path, delivery=delivery))
    begun.append(epochs)
    sent = log.send(f"{name}.in", [{"key": b"slow", "value": b"1"}, {"key": b"k", "value": b"1"}])
    epochs.run(seconds=1.0)
    sent += log.send(f"{name}.in", [{"key": b"slow", "value": b"2"}, {"key": b"k", "value": b"2"}])
    (first,) = epochs.workers()
    epochs.run(seconds=10.0, fresh=1)
    assert not first._thread.is_alive()
    assert judge(sent).repeats == 0
    assert log.lag(name, f"{name}.in") == 0


def test_a_task_takes_the_part_that_its_worker_has(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs]
) -> None:
    """Spark gives a task to any process that is free: here the two change places every time."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    began = time.time()
    with Load(log, f"{name}.in") as load:
        epochs.run(assignment=EACH, seconds=2.0)
        workers = epochs.workers()
        for _ in range(4):
            epochs.processes.reverse()
            epochs.run(assignment=EACH)
    epochs.run(assignment=EACH, seconds=2.0)
    assert set(map(id, epochs.workers())) == set(map(id, workers))
    assert largest_gap(tmp_path / "history", since=began + 2) < 0.3
    epochs.end()
    assert judge(load.sent).repeats == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_new_worker_takes_the_part_that_has_no_task(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs], known: bool
) -> None:
    """Spark runs one of two tasks in a new process. The lanes in the old one are released to it."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    with Load(log, f"{name}.in") as load:
        epochs.run(assignment=EACH, seconds=2.0)
        stays, leaves = epochs.workers()
        epochs.run(assignment=EACH, seconds=6.0, fresh=1, known=known)
        assert not leaves._thread.is_alive()
        assert stays._thread.is_alive() is known
        assert len(epochs.workers()) - leaves.idle == 2
    epochs.run(assignment=EACH, seconds=2.0)
    epochs.end()
    assert judge(load.sent).repeats == 0


def test_lanes_of_vanished_workers_are_taken_in_short_epochs(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs]
) -> None:
    """The planner believes that both workers are there, and neither gets a task any more."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    with Load(log, f"{name}.in") as load:
        epochs.run(assignment=EACH, seconds=2.0)
        vanished = epochs.workers()
        epochs.run(assignment=EACH, seconds=1.5, fresh=2)
        for _ in range(4):
            epochs.run(assignment=EACH, seconds=1.5)
        assert not any(worker._thread.is_alive() for worker in vanished)
    epochs.run(assignment=EACH, seconds=2.0)
    assert log.lag(name, f"{name}.in") == 0
    epochs.end()
    assert judge(load.sent).repeats == 0


def test_new_workers_that_choose_at_once_take_different_parts(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs]
) -> None:
    """All of them know of one part that has a worker, and that worker never comes."""
    quarters = [Slots(n * SLOTS // 4, (n + 1) * SLOTS // 4 - 1) for n in range(4)]
    four = Assignment(tuple((AssignedRange(0, slots), AssignedRange(1, slots)) for slots in quarters))
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    with Load(log, f"{name}.in") as load:
        epochs.run(assignment=four, known=False, seconds=8.0)
    assert sorted(worker._plan.task for worker in epochs.workers()) == [0, 1, 2, 3]
    epochs.run(assignment=four, seconds=2.0)
    epochs.end()
    assert judge(load.sent).repeats == 0


def test_parts_that_change_hands_are_drained_and_restored(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs]
) -> None:
    """Plans that split partitions, give whole ones away and join them again, while messages flow."""
    halves = Assignment(tuple((AssignedRange(0, slots), AssignedRange(1, slots)) for slots in (LOW, HIGH)))
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    with Load(log, f"{name}.in") as load:
        for assignment in (EACH, halves, WHOLE, halves, EACH, WHOLE):
            epochs.run(assignment=assignment, seconds=3.0)
    epochs.run(seconds=2.0)
    epochs.end()
    assert judge(load.sent).repeats == 0
    assert log.lag(name, f"{name}.in") == 0


def test_an_error_between_two_epochs_is_raised_by_the_next_task(
    log: Log, name: str, tmp_path: Path, begun: list[Epochs]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    log.send(f"{name}.in", [{"key": b"k", "value": b"1"}])
    epochs.run(seconds=1.0)
    (worker,) = epochs.workers()
    assert worker._commits is not None
    worker._commits.contributors.append(Failing())
    wait_until(lambda: not worker._thread.is_alive(), 10, "the lanes have failed")
    with pytest.raises(ZeroDivisionError):
        epochs.run(seconds=1.0)
    log.send(f"{name}.in", [{"key": b"k", "value": b"2"}])
    epochs.run(seconds=2.0)
    assert log.lag(name, f"{name}.in") == 0


def test_a_stop_between_two_epochs_drains(log: Log, name: str, tmp_path: Path, begun: list[Epochs]) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    epochs = Epochs(log, slow_app(name, tmp_path))
    begun.append(epochs)
    log.send(f"{name}.in", [{"key": b"slow", "value": b"1"}, {"key": b"slow", "value": b"2"}])
    epochs.run(seconds=1.0)
    order_stop(log.settings, epochs.app.spec.state, 2, "r1")
    began = time.monotonic()
    epochs.run(seconds=30.0)
    assert time.monotonic() - began < 10, "the task ends with the drain"
    assert [len(rows) for rows in epochs.rows.values()] == [0, 1]
    assert epochs.workers() == []
    assert [e.offset for e in read_history(tmp_path / "history").events if e.kind is EventKind.END] == [0]
    assert log.lag(name, f"{name}.in") == 1, "the second message did not start"


class Failing(Contributor):
    """A bug."""

    def collect(self, batch: Any, /) -> None:
        raise ZeroDivisionError

    def committed(self) -> None:
        pass

    def aborted(self) -> None:
        pass
