"""`keylane pause|resume`: stop an app, a partition, a stage or a key for a while, without losing its place."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client
from keylane.errors import KeylaneError, SettingsError
from keylane.key_text import parse_key, printable, show_key
from keylane.state.admin import AdminClient
from keylane.state.commands import check_reason, operator_name
from keylane.state.facts import answer_facts
from keylane.state.pauses import PauseRecord
from keylane.wording import age

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.state.answers import CommandAnswer

Partition = Annotated[
    int | None, typer.Option("--partition", min=0, help="Only the messages of this partition of the source.")
]
Stage = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Only this stage or handler; those before it run."),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="KEY", help="Only the messages of this key: text, or hex:… for other bytes."
    ),
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why, for whoever sees the pause.", show_default=False)
]
Wait = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the app's answer.")]


def pause(
    name: App,
    partition: Partition = None,
    stage: Stage = None,
    key: Key = None,
    reason: Reason = "",
    bootstrap: Bootstrap = None,
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Pause an app, or only a partition, a stage or a key, until 'keylane resume'.

    What runs is finished, and nothing new starts; order, attempts and progress stay. The pause holds over restarts of
    the app, and is shown by 'keylane lanes list', 'keylane plan' and 'keylane lag'. An app that does not run begins
    paused. 'keylane lanes audit' shows who paused it.

    \b
    Exit codes:
      0  paused
      1  the app has no such stage

    \b
    keylane pause billing --reason "the bank is down"
    keylane pause billing --stage charge
    keylane pause billing --key customer-17
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    found = _named(partition, stage, key, check_reason(reason))
    with AdminClient(client(bootstrap, option), name) as operator:
        _check_partition(operator, found)
        answer = operator.pause(found, timeout=wait)
        if answer is not None and not answer.ok:
            operator.withdraw_pause(found)
    _report(name, "paused", found, answer, as_json=as_json)


def resume(
    name: App,
    partition: Partition = None,
    stage: Stage = None,
    key: Key = None,
    bootstrap: Bootstrap = None,
    wait: Wait = 10.0,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Resume what 'keylane pause' has paused: name the same partition, stage or key.

    Resuming the app does not resume a partition, stage or key that was paused for itself.

    \b
    keylane resume billing
    keylane resume billing --stage charge
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    found = _named(partition, stage, key, "")
    with AdminClient(client(bootstrap, option), name) as operator:
        paused = operator.pauses()
        if found.scope not in {record.scope for record in paused}:
            others = f"; paused: {', '.join(map(shown, paused))}" if paused else ", and nothing of it is"
            raise KeylaneError(f"{shown(found)} of app {name!r} is not paused{others}")
        answer = operator.resume(found, timeout=wait)
    _report(name, "resumed", found, answer, as_json=as_json)


def shown(record: PauseRecord) -> str:
    """What is paused, in words."""
    if record.kind == "key":
        return f"key {printable(show_key(record.key))}"
    what = {"partition": record.partition, "stage": record.stage}.get(record.kind)
    return "all" if record.kind == "app" else f"{record.kind} {printable(str(what))}"


def pause_lines(pauses: Iterable[PauseRecord], now: float) -> list[str]:
    """One line for each pause, for the views of other commands."""
    return [
        f"paused: {shown(one)}, for {age(now - one.at)}, by {printable(one.who)}"
        + (f": {printable(one.reason)}" if one.reason else "")
        for one in pauses
    ]


def pauses_of(pauses: Iterable[PauseRecord], key: bytes | None) -> list[PauseRecord]:
    """Those that hold back messages of this key, without those of single partitions."""
    return [one for one in pauses if one.kind in ("app", "stage") or (one.kind == "key" and one.key == key)]


def pause_facts(record: PauseRecord) -> dict[str, Any]:
    """One pause as JSON facts."""
    return {
        "what": record.kind,
        "partition": record.partition,
        "stage": record.stage or None,
        "key": None if record.key is None else show_key(record.key),
        "who": record.who,
        "at": record.at,
        "reason": record.reason or None,
    }


def _named(partition: int | None, stage: str | None, key: str | None, reason: str) -> PauseRecord:
    if sum(each is not None for each in (partition, stage, key)) > 1:
        raise SettingsError("expected at most one of --partition, --stage and --key; pause them one by one")
    who, at = operator_name(), time.time()
    if partition is not None:
        return PauseRecord(kind="partition", partition=partition, who=who, at=at, reason=reason)
    if stage is not None:
        if not stage:
            raise SettingsError("expected the name of a stage for --stage, got an empty text")
        return PauseRecord(kind="stage", stage=stage, who=who, at=at, reason=reason)
    if key is not None:
        return PauseRecord(kind="key", key=parse_key(key), who=who, at=at, reason=reason)
    return PauseRecord(kind="app", who=who, at=at, reason=reason)


def _check_partition(operator: AdminClient, record: PauseRecord) -> None:
    if record.partition is not None and record.partition >= operator.partitions:
        raise SettingsError(
            f"expected a --partition from 0 to {operator.partitions - 1}, got {record.partition}"
        )


def _report(
    name: str, done: str, record: PauseRecord, answer: CommandAnswer | None, *, as_json: bool
) -> None:
    failed = answer is not None and not answer.ok
    if as_json:
        facts = {"app": name, **pause_facts(record), "done": None if failed else done}
        typer.echo(json.dumps(facts | {"answer": None if answer is None else answer_facts(answer)}))
    elif answer is None:
        typer.echo(
            f"app {name}: {shown(record)} {done}; the app does not seem to be running, it finds it when it starts"
        )
    else:
        what = f"not {done}, {printable(answer.result)}" if failed else done
        typer.echo(f"app {name}: {shown(record)} {what} (by task {printable(answer.owner)})")
    if failed:
        raise typer.Exit(1)
