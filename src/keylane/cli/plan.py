"""`keylane plan`: which task owns which slots of which partitions."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client
from keylane.cli.pause import pause_facts, pause_lines
from keylane.errors import SettingsError
from keylane.offsets.assignment import Assignment, make_plan
from keylane.offsets.shard import WHOLE
from keylane.offsets.slots import ALL, SLOTS
from keylane.state.admin import AdminClient
from keylane.wording import counted


def plan(
    name: App,
    bootstrap: Bootstrap = None,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Show the plan for this number of tasks instead of the current one."),
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show which task owns which slots of which partitions, in the current or last epoch.

    A partition shown without slots belongs to one task. Where several tasks share a partition, each owns a range of
    its slots, 0 to 65535. Every key hashes to one slot, so it belongs to one task.

    An app that runs in shards has a plan for each: --tasks is the number in each shard, --json prints a line for each.

    \b
    keylane plan chat
    keylane plan chat --json | jq '.tasks[0]'
    keylane plan chat --tasks 8
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with AdminClient(client(bootstrap, option), name) as operator:
        plans = operator.plans()
        paused = operator.pauses()
    if not plans:
        raise SettingsError(f"app {name!r} has not planned an epoch yet: run it first")
    for found in plans:
        shared = Assignment.decode(found["tasks"])
        if tasks is not None:
            partitions = sorted({one.partition for task in shared.tasks for one in task})
            shared = make_plan(partitions, tasks, before=shared)
        if as_json:
            facts = _facts(name, found, shared, planned=tasks is None)
            typer.echo(json.dumps(facts | {"paused": list(map(pause_facts, paused))}))
        else:
            _show(name, found, shared, tasks)
    if not as_json:
        for line in pause_lines(paused, time.time()):
            typer.echo(line)


def _show(name: str, found: dict[str, Any], shared: Assignment, tasks: int | None) -> None:
    when = f"epoch {found['epoch']}" if tasks is None else f"with {counted(tasks, 'task')}"
    part = "" if found["shard"] == str(WHOLE) else f" shard {found['shard']},"
    typer.echo(f"app {name},{part} {when}: {counted(len(shared.tasks), 'task')}")
    for number, ranges in enumerate(shared.tasks):
        owned = ", ".join(
            f"partition {one.partition}"
            if one.slots == ALL
            else f"partition {one.partition} slots {one.slots} ({len(one.slots) / SLOTS:.0%})"
            for one in ranges
        )
        typer.echo(f"  task {number}: {owned}")


def _facts(name: str, found: dict[str, Any], shared: Assignment, *, planned: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"app": name, "shard": found["shard"]}
    if planned:
        facts |= {"run": found["run"], "epoch": found["epoch"], "at": found["at"]}
    facts["tasks"] = [
        [{"partition": one.partition, "first": one.slots.first, "last": one.slots.last} for one in task]
        for task in shared.tasks
    ]
    return facts
