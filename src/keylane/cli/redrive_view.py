"""Views of a redrive, before and after: facts for JSON, and text."""

from __future__ import annotations

from typing import Any

import typer

from keylane.cli.layout import cell, print_table, table
from keylane.key_text import printable, show_key
from keylane.state.admin import CommandResults
from keylane.state.answers import RedriveCounts
from keylane.state.commands import Command
from keylane.state.redrive_selection import LaneSelection, RedriveSelection
from keylane.wording import counted

LANES_SHOWN = 20
"""How many lanes are listed separately."""
_POSITIONS_SHOWN = 8


def _left_out(choice: RedriveSelection) -> list[str]:
    notes = []
    if choice.redriven:
        notes.append(f"{choice.redriven:,} redriven before")
    if choice.archived:
        notes.append(f"{choice.archived:,} archived: see 'keylane lanes list'")
    if blocked := choice.blocked.total():
        notes.append(f"{blocked:,} of blocked lanes: see 'keylane lanes list'")
    if choice.unreadable:
        notes.append(f"{choice.unreadable:,} unreadable")
    return [f"left out: {', '.join(notes)}"] if notes else []


def _facts(choice: RedriveSelection, lots: list[LaneSelection]) -> dict[str, Any]:
    return {
        "letters": sum(lot.chosen for lot in lots),
        "left_out": {
            "redriven": choice.redriven,
            "archived": choice.archived,
            "blocked": choice.blocked.total(),
            "unreadable": choice.unreadable,
        },
    }


def _lane_facts(lot: LaneSelection) -> dict[str, Any]:
    return {
        "key": None if lot.key is None else show_key(lot.key),
        "partition": lot.partition,
        "parked": lot.parked,
        "letters": lot.chosen,
    }


def plan_facts(
    name: str, choice: RedriveSelection, lots: list[LaneSelection], *, dry_run: bool
) -> dict[str, Any]:
    """Return as JSON facts what would be redriven, for a dry run or an empty selection."""
    lanes = [
        {**_lane_facts(lot), "order": [f"{lot.partition}@{source}" for source in lot.sources()]}
        for lot in lots
    ]
    return {"app": name, "dry_run": dry_run, **_facts(choice, lots), "lanes": lanes}


def print_plan(name: str, choice: RedriveSelection, lots: list[LaneSelection], *, whole: bool) -> None:
    """Print what would be redriven."""
    if not lots:
        typer.echo("; ".join([f"nothing to redrive in {name}.dlq", *_left_out(choice)]))
        return
    made = table("LANE", "DEAD LETTERS", "STATE", "SOURCE, IN THIS ORDER")
    for lot in lots[:LANES_SHOWN]:
        sources = lot.sources()
        places = [f"{lot.partition}@{source}" for source in sources[:_POSITIONS_SHOWN]]
        more = [f"… {len(sources) - _POSITIONS_SHOWN:,} more"] if len(sources) > _POSITIONS_SHOWN else []
        made.add_row(
            cell(show_key(lot.key)),
            f"{lot.chosen:,}",
            "parked" if lot.parked else "running",
            " ".join([*places, *more]) or "-",
        )
    print_table(made)
    notes = [
        f"{counted(sum(lot.chosen for lot in lots), 'dead letter')} of {counted(len(lots), 'lane')} would be redriven"
    ]
    if len(lots) > LANES_SHOWN:
        notes.append(f"{len(lots) - LANES_SHOWN:,} lanes not shown")
    if whole or any(lot.parked for lot in lots):
        notes.append("also what is parked meanwhile")
    typer.echo("; ".join([*notes, *_left_out(choice)]))


class RedriveReport:
    """Results of the commands, one per lane selection. ``heard`` is None without waiting for answers."""

    def __init__(
        self,
        name: str,
        choice: RedriveSelection,
        lots: list[LaneSelection],
        commands: list[Command],
        heard: CommandResults | None,
    ) -> None:
        self._name = name
        self._choice = choice
        self._lanes = list(zip(lots, commands, strict=True))
        self._waited = heard is not None
        self._answers = heard.answers if heard is not None else {}
        self._lost = heard.lost if heard is not None else frozenset()
        answers = self._answers.values()
        self._sum = RedriveCounts.total(answer.counts for answer in answers if answer.counts is not None)

    @property
    def through(self) -> bool:
        """Whether no message is known to have failed."""
        return not self._lost and all(answer.ok for answer in self._answers.values())

    def facts(self) -> dict[str, Any]:
        """Return the results as JSON facts."""
        lanes = []
        for lot, command in self._lanes:
            answer = self._answers.get(command.id)
            lanes.append(
                {
                    **_lane_facts(lot),
                    "id": command.id,
                    "ok": None if answer is None else answer.ok,
                    "result": None if answer is None else answer.result,
                    "waiting": answer is None and command.id not in self._lost,
                }
            )
        return {
            "app": self._name,
            "dry_run": False,
            **_facts(self._choice, [lot for lot, _ in self._lanes]),
            "through": self._sum.through,
            "dead_again": self._sum.dead,
            "still_parked": self._sum.parked,
            "stale": self._sum.stale,
            "unanswered": len(self._lanes) - len(self._answers),
            "lanes": lanes,
        }

    def print(self) -> None:
        """Print the results as text."""
        letters = sum(lot.chosen for lot, _ in self._lanes)
        what = f"{counted(letters, 'dead letter')} of {counted(len(self._lanes), 'lane')}"
        waiting = len(self._lanes) - len(self._answers) - len(self._lost)
        if self._answers:
            typer.echo("; ".join([f"{what}: {self._sum}", *_left_out(self._choice)]))
            bad = [
                (lot, a) for lot, o in self._lanes if (a := self._answers.get(o.id)) is not None and not a.ok
            ]
            for lot, answer in bad[:LANES_SHOWN]:
                typer.echo(f"{lot.name}: {printable(answer.result)}")
            if len(bad) > LANES_SHOWN:
                typer.echo(f"… {len(bad) - LANES_SHOWN:,} more lanes where some messages failed")
            if self._sum.dead:
                typer.echo(f"'keylane dlq list {self._name}' shows why some are dead again")
            if self._sum.parked:
                typer.echo(f"'keylane lanes list {self._name}' shows why some are still parked")
        else:
            typer.echo("; ".join([what, *_left_out(self._choice)]))
        if waiting:
            self._print_waiting(waiting)
        if self._lost:
            typer.echo(f"{counted(len(self._lost), 'command')} ended without an answer")

    def _print_waiting(self, waiting: int) -> None:
        commands = f"{counted(waiting, 'command')} {'are' if waiting != 1 else 'is'} waiting"
        if not self._waited or self._answers:
            typer.echo(f"{commands} to be carried out; 'keylane lanes audit {self._name}' shows the results")
        else:
            typer.echo(
                f"no answer: the app does not seem to be running. {commands} to be carried out when it starts; "
                f"'keylane lanes audit {self._name}' shows the results"
            )
