"""Epochs: lanes run on when one ends, and nothing is lost or runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Transient
from keylane.testing import EventKind, HistoryWriter, Verdict, check_results, read_history
from support.topics import ids, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.spec import DeliveryMode
    from support.topics import Log


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")


def slow_app(name: str, folder: Path) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(folder / "history"))
    opened = folder / "opened"
    closed = folder / "closed"

    @app.resource
    async def client() -> AsyncIterator[str]:
        append(opened)
        yield "client"
        append(closed)

    @app.stage
    async def work(msg: Message, client: str) -> bytes:
        await asyncio.sleep(0.002)
        if msg.attempt == 1 and msg.offset % 10 == 3:
            raise Transient("not yet")
        return bytes(msg.value)

    return app


@pytest.mark.timeout(120)
def test_nothing_runs_twice_and_nothing_is_lost_over_many_epochs(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    # A backlog larger than fits beside an offset when an epoch cuts it off in the middle, then a steady load.
    load = [
        {"key": b"k%d" % (i * 7919 % 500), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(40_000)
    ]
    sent = log.send(f"{name}.in", load[:30_000])
    query = slow_app(name, tmp_path).start(spark, bootstrap=broker.bootstrap, epoch=1)

    def offer() -> None:
        for at in range(30_000, len(load), 500):
            sent.extend(log.send(f"{name}.in", load[at : at + 500]))
            time.sleep(0.4)

    offering = threading.Thread(target=offer)
    offering.start()
    offering.join()
    deadline = time.monotonic() + 60
    while log.lag(name, f"{name}.in") and time.monotonic() < deadline:
        time.sleep(0.2)
    query.stop()
    assert query.exception() is None
    epochs = query.lastProgress["batchId"] + 1  # type: ignore[index]
    assert epochs >= 6

    verdict = judge(sent)
    assert verdict.repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    # Each worker opened the resource once and closed it once, also in the one or two epochs after the stop.
    opened, closed = (tmp_path / "opened").read_text(), (tmp_path / "closed").read_text()
    assert opened == closed
    assert 2 <= len(opened) <= 6


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_the_end_of_an_epoch_pauses_no_key(
    log: Log,
    spark: SparkSession,
    broker: Broker,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    delivery: DeliveryMode,
) -> None:
    """While a key's handler is in the middle of a call of five seconds, at every end of an epoch of two."""
    log.create(f"{name}.in", f"{name}.out", partitions=4)
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        delivery=delivery,
        observer=HistoryWriter(tmp_path / "history"),
    )

    @app.stage
    async def call(msg: Message) -> bytes:
        await asyncio.sleep(5.0 if msg.key == b"slow" else 0.01)
        return bytes(msg.value)

    def event(key: bytes, number: int) -> dict[str, Any]:
        return {"key": key, "value": b"%d" % number, "headers": [("event-id", b"%s-%d" % (key, number))]}

    sent = log.send(f"{name}.in", [event(b"slow", n) for n in range(3)])
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=2.0)
    for number in range(160):
        sent += log.send(f"{name}.in", [event(b"k%d" % key, number) for key in range(20)])
        time.sleep(0.1)
    wait_until(lambda: not log.lag(name, f"{name}.in"), 60, "everything is done")
    query.stop()
    assert query.exception() is None
    assert query.lastProgress["batchId"] >= 6  # type: ignore[index]
    assert judge(sent).repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    quick = [e for e in read_history(tmp_path / "history").events if e.key != b"slow"]
    starts = [e.at for e in quick if e.kind is EventKind.START]
    first = starts[0] + 3  # from then on everything is warm
    gap = max(later - earlier for earlier, later in pairwise(starts) if earlier > first)
    assert gap < 1.0, "the call takes up to five seconds longer than an epoch"


