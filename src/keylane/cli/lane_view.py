"""How stopped lanes and orders look on the command line: as facts for JSON, and as text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import typer

from keylane.cli.keys import show_key
from keylane.cli.layout import age, block, brief, cell, counted, fact, local, print_table, table
from keylane.cli.stopped import StoppedLane, totals, which
from keylane.core.record import Stop
from keylane.kafka.operator import Action, Answer
from keylane.kafka.orders import Order

_MEANS = {
    Stop.BLOCKED: "it stands before a message that failed for good, until an operator acts",
    Stop.PARKED: "what failed for good and all that follows goes to the dead letters, until it is redriven",
    Stop.SKIPPING: "an operator skipped the message; the lane goes on as soon as that is committed",
}


def lane_facts(lane: StoppedLane) -> dict[str, Any]:
    """One line of the list, for JSON."""
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
        "orders": [order_facts(order) for order in lane.orders],
    }


def order_facts(order: Order) -> dict[str, Any]:
    """A standing order, for JSON."""
    return {
        "id": order.id,
        "do": order.do,
        "letters": None if order.letters is None else len(order.letters),
        "who": order.who,
        "at": order.at,
    }


def print_lanes(name: str, lanes: Sequence[StoppedLane], now: float, limit: int) -> None:
    """The list, and how many there are of each."""
    if not lanes:
        typer.echo(f"no lane of app {name!r} has stopped, and no order stands")
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


def full_facts(name: str, lane: StoppedLane, trail: Sequence[Action], bootstrap: str) -> dict[str, Any]:
    """All about a lane, for JSON."""
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


def print_lane(name: str, lane: StoppedLane, trail: Sequence[Action], now: float, bootstrap: str) -> None:
    """All about a lane, and what to do next."""
    record = lane.record
    fact("lane", f"{'a message without a key' if lane.key is None else show_key(lane.key)}, of app {name}")
    fact("state", lane.state)
    if record is not None:
        fact("means", _MEANS[record.stop])
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
    for number, order in enumerate(lane.orders):
        fact(
            "" if number else "orders",
            f"to {_deed(order.do, _count(order))}, by {order.who} at {local(order.at)}",
        )
    for number, action in enumerate(trail):
        fact(
            "" if number else "audit",
            f"{local(action.at)}  {action.who}: {_deed(action.do, action.letters)}: {outcome(action)}",
        )
    steps = next_steps(name, lane, bootstrap)
    if steps:
        block("next", "\n".join(f"{command}\n    {what}" for command, what in steps))


def next_steps(name: str, lane: StoppedLane, bootstrap: str) -> list[tuple[str, str]]:
    """Commands that an operator may want now, and what they do."""
    if lane.record is None or lane.record.stop is Stop.SKIPPING:
        return []
    at = "" if os.environ.get("KEYLANE_BOOTSTRAP") == bootstrap else f" --bootstrap {bootstrap}"
    lane_ = which(lane.key, lane.position)
    if lane.record.stop is Stop.BLOCKED:
        return [
            (
                f"keylane lanes release {name} {lane_}{at}",
                "when the cause is mended: the message runs again, with all its attempts",
            ),
            (
                f"keylane lanes skip {name} {lane_}{at}",
                "gives the message up: it becomes a dead letter, and the lane goes on behind it",
            ),
        ]
    return [
        (f"keylane dlq list {name} --key {lane_} --letters{at}", "what of it lies among the dead letters"),
        (
            f"keylane dlq redrive {name} --lane {lane_}{at}",
            "when the cause is mended: all of it runs, in order, and the lane goes on",
        ),
    ]


def outcome(action: Action) -> str:
    """What came of it, in words."""
    if action.answer is not None:
        soon = f"{max(0.0, action.answer.at - action.at):.1f} s later"
        return f"{action.answer.result}, by {action.answer.owner} {soon}"
    return "the order stands" if action.stands else "another order took its place"


def action_facts(action: Action) -> dict[str, Any]:
    """One order and what came of it, for JSON."""
    keyless = action.key is None and action.do != "redrive"
    return {
        "id": action.id,
        "do": action.do,
        "key": None if action.key is None else show_key(action.key),
        "partition": action.partition,
        "offset": action.offset if keyless else None,
        "letters": action.letters,
        "who": action.who,
        "at": action.at,
        "stands": action.stands,
        "answer": None if action.answer is None else answer_facts(action.answer),
    }


def answer_facts(answer: Answer) -> dict[str, Any]:
    """For JSON."""
    return {"ok": answer.ok, "result": answer.result, "owner": answer.owner, "at": answer.at}


def print_audit(name: str, actions: Sequence[Action]) -> None:
    """Every order, oldest first."""
    if not actions:
        typer.echo(f"nobody has ordered anything of app {name!r}")
        return
    made = table("WHEN", "WHO", "WHAT", "LANE", "RESULT")
    for action in actions:
        if action.key is not None:
            lane = show_key(action.key)
        else:
            lane = f"keyless, {action.partition}/{'-' if action.do == 'redrive' else action.offset}"
        made.add_row(
            local(action.at),
            cell(action.who),
            cell(_deed(action.do, action.letters)),
            cell(lane),
            cell(outcome(action)),
        )
    print_table(made)


def _count(order: Order) -> int | None:
    return None if order.letters is None else len(order.letters)


def _deed(do: str, letters: int | None) -> str:
    if do != "redrive":
        return do
    return "redrive all letters" if letters is None else f"redrive {counted(letters, 'letter')}"
