"""`keylane lanes …`: lanes that have stopped, and commands to move them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, Reason, client
from keylane.cli.lane_view import (
    cancel_facts,
    print_audit,
    print_cancelled,
    print_lane,
    print_lanes,
)
from keylane.cli.named_lane import NamedLane
from keylane.cli.pause import pause_lines, pauses_of
from keylane.errors import KeylaneError, SettingsError
from keylane.key_text import printable
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient, CommandResults, cancel_command
from keylane.state.commands import Command
from keylane.state.facts import action_facts, answer_facts, full_facts, lane_facts
from keylane.state.lane_moves import plan_move
from keylane.state.stopped_lanes import StoppedLane, stopped_lanes, trail, which
from keylane.wording import brief, counted

if TYPE_CHECKING:
    from keylane.lanes.lane_record import LaneRecord

app = typer.Typer(
    name="lanes",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Lanes that have stopped: which, why, and how to move them.",
)

Key = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY", help="The lane: text, or hex:… for bytes that are not text.", show_default=False
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="PARTITION@OFFSET",
        help="The lane that stopped at this position; needed for a message without a key.",
    ),
]
Wait = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the app's answer.")]
LANES_SHOWN = 20
"""How many lanes are listed separately."""
_FAILS_AGAIN_SECONDS = 0.5
"""Seconds during which a message that fails again after a release is reported."""


@app.command("list")
def list_(
    name: App,
    bootstrap: Bootstrap = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many lines; --json shows all.")] = 50,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show the lanes that have stopped, the oldest stop first, and why.

    A blocked lane waits at a message that failed for good: 'keylane lanes release' or 'skip' moves it. The messages
    of a parked lane go to the dead letters: 'keylane dlq redrive' runs them again. Also shows lanes with commands
    that were given and not carried out yet.

    \b
    keylane lanes list chat
    keylane lanes list chat --json | jq '.[] | select(.state == "blocked") | .key'
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with AdminClient(client(bootstrap, option), name) as operator:
        found = stopped_lanes(operator.lanes(), operator.open_commands())
        paused = operator.pauses()
    if as_json:
        typer.echo(json.dumps([lane_facts(lane) for lane in found]))
    else:
        print_lanes(name, found, time.time(), limit)
        for line in pause_lines(paused, time.time()):
            typer.echo(line)


@app.command()
def show(
    name: App,
    key: Key = None,
    at: At = None,
    bootstrap: Bootstrap = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show one lane: why it stopped, each attempt, the traceback, the commands given, and what to do next.

    \b
    keylane lanes show chat user-17
    keylane lanes show chat hex:00ff --json
    keylane lanes show chat --at 3@1042
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    named = NamedLane.parse(key, at)
    settings = client(bootstrap, option)
    with AdminClient(settings, name) as operator:
        found = named.of(stopped_lanes(operator.lanes(), operator.open_commands()))
        actions = operator.audit()
        paused = pauses_of(operator.pauses(), named.key)
    if not found:
        partition, offset = named.at or (next((a.partition for a in actions if a.key == named.key), 0), None)
        lane = StoppedLane(partition=partition, key=named.key, offset=offset, record=None, commands=())
        if not trail(actions, lane) and not paused:
            raise KeylaneError(f"{named.not_stopped(name)}, and has never been given a command")
        found = [lane]
    if as_json:
        facts = [full_facts(name, lane, trail(actions, lane), settings.bootstrap) for lane in found]
        typer.echo(json.dumps(facts[0] if len(facts) == 1 else facts))
        return
    for number, lane in enumerate(found):
        if number:
            typer.echo()
        print_lane(name, lane, trail(actions, lane), time.time(), settings.bootstrap)
    for line in pause_lines(paused, time.time()):
        typer.echo(line)


@app.command()
def release(
    name: App,
    key: Key = None,
    at: At = None,
    every: Annotated[bool, typer.Option("--all", help="Release every blocked lane.")] = False,
    bootstrap: Bootstrap = None,
    reason: Reason = "",
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Release a blocked lane: its message runs again, with all its attempts.

    Fix the cause first; otherwise the lane blocks again. A running app does it at once; otherwise it happens when the
    app starts. If the message fails again within half a second, this is reported, with exit code 1.

    \b
    keylane lanes release chat user-17
    keylane lanes release chat --at 3@1042
    keylane lanes release chat --all
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if every and (key is not None or at is not None):
        raise SettingsError("give a lane or --all, not both")
    named = None if every else NamedLane.parse(key, at)
    with AdminClient(client(bootstrap, option), name) as operator:
        _carry_out(operator, "release", named, wait, reason, as_json=as_json)


@app.command()
def skip(
    name: App,
    key: Key = None,
    at: At = None,
    bootstrap: Bootstrap = None,
    reason: Reason = "",
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Skip the message at which a lane is blocked: it becomes a dead letter, and the lane continues after it.

    The following messages of the lane run without it. To run it later, see 'keylane dlq redrive'.

    \b
    keylane lanes skip chat user-17
    keylane lanes skip chat --at 3@1042
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    named = NamedLane.parse(key, at)
    with AdminClient(client(bootstrap, option), name) as operator:
        _carry_out(operator, "skip", named, wait, reason, as_json=as_json)


@app.command()
def cancel(
    name: App,
    key: Key = None,
    at: At = None,
    command_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="One command, by its ID in 'keylane lanes audit'."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every command that was not carried out.")] = False,
    bootstrap: Bootstrap = None,
    reason: Reason = "",
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Cancel commands that were not carried out yet: release, skip, redrive.

    The task that carries out a command decides which came first, the command or the cancel; 'keylane lanes audit'
    shows the result. In a redrive that has begun, messages that run now are finished first, up to 1,000; the others
    stay dead letters. If the app is not running, it cancels when it starts, before it carries out anything.

    \b
    keylane lanes cancel chat user-17
    keylane lanes cancel chat --id 5f2c9a1e0b77
    keylane lanes cancel chat --all --json
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if sum((key is not None or at is not None, command_id is not None, every)) != 1:
        raise SettingsError(
            "expected exactly one choice of commands: KEY or --at PARTITION@OFFSET, --id ID, or --all"
        )
    named = None if every or command_id is not None else NamedLane.parse(key, at)
    with AdminClient(client(bootstrap, option), name) as operator:
        commands = [
            command
            for command in operator.open_commands()
            if command_id in (None, command.id) and (named is None or named.takes(command))
        ]
        if not commands and not every:
            what = f"command {command_id!r}" if named is None else f"a command for {named}"
            raise KeylaneError(
                f"expected {what} that was not carried out, found none. 'keylane lanes audit {name}' shows the "
                "commands and their results"
            )
        cancels = [cancel_command(command, reason=reason) for command in commands]
        try:
            operator.give(cancels)
            heard = operator.wait(cancels, timeout=wait)
        except KeyboardInterrupt:
            typer.echo(
                "stopped waiting: the commands are cancelled unless they were carried out before", err=True
            )
            raise typer.Exit(130) from None
        results = {action.id: action.answer for action in operator.audit()}
    given = list(zip(commands, cancels, strict=True))
    if as_json:
        typer.echo(json.dumps([cancel_facts(o, c, heard, results.get(o.id)) for o, c in given]))
    else:
        print_cancelled(name, given, heard, results)
    if not all(answer.ok for answer in heard.answers.values()):
        raise typer.Exit(1)


@app.command()
def audit(name: App, bootstrap: Bootstrap = None, option: Options = None, as_json: Json = False) -> None:
    """Show every command that was given, oldest first: who, when, what, and the result.

    \b
    keylane lanes audit chat
    keylane lanes audit chat --json | jq '.[] | select(.answer.ok | not)'
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with AdminClient(client(bootstrap, option), name) as operator:
        actions = operator.audit()
    if as_json:
        typer.echo(json.dumps([action_facts(action) for action in actions]))
    else:
        print_audit(name, actions)


