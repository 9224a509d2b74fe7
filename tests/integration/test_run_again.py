"""``keylane run`` as the supervisor of its query: what fails is started again, unless it is the app's own failure."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message
from keylane.spark import jvm
from keylane.state.ownership import take_over
from keylane.testing import check, check_results, read_history
from support.topics import Running, ids, kill, processes, python_workers, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from support.topics import Log

pytestmark = pytest.mark.slow  # minutes on two cores: make soak
APP = """
import asyncio, os
from pathlib import Path
from keylane import App, Message
from keylane.state.ownership import take_over
from keylane.testing import HistoryWriter

app = App("{name}", source="{name}.in", sink="{name}.out", observer=HistoryWriter("{folder}/history"))

@app.stage
async def work(msg: Message):
    if msg.partition == 1 and not Path("{folder}/fixed").exists():
        os.kill(os.getpid(), 9)
    await asyncio.sleep(0.02)
    return msg.value
"""


def load(begin: int, end: int) -> list[dict[str, Any]]:
    return [
        {
            "key": b"k%d" % (i % 8),
            "value": b"%d" % i,
            "headers": [("event-id", b"e%d" % i)],
            "partition": i % 4,
        }
        for i in range(begin, end)
    ]


@pytest.mark.timeout(200)
def test_failed_query_or_jvm_restarts_until_taken_over(
    log: Log, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    (tmp_path / "shop.py").write_text(APP.format(name=name, folder=tmp_path))
    sent = log.send(f"{name}.in", load(0, 2_000))
    with Running(tmp_path, "shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]") as run:
        run.says("the query failed: a Python worker ended unexpectedly, 4 times in a row")
        run.says("Restarting it in 1 s (failure 1 in a row)")
        (tmp_path / "fixed").touch()
        run.says("runs again")
        run.until(lambda: log.lag(name, f"{name}.in") == 0, 60, "everything is done")

        before = log.count(f"{name}.out")
        sent += log.send(f"{name}.in", load(2_000, 3_000))
        run.until(lambda: log.count(f"{name}.out") > before, 30, "it is in the middle of it")
        kill(run.has("java"))
        run.says("the query failed: Spark's JVM ended")
        run.says("runs again", 2)
        run.until(lambda: log.lag(name, f"{name}.in") == 0, 60, "everything is done")

        run.notice()
        take_over(log.settings, name, f"{name}.state", 4, "another")
        code, facts = run.ends(within=60)
    assert code == 3, run.lines
    assert (facts["ended"], facts["lag"], facts["processed"]) == ("failed", 0, 3_000)
    assert facts["error"].startswith(f"app '{name}' was taken over by another run, started by ")
    assert f"error: {facts['error']}" in run.lines
    assert "will not restart" in run.lines[-1]
    assert "Traceback" not in "".join(run.lines)
    check(read_history(tmp_path / "history"), sent=sent, allow_repeats=5).raise_if_bad()
    pairs = [ids(log.read(f"{name}.{end}")) for end in ("in", "out")]
    check_results(*pairs, allow_duplicates=True).raise_if_bad()


def test_a_failed_query_has_tasks_until_spark_is_idle(
    spark: SparkSession, log: Log, broker: Broker, name: str
) -> None:
    log.create(f"{name}.in")
    log.send(f"{name}.in", load(0, 4))
    app = App(name, source=f"{name}.in")

    @app.stage
    async def work(msg: Message) -> None:
        if msg.partition == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    query = app.start(spark, bootstrap=broker.bootstrap)
    wait_until(lambda: not query.isActive, 50, "Spark has given up")
    well = python_workers()
    assert jvm.running(spark) == len(well) == 1, "the task of the other partitions"
    assert not jvm.await_idle(spark, 0.5)
    assert jvm.await_idle(spark, 20)
    assert jvm.running(spark) == 0
    wait_until(lambda: not set(well) & processes().keys(), 1, "its process has gone too")
    assert jvm.is_alive(spark)
