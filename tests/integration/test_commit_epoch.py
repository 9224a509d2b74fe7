"""``commit="epoch"``: results in Parquet, each once, whatever crashes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison
from keylane.testing import HistoryWriter, Verdict, read_history
from support.topics import Log, at_work, kill, python_workers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.spark.query import LaneQuery


pytestmark = pytest.mark.slow  # minutes on two cores: make soak


def scores(name: str, folder: Path) -> App:
    app = App(name, source=f"{name}.in", commit="epoch", observer=HistoryWriter(folder / "history"))

    @app.stage
    async def score(msg: Message) -> dict[str, int]:
        await asyncio.sleep(0.06)  # 97 keys: 1,600 a second, so an epoch of two seconds ends in the middle
        number = int(msg.value)
        if number % 500 == 123:
            raise Poison("no score")
        return {"twice": 2 * number}

    return app


def start(app: App, spark: SparkSession, bootstrap: str, folder: Path, **more: Any) -> LaneQuery:
    return app.start(
        spark,
        bootstrap=bootstrap,
        epoch=2,
        format="parquet",
        path=str(folder / "table"),
        checkpoint_location=str(folder / "checkpoint"),
        **more,
    )


def load(first: int, last: int) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % (i % 97), "value": b"%d" % i} for i in range(first, last)]


@pytest.mark.timeout(150)
def test_every_result_is_in_parquet_once(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in")
    sent: list[Any] = []

    def offer(first: int, last: int) -> threading.Thread:
        def send() -> None:
            for at in range(first, last, 200):
                sent.extend(log.send(f"{name}.in", load(at, at + 200)))
                time.sleep(0.1)

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def wait_for_more(events: int) -> None:
        begin = len(list(read_history(tmp_path / "history")))
        wait_until(lambda: len(list(read_history(tmp_path / "history"))) > begin + events, 60, "it goes on")

    # A driver of its own, killed with everything below it in the middle of an epoch that is not its first.
    driver = subprocess.Popen(
        [sys.executable, __file__, name, str(tmp_path), broker.bootstrap],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        offering = offer(0, 6_000)
        wait_until(lambda: log.lag(name, f"{name}.in") < len(sent) - 1_000, 60, "an epoch was committed")
        wait_for_more(500)
        for worker in python_workers(driver.pid):
            kill(worker)
    finally:
        driver.kill()
        driver.wait()
    offering.join()

    query = start(scores(name, tmp_path), spark, broker.bootstrap, tmp_path)
    offering = offer(6_000, 10_000)
    wait_for_more(500)
    kill(at_work(tmp_path / "history"))
    offering.join()
    wait_until(lambda: not log.lag(name, f"{name}.in"), 40, "everything is committed")
    query.stop()
    assert query.exception() is None

    verdict = judge(sent, allow_repeats=3)
    assert verdict.repeats > 0, "nothing ran again: the kills hit nothing"
    rows = spark.read.parquet(str(tmp_path / "table")).collect()
    places = Counter((row.partition, row.offset) for row in rows)
    assert set(places) == {(one.partition, one.offset) for one in sent}, "lost, or invented"
    assert max(places.values()) == 1, "a row stands there twice"
    results = sorted(row.result.decode() for row in rows if row.outcome == "ok")
    assert results == sorted(f'{{"twice":{2 * i}}}' for i in range(10_000) if i % 500 != 123)
    assert all(row.result is None for row in rows if row.outcome == "dead")
    again = start(scores(name, tmp_path), spark, broker.bootstrap, tmp_path, available_now=True)
    assert again.awaitTermination(60)
    assert spark.read.parquet(str(tmp_path / "table")).count() == len(rows)


if __name__ == "__main__":
    from keylane.spark import session

    start(
        scores(sys.argv[1], Path(sys.argv[2])), session("local[2]", "driver"), sys.argv[3], Path(sys.argv[2])
    )
    threading.Event().wait()
