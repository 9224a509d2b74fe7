"""Batch stages through real Kafka: real tasks without Spark, and once with it."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keylane import App, Message, Outcome, Poison, Retry, Transient
from keylane.testing import Harness, HistoryWriter, check_results
from support.tasks import Runner
from support.topics import ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Verdict
    from support.topics import Log

EXAMPLES = Path(__file__).parents[2] / "examples"
MESSAGES, KEYS = 4_000, 200


def scoring(name: str, folder: Path, sizes: list[int], **settings: Any) -> App:
    """A stage, a batch stage in a thread that is given a table, and one on the loop that fails for some."""
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        decode="json",
        retry=Retry(wait_initial=0.01, wait_max=0.02),
        observer=HistoryWriter(folder / "history"),
        **settings,
    )

    @app.stage
    async def check(msg: Message) -> Any:
        if msg.value == 501:
            raise Poison("five hundred and one")
        return msg.value

    @app.batch_stage(max_size=32, max_concurrency=1)
    def double(table: pa.Table) -> pa.Array:
        return pc.multiply(table["value"], 2)

    @app.batch_stage(max_size=50)
    async def send(msgs: list[Message]) -> list[Any]:
        assert len({msg.key for msg in msgs}) == len(msgs)
        sizes.append(len(msgs))
        await asyncio.sleep(0.002)
        return [
            Transient("busy")
            if msg.value % 40 == 6 and msg.attempt == 1
            else Poison("no")
            if msg.value == 2222
            else msg.value
            for msg in msgs
        ]

    return app


def load() -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (n * 7 % KEYS), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}
        for n in range(MESSAGES)
    ]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_batches_keep_key_order_and_fail_per_message(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    sent = log.send(f"{name}.in", load())
    sizes: list[int] = []
    runner = Runner(log, name, tmp_path, scoring(name, tmp_path, sizes, delivery=delivery))
    assert len(runner.run()) == MESSAGES
    verdict = judge(sent)
    assert verdict.repeats == 0
    assert verdict.counts.retried == MESSAGES // 20
    assert runner.outcomes.count(Outcome.DEAD) == 2
    letters = {(row.value, row.header("keylane-stage")) for row in log.read(f"{name}.dlq")}
    assert letters == {(b"501", b"check"), (b"1111", b"send")}
    rows = log.read(f"{name}.out")
    assert {row.came_from: row.value for row in rows} == {
        b"e%d" % n: b"%d" % (2 * n) for n in range(MESSAGES) if n not in (501, 1111)
    }
    kept = [row for row in log.read(f"{name}.in") if row.value not in (b"501", b"1111")]
    check_results(ids(kept), ids(rows)).raise_if_bad()
    assert sum(sizes) / len(sizes) > 5
    assert not log.lag(name, f"{name}.in")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("scoring")


def test_the_example_scores_in_batches_and_in_order(example: Any) -> None:
    harness = Harness(example.app)
    for number in range(300):
        amount = b"1e9" if number == 77 else b'"a lot"' if number == 99 else b"%d" % number
        harness.send(key=b"c%d" % (number % 40), value=b'{"amount": %s, "abroad": 1, "hour": 3}' % amount)
    result = harness.run()
    result.verdict.raise_if_bad()
    (dead,) = result.dead
    assert dead.message.startswith("no payment")
    found = [json.loads(written.value) for written in result.results]
    assert [payment["amount"] for payment in found if payment["stop"]] == [
        payment["amount"] for payment in found if payment["fraud"] > 0.5
    ]
    assert any(payment["stop"] for payment in found)
    assert not all(payment["stop"] for payment in found)
    assert max(payment["batch"] for payment in found) == 40


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_scoring_example_scores_payments_in_card_order(
    log: Log, broker: Broker, spark: SparkSession, example: Any
) -> None:
    scoring = example
    log.create(scoring.app.source, scoring.app.sink, partitions=scoring.PARTITIONS)
    expected = scoring.publish(broker.bootstrap, 5_000)
    query = scoring.app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert query.awaitTermination(100)
    found = scoring.read(broker.bootstrap, 4_950)
    assert scoring.judge(expected, found) == []
    sizes = [json.loads(msg.value)["batch"] for msg in found]
    assert sum(sizes) / len(sizes) > 10, "most of them share their call with others"
    assert log.count("scoring.dlq") == 50


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_example_runs_by_one_command() -> None:
    told = subprocess.run(
        [sys.executable, "scoring.py", "--messages", "3000"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=190,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "2,970 payments" in told.stdout
    assert "each card's in order: yes" in told.stdout
