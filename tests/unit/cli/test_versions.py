"""`keylane versions`: an entity's versions as an operator sees them, and the command to set them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from keylane.cli.main import app
from keylane.lanes.lane_record import RetryState, encode_retries
from keylane.offsets.slots import slot_of
from keylane.policies.versions import VersionMark, mark_at
from keylane.state.commands import audit_name, decode_command
from keylane.state.topic import ATTEMPTS, VERSION
from support.state_log import AT, StateLog

pytestmark = pytest.mark.timeout(20)

MARK = VersionMark(17, 17, 120, 3, b"15:100,16!110,17:120", b"5-7,9-9", b"20:130")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    log = StateLog(monkeypatch)
    log.put(2, VERSION + b"user-17", MARK.encode())
    return log


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["versions", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def facts(*arguments: str, code: int = 0) -> Any:
    found = json.loads(run(*arguments, "--json", code=code))
    assert isinstance(found, dict)
    return found


def wait(key: bytes) -> RetryState:
    slot = slot_of(key, 0)
    return RetryState(stage="", attempt=1, attempts=0, since=AT, due=AT, slot=slot, waited=AT, lives=1)


def test_show_prints_marks_and_waiting_messages(log: StateLog) -> None:
    kept = {140: wait(b"user-17"), 150: wait(b"other")}
    log.put(2, ATTEMPTS, encode_retries(kept, 10_000))
    assert facts("show", "chat", "user-17") == {
        "app": "chat",
        "key": "user-17",
        "partition": 2,
        "known": True,
        "next": 18,
        "applied": 17,
        "given_up": [[5, 7], [9, 9]],
        "failed": [16],
        "ahead": [20],
        "waiting": [140],
        "ordered": False,
    }
    shown = run("show", "chat", "user-17")
    for said in (
        "next version: 18; 17 ran last",
        "5-7, 9",
        "keylane dlq list): 16",
        "next one: 20",
        "offset 140",
    ):
        assert said in shown


def test_show_of_an_unknown_entity_says_so(log: StateLog) -> None:
    assert "no version was processed yet" in run("show", "chat", "nobody")
    assert facts("show", "chat", "nobody")["known"] is False
    assert log.given == []


@pytest.mark.parametrize(("option", "to"), [((), None), (("--to", "0"), 0), (("--to", "41"), 41)])
def test_reset_orders_the_owning_task(log: StateLog, option: tuple[str, ...], to: int | None) -> None:
    log.app = log.answer
    answered = facts("reset", "chat", "user-17", *option)
    assert (answered["waiting"], answered["answer"]["ok"], answered["to"]) == (False, True, to)
    (given,) = log.given
    assert (given.do, given.partition, given.key, given.to) == ("reset", 2, b"user-17", to)
    assert decode_command(given.name, 2, given.encode()) == given


def test_reset_is_in_the_audit(log: StateLog) -> None:
    log.app = log.answer
    said = run("reset", "chat", "user-17", "--to", "41")
    assert "version 42 is next" in said
    deed = next(one for one in log.records if one.name == audit_name(log.given[0].id))
    assert json.loads(deed.content or b"")["to"] == 41
    audit = CliRunner().invoke(app, ["lanes", "audit", "chat", "--json"])
    assert [one["do"] for one in json.loads(audit.stdout)] == ["reset"]


def test_reset_that_the_app_refuses_fails(log: StateLog) -> None:
    log.app = lambda command: log.answer(command, "the app has no versions", ok=False)
    assert "not reset: the app has no versions" in run("reset", "chat", "user-17", code=1)


def test_reset_waits_for_the_app_to_start(log: StateLog) -> None:
    assert "the app carries out the command when it starts" in run("reset", "chat", "user-17", "--wait", "0")
    assert "reset requested" in run("show", "chat", "user-17")
    assert facts("show", "chat", "user-17")["ordered"] is True


@pytest.mark.parametrize("command", ["show", "reset"])
def test_help_has_examples(command: str) -> None:
    assert f"keylane versions {command} orders user-17" in run(command, "--help")


def test_reset_mark_names_the_next_version() -> None:
    assert mark_at(41).facts()["next"] == 42
    assert VersionMark(-9, -1).facts() == {
        "next": None,
        "applied": None,
        "given_up": [],
        "failed": [],
        "ahead": [],
    }
