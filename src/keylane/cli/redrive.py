"""`keylane dlq redrive`: letters back into their lanes, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    Since,
    Stage,
    Until,
    client,
    place,
    select,
)
from keylane.cli.choice import Choice, Takes, order_for
from keylane.cli.keys import key_argument, parse_key, printable, show_key
from keylane.cli.layout import counted
from keylane.cli.redrive_view import Report, plan_facts, print_plan
from keylane.core.record import Stop
from keylane.errors import KafkaError, KeylaneError, SettingsError
from keylane.kafka.letter import Kind, Letter, Unreadable
from keylane.kafka.letters import read_letters
from keylane.kafka.operator import Heard, Operator
from keylane.kafka.orders import Order
from keylane.kafka.settings import KafkaSettings

SILENCE = 5.0
"""Seconds without any sign of the app after which it does not seem to run."""
_EVERY = 10.0
"""Seconds between two lines of progress when the output is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How the letters are chosen. ``whole``: the lanes with all they have, also what comes meanwhile."""

    takes: Takes
    whole: bool = False
    key: bytes | None = None
    places: frozenset[tuple[int, int]] = frozenset()


def redrive(
    name: App,
    positions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PARTITION/OFFSET", help="Single letters, by their places in APP.dlq.", show_default=False
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    lane: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="All letters of this key: text, or hex:… for bytes that are no text."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All letters of all lanes.")] = False,
    stage: Stage = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    kind: OfKind = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run in which order, and change nothing.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Wait at most so long.", show_default="until it is done"),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Give the orders and leave.")] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Run dead letters again, each lane's in the order of their messages, before anything newer in the lane.

    The running app does it; one that does not run does it when it starts. A letter that comes through is redriven:
    'keylane dlq list' shows it no more. One that fails again has a new letter. A lane that is parked is redriven
    whole, and is parked no more when all of it came through; if one fails again, it and the rest stay where they are.

    Archived letters are left out: their messages stand in their lanes, and 'keylane lanes release' runs them. So are
    letters of lanes that are blocked: what stands there comes first.
    Choose by place, by lane, by filters as in 'keylane dlq list', or take all. The exit code is 1 when something did
    not come through. Ctrl-C ends the waiting only.

    \b
    keylane dlq redrive chat --lane user-17 --dry-run
    keylane dlq redrive chat 3/17 3/18
    keylane dlq redrive chat --stage answer --since 2h
    keylane dlq redrive chat --all --no-wait
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if wait is not None and no_wait:
        raise SettingsError("give --wait or --no-wait, not both")
    filters = {"stage": stage, "error": error, "since": since, "until": until, "kind": kind}
    way = _way(positions or [], lane, filters, every=every)
    settings = client(bootstrap, option)
    with Operator(settings, name) as operator:
        choice = _choose(settings, name, way, operator)
        lots = choice.lots()
        standing = {(o.partition, o.key): o for o in operator.standing() if o.do == "redrive"}
        orders = [
            order_for(name, lot, standing.get((lot.partition, lot.key)), whole=way.whole) for lot in lots
        ]
        if dry_run or not lots:
            if as_json:
                typer.echo(json.dumps(plan_facts(name, choice, lots, dry_run=dry_run)))
            else:
                print_plan(name, choice, lots, whole=way.whole)
            return
        before = _redriven(operator)
        stood = {order.id for order in standing.values()}
        operator.give(order for order in orders if order.id not in stood)
        heard = None if no_wait else _wait(operator, orders, wait, before)
    report = Report(name, choice, lots, orders, heard)
    if as_json:
        typer.echo(json.dumps(report.facts()))
    else:
        report.print()
    if not report.through:
        raise typer.Exit(1)


def _way(positions: list[str], lane: str | None, filters: dict[str, Any], *, every: bool) -> _Way:
    ways = [bool(positions), lane is not None, every, any(value is not None for value in filters.values())]
    if sum(ways) != 1:
        raise SettingsError(
            "say which letters in one way: their places (PARTITION/OFFSET …), --lane KEY, --all, or filters "
            "(--stage, --error, --since, --until, --kind)"
        )
    if positions:
        places = frozenset(place(position) for position in positions)
        return _Way(
            takes=lambda letter, _cause, _at: (letter.partition, letter.offset) in places, places=places
        )
    if lane is not None:
        key = parse_key(lane)
        return _Way(takes=lambda letter, _cause, _at: letter.key == key, whole=True, key=key)
    if every:
        return _Way(takes=lambda _letter, _cause, _at: True, whole=True)
    if filters["kind"] is Kind.ARCHIVED:
        raise SettingsError(
            "archived letters are copies: their messages stand in their lanes. 'keylane lanes release' runs them again"
        )
    return _Way(takes=select(time.time(), **filters).takes)


def _choose(settings: KafkaSettings, name: str, way: _Way, operator: Operator) -> Choice:
    stopped = operator.lanes()
    choice = Choice(way.takes, operator.redriven(), stopped)
    met = False
    missing = set(way.places)
    partitions = sorted({partition for partition, _ in missing}) or None
    for each in read_letters(settings, f"{name}.dlq", partitions=partitions):
        choice.add(each)
        met = met or each.key == way.key
        if missing and (each.partition, each.offset) in missing:
            missing.discard((each.partition, each.offset))
            _refuse(name, each)
    if missing:
        partition, offset = min(missing)
        raise KafkaError(
            f"nothing lies at {partition}/{offset} of topic '{name}.dlq': it ends before, or it was deleted by its "
            f"age. 'keylane dlq list {name} --letters' shows what is there"
        )
    if way.whole:
        for record in stopped:  # also those whose letters are gone: nothing else ends the parking
            if record.stop is Stop.PARKED and way.key in (None, record.key):
                choice.lane(record.partition, record.key)
                met = True
    if way.key is not None and not met:
        raise KeylaneError(f"no dead letter of app {name!r} has the key {show_key(way.key)}")
    named = way.key is not None or way.places
    for (_, key), count in choice.blocked.items():
        if named and count and key is not None:
            raise KeylaneError(
                f"lane {show_key(key)} is blocked: nothing in it moves before the message at which it stands. "
                f"Release or skip that first: keylane lanes show {name} {key_argument(key)}"
            )
    return choice


def _refuse(name: str, each: Letter | Unreadable) -> None:
    """Raise when this one was asked for and can never be redriven."""
    if isinstance(each, Unreadable):
        raise KeylaneError(f"{each.position} of topic '{name}.dlq' is no letter: {printable(each.reason)}")
    if each.kind is Kind.ARCHIVED:
        raise SettingsError(
            f"letter {each.position} is an archived copy: its message stands in its lane, or was released since. "
            f"'keylane lanes release {name} --at {each.source}' runs it again"
        )


def _redriven(operator: Operator) -> int:
    return sum(len(ranges) for ranges in operator.redriven().values())


def _wait(operator: Operator, orders: list[Order], seconds: float | None, before: int) -> Heard:
    """Raises typer.Exit at Ctrl-C."""
    try:
        with _shown(operator, len(orders), before) as tell:
            return operator.wait(
                orders, timeout=seconds, silence=SILENCE if seconds is None else None, tell=tell
            )
    except KeyboardInterrupt:
        typer.echo("not waiting any more: the orders stand; the app goes on", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _shown(operator: Operator, lanes: int, before: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr: a bar on a terminal, elsewhere a line now and then. ``before`` were redriven already."""
    console = Console(stderr=True)
    said = time.monotonic()
    columns = (
        TextColumn("redriving"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lanes, {task.fields[letters]:,} letters"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=lanes, letters=0)

        def tell(answered: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said < (0.2 if console.is_terminal else _EVERY):
                return
            said = now
            done = _redriven(operator) - before
            bar.update(task, completed=answered, letters=done)
            if not console.is_terminal:
                typer.echo(
                    f"{answered:,} of {counted(lanes, 'lane')}, {counted(done, 'letter')} redriven", err=True
                )

        yield tell
