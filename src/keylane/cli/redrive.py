"""`keylane dlq redrive`: dead letters back into their lanes, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keylane.cli.arguments import (
    App,
    Bootstrap,
    Error,
    Json,
    OfKind,
    Options,
    Reason,
    Since,
    Stage,
    Until,
    client,
    place,
    select,
)
from keylane.cli.redrive_view import RedriveReport, plan_facts, print_plan
from keylane.dlq.record import DeadLetterKind
from keylane.errors import SettingsError
from keylane.key_text import parse_key
from keylane.state.admin import AdminClient, CommandResults
from keylane.state.commands import Command
from keylane.state.redrive_choice import RedrivePlan, RedriveWay, choose
from keylane.wording import counted

NO_ANSWER_SECONDS = 5.0
"""Seconds without a sign of the app after which it is reported as not running."""
_LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two lines of progress when the output is not a terminal."""


def redrive(
    name: App,
    positions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PARTITION@OFFSET",
            help="Single dead letters, by their positions in APP.dlq.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    lane: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="All dead letters of this key: text, or hex:… for bytes that are not text."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters of all lanes.")] = False,
    stage: Stage = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    kind: OfKind = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, in which order; change nothing.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Wait at most this long.", show_default="until it is done"
        ),
    ] = None,
    reason: Reason = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Give the commands and exit.")] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Run dead letters again, each lane's in the order of their messages, before anything newer in the lane.

    A running app does it at once; otherwise it happens when the app starts. A dead letter that succeeds is redriven:
    'keylane dlq list' no longer shows it. One that fails again becomes a new dead letter. A parked lane is redriven
    whole, and continues once all its messages succeed; if one fails again, it and the rest stay parked.

    Archived dead letters are left out: their messages are still in their lanes, and 'keylane lanes release' runs them.
    Dead letters of blocked lanes are left out too: the message that blocks the lane comes first.
    Choose by position, by lane, by the filters of 'keylane dlq list', or all. The exit code is 1 if a message did not
    succeed. Ctrl-C only ends the waiting.

    \b
    keylane dlq redrive chat --lane user-17 --dry-run
    keylane dlq redrive chat 3@17 3@18
    keylane dlq redrive chat --stage answer --since 2h
    keylane dlq redrive chat --all --no-wait
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if wait is not None and no_wait:
        raise SettingsError("give --wait or --no-wait, not both")
    filters = {"stage": stage, "error": error, "since": since, "until": until, "kind": kind}
    way = _way(positions or [], lane, filters, every=every)
    settings = client(bootstrap, option)
    with AdminClient(settings, name) as operator:
        choice = choose(settings, way, operator)
        plan = RedrivePlan.of(operator, choice, whole=way.whole, reason=reason)
        lots, commands = plan.lots, plan.commands
        if dry_run or not lots:
            if as_json:
                typer.echo(json.dumps(plan_facts(name, choice, lots, dry_run=dry_run)))
            else:
                print_plan(name, choice, lots, whole=way.whole)
            return
        before = _redriven(operator)
        operator.give(plan.fresh)
        heard = None if no_wait else _wait(operator, commands, wait, before)
    report = RedriveReport(name, choice, lots, commands, heard)
    if as_json:
        typer.echo(json.dumps(report.facts()))
    else:
        report.print()
    if not report.through:
        raise typer.Exit(1)


def _way(positions: list[str], lane: str | None, filters: dict[str, Any], *, every: bool) -> RedriveWay:
    ways = [bool(positions), lane is not None, every, any(value is not None for value in filters.values())]
    if sum(ways) != 1:
        raise SettingsError(
            "expected one choice of dead letters: positions (PARTITION@OFFSET …), --lane KEY, --all, or filters "
            "(--stage, --error, --since, --until, --kind)"
        )
    if positions:
        places = frozenset(place(position) for position in positions)
        return RedriveWay(
            takes=lambda letter, _cause, _at: (letter.partition, letter.offset) in places, places=places
        )
    if lane is not None:
        key = parse_key(lane)
        return RedriveWay(takes=lambda letter, _cause, _at: letter.key == key, whole=True, key=key)
    if every:
        return RedriveWay(takes=lambda _letter, _cause, _at: True, whole=True)
    if filters["kind"] is DeadLetterKind.ARCHIVED:
        raise SettingsError(
            "archived dead letters are copies: their messages are still in their lanes. Use 'keylane lanes release'"
        )
    return RedriveWay(takes=select(time.time(), **filters).takes)


def _redriven(operator: AdminClient) -> int:
    return sum(len(ranges) for ranges in operator.redriven().values())


def _wait(
    operator: AdminClient, commands: list[Command], seconds: float | None, before: int
) -> CommandResults:
    """Wait for the results. Raises typer.Exit at Ctrl-C."""
    try:
        with _shown(operator, len(commands), before) as tell:
            return operator.wait(
                commands, timeout=seconds, silence=NO_ANSWER_SECONDS if seconds is None else None, tell=tell
            )
    except KeyboardInterrupt:
        typer.echo("stopped waiting: the commands remain, and the app will carry them out", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _shown(operator: AdminClient, lanes: int, before: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr: a bar on a terminal, else a line now and then. ``before`` were redriven already."""
    console = Console(stderr=True)
    said = time.monotonic()
    columns = (
        TextColumn("redriving"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lanes, {task.fields[letters]:,} dead letters"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=lanes, letters=0)

        def tell(answered: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said < (0.2 if console.is_terminal else _LINE_INTERVAL_SECONDS):
                return
            said = now
            done = _redriven(operator) - before
            bar.update(task, completed=answered, letters=done)
            if not console.is_terminal:
                typer.echo(
                    f"{answered:,} of {counted(lanes, 'lane')}, {counted(done, 'dead letter')} redriven",
                    err=True,
                )

        yield tell
