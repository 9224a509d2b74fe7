"""Stopped lanes, commands and answers as JSON facts, for the command line and the console."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from keylane.key_text import show_key
from keylane.lanes.lane_record import LaneStatus
from keylane.state.stopped_lanes import StoppedLane, which

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.state.admin import AuditEntry
    from keylane.state.answers import CommandAnswer
    from keylane.state.commands import Command


def lane_facts(lane: StoppedLane) -> dict[str, Any]:
    """Return one line of the list as JSON facts."""
    record = lane.record
    letter = None if record is None else record.letter
    return {
        "key": None if lane.key is None else show_key(lane.key),
        "state": None if record is None else record.stop.value,
        "partition": lane.partition,
        "offset": lane.offset,
        "since": None if record is None else record.since,
        "stage": letter and letter.stage,
        "error": letter and letter.error,
        "message": letter and letter.message,
        "attempts": letter and letter.attempts,
        "why": None if record is None else record.why or None,
        "commands": [command_facts(command) for command in lane.commands],
    }


def command_facts(command: Command) -> dict[str, Any]:
    """Return a command that waits to be carried out as JSON facts."""
    return {
        "id": command.id,
        "do": command.do,
        "offset": command.offset,
        "letters": None if command.letters is None else len(command.letters),
        "who": command.who,
        "at": command.at,
        "reason": command.reason or None,
    }


def full_facts(name: str, lane: StoppedLane, trail: Sequence[AuditEntry], bootstrap: str) -> dict[str, Any]:
    """Return a lane's details as JSON facts."""
    letter = None if lane.record is None else lane.record.letter
    return {
        "app": name,
        **lane_facts(lane),
        "failed_at": letter and letter.failed_at,
        "traceback": letter and letter.traceback,
        "failures": []
        if letter is None
        else [
            {"stage": f.stage, "attempt": f.attempt, "at": f.at, "error": f.error} for f in letter.failures
        ],
        "audit": [action_facts(action) for action in trail],
        "next": [command for command, _ in next_steps(name, lane, bootstrap)],
    }


def next_steps(name: str, lane: StoppedLane, bootstrap: str) -> list[tuple[str, str]]:
    """Return the commands that an operator may want next, and what they do."""
    if lane.record is None or lane.record.stop is LaneStatus.SKIPPING:
        return []
    at = "" if os.environ.get("KEYLANE_BOOTSTRAP") == bootstrap else f" --bootstrap {bootstrap}"
    lane_ = which(lane.key, lane.position)
    if lane.record.stop is LaneStatus.BLOCKED:
        return [
            (
                f"keylane lanes release {name} {lane_}{at}",
                "when the cause is fixed: the message runs again, with all its attempts",
            ),
            (
                f"keylane lanes skip {name} {lane_}{at}",
                "gives up the message: it becomes a dead letter, and the lane continues after it",
            ),
        ]
    return [
        (f"keylane dlq list {name} --key {lane_} --letters{at}", "lists the lane's dead letters"),
        (
            f"keylane dlq redrive {name} --lane {lane_}{at}",
            "when the cause is fixed: its messages run in order, and the lane continues",
        ),
    ]


def outcome(action: AuditEntry) -> str:
    """Return the result of a command in words."""
    if action.answer is not None:
        soon = f"{max(0.0, action.answer.at - action.at):.1f} s later"
        return f"{action.answer.result}, by {action.answer.owner} {soon}"
    return "waiting to be carried out" if action.open else "not carried out: its message is gone"


def action_facts(action: AuditEntry) -> dict[str, Any]:
    """Return one command and its result as JSON facts."""
    return {
        "id": action.id,
        "do": action.do,
        "key": None if action.key is None else show_key(action.key),
        "partition": action.partition,
        "offset": action.offset,
        "letters": action.letters,
        "cancels": action.withdraws or None,
        "scope": action.scope or None,
        "stage": action.stage or None,
        "who": action.who,
        "at": action.at,
        "reason": action.reason or None,
        "waiting": action.open,
        "answer": None if action.answer is None else answer_facts(action.answer),
    }


def answer_facts(answer: CommandAnswer) -> dict[str, Any]:
    """Return an answer as JSON facts."""
    return {"ok": answer.ok, "result": answer.result, "owner": answer.owner, "at": answer.at}