@pytest.mark.timeout(120)
def test_partition_stays_with_its_worker(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """The one that has its clients, its window of event ids, and nothing to read again."""
    log.create(f"{name}.in", f"{name}.out", partitions=8)
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))

    @app.stage
    async def who(msg: Message) -> bytes:
        return b"%d %d" % (msg.partition, os.getpid())

    query = app.start(spark, bootstrap=broker.bootstrap, epoch=1.0)
    sent = []
    for number in range(64):
        sent += log.send(f"{name}.in", [{"key": b"k%d" % key, "value": b"%d" % number} for key in range(64)])
        time.sleep(0.25)
    wait_until(lambda: not log.lag(name, f"{name}.in"), 60, "everything is done")
    query.stop()
    assert query.lastProgress["batchId"] >= 6  # type: ignore[index]
    workers: dict[bytes, set[bytes]] = {}
    for row in log.read(f"{name}.out"):
        partition, pid = (row.value or b"").split()
        workers.setdefault(partition, set()).add(pid)
    assert [len(pids) for pids in workers.values()] == [1] * len(workers)
    assert len(set.union(*workers.values())) == 2
    assert judge(sent).repeats == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stop_drains_and_the_next_start_continues(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    load = [
        {"key": b"k%d" % (i % 200), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(40_000)
    ]
    sent = log.send(f"{name}.in", load)
    query = slow_app(name, tmp_path).start(spark, bootstrap=broker.bootstrap)
    while log.count(f"{name}.out") < 5_000:
        time.sleep(0.05)
    query.stop()
    assert not query.isActive
    done = log.count(f"{name}.out")
    assert done < 40_000, "it had finished before it was stopped: this proves nothing"
    again = slow_app(name, tmp_path).start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert again.awaitTermination(90)

    assert judge(sent).repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


def refuse() -> str:
    raise ConnectionRefusedError("nobody listens there")


@pytest.mark.timeout(90)
def test_a_resource_that_cannot_be_opened_is_named(
    log: Log, spark: SparkSession, broker: Broker, name: str
) -> None:
    log.create(f"{name}.in")
    log.send(f"{name}.in", [{"key": b"k", "value": b"v"}])
    app = App(name, source=f"{name}.in")

    @app.resource
    async def database() -> AsyncIterator[str]:
        yield refuse()

    @app.stage
    async def write(msg: Message, database: str) -> None: ...

    query = app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    with pytest.raises(
        Exception, match=r"resource 'database' of app .* could not be opened: ConnectionRefusedError: nobody"
    ):
        query.awaitTermination(60)


@pytest.mark.timeout(60)
def test_speculation_is_refused(
    log: Log, spark: SparkSession, broker: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(f"{name}.in")
    conf = spark.sparkContext.getConf().set("spark.speculation", "true")
    monkeypatch.setattr(type(spark.sparkContext), "getConf", lambda _: conf)
    app = App(name, source=f"{name}.in")

    @app.stage
    async def nothing(msg: Message) -> None: ...

    with pytest.raises(Exception, match=r"spark\.speculation must be off"):
        app.start(spark, bootstrap=broker.bootstrap)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_stage_that_cannot_be_cancelled_goes_with_its_process(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Without it the epoch's end would wait endlessly, and with it every lane of the task."""
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        observer=HistoryWriter(tmp_path / "history"),
        drain_timeout=1,
    )
    first = tmp_path / "first"

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"7":
            with contextlib.suppress(FileExistsError), first.open("x") as file:
                file.write(str(os.getpid()))
            while first.read_text() == str(os.getpid()):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(100)
        return bytes(msg.value)

    log.create(f"{name}.in", f"{name}.out", partitions=2)
    sent = log.send(
        f"{name}.in",
        [
            {"key": b"k%d" % (i % 5), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
            for i in range(100)
        ],
    )
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=2)
    deadline = time.monotonic() + 90
    while log.lag(name, f"{name}.in") and time.monotonic() < deadline:
        time.sleep(0.2)
    query.stop()
    assert query.exception() is None
    judge(sent, allow_repeats=1)
