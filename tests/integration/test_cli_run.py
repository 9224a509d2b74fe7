"""``keylane run`` as a user starts and stops it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from keylane.testing import check, check_results, read_history
from support.topics import Running, ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from keylane.broker import Broker
    from support.topics import Log

KEYLANE = [sys.executable, "-m", "keylane"]

APP = """
import asyncio
from keylane import App, Message, Transient
from keylane.testing import HistoryWriter

app = App("{name}", source="{name}.in", sink="{name}.out", observer=HistoryWriter({history!r}))

@app.stage
async def work(msg: Message):
    await asyncio.sleep(0.002)
    if msg.attempt == 1 and msg.offset % 10 == 3:
        raise Transient("not yet")
    return msg.value

def plain(): ...
"""


def write_app(folder: Path, name: str) -> None:
    (folder / "shop.py").write_text(APP.format(name=name, history=str(folder / "history")))


def keylane(*arguments: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KEYLANE, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False, **more
    )


@pytest.fixture(scope="module", autouse=True)
def unanswered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A run without a broker: it waits 10 s for one while other tests continue."""
    folder = tmp_path_factory.mktemp("unanswered")
    write_app(folder, "nowhere")
    process = subprocess.Popen(
        [*KEYLANE, "run", "shop:app", "--bootstrap", "127.0.0.1:9"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(180)
def test_a_signal_drains_and_the_next_run_catches_up(
    log: Log, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    load = [
        {"key": b"k%d" % (i % 200), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(12_000)
    ]
    sent = log.send(f"{name}.in", load)
    write_app(tmp_path, name)
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]")
    with Running(tmp_path, *arguments, "--log-format", "json", "--metrics-port", "0") as run:
        run.until(lambda: log.count(f"{name}.out") >= 2_000, 60, "results")
        (served,) = (line for line in run.lines if "metrics at http" in line)
        port = re.findall(r":(\d+)/metrics", served)[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert f'keylane_partition_lag{{app="{name}"' in answer.read().decode()
        run.send(signal.SIGTERM)
        code, facts = run.ends(within=60)
    assert code == 0, run.lines
    assert (facts["ended"], facts["drained"]) == ("stopped", True)
    assert facts["processed"] > 0
    assert facts["lag"] > 0
    loggers = {json.loads(line)["logger"] for line in run.lines if line.startswith("{")}
    assert {"keylane.run", "keylane.task"} <= loggers
    assert not any("keylane." in line for line in run.lines if not line.startswith("{"))

    with Running(tmp_path, *arguments, "--until-caught-up") as run:
        run.has("java")
        code, facts = run.ends(within=100)
    assert code == 0, run.lines
    assert (facts["ended"], facts["lag"]) == ("caught up", 0)
    verdict = check(read_history(tmp_path / "history"), sent=sent)
    verdict.raise_if_bad()
    assert verdict.repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nosuch:app", "module 'nosuch' was not found"),
        ("shop", "expected MODULE:APP"),
        ("shop:missing", "module 'shop' has no 'missing'; its apps are: app"),
        ("shop:plain", "expected an App, got a function"),
        ("broken:app", "could not import module 'broken': ZeroDivisionError"),
        ("empty:app", "has no stages"),
        ("shop:app", "topic 'nowhere.in' does not exist"),
    ],
)
def test_a_wrong_app_is_one_clear_sentence(
    reference: str, message: str, broker: Broker, tmp_path: Path
) -> None:
    write_app(tmp_path, "nowhere")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("from keylane import App\napp = App('e', source='e.in')\n")
    ran = keylane("run", reference, "--bootstrap", broker.bootstrap, folder=tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.timeout(60)
def test_no_broker_given_and_none_there(tmp_path: Path, unanswered: subprocess.Popen[str]) -> None:
    write_app(tmp_path, "nowhere")
    environment = {k: v for k, v in os.environ.items() if k != "KEYLANE_BOOTSTRAP"}
    ran = keylane("run", "shop:app", folder=tmp_path, env=environment)
    assert ran.returncode == 2
    assert "no broker given" in ran.stderr
    _, told = unanswered.communicate(timeout=30)
    assert unanswered.returncode == 2
    assert "no Kafka broker answered at 127.0.0.1:9" in told


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stopped_lane_is_reported_and_fails_a_catch_up(
    log: Log, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = APP.format(name=name, history=str(tmp_path / "history"))
    app = app.replace(f'sink="{name}.out"', f'sink="{name}.out", on_failure="block"')
    (tmp_path / "shop.py").write_text(app.replace('raise Transient("not yet")', 'raise ValueError("never")'))
    sent = log.send(f"{name}.in", [{"key": b"k%d" % (i % 4), "value": b"%d" % i} for i in range(40)])
    run = ("run", "shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]", "--until-caught-up")
    told = keylane(*run, "--json", folder=tmp_path)
    assert told.returncode == 1, told.stderr
    facts = json.loads(told.stdout)
    assert facts["ended"] == "caught up"
    assert 0 < facts["stopped_lanes"] <= 4
    assert f"keylane lanes list {name}" in " ".join(told.stderr.split())
    listed = json.loads(
        keylane("lanes", "list", name, "--json", "--bootstrap", broker.bootstrap, folder=tmp_path).stdout
    )
    assert len(listed) == facts["stopped_lanes"]
    verdict = check(read_history(tmp_path / "history"), sent=sent, allow_repeats=0, min_seen=0.1)
    assert set(verdict.tally) <= {"lost"}, verdict
