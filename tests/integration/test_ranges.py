"""Partitions that are shared out between tasks: in order, each message once, whoever owns its slot."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Retry
from keylane.core.plan import Plan, Range, make_plan
from keylane.core.ring import SLOTS, Slots
from keylane.testing import check_results
from support import ids
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


@pytest.mark.parametrize("seed", range(int(os.environ.get("KEYLANE_RECUTS", "2"))))
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
