"""The promise itself, through real Kafka and real Spark."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Retry, Transient
from keylane.testing import HistoryWriter, Verdict, check_results, read_history
from support.topics import Log, at_work, ids, kill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker


def failures_of(value: bytes) -> int:
    """How often a message fails before it works: every tenth once, every fiftieth twice."""
    number = int(value.split(b"|")[0])
    return 2 if number % 50 == 7 else 1 if number % 10 == 7 else 0


def chat_app(name: str, history: Path) -> App:
    quick = Retry(wait_initial=0.02, wait_max=0.1)  # ten keys with thousands of backoffs each
    app = App(name, source=f"{name}.in", sink=f"{name}.out", retry=quick, observer=HistoryWriter(history))

    @app.stage
    async def answer(msg: Message) -> bytes:
        if msg.attempt <= failures_of(msg.value):
            raise Transient("not yet")
        return bytes(msg.value)

    return app


def messages(count: int, keys: int, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "key": b"k%d" % rng.randrange(keys),
            "value": b"%d|" % i + b"x" * 100,
            "headers": [("event-id", b"e%d" % i)],
        }
        for i in range(count)
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("keys", [pytest.param(10, marks=pytest.mark.slow), 5000])
def test_results_are_written_once_and_in_key_order(
    keys: int,
    log: Log,
    spark: SparkSession,
    broker: Broker,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    sent = log.send(f"{name}.in", messages(50_000, keys))
    query = chat_app(name, tmp_path / "history").start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert query.awaitTermination(150)

    verdict = judge(sent)
    assert verdict.repeats == 0
    assert verdict.counts.retried >= 5_000
    outcome = check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out")))
    outcome.raise_if_bad()
    tool = broker.tool(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        "--bootstrap-server", broker.bootstrap, "--describe", "--group", name,
    )  # fmt: skip
    rows = [line.split() for line in tool.splitlines() if line.startswith(name)]
    assert len(rows) == 4
    assert {row[5] for row in rows} == {"0"}, tool


@pytest.mark.timeout(180)
def test_killed_worker_repeats_only_since_the_last_commit(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = chat_app(name, tmp_path / "history")
    sent: list[Any] = []
    load = messages(50_000, 1000)

    def offer() -> None:
        for at in range(0, len(load), 1000):
            sent.extend(log.send(f"{name}.in", load[at : at + 1000]))

    query = app.start(spark, bootstrap=broker.bootstrap, epoch=120)
    offering = threading.Thread(target=offer)
    offering.start()
    killed = 0
    deadline = time.monotonic() + 60
    while killed < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        if log.count(f"{name}.out") > 5_000:
            kill(at_work(tmp_path / "history"))
            killed += 1
    offering.join()
    while log.lag(name, f"{name}.in") and time.monotonic() < deadline + 60:
        time.sleep(0.2)
    query.stop()
    assert killed == 1
    assert query.exception() is None

    verdict = judge(sent, allow_repeats=1)
    assert verdict.counts.owners >= 3, "nobody took over: the kill did not hit a worker that ran a task"
    outcome = check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out")), allow_duplicates=True)
    outcome.raise_if_bad()
    # What runs again had ended after the last commit: the interval, and what a commit and its acknowledgements take.
    first: dict[tuple[int, int], float] = {}
    late: dict[tuple[int, int], float] = {}
    death: dict[str, float] = {}
    for event in read_history(tmp_path / "history"):
        death[event.owner] = event.at
        if event.outcome == "ok":
            place = (event.partition, event.offset)
            if place in first:
                late[place] = first[place]
            else:
                first[place] = event.at
    dead = min(death.values())
    assert all(dead - at <= app.spec.commit_interval + 1.0 for at in late.values())
