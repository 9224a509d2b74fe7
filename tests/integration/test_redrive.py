"""Redrives in tasks and the planner, against a real broker, without Spark."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison
from keylane.dlq.headers import dead_letter_headers
from keylane.offsets.identity import TopicIdentity
from keylane.offsets.murmur2 import partition_of
from keylane.policies.failure_info import FailureInfo
from keylane.state.admin import AdminClient
from keylane.state.answers import CommandAnswer, RedriveCounts
from keylane.worker import session as worker_session
from support.planned import Planned
from support.tasks import Runner
from support.topics import Log, wait_until

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.timeout(60)


def fixable(name: str, source: str = "", **options: Any) -> tuple[App, threading.Event]:
    """An app that cannot process messages that begin with "bad", until the event is set."""
    app, fixed = App(name, source=source or f"{name}.in", **options), threading.Event()

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value.startswith(b"bad") and not fixed.is_set():
            raise Poison("the cause is still there")
        return bytes(msg.value)

    return app, fixed


def answer_to(operator: AdminClient, order: Any) -> CommandAnswer | None:
    return operator.answer(order, 0.5)


@pytest.mark.parametrize("do", ["redrive", "skip"])
def test_command_runs_without_new_messages(log: Log, name: str, do: Any) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [{"key": b"k", "value": b"bad"}])
    app, fixed = fixable(name, sink=f"{name}.out", on_failure="skip" if do == "redrive" else "block")
    run = Planned(log, app)
    assert run.plan()
    run.attempt()
    run.commit()
    assert not run.plan()
    fixed.set()
    with AdminClient(log.settings, name) as operator:
        order = operator.command(do, partition=0, key=b"k", offset=0 if do == "skip" else None)
        assert run.plan()
        run.attempt()
        run.commit()
        answer = answer_to(operator, order)
        assert answer is not None
        assert answer.ok
    assert not run.plan()
    assert [each.value for each in log.read(f"{name}.out")] == ([b"bad"] if do == "redrive" else [])


def test_a_redrive_counts_with_its_epoch(log: Log, name: str) -> None:
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", [{"key": b"k", "value": b"bad"}])
    app, fixed = fixable(name, commit="epoch")
    run = Planned(log, app)
    assert run.plan()
    assert [done.outcome for done in run.attempt()] == ["dead"]
    run.commit()
    fixed.set()
    with AdminClient(log.settings, name) as operator:
        order = operator.command("redrive", partition=0, key=b"k")
        assert run.plan()
        assert [done.outcome for done in run.attempt()] == ["ok"]
        worker_session._sessions.clear()  # its executor is lost, and with it the attempt's rows
        assert answer_to(operator, order) is None
        assert operator.open_commands() == [order]
        assert [done.outcome for done in run.attempt()] == ["ok"]
        run.commit()
        answer = answer_to(operator, order)
        assert answer is not None
        assert (answer.ok, answer.counts) == (True, RedriveCounts(ok=1))
        assert operator.open_commands() == []
        assert {p: 0 in letters for p, letters in operator.redriven().items()} == {0: True}
    assert not run.plan()


def test_a_redrive_finds_the_letters_of_the_open_transaction(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    app, fixed = fixable(
        name, sink=f"{name}.out", on_failure="park", delivery="exactly_once", commit_interval=2.0
    )
    runner = Runner(log, name, tmp_path, app)
    running = threading.Thread(target=lambda: runner.run(seconds=20))
    log.send(f"{name}.in", [{"key": b"k", "value": b"bad1"}, {"key": b"k", "value": b"2"}])
    running.start()
    wait_until(lambda: log.cluster.topics().get(app.dlq) and len(log.read(app.dlq)) == 2, 20, "two letters")
    with AdminClient(log.settings, name) as operator:
        operator.answer(operator.command("redrive", partition=0, key=b"nobody"), 20)
        log.send(f"{name}.in", [{"key": b"k", "value": b"3"}])
        time.sleep(0.2)  # its letter is in the transaction that is open now
        fixed.set()
        answer = operator.answer(operator.command("redrive", partition=0, key=b"k"), 20)
        assert answer is not None
        assert answer.counts == RedriveCounts(ok=3)
        log.send(f"{name}.in", [{"key": b"k", "value": b"4"}])
        wait_until(lambda: len(log.read(f"{name}.out")) == 4, 20, "four results")
        assert operator.lanes() == []
    assert [each.value for each in log.read(f"{name}.out")] == [b"bad1", b"2", b"3", b"4"]
    running.join(30)


def test_a_letter_of_another_partition_does_not_end_the_task(log: Log, name: str, tmp_path: Path) -> None:
    """Something else than the app copied it here."""
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [{"key": b"x", "value": b"1"}])
    app, _ = fixable(name, sink=f"{name}.out")
    runner = Runner(log, name, tmp_path, app)
    runner.run()
    why = FailureInfo(stage="s", error="E", message="m", traceback="", attempts=1, failed_at=1.0)
    source = TopicIdentity(cluster="c", topic=app.source, id="")
    headers = dead_letter_headers(name, None, "dead", source, 7, 3, 0, why)
    log.send(app.dlq, [{"key": b"k", "value": b"letter", "partition": 0, "headers": headers}])
    with AdminClient(log.settings, name) as operator:
        order = operator.command("redrive", partition=0, key=b"k")
        runner.run()
        answer = answer_to(operator, order)
        assert answer is not None
        assert answer.counts == RedriveCounts()


def test_a_letter_of_the_former_source_lets_new_messages_run(log: Log, name: str, tmp_path: Path) -> None:
    """Its offset is one that reading has not come to in the source as it is now."""
    log.create(f"{name}.v1", f"{name}.v2", f"{name}.out", partitions=1)
    log.send(f"{name}.v1", [{"key": b"k", "value": b"1"}, {"key": b"k", "value": b"bad"}])
    app, _ = fixable(name, f"{name}.v1", sink=f"{name}.out")
    Runner(log, name, tmp_path, app, source=f"{name}.v1").run()
    worker_session._sessions.clear()
    app, fixed = fixable(name, f"{name}.v2", sink=f"{name}.out")
    fixed.set()
    log.send(f"{name}.v2", [{"key": b"n", "value": b"new%d" % n} for n in range(3)])
    runner = Runner(log, name, tmp_path, app, source=f"{name}.v2")
    with AdminClient(log.settings, name) as operator:
        order = operator.command("redrive", partition=0, key=b"k", letters=[0])
        runner.run(run="r2", starts={0: 0})
        answer = answer_to(operator, order)
        assert answer is not None
        assert answer.counts == RedriveCounts(ok=1)
    assert sorted(each.value or b"" for each in log.read(f"{name}.out")) == [
        b"1",
        b"bad",
        b"new0",
        b"new1",
        b"new2",
    ]


def moved(log: Log, name: str, *, tasks: int) -> tuple[Planned, bytes]:
    """A dead letter of a key that moved to partition 1 when the source grew, and all epochs until nothing is left."""
    key = next(b"k%d" % n for n in range(100) if partition_of(b"k%d" % n, 2) == 1)
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [{"key": key, "value": b"bad"}])
    app, fixed = fixable(name, sink=f"{name}.out")
    run = Planned(log, app, tasks=tasks)
    assert run.plan()
    run.attempt()
    run.commit()
    assert not run.plan()
    log.cluster.ensure(f"{name}.in", 2, {})
    Log(log.bootstrap).send(f"{name}.in", [{"key": key, "value": b"new", "partition": 1}])
    fixed.set()
    run = Planned(log, app, tasks=tasks)
    while run.plan():
        run.attempt()
        run.commit()
    return run, key


def test_a_moved_key_is_redriven_by_the_owner_of_both(log: Log, name: str) -> None:
    """One task runs the newer messages of the key too, in the same lane."""
    run, key = moved(log, name, tasks=1)
    with AdminClient(log.settings, name) as operator:
        order = operator.command("redrive", partition=0, key=key)
        assert run.plan()
        run.attempt()
        run.commit()
        answer = answer_to(operator, order)
        assert answer is not None
        assert answer.counts == RedriveCounts(ok=1)
    assert sorted(each.value or b"" for each in log.read(f"{name}.out")) == [b"bad", b"new"]


def test_a_moved_key_of_another_task_is_not_redriven(log: Log, name: str) -> None:
    """After the source grew, another task may run the newer messages of the key."""
    run, key = moved(log, name, tasks=2)
    with AdminClient(log.settings, name) as operator:
        order = operator.command("redrive", partition=0, key=key)
        assert run.plan()
        assert len(run.reader.partitions(run.at, run.planned)) == 2
        run.attempt()
        run.commit()
        answer = answer_to(operator, order)
        assert answer is not None
        assert not answer.ok
        assert "moved from partition 0 to 1" in answer.result
    assert log.count(f"{name}.out") == 1
