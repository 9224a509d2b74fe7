"""`keylane lanes list|show|release|skip|audit`: lanes that have stopped, and what an operator does about them."""

from __future__ import annotations

import json
import time
from typing import Annotated, Literal

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client
from keylane.cli.keys import printable
from keylane.cli.lane_view import (
    action_facts,
    answer_facts,
    full_facts,
    lane_facts,
    print_audit,
    print_lane,
    print_lanes,
)
from keylane.cli.layout import counted
from keylane.cli.stopped import Named, StoppedLane, stopped_lanes, trail, which
from keylane.core.record import Stop
from keylane.errors import KeylaneError, SettingsError
from keylane.kafka.operator import Heard, Operator, new_order
from keylane.kafka.orders import Order

app = typer.Typer(
    name="lanes",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Lanes that have stopped: which, why, and how they go on.",
)

Key = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY", help="The lane: text, or hex:… for bytes that are no text.", show_default=False
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="PARTITION/OFFSET",
        help="The lane that stopped there; the only way for a message without a key.",
    ),
]
Wait = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the app's answer.")]
SHOWN = 20
"""Lanes that are named one by one."""


@app.command("list")
def list_(
    name: App,
    bootstrap: Bootstrap = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many lines; with --json all.")] = 50,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show the lanes that have stopped, the longest first, and why.

    A blocked lane stands before a message that failed for good: 'keylane lanes release' or 'skip' moves it. What
    stands in a parked lane goes to the dead letters: 'keylane dlq redrive' brings it back. Lanes for which an order
    stands that no task has carried out yet are shown too.

    \b
    keylane lanes list chat
    keylane lanes list chat --json | jq '.[] | select(.state == "blocked") | .key'
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with Operator(client(bootstrap, option), name) as operator:
        found = stopped_lanes(operator.lanes(), operator.standing())
    if as_json:
        typer.echo(json.dumps([lane_facts(lane) for lane in found]))
    else:
        print_lanes(name, found, time.time(), limit)


@app.command()
def show(
    name: App,
    key: Key = None,
    at: At = None,
    bootstrap: Bootstrap = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show all about one lane: why it stopped, each attempt, the traceback, what was ordered, and what to do next.

    \b
    keylane lanes show chat user-17
    keylane lanes show chat hex:00ff --json
    keylane lanes show chat --at 3/1042
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    named = Named.parse(key, at)
    settings = client(bootstrap, option)
    with Operator(settings, name) as operator:
        found = named.of(stopped_lanes(operator.lanes(), operator.standing()))
        actions = operator.audit()
    if not found:
        partition, offset = named.at or (next((a.partition for a in actions if a.key == named.key), 0), None)
        lane = StoppedLane(partition=partition, key=named.key, offset=offset, record=None, orders=())
        if not trail(actions, lane):
            raise KeylaneError(f"{named.not_stopped(name)}, and nobody has ordered anything for it")
        found = [lane]
    if as_json:
        facts = [full_facts(name, lane, trail(actions, lane), settings.bootstrap) for lane in found]
        typer.echo(json.dumps(facts[0] if len(facts) == 1 else facts))
        return
    for number, lane in enumerate(found):
        if number:
            typer.echo()
        print_lane(name, lane, trail(actions, lane), time.time(), settings.bootstrap)


@app.command()
def release(
    name: App,
    key: Key = None,
    at: At = None,
    every: Annotated[bool, typer.Option("--all", help="Every lane that is blocked.")] = False,
    bootstrap: Bootstrap = None,
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Let a blocked lane go on: the message at which it stands runs again, with all its attempts.

    Mend the cause first; otherwise it is blocked again. The running app does it at once, one that does not run does it
    when it starts.

    \b
    keylane lanes release chat user-17
    keylane lanes release chat --at 3/1042
    keylane lanes release chat --all
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if every and (key is not None or at is not None):
        raise SettingsError("give a lane or --all, not both")
    named = None if every else Named.parse(key, at)
    with Operator(client(bootstrap, option), name) as operator:
        _carry_out(operator, "release", named, wait, as_json=as_json)


@app.command()
def skip(
    name: App,
    key: Key = None,
    at: At = None,
    bootstrap: Bootstrap = None,
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Give up the message at which a lane is blocked: it becomes a dead letter, and the lane goes on behind it.

    What follows in the lane runs without it. The dead letter can be redriven later: see 'keylane dlq redrive'.

    \b
    keylane lanes skip chat user-17
    keylane lanes skip chat --at 3/1042
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    named = Named.parse(key, at)
    with Operator(client(bootstrap, option), name) as operator:
        _carry_out(operator, "skip", named, wait, as_json=as_json)


@app.command()
def audit(name: App, bootstrap: Bootstrap = None, option: Options = None, as_json: Json = False) -> None:
    """Show every order that was given, oldest first: who, when, what, and what came of it.

    \b
    keylane lanes audit chat
    keylane lanes audit chat --json | jq '.[] | select(.answer.ok | not)'
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with Operator(client(bootstrap, option), name) as operator:
        actions = operator.audit()
    if as_json:
        typer.echo(json.dumps([action_facts(action) for action in actions]))
    else:
        print_audit(name, actions)


def _carry_out(
    operator: Operator, do: Literal["release", "skip"], named: Named | None, wait: float, *, as_json: bool
) -> None:
    """Give the orders, wait for what comes of them, and say it. ``named`` is None for all that are blocked."""
    name = operator.app
    lanes = _blocked(name, stopped_lanes(operator.lanes(), operator.standing()), named)
    orders, fresh = [], []
    for lane in lanes:
        order = next((order for order in lane.orders if order.do == do), None)
        if order is None:  # else it was given before, and nobody has carried it out
            for other in lane.orders:
                if other.do != "redrive":
                    said = f"{lane.name}: this takes the place of {other.who}'s order to {other.do}"
                    typer.echo(printable(said), err=True)
            order = new_order(do, partition=lane.partition, key=lane.key, offset=lane.offset or 0)
            fresh.append(order)
        orders.append(order)
    try:
        if fresh:
            operator.give(fresh)
        heard = operator.wait(orders, timeout=wait)
    except KeyboardInterrupt:
        typer.echo("not waiting any more: the order stands; the app goes on", err=True)
        raise typer.Exit(130) from None
    if as_json:
        facts = [
            {
                **{fact: lane_facts(lane)[fact] for fact in ("key", "partition", "offset")},
                "do": do,
                "id": order.id,
                "stands": order.id not in heard.answers and order.id not in heard.lost,
                "answer": answer_facts(heard.answers[order.id]) if order.id in heard.answers else None,
            }
            for lane, order in zip(lanes, orders, strict=True)
        ]
        typer.echo(json.dumps(facts))
    elif lanes:
        _say(do, list(zip(lanes, orders, strict=True)), heard)
    else:
        typer.echo(f"no lane of app {name!r} is blocked")
    if heard.lost or not all(answer.ok for answer in heard.answers.values()):
        raise typer.Exit(1)


def _blocked(name: str, lanes: list[StoppedLane], named: Named | None) -> list[StoppedLane]:
    """Those that are meant, all of them blocked. Raises KeylaneError when the one that was named is not."""
    if named is None:
        return [
            lane
            for lane in lanes
            if lane.record is not None
            and lane.record.stop is Stop.BLOCKED
            and not any(order.do == "skip" for order in lane.orders)  # somebody decided otherwise
        ]
    found = []
    for lane in named.of(lanes):
        if lane.record is None:
            continue
        if lane.record.stop is Stop.PARKED:
            raise KeylaneError(
                f"{lane.name} is parked, not blocked: its messages are among the dead letters. "
                f"Use: keylane dlq redrive {name} --lane {which(lane.key, lane.position)}"
            )
        if lane.record.stop is Stop.SKIPPING:
            raise KeylaneError(
                f"{lane.name} is being skipped already, and goes on as soon as that is committed"
            )
        found.append(lane)
    if not found:
        raise KeylaneError(f"{named.not_stopped(name)}. 'keylane lanes list {name}' shows those that have")
    return found


def _say(do: Literal["release", "skip"], given: list[tuple[StoppedLane, Order]], heard: Heard) -> None:
    answers = heard.answers
    done = {"release": "released", "skip": "skipped"}[do]
    answered = [(lane, order, answers[order.id]) for lane, order in given if order.id in answers]
    for lane, order, answer in answered[:SHOWN]:
        soon = f"{max(0.0, answer.at - order.at):.1f} s later"
        what = done if answer.ok else f"not {done}, {printable(answer.result)}; said"
        typer.echo(f"{lane.name}: {what} by the task {printable(answer.owner)}, {soon}")
    if len(answered) > SHOWN:
        typer.echo(f"… {len(answered) - SHOWN:,} more answers ('keylane lanes audit' shows them)")
    if len(given) > 1:
        through = sum(answer.ok for answer in answers.values())
        typer.echo(f"{through:,} of {counted(len(given), 'lane')} {done}")
    for lane, order in given:
        if order.id in heard.lost:
            typer.echo(f"{lane.name}: not {done}; another order took the place of this one")
    left = len(given) - len(answered) - len(heard.lost)
    orders = "the order stands and is" if left == 1 else f"{left:,} orders stand and are"
    if left == len(given):
        typer.echo(f"the app does not seem to run; {orders} carried out when it starts")
    elif left:
        typer.echo(f"{orders} not answered yet; 'keylane lanes audit' shows what comes of it")
