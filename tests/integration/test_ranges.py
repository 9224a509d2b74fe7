"""Partitions that tasks share: in order, each message once, whichever task owns its slot."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry
from keylane.errors import TakenOverError
from keylane.kafka import fetcher
from keylane.offsets.assignment import AssignedRange, Assignment, make_plan
from keylane.offsets.slots import SLOTS, Slots
from keylane.state.admin import AdminClient
from keylane.state.ownership import take_over
from keylane.state.topic import StateTopic
from keylane.testing import check_results, read_history
from keylane.worker import session as worker_session
from support.adjust import adjust
from support.tasks import Runner
from support.topics import ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Sent, Verdict
    from support.topics import Log

LOW, HIGH = Slots(0, SLOTS // 3), Slots(SLOTS // 3 + 1, SLOTS - 1)
HALVES = Assignment(((AssignedRange(0, LOW),), (AssignedRange(0, HIGH),)))


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
def test_one_task_continues_where_two_sharers_stopped(
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


def test_segment_records_are_deleted_when_merged(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has not read back its own records yet: the next task to split the partition would believe them."""
    log.create(f"{name}.in", partitions=1)
    runner = Runner(log, name, tmp_path, slow=0.01, commit_interval=0.05, max_buffered=64)
    sent = log.send(f"{name}.in", messages(range(1000)))
    runner.run_plan(Assignment(((AssignedRange(0, LOW),),)))
    with monkeypatch.context() as patched:
        patched.setattr(fetcher, "BATCH_MESSAGES", 20)  # so that it writes before all of it is read
        patched.setattr(StateTopic, "poll", lambda _state: False)
        runner.run()
    assert log.lag(name, f"{name}.in") == 0
    assert runner.run_plan(HALVES) == []
    assert judge(sent).repeats == 0


def test_moved_range_is_drained_before_its_new_owner(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Three messages are in flight when another run splits the partition: it waits for them, then continues."""
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
        done = other.run_plan(
            Assignment(((AssignedRange(0, Slots(0, 9)),), (AssignedRange(0, Slots(10, SLOTS - 1)),))), "r2"
        )
        with pytest.raises(TakenOverError):
            first.result()
    assert sorted(done) == [(0, 3), (0, 4), (0, 5)]
    events = read_history(tmp_path / "history").events
    ends = [event.seq for event in events if event.offset < 3 and event.kind == "end"]
    begins = [event.seq for event in events if event.offset >= 3 and event.kind == "start"]
    assert len(ends) == 3
    assert max(ends) < min(begins)
    assert judge(sent).repeats == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["low first", "high first"])
def test_a_rewind_is_followed_by_a_task_that_begins_later(
    log: Log, name: str, tmp_path: Path, order: tuple[int, int]
) -> None:
    """The first one has committed by then, and has nothing left to do."""
    log.create(f"{name}.in", partitions=1)
    runner = Runner(log, name, tmp_path)
    log.send(f"{name}.in", messages(range(300)))
    assert len(runner.run_plan(HALVES)) == 300
    runner.move(100)
    adjust(runner.app, observer=None, idempotency=None)
    worker_session._sessions.clear()  # as after a restart
    again: list[tuple[int, int]] = []
    for half in order:
        again += runner.run_plan(Assignment((HALVES.tasks[half],)), "r2", starts={0: 100})
    assert sorted(again) == [(0, offset) for offset in range(100, 300)]
    assert runner.committed()[0] == 300
    assert runner.run_plan(HALVES, "r2") == []


def test_records_of_removed_ranges_are_deleted(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    broken = True
    app = App(name, source=f"{name}.in")
    through: list[bytes] = []

    @app.stage
    async def work(msg: Message) -> None:
        if broken and msg.value.endswith(b"!"):
            raise Poison("broken")
        through.append(msg.value)

    def names() -> set[bytes]:
        last = {row.key: row.value for row in log.read(f"{name}.state")}
        records = (b"load", b"rest", b"redriven", b"versions")
        return {key for key, value in last.items() if key and value is not None and key.startswith(records)}

    def cut(at: int) -> Assignment:
        return Assignment(((AssignedRange(0, Slots(0, at)),), (AssignedRange(0, Slots(at + 1, SLOTS - 1)),)))

    runner = Runner(log, name, tmp_path, app)
    log.send(f"{name}.in", [{"key": b"k%d" % n, "value": b"%d!" % n} for n in range(8)])
    runner.run_plan(cut(1000))  # all letters are of the second range, in the order of their messages
    keys = [row.key for row in log.read(f"{name}.dlq")]
    broken = False
    for place, at in enumerate([20_000, 40_000, 30_000]):
        with AdminClient(log.settings, name) as operator:
            operator.command("redrive", partition=0, key=keys[place], letters=[place])
        runner.run_plan(cut(at))
    assert len(through) == 3
    with AdminClient(log.settings, name) as operator:
        assert [n for n in range(8) if n in operator.redriven()[0]] == [0, 1, 2]
    ranges = {str(slots).encode() for slots in (Slots(0, 30_000), Slots(30_001, SLOTS - 1))}
    assert {name.partition(b"/")[2] for name in names()} <= ranges
    runner.run()
    assert {name.partition(b"/")[2] for name in names()} == {b""}
    with AdminClient(log.settings, name) as operator:
        assert [n for n in range(8) if n in operator.redriven()[0]] == [0, 1, 2]
