"""Partitions that are shared out between tasks: in order, each message once, whoever owns its slot."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Retry
from keylane.core.plan import Plan, Range, make_plan
from keylane.core.ring import SLOTS, Slots
from keylane.errors import TakenOverError
from keylane.kafka import fetcher
from keylane.kafka.claims import take_over
from keylane.kafka.state import State
from keylane.testing import check_results, read_history
from support import ids, wait_until
from tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Sent, Verdict
    from support import Log

LOW, HIGH = Slots(0, SLOTS // 3), Slots(SLOTS // 3 + 1, SLOTS - 1)
HALVES = Plan(((Range(0, LOW),), (Range(0, HIGH),)))


def messages(numbers: range, keys: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "key": None if number % 50 == 7 else b"k%d" % (number * number % keys),
            "value": b"%d" % number,
            "headers": [("event-id", b"e%d" % number)],
        }
        for number in numbers
    ]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_two_tasks_share_a_partition_and_one_goes_on_where_both_were(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, sink=f"{name}.out", delivery=delivery)
    sent = log.send(f"{name}.in", messages(range(1000)))
    assert len(runner.run_plan(HALVES)) == 1000
    assert log.lag(name, f"{name}.in") == 0, "the group stands where both are"
    assert runner.run_plan(HALVES) == []
    sent += log.send(f"{name}.in", messages(range(1000, 1500)))
    assert len(runner.run()) == 500
    assert log.lag(name, f"{name}.in") == 0
    assert judge(sent).repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


@pytest.mark.parametrize("seed", range(int(os.environ.get("KEYLANE_RECUTS", "1"))))
def test_tasks_come_and_go_while_messages_flow(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], seed: int
) -> None:
    rng = random.Random(seed)
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    runner = Runner(log, name, tmp_path, sink=f"{name}.out", fails=20, retry=Retry(wait_initial=0.05))
    sent: list[Sent] = []

    def offer() -> None:
        for at in range(0, 4000, 100):
            sent.extend(log.send(f"{name}.in", messages(range(at, at + 100))))
            time.sleep(rng.random() * 0.2)

    offering = threading.Thread(target=offer)
    offering.start()
    plan = make_plan(range(2), 1)
    for tasks in (1, 4, 2, 3):
        plan = make_plan(range(2), tasks, before=plan)
        assert len(plan.tasks) == tasks
        runner.run_plan(plan, seconds=0.5 + rng.random())
    offering.join()
    runner.run_plan(plan)
    assert judge(sent).repeats == 0
    assert log.lag(name, f"{name}.in") == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


def test_what_an_owner_wrote_of_its_strips_goes_when_they_are_one_again(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it has not read back yet what it wrote: whoever cuts the partition next would believe it."""
    log.create(f"{name}.in", partitions=1)
    runner = Runner(log, name, tmp_path, slow=0.01, commit_interval=0.05, capacity=64)
    sent = log.send(f"{name}.in", messages(range(1000)))
    runner.run_plan(Plan(((Range(0, LOW),),)))
    with monkeypatch.context() as patched:
        patched.setattr(fetcher, "BATCH", 20)  # so that it writes before all of it is read
        patched.setattr(State, "poll", lambda _state: False)
        runner.run()
    assert log.lag(name, f"{name}.in") == 0
    assert runner.run_plan(HALVES) == []
    assert judge(sent).repeats == 0


def test_a_range_that_moves_is_drained_before_its_new_owner_starts_anything_of_it(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Three messages are in flight when another run cuts the partition otherwise: it waits for them, then goes on."""
    log.create(f"{name}.in", partitions=1)
    runner = Runner(log, name, tmp_path, slow=1.5)
    sent = log.send(f"{name}.in", [{"key": b"k%d" % n, "value": b"%d" % n} for n in (1, 2, 3, 1, 2, 3)])

    def started() -> int:
        return len(read_history(tmp_path / "history").events)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(runner.run_plan, HALVES, "r1", seconds=30)
        wait_until(lambda: (tmp_path / "history").exists() and started() == 3, 10, "three are in flight")
        take_over(log.settings, name, f"{name}.state", 1, "r2")
        other = Runner(log, name, tmp_path, slow=0.01)
        done = other.run_plan(Plan(((Range(0, Slots(0, 9)),), (Range(0, Slots(10, SLOTS - 1)),))), "r2")
        with pytest.raises(TakenOverError):
            first.result()
    assert sorted(done) == [(0, 3), (0, 4), (0, 5)]
    events = read_history(tmp_path / "history").events
    ends = [event.seq for event in events if event.offset < 3 and event.kind == "end"]
    begins = [event.seq for event in events if event.offset >= 3 and event.kind == "start"]
    assert len(ends) == 3
    assert max(ends) < min(begins)
    assert judge(sent).repeats == 0
