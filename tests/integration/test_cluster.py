"""A real Spark cluster: a master and two workers on this machine. The app is shipped to the executors."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane.testing import check, check_results, read_history
from support.standalone_cluster import Standalone
from support.topics import Running, below, ids, kill, wait_until

if TYPE_CHECKING:
    from keylane.broker import Broker
    from support.topics import Log

APP = """
import asyncio
from keylane import App, Message, Transient
from keylane.testing import HistoryWriter
from rates import pause

app = App("{name}", source="{name}.in", sink="{name}.out", observer=HistoryWriter({history!r}))

@app.stage
async def work(msg: Message):
    await asyncio.sleep(pause)
    if msg.attempt == 1 and msg.offset % 20 == 3:
        raise Transient("not yet")
    return msg.value
"""


def load(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (n * n % 199), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}
        for n in range(first, first + count)
    ]


def ship(folder: Path, name: str, history: Path) -> Path:
    """The app and a module that it needs, in an archive outside every search path."""
    archive = folder / "parcel" / "shop.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as package:
        package.writestr("shop.py", APP.format(name=name, history=str(history)))
        package.writestr("rates.py", "pause = 0.01\n")
    return archive


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_executor_loses_nothing(
    log: Log, broker: Broker, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=4)
    sent = log.send(f"{name}.in", load(30_000))
    history = tmp_path / "history"
    archive = ship(tmp_path, name, history)
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--py-files", str(archive))
    with Standalone(tmp_path) as cluster, Running(tmp_path, *arguments, "--master", cluster.url) as run:
        run.until(lambda: log.count(f"{name}.out") >= 5_000, 80, "results")
        assert len(cluster.executors()) == 2
        lost = cluster.executors()[0]
        kill(lost)
        killed = time.monotonic_ns()
        before = {event.owner for event in read_history(history).events}
        run.until(
            lambda: any(event.owner not in before for event in read_history(history).events),
            60,
            "what it had goes on elsewhere",
        )
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=60)
        assert code == 0, run.lines
        assert facts["drained"] is True
        with Running(tmp_path, *arguments, "--master", cluster.url, "--until-caught-up") as last:
            code, facts = last.ends(within=90)
        assert (code, facts["lag"]) == (0, 0), last.lines
    events = read_history(history)
    check(events, sent=sent, allow_repeats=1).raise_if_bad()
    again = next(event.seq for event in events.events if event.owner not in before) - killed
    with capsys.disabled():
        print(f"\nexecutor killed: its partitions went on after {again / 1e9:.1f} s")  # noqa: T201
    pairs = [ids(log.read(f"{name}.{end}")) for end in ("in", "out")]
    check_results(*pairs, allow_duplicates=True).raise_if_bad()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_spark_submit_runs_an_app_as_any_other_job(
    log: Log, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=4)
    sent = log.send(f"{name}.in", load(3_000))
    history = tmp_path / "history"
    archive = ship(tmp_path, name, history)
    (tmp_path / "job.py").write_text(
        "from pyspark.sql import SparkSession\n"
        "from shop import app\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        f"query = app.start(spark, bootstrap={broker.bootstrap!r}, available_now=True)\n"
        "query.awaitTermination()\n"
        "spark.stop()\n"
    )
    with Standalone(tmp_path) as cluster:
        submit = Path(sys.executable).with_name("spark-submit")
        done = subprocess.run(
            [str(submit), "--master", cluster.url, "--py-files", str(archive), str(tmp_path / "job.py")],
            env={"PATH": "/usr/bin:/bin", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    check(read_history(history), sent=sent).raise_if_bad()
    assert log.count(f"{name}.out") == 3_000


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_an_executor_that_is_added_gets_work(log: Log, broker: Broker, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    sent = log.send(f"{name}.in", load(5_000))
    history = tmp_path / "history"
    archive = ship(tmp_path, name, history)
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--py-files", str(archive))
    with (
        Standalone(tmp_path, workers=1) as cluster,
        Running(tmp_path, *arguments, "--master", cluster.url) as run,
    ):
        run.until(lambda: log.count(f"{name}.out") >= 3_000, 80, "results")
        (first,) = cluster.executors()
        cluster.add(1)

        def added_works() -> bool:
            """True if a Python worker of the new executor ran a message of a load that continues until then."""
            sent.extend(log.send(f"{name}.in", load(200, first=len(sent))))
            workers = {str(pid) for new in cluster.executors() if new != first for pid in below(new)}
            owners = {event.owner.partition("+")[0] for event in read_history(history).events}
            return bool(workers & owners)

        wait_until(added_works, 60, "the new executor runs messages")
        run.send(signal.SIGTERM)
        code, _ = run.ends(within=60)
        assert code == 0, run.lines
        with Running(tmp_path, *arguments, "--master", cluster.url, "--until-caught-up") as last:
            code, facts = last.ends(within=90)
        assert (code, facts["lag"]) == (0, 0), last.lines
    verdict = check(read_history(history), sent=sent)
    verdict.raise_if_bad()
    assert verdict.repeats == 0
