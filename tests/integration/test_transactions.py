"""Transactions that are aborted: nothing of them is left, and their messages run again in order. Without Spark."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from keylane import App, Message
from keylane.errors import AbortedError
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.transactional_client import TransactionalClient
from keylane.spark.packaging import AppPackage
from keylane.spark.source import LaneReader, RunPlan
from keylane.testing import HistoryWriter, Verdict, check_results
from keylane.worker.epoch_records import LastRecords
from keylane.worker.task import Task
from support.tasks import Runner
from support.topics import ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.worker.commit import CommitBatch
    from support.topics import Log


def events(count: int, *, poison: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    return [
        {
            "key": b"k%d" % (i % 7),
            "value": b"%d%s" % (i, b"!" if i in poison else b""),
            "headers": [("event-id", b"e%d" % i)],
        }
        for i in range(count)
    ]


def fine(log: Log, topic: str) -> list[Any]:
    return [row for row in log.read(topic) if not (row.value or b"").endswith(b"!")]


def test_refused_letter_is_spooled_and_nothing_repeats(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    log.create(f"{name}.dlq", partitions=2, max_message_bytes="300")  # smaller than any letter
    sent = log.send(f"{name}.in", events(200, poison=(50, 120)))
    runner = Runner(
        log, name, tmp_path, sink=f"{name}.out", delivery="exactly_once", spool=tmp_path / "spool"
    )
    assert len(runner.run()) == 200
    assert "transaction aborted, its messages run again in order" in caplog.text, (
        "no transaction was aborted: this proves nothing"
    )
    judge(sent, allow_repeats=5)
    check_results(ids(fine(log, f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    assert not log.read(f"{name}.dlq")
    log.alter(f"{name}.dlq", max_message_bytes="1000000")
    log.send(f"{name}.in", events(1))
    runner.run()

    def shipped() -> bool:
        runner.run()  # one that ends while it ships gives up, and the next ships again: so a letter may come twice
        return {row.header("event-id") for row in log.read(f"{name}.dlq")} == {b"e120", b"e50"}

    wait_until(shipped, 20, "the spool was shipped")


def test_a_result_that_the_sink_rejects_aborts_and_then_fails(log: Log, name: str, tmp_path: Path) -> None:
    large = os.urandom(5000) + b"x"  # no compression makes it smaller
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, max_message_bytes="200")
    log.send(f"{name}.in", [*events(20), {"key": b"k1", "value": large}])
    runner = Runner(log, name, tmp_path, sink=f"{name}.out", delivery="exactly_once", commit_interval=5.0)
    assert len(runner.run(sink_limit=1_000_000)) == 21
    assert sorted(row.value or b"" for row in log.read(f"{name}.out")) == sorted(b"%d" % i for i in range(20))
    assert [row.value for row in log.read(f"{name}.dlq")] == [large]
    assert runner.positions() == {0: 21}


@pytest.mark.parametrize("seed", range(4))
def test_lost_commits_leave_every_result_once(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    """Every so often a transaction is aborted instead of committed."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    sent = log.send(f"{name}.in", events(4_000, poison=tuple(range(99, 4_000, 300))))
    count = 0
    lock = threading.Lock()
    call_client = TransactionalClient._call

    def unlucky(self: TransactionalClient, call: Callable[[], None], deadline: float, *, retry: bool) -> None:
        nonlocal count
        with lock:
            count += 1
            lost = count % 9 == 5 + seed % 3
        if lost:
            self.abort()
            self.failure = AbortedError("lost on purpose")
            raise self.failure
        call_client(self, call, deadline, retry=retry)

    monkeypatch.setattr(TransactionalClient, "_call", unlucky)
    runner = Runner(
        log,
        name,
        tmp_path,
        sink=f"{name}.out",
        delivery="exactly_once",
        commit_interval=0.02,
        max_buffered=200 + 100 * seed,
        spool=tmp_path / "spool",
    )
    done: set[tuple[int, int]] = set()
    for _ in range(30):
        try:
            done.update(runner.run())
        except AbortedError:  # five in a row: Spark would run the task again, in another process
            assert isinstance(runner.app.spec.observer, HistoryWriter)
            runner.app.spec.observer.began_again()
            continue
        if len(done) == len(sent):
            break
    assert "lost on purpose" in caplog.text
    judge(sent, allow_repeats=100)
    check_results(ids(fine(log, f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    letters = [row.header("event-id") for row in log.read(f"{name}.dlq")]
    assert len(letters) == len(set(letters)) == 14


def abort_commits(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """The first commits of offsets or proposals are refused, and their transactions aborted."""
    left = [times]
    collect = LastRecords.collect
    call_client = TransactionalClient._call
    last: list[bool] = []

    def collect_last(self: LastRecords, batch: CommitBatch, /) -> None:
        last.append(True)
        collect(self, batch)

    def unlucky(self: TransactionalClient, call: Callable[[], None], deadline: float, *, retry: bool) -> None:
        if last and left[0]:
            left[0] -= 1
            self.abort()
            raise AbortedError("lost on purpose")
        call_client(self, call, deadline, retry=retry)

    monkeypatch.setattr(LastRecords, "collect", collect_last)
    monkeypatch.setattr(TransactionalClient, "_call", unlucky)


@pytest.mark.parametrize("commit", ["epoch", "live"])
def test_last_commit_aborted_once_is_retried_alone(
    log: Log, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    log.create(f"{name}.in", partitions=1)
    sent = log.send(f"{name}.in", events(10))
    abort_commits(monkeypatch, times=1)
    rows = Runner(log, name, tmp_path, commit=commit).run()
    assert sorted(rows) == [(0, one.offset) for one in sent], "one row for each message in one attempt"


def test_epoch_attempt_fails_when_its_commit_is_lost(
    log: Log, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", events(10))
    abort_commits(monkeypatch, times=1000)
    with pytest.raises(AbortedError, match="lost on purpose"):
        Runner(log, name, tmp_path, commit="epoch").run()


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_available_now_ends_before_an_open_transaction(log: Log, name: str, isolation: str) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", events(3))
    open_one = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": f"{name}.other"})
    open_one.init_transactions(10)
    open_one.begin_transaction()
    open_one.produce(f"{name}.in", b"open", b"k1")
    open_one.flush(10)
    app = App(name, source=f"{name}.in", sink=f"{name}.out")
    app.stage(echo)
    settings = KafkaSettings(log.bootstrap, (("isolation.level", isolation),))
    topics = Cluster(settings).prepare(app.spec)
    plan = RunPlan(
        run="r1",
        since={},
        app=name,
        topic=f"{name}.in",
        package=AppPackage(),
        settings=settings,
        starting="earliest",
        epoch=30,
        tasks=1,
        there=1,
        source=log.cluster.identity(f"{name}.in").source,
        split=False,
        sink_limit=topics.sink_limit,
        sink_stamps=False,
        outcomes="all",
        commit="live",
        read_committed=settings.reads_committed(app.spec.delivery),
    )
    reader = LaneReader(plan)
    reader.prepareForTriggerAvailableNow()
    first = reader.initialOffset()
    planned = reader.latestOffset(first, None)
    (task,) = reader.partitions(first, planned)
    began = time.monotonic()
    done = [one.offset for batch in Task(app.spec, task.plan).outcomes() for one in batch]
    assert time.monotonic() - began < 15, "it waited for the transaction"
    assert sorted(done) == ([0, 1, 2] if isolation == "read_committed" else [0, 1, 2, 3])
    assert reader.latestOffset(planned, None) == planned, "all is done that a reader can see"
    open_one.abort_transaction(10)


async def echo(msg: Message) -> bytes:
    return bytes(msg.value)
