"""`keylane versions show|reset`: the version that an entity has reached, and how to set it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client
from keylane.errors import KeylaneError
from keylane.key_text import parse_key, printable, show_key
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import slot_of
from keylane.policies.versions import MAX_VERSION
from keylane.state.admin import AdminClient, new_command
from keylane.state.facts import answer_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.policies.versions import VersionMark

app = typer.Typer(
    name="versions",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Versions of entities: show the next one and what was given up, and set it.",
)

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The entity: text, or hex:… for bytes that are not text.")
]
VERSIONS_SHOWN = 20
"""How many offsets and versions are listed separately."""


@app.command()
def show(
    name: App, key: Key, bootstrap: Bootstrap = None, option: Options = None, as_json: Json = False
) -> None:
    """Show an entity's next version, versions given up or failed, and waiting messages.

    \b
    keylane versions show orders user-17
    keylane versions show orders hex:00ff --json | jq .next
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    entity = parse_key(key)
    with AdminClient(client(bootstrap, option), name, versions=True) as operator:
        marks = operator.marks(entity)
        partition = _home(marks, entity, operator.partitions)
        kept = operator.attempts().get(partition, {})
        ordered = [
            command for command in operator.open_commands() if (command.do, command.key) == ("reset", entity)
        ]
    slot = slot_of(entity, 0)
    waiting = sorted(offset for offset, one in kept.items() if one.waited and one.slot == slot)
    mark = marks.get(partition)
    known = {} if mark is None else mark.facts()
    if as_json:
        unknown: dict[str, Any] = {"next": None, "applied": None, "given_up": [], "failed": [], "ahead": []}
        facts = {"app": name, "key": show_key(entity), "partition": partition, **unknown, **known}
        facts |= {"known": mark is not None, "waiting": waiting, "ordered": bool(ordered)}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"app {name}, entity {printable(show_key(entity))}, partition {partition}")
    for line in _lines(known, waiting):
        typer.echo(f"  {line}")
    if ordered:
        typer.echo(f"  reset requested by {printable(ordered[0].who)}; not carried out yet")


@app.command()
def reset(
    name: App,
    key: Key,
    to: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_VERSION,
            help="The next version is the one after this. Without it, the entity starts over.",
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the app's answer.")
    ] = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Set an entity's next version. Messages that wait for it run; lower versions are stale.

    A running app does it at once; otherwise it happens when the app starts. 'keylane lanes audit' shows who gave the
    command, and the result.

    \b
    Exit codes:
      0  done, or waiting until the app starts
      1  the app could not do it

    \b
    keylane versions reset orders user-17 --to 17
    keylane versions reset orders user-17
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    entity = parse_key(key)
    with AdminClient(client(bootstrap, option), name, versions=True) as operator:
        if not operator.source:
            raise KeylaneError(f"app {name!r} has not planned an epoch yet: it has no versions to reset")
        partition = _home(operator.marks(entity), entity, operator.partitions)
        command = new_command("reset", partition=partition, key=entity, to=to)
        operator.give([command])
        try:
            heard = operator.wait([command], timeout=wait)
        except KeyboardInterrupt:
            typer.echo("stopped waiting: the command remains, and the app will carry it out", err=True)
            raise typer.Exit(130) from None
    answer = heard.answers.get(command.id)
    if as_json:
        facts = {"app": name, "key": show_key(entity), "partition": partition, "to": to, "id": command.id}
        facts |= {"waiting": answer is None and command.id not in heard.lost}
        typer.echo(json.dumps(facts | {"answer": None if answer is None else answer_facts(answer)}))
    elif answer is None:
        left = (
            "no task answered, and the command is gone"
            if heard.lost
            else "the app carries out the command when it starts"
        )
        typer.echo(f"no answer: {left}")
    else:
        what = "it starts over" if to is None else f"version {to + 1} is next"
        done = what if answer.ok else f"not reset: {printable(answer.result)}"
        typer.echo(f"entity {printable(show_key(entity))}: {done} (by task {printable(answer.owner)})")
    if heard.lost or (answer is not None and not answer.ok):
        raise typer.Exit(1)


def _home(marks: Mapping[int, VersionMark], key: bytes, partitions: int) -> int:
    """Return the partition that tracks the entity; its key's partition if none or several do."""
    return next(iter(marks)) if len(marks) == 1 else partition_of(key, partitions)


def _lines(known: dict[str, Any], waiting: list[int]) -> list[str]:
    if not known:
        lines = ["no version was processed yet"]
    elif known["next"] is None:
        lines = ["any version is next: the group was moved back before the tracked versions"]
    else:
        ran = "none ran yet" if known["applied"] is None else f"{known['applied']} ran last"
        lines = [f"next version: {known['next']}; {ran}"]
    if known.get("given_up"):
        stretches = [str(a) if a == b else f"{a}-{b}" for a, b in known["given_up"]]
        lines.append(f"given up before they arrived: {_some(stretches)}")
    if known.get("failed"):
        lines.append(f"failed (see keylane dlq list): {_some(list(map(str, known['failed'])))}")
    if known.get("ahead"):
        lines.append(f"done already, above the next one: {_some(list(map(str, known['ahead'])))}")
    if waiting:
        lines.append(f"messages waiting for an earlier version, at offset {_some(list(map(str, waiting)))}")
    return lines


def _some(items: list[str]) -> str:
    more = f" and {len(items) - VERSIONS_SHOWN} more" if len(items) > VERSIONS_SHOWN else ""
    return ", ".join(items[:VERSIONS_SHOWN]) + more
