"""Ranges that move one by one, while the others run: tasks in the test's own process, against a real broker."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from keylane.errors import FencedError
from keylane.offsets.assignment import AssignedRange, Assignment, make_plan
from keylane.testing import check_results
from support.epochs import Epochs, Load, slow_app, slow_calls
from support.topics import Log, ids

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keylane.testing import Verdict


PARTITIONS = 4
ONE = Assignment((tuple(map(AssignedRange, range(PARTITIONS))),))
TWO = Assignment(((AssignedRange(0), AssignedRange(1), AssignedRange(2)), (AssignedRange(3),)))


@pytest.fixture
def begun() -> Iterator[list[Epochs]]:
    epochs: list[Epochs] = []
    yield epochs
    for one in epochs:
        one.end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(4))
def test_random_moves_keep_order_and_lose_nothing(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], begun: list[Epochs], seed: int
) -> None:
    rng = random.Random(seed)
    exact = seed % 2 == 1
    log.create(f"{name}.in", f"{name}.out", partitions=PARTITIONS)
    app = slow_app(
        name, tmp_path, slow=rng.uniform(0.2, 1.5), delivery="exactly_once" if exact else "at_least_once"
    )
    epochs = Epochs(log, app, partitions=PARTITIONS)
    begun.append(epochs)
    plan: Assignment | None = None
    with Load(log, f"{name}.in", 200.0, partitions=PARTITIONS) as load:
        for _ in range(8):
            if rng.random() < 0.5:
                load.sent.extend(slow_calls(log, name))
            plan = make_plan(range(PARTITIONS), rng.randint(1, 3), before=plan, split=rng.random() < 0.3)
            if rng.random() < 0.3:
                plan = Assignment(tuple(rng.sample(plan.tasks, len(plan.tasks))))
            epochs.run(
                seconds=rng.uniform(0.5, 2.0),
                assignment=plan,
                fresh=rng.choice([0, 0, 0, 1]),
                known=rng.random() < 0.9,
            )
    epochs.run(seconds=6.0, assignment=ONE)
    epochs.run(seconds=2.0, assignment=ONE)
    epochs.end()
    assert judge(load.sent).repeats == 0
    assert log.lag(name, f"{name}.in") == 0
    if exact:
        check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


@pytest.mark.timeout(120)
def test_an_owner_that_hangs_in_a_move_is_fenced(
    log: Log, name: str, tmp_path: Path, begun: list[Epochs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes up when its range has a new owner: nothing of what it then does counts."""
    log.create(f"{name}.in", f"{name}.out", partitions=PARTITIONS)
    app = slow_app(name, tmp_path, delivery="exactly_once")
    epochs = Epochs(log, app, partitions=PARTITIONS)
    begun.append(epochs)
    with Load(log, f"{name}.in", 200.0, partitions=PARTITIONS):
        epochs.run(seconds=2.0, assignment=ONE)
        (first,) = epochs.workers()
        begins, close = threading.Event(), first._held.close

        def hang(partition: int) -> asyncio.Event:
            if not begins.is_set():
                begins.set()
                time.sleep(5.0)  # the whole loop
            return close(partition)

        monkeypatch.setattr(first._held, "close", hang)
        with pytest.raises(FencedError):
            epochs.run(seconds=8.0, assignment=TWO)
        assert begins.is_set()
    for _ in range(3):
        epochs.run(seconds=3.0, assignment=TWO)
    assert not first._thread.is_alive()
    epochs.end()
    assert log.lag(name, f"{name}.in") == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