def _carry_out(
    operator: AdminClient,
    do: Literal["release", "skip"],
    named: NamedLane | None,
    wait: float,
    reason: str,
    *,
    as_json: bool,
) -> None:
    """Give the commands, wait for the results, and print them. ``named`` is None for all blocked lanes."""
    name = operator.app
    lanes = _blocked(name, stopped_lanes(operator.lanes(), operator.open_commands()), named)
    planned = [plan_move(do, lane, reason=reason) for lane in lanes]
    commands = [move.command for move in planned]
    fresh = [command for move in planned for command in move.fresh]
    for lane, move in zip(lanes, planned, strict=True):
        for other in move.replaced:
            said = f"{lane.name}: this replaces {other.who}'s command to {other.do}"
            typer.echo(printable(said), err=True)
    try:
        if fresh:
            operator.give(fresh)
        heard = operator.wait(commands, timeout=wait)
    except KeyboardInterrupt:
        typer.echo("stopped waiting: the command remains, and the app will carry it out", err=True)
        raise typer.Exit(130) from None
    again = _blocked_again(operator, lanes, commands, heard) if do == "release" and wait else {}
    if as_json:
        facts = [
            {
                **{fact: lane_facts(lane)[fact] for fact in ("key", "partition", "offset")},
                "do": do,
                "id": command.id,
                "waiting": command.id not in heard.answers and command.id not in heard.lost,
                "answer": answer_facts(heard.answers[command.id]) if command.id in heard.answers else None,
                "blocked_again": command.id in again,
            }
            for lane, command in zip(lanes, commands, strict=True)
        ]
        typer.echo(json.dumps(facts))
    elif lanes:
        _say(do, list(zip(lanes, commands, strict=True)), heard)
        for lane, command in zip(lanes, commands, strict=True):
            if command.id in again:
                letter = again[command.id].letter
                why = printable(brief(letter.error, letter.message))
                typer.echo(f"{lane.name}: blocked again at offset {again[command.id].offset}: {why}")
    else:
        typer.echo(f"no lane of app {name!r} is blocked")
    if heard.lost or again or not all(answer.ok for answer in heard.answers.values()):
        raise typer.Exit(1)


