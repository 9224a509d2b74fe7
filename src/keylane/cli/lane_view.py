"""Views of stopped lanes and operators' commands: facts for JSON, and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from keylane.cli.layout import block, cell, fact, print_table, table
from keylane.key_text import printable, show_key
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AuditEntry, CommandResults
from keylane.state.answers import CommandAnswer
from keylane.state.commands import Command
from keylane.state.facts import command_facts, next_steps, outcome
from keylane.state.stopped_lanes import StoppedLane, lane_name, totals
from keylane.wording import age, brief, counted, local

_MEANS = {
    LaneStatus.BLOCKED: "it waits at a message that failed for good, until an operator acts",
    LaneStatus.PARKED: "the message that failed for good and all behind it go to the dead letters, until a redrive",
    LaneStatus.SKIPPING: "an operator skipped the message; the lane continues as soon as that is committed",
}


def print_lanes(name: str, lanes: Sequence[StoppedLane], now: float, limit: int) -> None:
    """Print the list, and how many lanes are in each state."""
    if not lanes:
        typer.echo(f"no lane of app {name!r} has stopped, and no command is waiting")
        return
    made = table("KEY", "STATE", "AT", "SINCE", "STAGE", "CAUSE")
    for lane in lanes[:limit]:
        record = lane.record
        cause = None
        if record is not None:
            cause = brief(record.letter.error, record.letter.message) + (
                f" ({record.why})" if record.why else ""
            )
        made.add_row(
            cell(show_key(lane.key)),
            lane.state,
            lane.position,
            "-" if record is None else age(now - record.since),
            cell(None if record is None else record.letter.stage),
            cell(cause),
        )
    print_table(made)
    notes = [f"{totals(lanes)} in app {name!r}"]
    if len(lanes) > limit:
        notes.append(f"{len(lanes) - limit:,} not shown (--limit)")
    typer.echo("; ".join(notes))


def print_lane(name: str, lane: StoppedLane, trail: Sequence[AuditEntry], now: float, bootstrap: str) -> None:
    """Print a lane's details, and what to do next."""
    record = lane.record
    fact("lane", f"{'a message without a key' if lane.key is None else show_key(lane.key)}, of app {name}")
    fact("state", lane.state)
    if record is not None:
        fact("meaning", _MEANS[record.stop])
        fact("message", f"{lane.position} in the source")
        fact("since", f"{local(record.since)}, {age(now - record.since)} ago")
        if record.why:
            fact("why", record.why)
        letter = record.letter
        fact(
            "failed",
            f"{local(letter.failed_at)} in stage {letter.stage} after {counted(letter.attempts, 'attempt')}",
        )
        fact("error", f"{letter.error}: {letter.message}" if letter.message else letter.error)
        for number, each in enumerate(letter.failures):
            tried = f"{local(each.at, exact=True)}  {each.stage}, attempt {each.attempt}: {each.error}"
            fact("" if number else "attempts", tried)
        if letter.traceback:
            block("traceback", letter.traceback.rstrip())
    for number, command in enumerate(lane.commands):
        fact(
            "" if number else "commands",
            f"{command.id}: {_action(command.do, _count(command))}{_at(command)}, "
            f"by {command.who} at {local(command.at)}",
        )
    for number, action in enumerate(trail):
        fact(
            "" if number else "audit",
            f"{local(action.at)}  {action.who}: {_what(action)}{_at(action)}: {outcome(action)}"
            + (f"; reason: {action.reason}" if action.reason else ""),
        )
    steps = next_steps(name, lane, bootstrap)
    if steps:
        block("next", "\n".join(f"{command}\n    {what}" for command, what in steps))


def cancel_facts(
    command: Command, cancel: Command, heard: CommandResults, result: CommandAnswer | None
) -> dict[str, Any]:
    """Return a command to cancel as JSON facts. ``cancelled`` is None until a task answers."""
    answer = heard.answers.get(cancel.id)
    return {
        **command_facts(command),
        "key": None if command.key is None else show_key(command.key),
        "partition": command.partition,
        "cancelled": None if answer is None else answer.ok,
        "cancel": cancel.id,
        "result": None if result is None else result.result,
    }


def print_cancelled(
    name: str,
    given: Sequence[tuple[Command, Command]],
    heard: CommandResults,
    results: Mapping[str, CommandAnswer | None],
) -> None:
    """Print which commands were cancelled, and which had been carried out before."""
    if not given:
        typer.echo(f"app {name!r} has no waiting command")
    for command, cancel in given:
        answer, result = heard.answers.get(cancel.id), results.get(command.id)
        if answer is None:
            continue
        lane = lane_name(
            command.key, f"{command.partition}@{'-' if command.offset is None else command.offset}"
        )
        what = f"{lane}: {_action(command.do, _count(command))} ({command.id})"
        came = "" if result is None else f": {printable(result.result)}"
        typer.echo(f"{what} was cancelled" if answer.ok else f"{what} had been carried out before{came}")
    left = len(given) - len(heard.answers)
    if left:
        typer.echo(
            f"{left:,} not answered yet: the app does not seem to be running. When it starts, it cancels them before "
            f"it carries out anything; 'keylane lanes audit {name}' shows the results"
        )


def print_audit(name: str, actions: Sequence[AuditEntry]) -> None:
    """Print every command, oldest first."""
    if not actions:
        typer.echo(f"app {name!r} has never been given a command")
        return
    made = table("ID", "WHEN", "WHO", "WHAT", "LANE", "AT", "RESULT", "REASON")
    for action in actions:
        made.add_row(
            cell(action.id),
            local(action.at),
            cell(action.who),
            cell(_what(action)),
            cell(show_key(action.key)),
            f"{action.partition}@{'-' if action.offset is None else action.offset}",
            cell(outcome(action)),
            cell(action.reason or None),
        )
    print_table(made)


def _count(command: Command) -> int | None:
    return None if command.letters is None else len(command.letters)


def _what(action: AuditEntry) -> str:
    if action.withdraws:
        return f"cancel {action.withdraws}"
    if action.scope:
        what = {"app": "", "partition": f" partition {action.partition}", "stage": f" stage {action.stage}"}
        return f"{action.do}{what.get(action.scope, f' {action.scope}')}"
    return _action(action.do, action.letters)


def _at(command: Command | AuditEntry) -> str:
    return "" if command.offset is None else f" {command.partition}@{command.offset}"


def _action(do: str, letters: int | None) -> str:
    if do != "redrive":
        return do
    return "redrive all dead letters" if letters is None else f"redrive {counted(letters, 'dead letter')}"
