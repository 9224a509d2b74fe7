"""How a redrive looks on the command line: what would run, and what came of it; as facts for JSON, and as text."""

from __future__ import annotations

from typing import Any

import typer

from keylane.cli.choice import Choice, Lot
from keylane.cli.keys import printable, show_key
from keylane.cli.layout import cell, counted, print_table, table
from keylane.kafka.operator import Heard, Tally
from keylane.kafka.orders import Order

SHOWN = 20
"""Lanes that are named one by one."""
_PLACES = 8


def _left_out(choice: Choice) -> list[str]:
    notes = []
    if choice.redriven:
        notes.append(f"{choice.redriven:,} redriven before")
    if choice.archived:
        notes.append(f"{choice.archived:,} archived: see 'keylane lanes list'")
    if blocked := choice.blocked.total():
        notes.append(f"{blocked:,} of blocked lanes: see 'keylane lanes list'")
    if choice.unreadable:
        notes.append(f"{choice.unreadable:,} that are no letters")
    return [f"left out: {', '.join(notes)}"] if notes else []


def _facts(choice: Choice, lots: list[Lot]) -> dict[str, Any]:
    return {
        "letters": sum(lot.chosen for lot in lots),
        "left_out": {
            "redriven": choice.redriven,
            "archived": choice.archived,
            "blocked": choice.blocked.total(),
            "unreadable": choice.unreadable,
        },
    }


def _lane_facts(lot: Lot) -> dict[str, Any]:
    return {
        "key": None if lot.key is None else show_key(lot.key),
        "partition": lot.partition,
        "parked": lot.parked,
        "letters": lot.chosen,
    }


def plan_facts(name: str, choice: Choice, lots: list[Lot], *, dry_run: bool) -> dict[str, Any]:
    """What would be redriven, for JSON; nothing is, because it is a dry run or there is nothing."""
    lanes = [
        {**_lane_facts(lot), "order": [f"{lot.partition}/{source}" for source in lot.sources()]}
        for lot in lots
    ]
    return {"app": name, "dry_run": dry_run, **_facts(choice, lots), "lanes": lanes}


def print_plan(name: str, choice: Choice, lots: list[Lot], *, whole: bool) -> None:
    """What would be redriven."""
    if not lots:
        typer.echo("; ".join([f"nothing to redrive in {name}.dlq", *_left_out(choice)]))
        return
    made = table("LANE", "LETTERS", "STATE", "IN THIS ORDER")
    for lot in lots[:SHOWN]:
        sources = lot.sources()
        places = [f"{lot.partition}/{source}" for source in sources[:_PLACES]]
        more = [f"… {len(sources) - _PLACES:,} more"] if len(sources) > _PLACES else []
        made.add_row(
            cell(show_key(lot.key)),
            f"{lot.chosen:,}",
            "parked" if lot.parked else "goes on",
            " ".join([*places, *more]) or "-",
        )
    print_table(made)
    notes = [
        f"{counted(sum(lot.chosen for lot in lots), 'letter')} of {counted(len(lots), 'lane')} would be redriven"
    ]
    if len(lots) > SHOWN:
        notes.append(f"{len(lots) - SHOWN:,} lanes not shown")
    if whole or any(lot.parked for lot in lots):
        notes.append("what is parked meanwhile comes along")
    typer.echo("; ".join([*notes, *_left_out(choice)]))


class Report:
    """What came of the orders, each of which redrives the lot at its place. ``heard`` is None if nobody waited."""

    def __init__(
        self, name: str, choice: Choice, lots: list[Lot], orders: list[Order], heard: Heard | None
    ) -> None:
        self._name = name
        self._choice = choice
        self._lanes = list(zip(lots, orders, strict=True))
        self._waited = heard is not None
        self._answers = heard.answers if heard is not None else {}
        self._lost = heard.lost if heard is not None else frozenset()
        tallies = [answer.tally for answer in self._answers.values()]
        self._sum = Tally(
            through=sum(tally.through for tally in tallies if tally is not None),
            dead=sum(tally.dead for tally in tallies if tally is not None),
            parked=sum(tally.parked for tally in tallies if tally is not None),
        )

    @property
    def through(self) -> bool:
        """Whether nothing is known that did not come through."""
        return not self._lost and all(answer.ok for answer in self._answers.values())

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        lanes = []
        for lot, order in self._lanes:
            answer = self._answers.get(order.id)
            lanes.append(
                {
                    **_lane_facts(lot),
                    "id": order.id,
                    "ok": None if answer is None else answer.ok,
                    "result": None if answer is None else answer.result,
                    "stands": answer is None and order.id not in self._lost,
                }
            )
        return {
            "app": self._name,
            "dry_run": False,
            **_facts(self._choice, [lot for lot, _ in self._lanes]),
            "through": self._sum.through,
            "dead_again": self._sum.dead,
            "still_parked": self._sum.parked,
            "unanswered": len(self._lanes) - len(self._answers),
            "lanes": lanes,
        }

    def print(self) -> None:
        """As text."""
        what = f"{counted(sum(lot.chosen for lot, _ in self._lanes), 'letter')} of {counted(len(self._lanes), 'lane')}"
        standing = len(self._lanes) - len(self._answers) - len(self._lost)
        if self._answers:
            tally = self._sum
            result = f"{tally.through:,} through, {tally.dead:,} dead again, {tally.parked:,} still parked"
            typer.echo("; ".join([f"{what}: {result}", *_left_out(self._choice)]))
            bad = [
                (lot, a) for lot, o in self._lanes if (a := self._answers.get(o.id)) is not None and not a.ok
            ]
            for lot, answer in bad[:SHOWN]:
                typer.echo(f"{lot.name}: {printable(answer.result)}")
            if len(bad) > SHOWN:
                typer.echo(f"… {len(bad) - SHOWN:,} more lanes where not all came through")
            if tally.dead:
                typer.echo(f"'keylane dlq list {self._name}' shows why some are dead again")
            if tally.parked:
                typer.echo(f"'keylane lanes list {self._name}' shows why some are still parked")
        else:
            typer.echo("; ".join([what, *_left_out(self._choice)]))
        if standing:
            self._say_what_stands(standing)
        if self._lost:
            typer.echo(f"{counted(len(self._lost), 'order')} came to an end without an answer")

    def _say_what_stands(self, standing: int) -> None:
        orders = f"{counted(standing, 'order')} {'stand' if standing != 1 else 'stands'}"
        if not self._waited or self._answers:
            typer.echo(
                f"{orders} and will be carried out; 'keylane lanes audit {self._name}' shows what came of it"
            )
        else:
            typer.echo(
                f"nobody has answered: the app does not seem to run. {orders}, to be carried out when it starts; "
                f"'keylane lanes audit {self._name}' shows what came of it"
            )
