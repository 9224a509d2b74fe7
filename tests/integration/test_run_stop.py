"""SIGTERM and Ctrl-C in every phase of ``keylane run``: it ends in time, leaves nothing behind, and nothing is lost."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from keylane.testing import check, check_results, read_history
from support.topics import Running, ids, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from keylane.broker import Broker
    from support.topics import Log

pytestmark = pytest.mark.slow  # minutes on two cores: make soak
DRAIN = 2
APP = """
import asyncio, threading, time
from pathlib import Path
from keylane import App, Message
from keylane.testing import HistoryWriter

folder = Path("{folder}")
app = App(
    "{name}", source="{name}.in", sink="{name}.out", drain_timeout={drain}, observer=HistoryWriter(folder / "history")
)
if (folder / "slow").exists():
    (folder / "importing").touch()
    time.sleep(60)

@app.resource
async def database():
    if (folder / "broken").exists():
        raise OSError("it said no")
    yield

@app.stage
async def think(msg: Message, database):
    while msg.key == b"stubborn" and not (folder / "fixed").exists():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    return msg.value

@app.stage
def write(msg: Message):
    if msg.key == b"blocked" and not (folder / "fixed").exists():
        threading.Event().wait()
    return msg.value
"""


def load(
    begin: int, end: int, key: bytes | None = None, partition: int | None = None
) -> list[dict[str, Any]]:
    return [
        {
            "key": key or b"k%d" % (i % 20),
            "value": b"%d" % i,
            "headers": [("event-id", b"e%d" % i)],
            "partition": i % 4 if partition is None else partition,
        }
        for i in range(begin, end)
    ]


@pytest.mark.timeout(250)
def test_a_stop_in_every_phase(log: Log, broker: Broker, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out")
    (tmp_path / "shop.py").write_text(APP.format(name=name, folder=tmp_path, drain=DRAIN))
    sent = log.send(f"{name}.in", load(0, 200))
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]")

    (tmp_path / "slow").touch()  # while the app is imported
    with Running(tmp_path, *arguments) as run:
        wait_until((tmp_path / "importing").exists, 30, "the app is being imported")
        run.send(signal.SIGINT)
        code, facts = run.ends(within=5)
    assert (code, facts["ended"]) == (0, "stopped"), run.lines
    assert "stopped: nothing was running" in run.lines
    (tmp_path / "slow").unlink()

    with Running(tmp_path, *arguments) as run:  # while Spark starts
        run.has("java")
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=8)
    assert (code, facts["ended"]) == (0, "stopped"), run.lines
    assert "stopped: nothing was running" in run.lines

    with Running(tmp_path, *arguments) as run:  # while the query starts
        run.has("pyspark.daemon")
        run.send_all(signal.SIGINT)
        code, facts = run.ends(within=60)
    assert (code, facts["ended"], facts["drained"]) == (0, "stopped", True), run.lines

    (tmp_path / "broken").touch()  # in the backoff
    with Running(tmp_path, *arguments) as run:
        run.says(
            f"resource 'database' of app '{name}' could not be opened: OSError: it said no. It is started again"
        )
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=15)
    assert (code, facts["ended"], facts["drained"]) == (0, "stopped", True), run.lines
    (tmp_path / "broken").unlink()

    # In the drain: one task has a stage that no cancellation ends, the other one a thread that nothing ends.
    sent += log.send(f"{name}.in", load(200, 203, b"stubborn", 0) + load(203, 206, b"blocked", 1))
    with Running(tmp_path, *arguments) as run:
        run.until(lambda: log.count(f"{name}.out") == 200, 60, "all lanes have run but the two")
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=DRAIN + 15)
    assert (code, facts["ended"], facts["drained"]) == (4, "stopped", False), run.lines
    assert any("messages in flight run again next time" in line for line in run.lines)

    (tmp_path / "fixed").touch()
    with Running(tmp_path, *arguments, "--until-caught-up") as run:
        run.has("java")
        code, facts = run.ends(within=90)
    assert (code, facts["ended"], facts["lag"]) == (0, "caught up", 0), run.lines
    check(read_history(tmp_path / "history"), sent=sent, allow_repeats=1).raise_if_bad()
    pairs = [ids(log.read(f"{name}.{end}")) for end in ("in", "out")]
    check_results(*pairs, allow_duplicates=True).raise_if_bad()


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_hanging_spark_is_stopped(log: Log, broker: Broker, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out")
    (tmp_path / "shop.py").write_text(APP.format(name=name, folder=tmp_path, drain=DRAIN))
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]")
    with Running(tmp_path, *arguments) as run:
        run.says("epoch 1 began", 2)
        os.kill(run.has("java"), signal.SIGSTOP)
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=DRAIN + 30)
    assert (code, facts["ended"], facts["drained"]) == (4, "stopped", False), run.lines
    assert any("Spark did not end within 22 s; ending it now" in line for line in run.lines)
