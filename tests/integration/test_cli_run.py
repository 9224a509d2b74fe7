"""``keylane run`` as a user starts and stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane.testing import check, check_results, read_history

if TYPE_CHECKING:
    from pathlib import Path

    from keylane.broker import Broker
    from support import Log

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


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_next_run_catches_up(
    number: signal.Signals, log: Log, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    load = [
        {"key": b"k%d" % (i % 200), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(40_000)
    ]
    sent = log.send(f"{name}.in", load)
    write_app(tmp_path, name)
    run = [*KEYLANE, "run", "shop:app", "--bootstrap", broker.bootstrap, "--master", "local[2]", "--json"]
    process = subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while log.count(f"{name}.out") < 5_000:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        # As the terminal does it: Ctrl-C goes to every process in the foreground, SIGTERM to the one that was named.
        os.killpg(process.pid, number) if number is signal.SIGINT else process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    facts = json.loads(out)
    assert facts["ended"] == "stopped"
    assert 0 < facts["processed"] < 40_000

    again = keylane(*run[len(KEYLANE) :], "--until-caught-up", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["lag"] == 0
    verdict = check(read_history(tmp_path / "history"), sent=sent)
    verdict.raise_if_bad()
    assert verdict.repeats == 0
    pairs = [[(r.key, r.header("event-id")) for r in log.read(f"{name}.{end}")] for end in ("in", "out")]
    check_results(*pairs).raise_if_bad()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nosuch:app", "there is no module 'nosuch' here"),
        ("shop", "needs MODULE:APP"),
        ("shop:missing", "module 'shop' has no 'missing'; its apps are: app"),
        ("shop:plain", "is a function, not an App"),
        ("broken:app", "module 'broken' does not import: ZeroDivisionError"),
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
def test_no_broker_given_and_none_there(tmp_path: Path) -> None:
    write_app(tmp_path, "nowhere")
    environment = {k: v for k, v in os.environ.items() if k != "KEYLANE_BOOTSTRAP"}
    ran = keylane("run", "shop:app", folder=tmp_path, env=environment)
    assert ran.returncode == 2
    assert "no broker given" in ran.stderr
    ran = keylane("run", "shop:app", "--bootstrap", "127.0.0.1:9", folder=tmp_path)
    assert ran.returncode == 2
    assert "no Kafka broker answered at 127.0.0.1:9" in ran.stderr


@pytest.mark.timeout(120)
def test_caught_up_but_for_a_stopped_lane_is_told_and_is_no_success(
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