def _blocked_again(
    operator: AdminClient, lanes: list[StoppedLane], commands: list[Command], heard: CommandResults
) -> dict[str, LaneRecord]:
    """Return released lanes that blocked again a moment later, by the IDs of their commands."""
    released = {
        (lane.partition, lane.key, lane.offset if lane.key is None else None): (command.id, lane.record.since)
        for lane, command in zip(lanes, commands, strict=True)
        if lane.record is not None and command.id in heard.answers and heard.answers[command.id].ok
    }
    found: dict[str, LaneRecord] = {}
    deadline = time.monotonic() + _FAILS_AGAIN_SECONDS
    while len(found) < len(released):
        for record in operator.lanes():
            place = record.partition, record.key, record.offset if record.key is None else None
            command_id, before = released.get(place, ("", 0.0))
            if command_id and record.stop is LaneStatus.BLOCKED and record.since > before:
                found[command_id] = record
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def _blocked(name: str, lanes: list[StoppedLane], named: NamedLane | None) -> list[StoppedLane]:
    """Return the chosen lanes, all blocked. Raises KeylaneError if a named lane is not blocked."""
    if named is None:
        return [
            lane
            for lane in lanes
            if lane.record is not None
            and lane.record.stop is LaneStatus.BLOCKED
            and not any(command.do == "skip" for command in lane.commands)  # an operator chose to skip it
        ]
    found = []
    for lane in named.of(lanes):
        if lane.record is None:
            continue
        if lane.record.stop is LaneStatus.PARKED:
            raise KeylaneError(
                f"{lane.name} is parked, not blocked: its messages are among the dead letters. "
                f"Use: keylane dlq redrive {name} --lane {which(lane.key, lane.position)}"
            )
        if lane.record.stop is LaneStatus.SKIPPING:
            raise KeylaneError(
                f"{lane.name} is being skipped already, and continues as soon as that is committed"
            )
        found.append(lane)
    if not found:
        raise KeylaneError(f"{named.not_stopped(name)}. 'keylane lanes list {name}' shows the stopped lanes")
    return found


def _say(
    do: Literal["release", "skip"], given: list[tuple[StoppedLane, Command]], heard: CommandResults
) -> None:
    answers = heard.answers
    done = {"release": "released", "skip": "skipped"}[do]
    answered = [(lane, command, answers[command.id]) for lane, command in given if command.id in answers]
    for lane, command, answer in answered[:LANES_SHOWN]:
        soon = f"{max(0.0, answer.at - command.at):.1f} s later"
        what = done if answer.ok else f"not {done}, {printable(answer.result)}; answered"
        typer.echo(f"{lane.name}: {what} by task {printable(answer.owner)}, {soon}")
    if len(answered) > LANES_SHOWN:
        typer.echo(f"… {len(answered) - LANES_SHOWN:,} more answers ('keylane lanes audit' shows them)")
    if len(given) > 1:
        through = sum(answer.ok for answer in answers.values())
        typer.echo(f"{through:,} of {counted(len(given), 'lane')} {done}")
    for lane, command in given:
        if command.id in heard.lost:
            typer.echo(f"{lane.name}: not {done}: no task answered, and the message is gone from the source")
    left = len(given) - len(answered) - len(heard.lost)
    commands = "the command" if left == 1 else f"{left:,} commands"
    if left == len(given):
        typer.echo(f"the app does not seem to be running; it will carry out {commands} when it starts")
    elif left:
        typer.echo(f"{commands} not answered yet; 'keylane lanes audit' will show the result")
