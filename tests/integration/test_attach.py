"""Lanes that outlive the Spark task: tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.slots import SLOTS, Slots
from keylane.state.topic import order_stop
from keylane.testing import EventKind, read_history
from keylane.worker.commit import Contributor
from support.epochs import WHOLE, Epochs, Load, largest_gap, slow_app
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keylane.testing import Verdict
    from support.topics import Log

LOW, HIGH = Slots(0, SLOTS // 2 - 1), Slots(SLOTS // 2, SLOTS - 1)
EACH = Assignment(((AssignedRange(0),), (AssignedRange(1),)))


@pytest.fixture
def begun() -> Iterator[list[Epochs]]:
    epochs: list[Epochs] = []
    yield epochs
    for one in epochs:
        one.end()


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
