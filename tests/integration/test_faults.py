"""Parts that die in the middle: nothing is lost, nothing is out of order."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Transient
from keylane.broker import Broker
from keylane.kafka import cluster
from keylane.spark.source import LaneReader
from keylane.testing import HistoryWriter, check, check_results, read_history
from support.topics import Log, Running, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def load(count: int) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (i * i % 499), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(count)
    ]


def assert_whole(log: Log, name: str, sent: list[Any], history: Path, *, repeats: int) -> None:
    check(read_history(history), sent=sent, allow_repeats=repeats).raise_if_bad()
    pairs = [[(r.key, r.came_from) for r in log.read(f"{name}.{end}")] for end in ("in", "out")]
    check_results(*pairs, allow_duplicates=bool(repeats)).raise_if_bad()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_broker_that_dies_and_comes_back_is_waited_for(
    spark: SparkSession,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Broker() as broker:
        log = Log(broker.bootstrap)
        log.create(f"{name}.in", f"{name}.out")
        app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))

        @app.stage
        async def work(msg: Message) -> bytes:
            if msg.attempt == 1 and int(msg.value) % 10 == 3:
                raise Transient("not yet")
            return bytes(msg.value)

        messages = load(30_000)
        sent: list[Any] = []

        def offer() -> None:
            for at in range(0, len(messages), 500):
                sent.extend(log.send(f"{name}.in", messages[at : at + 500]))

        query = app.start(spark, bootstrap=broker.bootstrap, epoch=300)
        offering = threading.Thread(target=offer)
        offering.start()
        while log.count(f"{name}.out") < 3_000:
            time.sleep(0.05)
        (node,) = broker.nodes
        node.kill()
        time.sleep(2)
        node.start()
        offering.join(60)
        deadline = time.monotonic() + 60
        while log.lag(name, f"{name}.in") and time.monotonic() < deadline:
            time.sleep(0.2)
        query.stop()
        assert query.exception() is None
        assert len(sent) == 30_000
        assert_whole(log, name, sent, tmp_path / "history", repeats=0)

        # Between two epochs it is the planner that needs the broker.
        monkeypatch.setattr(cluster, "REQUEST_SECONDS", 1.0)
        reader = LaneReader(query._plan)
        start = reader.initialOffset()
        node.kill()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(reader.latestOffset, start, None)
            wait_until(
                lambda: asked.done() or "retrying for up to" in caplog.text, 10, "it has asked once in vain"
            )
            node.start()
            planned = asked.result(30)
        assert planned["epoch"] == 1
        assert sum(planned["starts"].values()) == 30_000


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_driver_without_a_drain_loses_nothing(log: Log, broker: Broker, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out")
    sent = log.send(f"{name}.in", load(30_000))
    history = tmp_path / "history"
    (tmp_path / "shop.py").write_text(
        "import asyncio\n"
        "from keylane import App, Message\n"
        "from keylane.testing import HistoryWriter\n"
        f"app = App({name!r}, source='{name}.in', sink='{name}.out', observer=HistoryWriter({str(history)!r}))\n"
        "@app.stage\n"
        "async def work(msg: Message):\n"
        "    await asyncio.sleep(0.02)\n"
        "    return msg.value\n"
    )
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]")
    with Running(tmp_path, *arguments) as run:
        run.until(lambda: log.count(f"{name}.out") >= 5_000, 60, "5,000 results")
        run.send(signal.SIGKILL)
        assert run.ends(within=5, leaves=10) == (-signal.SIGKILL, {})

    reached: dict[int, int] = {}
    for event in read_history(history):
        reached[event.partition] = max(event.offset, reached.get(event.partition, -1))

    def is_past() -> bool:  # what ran before the kill is committed: whatever is repeated now, it is not that
        committed = log.cluster.committed(name, f"{name}.in", reached)
        return all(p in committed and committed[p][0] > offset for p, offset in reached.items())

    with Running(tmp_path, *arguments) as run:
        run.until(is_past, 60, f"progress past {reached}")
        run.send(signal.SIGTERM)
        run.says("A second signal ends the run at once")
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=10)
    assert (code, facts["ended"], facts["drained"]) == (128 + signal.SIGTERM, "stopped", False), run.lines
    assert "ended without a drain: messages in flight run again next time" in run.lines

    with Running(tmp_path, *arguments, "--until-caught-up") as run:
        run.has("java")
        code, _ = run.ends(within=100)
    assert code == 0, run.lines
    assert log.lag(name, f"{name}.in") == 0
    assert_whole(log, name, sent, history, repeats=1)
