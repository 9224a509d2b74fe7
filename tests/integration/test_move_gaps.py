"""How long lanes pause while ranges move: tasks in the test's own process, against a real broker."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.testing import EventKind, read_history
from support.epochs import Epochs, Load, largest_gap, slow_app, slow_calls
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keylane.testing import HistoryEvent, Verdict


PARTITIONS = 4
ONE = Assignment((tuple(map(AssignedRange, range(PARTITIONS))),))
TWO = Assignment(((AssignedRange(0), AssignedRange(1), AssignedRange(2)), (AssignedRange(3),)))
GAP_SECONDS = 0.15
"""The longest time that lanes which stay may pause; on a busy machine twice the longest one of as much time without a
move, in the same run."""
SLOW_SECONDS = 3.0
"""What a long call takes: lanes that waited for one would pause that long."""


@pytest.fixture
def begun() -> Iterator[list[Epochs]]:
    epochs: list[Epochs] = []
    yield epochs
    for one in epochs:
        one.end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_lanes_that_stay_run_while_others_move(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs], delivery: str
) -> None:
    """A worker comes and takes one of four partitions, and leaves again, while every partition has a long call."""
    log.create(f"{name}.in", f"{name}.out", partitions=PARTITIONS)
    epochs = Epochs(
        log, slow_app(name, tmp_path, slow=SLOW_SECONDS, delivery=delivery), partitions=PARTITIONS
    )
    begun.append(epochs)
    with Load(log, f"{name}.in", 400.0, partitions=PARTITIONS) as load:
        epochs.run(seconds=2.0, assignment=ONE)
        (first,) = epochs.workers()
        calm = time.time()
        load.sent.extend(slow_calls(log, name))
        epochs.run(seconds=6.0, assignment=ONE)
        load.sent.extend(slow_calls(log, name))
        time.sleep(0.3)
        moves = time.time()
        epochs.run(seconds=6.0, assignment=TWO)
        assert len(epochs.workers()) == 2
        load.sent.extend(slow_calls(log, name))
        time.sleep(0.3)
        back = time.time()
        epochs.run(seconds=6.0, assignment=ONE)
        ended = time.time()
    epochs.run(seconds=2.0, assignment=ONE)
    alive = [worker for worker in epochs.workers() if worker._thread.is_alive()]
    assert alive == [first], "the first worker kept its lanes, and the second one ended"
    history = tmp_path / "history"

    def stays(event: HistoryEvent) -> bool:
        return event.partition < 3

    before = largest_gap(history, since=calm, until=moves, where=stays)
    during = largest_gap(history, since=moves, until=ended, where=stays)
    assert during < max(GAP_SECONDS, 2 * before), f"{during:.3f} s, and {before:.3f} s without a move"
    for since in (moves, back):
        began = [
            event.at
            for event in read_history(history).events
            if event.kind is EventKind.START and event.partition == 3 and since < event.at < since + 6
        ]
        gaps = [later - earlier for earlier, later in pairwise(began)]
        most = SLOW_SECONDS + max(1.5, 10 * before)
        assert max(gaps) < most, "a range that moves waits for its own call only"
    epochs.end()
    assert judge(load.sent).repeats == 0
    assert log.lag(name, f"{name}.in") == 0


@pytest.mark.timeout(120)
def test_partitions_that_are_added_are_taken_by_running_lanes(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs]
) -> None:
    """Every old partition has a long call when the new ones are taken."""
    log.create(f"{name}.in", f"{name}.out", partitions=PARTITIONS)
    epochs = Epochs(log, slow_app(name, tmp_path), partitions=PARTITIONS)
    begun.append(epochs)
    with Load(log, f"{name}.in", 200.0, partitions=PARTITIONS) as load:
        epochs.run(seconds=2.0, assignment=ONE)
        with Load(Log(log.bootstrap), f"{name}.in", 200.0, partitions=PARTITIONS) as other:
            calm = time.time()
            epochs.run(seconds=5.0, assignment=ONE)
        (first,) = epochs.workers()
        for topic in ("in", "dlq", "state"):
            log.create(f"{name}.{topic}", partitions=2 * PARTITIONS)
        grown = Assignment((tuple(map(AssignedRange, range(2 * PARTITIONS))),))
        epochs.partitions = 2 * PARTITIONS
        load.sent.extend(slow_calls(log, name))
        with Load(Log(log.bootstrap), f"{name}.in", 200.0, partitions=2 * PARTITIONS) as more:
            began = time.time()
            epochs.run(seconds=5.0, assignment=grown, former=(PARTITIONS,))
            ended = time.time()
    epochs.run(seconds=5.0, assignment=grown, former=(PARTITIONS,))
    assert epochs.workers() == [first]
    before = largest_gap(tmp_path / "history", since=calm, until=began)
    during = largest_gap(tmp_path / "history", since=began, until=ended)
    assert during < max(GAP_SECONDS, 2 * before), f"{during:.3f} s, and {before:.3f} s without a move"
    assert {partition for found in epochs.rows.values() for partition, _ in found} == set(
        range(2 * PARTITIONS)
    )
    epochs.end()
    assert judge([*load.sent, *other.sent, *more.sent]).repeats == 0
    assert log.lag(name, f"{name}.in") == 0
