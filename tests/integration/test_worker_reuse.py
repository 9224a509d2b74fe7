"""Python workers that Spark uses for other work too, while lanes run in them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.functions import udf

from keylane import App, Message
from keylane.testing import EventKind, HistoryWriter, check, check_results, read_history
from support.topics import ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Verdict
    from support.topics import Log


def app_of(name: str, folder: Path) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(folder / "history"))

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(3.0 if msg.key == b"slow" else 0.005)
        return bytes(msg.value)

    return app


def event(key: bytes, number: int) -> dict[str, Any]:
    return {"key": key, "value": b"%d" % number, "headers": [("event-id", b"%s-%d" % (key, number))]}


def processes_of(history: Path) -> set[int]:
    """Those that ran messages."""
    return {int(event.owner.partition("+")[0]) for event in read_history(history).events}


@pytest.mark.timeout(120)
def test_plain_spark_work_beside_lanes_disturbs_nothing(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Spark gives a worker that is free between two epochs to whatever comes next; the app's task then gets another."""
    log.create(f"{name}.in", f"{name}.out")
    query = app_of(name, tmp_path).start(spark, bootstrap=broker.bootstrap, epoch=1.0, tasks=1)
    sent = log.send(f"{name}.in", [event(b"slow", n) for n in range(3)])
    over, others = threading.Event(), set[int]()

    def pid(_: int) -> int:
        """Where it runs. Takes a moment, so that an epoch begins meanwhile."""
        time.sleep(0.1)
        return os.getpid()

    where = udf(pid, "long", useArrow=False)

    def other_work() -> None:
        while not over.wait(0.2):  # in between the app gets a slot
            others.update(
                row.pid for row in spark.range(0, 4, 1, 2).select(where("id").alias("pid")).collect()
            )
            others.update(spark.sparkContext.parallelize(range(4), 2).map(pid).collect())

    beside = threading.Thread(target=other_work)
    beside.start()
    try:
        for number in range(120):
            sent += log.send(f"{name}.in", [event(b"k%d" % key, number) for key in range(20)])
            time.sleep(0.1)
    finally:
        over.set()
        beside.join()
    wait_until(lambda: not log.lag(name, f"{name}.in"), 60, "everything is done")
    query.stop()
    assert query.exception() is None
    assert query.lastProgress["batchId"] >= 4  # type: ignore[index]
    assert judge(sent).repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    assert processes_of(tmp_path / "history") & others, (
        "other work ran in a worker with lanes, or this proves nothing"
    )


@pytest.mark.timeout(120)
def test_two_apps_share_the_workers_of_a_session(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path
) -> None:
    names = [f"{name}-{n}" for n in (1, 2)]
    sent: dict[str, list[Any]] = {}
    queries = {}
    for number, one in enumerate(names):
        (tmp_path / one).mkdir()
        log.create(f"{one}.in", f"{one}.out")
        sent[one] = log.send(f"{one}.in", [event(b"slow", n) for n in range(2)])
        app = app_of(one, tmp_path / one)
        queries[one] = app.start(spark, bootstrap=broker.bootstrap, epoch=1.0 + number / 4, tasks=1)
    for one in names:
        wait_until(lambda one=one: (tmp_path / one / "history").is_dir(), 60, f"{one} runs")  # type: ignore[misc]
    for number in range(100):
        for one in names:
            sent[one] += log.send(f"{one}.in", [event(b"k%d" % key, number) for key in range(20)])
        time.sleep(0.1)
    for one in names:
        wait_until(lambda one=one: not log.lag(one, f"{one}.in"), 60, "everything is done")  # type: ignore[misc]
        queries[one].stop()
        assert queries[one].exception() is None
        history = read_history(tmp_path / one / "history")
        assert check(history, sent=sent[one]).repeats == 0
        check(history, sent=sent[one]).raise_if_bad()
        check_results(ids(log.read(f"{one}.in")), ids(log.read(f"{one}.out"))).raise_if_bad()
        starts = [e.at for e in history.events if e.kind is EventKind.START and e.key != b"slow"]
        first = starts[0] + 4
        gap = max(later - earlier for earlier, later in pairwise(starts) if earlier > first)
        assert gap < 2.5, "no epoch of either app waited for the other's slow call"
    shared = processes_of(tmp_path / names[0] / "history") & processes_of(tmp_path / names[1] / "history")
    assert len(processes_of(tmp_path / names[0] / "history")) <= 3, shared
