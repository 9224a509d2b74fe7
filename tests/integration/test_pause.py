"""`keylane pause` and `resume`, with the real broker: what runs, what an operator sees, and a restart in between."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane import App, Message
from keylane.cli.main import app as cli
from keylane.errors import KeylaneError
from support.tasks import Runner
from support.topics import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from support.topics import Log

pytestmark = pytest.mark.timeout(120)


def keylane(log: Log, *given: str) -> tuple[int, str]:
    """A command's exit code, and what it says."""
    ran = CliRunner().invoke(cli, [*given, "--bootstrap", log.bootstrap])
    if isinstance(ran.exception, KeylaneError):
        return 2, str(ran.exception)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def copying(name: str) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out", commit_interval=0.1)

    @app.stage
    async def work(msg: Message) -> bytes:
        return bytes(msg.value)

    return app


@pytest.fixture
def runner(log: Log, name: str, tmp_path: Path) -> Runner:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    return Runner(log, name, tmp_path, copying(name))


def send(log: Log, name: str, *values: str, key: bytes = b"k") -> None:
    log.send(f"{name}.in", [{"key": key, "value": value.encode()} for value in values])


def test_pause_holds_over_a_restart_until_it_is_resumed(log: Log, name: str, runner: Runner) -> None:
    send(log, name, "1")
    runner.run()
    code, told = keylane(log, "pause", name, "--reason", "the bank is down", "--wait", "0")
    assert (code, "does not seem to be running" in told) == (0, True)
    send(log, name, "2", "3")
    runner.run(seconds=3)  # the app begins paused
    assert log.count(f"{name}.out") == 1
    assert log.lag(name, f"{name}.in") == 2
    for command in (("plan", name), ("lanes", "list", name)):
        assert "paused: all, for" in keylane(log, *command)[1]
        assert "the bank is down" in keylane(log, *command)[1]
    assert keylane(log, "resume", name, "--wait", "0")[0] == 0
    runner.run()
    assert [row.value for row in log.read(f"{name}.out") if row.key == b"k"] == [b"1", b"2", b"3"]
    assert "paused" not in keylane(log, "plan", name)[1]
    audit = json.loads(keylane(log, "lanes", "audit", name, "--json")[1])
    assert [(one["do"], one["scope"], one["reason"], one["answer"]["ok"]) for one in audit] == [
        ("pause", "app", "the bank is down", True),
        ("resume", "app", None, True),
    ]


def test_running_app_pauses_a_key_and_answers(log: Log, name: str, runner: Runner) -> None:
    send(log, name, "1")
    runner.run()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, seconds=12)
        time.sleep(2)
        began = time.monotonic()
        code, told = keylane(log, "pause", name, "--key", "k")
        assert (code, "key k paused (by task" in told) == (0, True), told
        assert time.monotonic() - began < 5
        send(log, name, "2")
        send(log, name, "x", key=b"other")
        wait_until(lambda: log.count(f"{name}.out") == 2, 5, "the other key continues")
        code, told = keylane(log, "lanes", "show", name, "k")
        assert (code, "paused: key k, for" in told) == (0, True), told
        code, told = keylane(log, "resume", name)
        assert (code, told) == (2, f"all of app '{name}' is not paused; paused: key k")
        assert keylane(log, "resume", name, "--key", "k")[0] == 0
        wait_until(lambda: log.count(f"{name}.out") == 3, 5, "the key continues")
        code, told = keylane(log, "pause", name, "--stage", "wrok")
        assert code == 1
        assert "not paused, the app has no stage 'wrok'; it has 'work'" in told
        assert "paused" not in keylane(log, "plan", name)[1]
        running.result(60)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("pause", "--key", "a", "--stage", "b"), "expected at most one of --partition, --stage and --key"),
        (("pause", "--partition", "9"), "expected a --partition from 0 to 1, got 9"),
        (("pause", "--stage", ""), "expected the name of a stage for --stage"),
        (("pause", "--reason", "x" * 1001), "expected a reason of at most 1000 characters, got 1,001"),
        (("resume",), "is not paused, and nothing of it is"),
    ],
)
def test_pause_that_cannot_work_is_refused(
    log: Log, name: str, runner: Runner, given: Any, complaint: str
) -> None:
    send(log, name, "1")
    runner.run()
    command, *options = given
    code, told = keylane(log, command, name, *options)
    assert code == 2
    assert complaint in told
