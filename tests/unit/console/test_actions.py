"""Operators' actions of the console, on a state topic in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.console import actions as actions_module
from keylane.console.actions import Actions, CommandWriter, Job, ReadOnlyError
from keylane.dlq.record import DeadLetter, DeadLetterKind
from keylane.errors import SettingsError
from keylane.kafka.settings import KafkaSettings
from keylane.state import redrive_choice
from keylane.state.admin import AdminClient
from keylane.state.answers import RedriveCounts
from keylane.state.redrive_choice import RedriveWay
from support.state_log import StateLog, identity, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.state.commands import Command

SETTINGS = KafkaSettings("localhost:1")
ALL = RedriveWay(takes=lambda _letter, _cause, _at: True)
SOURCE = identity().source
LETTER = DeadLetter(
    partition=0, offset=0, key=b"k", value=b"v", headers=(), headers_unreadable=None, topic=SOURCE.topic,
    topic_id=SOURCE.id, cluster=SOURCE.cluster, source_partition=0, source_offset=0, timestamp=None,
    kind=DeadLetterKind.DEAD, stage="send", error="Refused", message="no", traceback=None, attempts=1, failures=(),
    failed_at=1000.0, park=None, redrives=0, app="chat", app_version=None,
)  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    monkeypatch.setattr(actions_module, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(actions_module, "_ANSWER_SECONDS", 0.2)
    made = StateLog(monkeypatch)
    letters = [replace(LETTER, offset=n, source_offset=n, key=b"k%d" % (n % 2)) for n in range(4)]
    monkeypatch.setattr(redrive_choice, "read_dead_letters", lambda *_, **__: iter(letters))
    return made


@pytest.fixture
def actions() -> Iterator[Actions]:
    made = Actions(SETTINGS, CommandWriter(allowed=True))
    yield made
    made.close()


@pytest.fixture
def read_only() -> Iterator[Actions]:
    made = Actions(SETTINGS, CommandWriter(allowed=False))
    yield made
    made.close()


def ended(job: Job) -> Job:
    deadline = time.monotonic() + 10
    while job.ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job


def move(actions: Actions, **given: Any) -> Job:
    known: dict[str, Any] = {"partition": 1, "key": b"k1", "offset": 100, "reason": "fixed", "who": "ada"}
    return actions.move("chat", "release", **{**known, **given})


def test_read_only_console_writes_nothing(log: StateLog, read_only: Actions) -> None:
    log.stop(stopped())
    with pytest.raises(ReadOnlyError, match="--allow-actions"):
        move(read_only)
    plan = read_only.plan_redrive("chat", ALL, "all")
    assert plan["letters"] == 4
    with pytest.raises(ReadOnlyError):
        read_only.redrive("chat", plan["plan"], reason="x", who="ada")
    with AdminClient(SETTINGS, "chat") as operator, pytest.raises(ReadOnlyError):
        read_only.writer.give(operator, [])
    assert log.given == []


@pytest.mark.parametrize("reason", ["", "  ", "x" * 1001])
def test_command_needs_a_reason(log: StateLog, actions: Actions, reason: str) -> None:
    log.stop(stopped())
    plan = actions.plan_redrive("chat", ALL, "all")
    with pytest.raises(SettingsError, match="reason"):
        move(actions, reason=reason)
    with pytest.raises(SettingsError, match="reason"):
        actions.redrive("chat", plan["plan"], reason=reason, who="ada")
    assert log.given == []


def test_release_is_recorded_with_reason_and_name(log: StateLog, actions: Actions) -> None:
    log.stop(stopped())
    log.app = lambda command: log.answer(command, "done", ok=True)
    job = ended(move(actions, reason=" fixed \n"))
    assert (job.ok, job.outcome, job.answered) == (True, "done", 1)
    (command,) = log.given
    assert (command.do, command.key, command.offset) == ("release", b"k1", 100)
    assert (command.reason, command.who) == ("fixed", "ada (console)")
    with AdminClient(SETTINGS, "chat") as operator:
        assert operator.audit()[0].reason == "fixed"


def test_lane_that_moved_meanwhile_is_not_touched(log: StateLog, actions: Actions) -> None:
    log.stop(stopped())
    with pytest.raises(SettingsError, match="not blocked at 1@99"):
        move(actions, offset=99)
    with pytest.raises(SettingsError, match="not blocked"):
        move(actions, key=b"other")
    assert log.given == []


def test_release_of_an_app_that_does_not_run_waits(log: StateLog, actions: Actions) -> None:
    log.stop(stopped())
    job = ended(move(actions))
    assert (job.ok, job.answered) == (None, 0)
    assert "when it runs" in job.outcome


def test_dry_run_writes_nothing_and_is_carried_out_once(log: StateLog, actions: Actions) -> None:
    plan = actions.plan_redrive("chat", ALL, "all dead letters")
    assert (plan["letters"], plan["lanes"]) == (4, 2)
    assert plan["sample"][0]["order"] == ["0@0", "0@2"]
    assert log.given == []

    def answer(command: Command) -> None:
        log.answer(command, RedriveCounts(ok=2), ok=True)

    log.app = answer
    job = ended(actions.redrive("chat", plan["plan"], reason="post is open", who=""))
    assert (job.ok, job.answered, job.total, job.letters) == (True, 2, 2, 4)
    assert job.outcome == "4 through, 0 dead again, 0 still parked"
    assert {command.letters for command in log.given} == {(0, 2), (1, 3)}
    assert {command.reason for command in log.given} == {"post is open"}
    assert all(command.who.endswith("(console)") for command in log.given)
    with pytest.raises(SettingsError, match="make a new one"):
        actions.redrive("chat", plan["plan"], reason="again", who="")


def test_dry_run_of_another_app_is_refused(log: StateLog, actions: Actions) -> None:
    plan = actions.plan_redrive("chat", ALL, "all")
    with pytest.raises(SettingsError, match="make a new one"):
        actions.redrive("other", plan["plan"], reason="x", who="ada")


def test_failed_lanes_of_a_redrive_are_listed(log: StateLog, actions: Actions) -> None:
    log.app = lambda command: log.answer(command, RedriveCounts(ok=1, dead=1), ok=False)
    job = ended(
        actions.redrive("chat", actions.plan_redrive("chat", ALL, "all")["plan"], reason="x", who="ada")
    )
    assert job.ok is False
    assert job.failures == [f"lane k{n}: 1 through, 1 dead again, 0 still parked" for n in range(2)]


def test_jobs_of_an_app_are_bounded(log: StateLog, actions: Actions) -> None:
    for number in range(actions_module.JOBS_KEPT + 5):
        actions._job("chat", "release", str(number), "ada", "x", total=1)
    assert len(actions._jobs) == actions_module.JOBS_KEPT
    assert [job["what"] for job in actions.jobs("chat")][:2] == ["54", "53"]
    assert actions.jobs("other") == []
