"""`keylane seed`: fills a topic with messages whose order can be checked."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from keylane.errors import KeylaneError, SettingsError
from keylane.seed import DEFAULT_PARTITIONS, Distribution, Load, Report, Target, send

if TYPE_CHECKING:
    from collections.abc import Callable


def seed(
    topic: Annotated[str, typer.Argument(help="The topic to fill; it is created if it does not exist.")],
    bootstrap: Annotated[
        str, typer.Option(envvar="KEYLANE_BOOTSTRAP", help="The broker, as host:port.")
    ] = "localhost:9092",
    messages: Annotated[int, typer.Option(min=0, help="How many messages to send.")] = 10_000,
    keys: Annotated[int, typer.Option(min=1, help="How many different keys: k0, k1, k2 ...")] = 1_000,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=f"as the topic has, {DEFAULT_PARTITIONS} for a new one",
            help="Partitions of the topic.",
        ),
    ] = None,
    replication: Annotated[
        int | None,
        typer.Option(min=1, show_default="the broker's default", help="Replicas, if the topic is created."),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages per second; 0 sends as fast as the broker takes them.")
    ] = 0.0,
    dist: Annotated[
        Distribution, typer.Option(help="How messages are shared out to keys.")
    ] = Distribution.UNIFORM,
    zipf_s: Annotated[float, typer.Option(help="With zipf: the larger, the hotter the first keys.")] = 1.1,
    value_size: Annotated[int, typer.Option(min=1, help="Bytes of a value.")] = 200,
    event_ids: Annotated[
        bool, typer.Option("--event-ids/--no-event-ids", help="Send the header event-id.")
    ] = True,
    number: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            show_default="another one every time",
            help="The same number makes the same keys and event ids again.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--kafka", metavar="NAME=VALUE", help="A setting for the Kafka client. May be repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")] = False,
) -> None:
    """Fill a topic with messages whose order can be checked.

    Every value starts with a sequence number inside its key, the time it was due, and an event id.

    **Examples**

    - `keylane seed chat.in --messages 100000 --keys 1000`: as fast as possible
    - `keylane seed chat.in --messages 60000 --rate 2000`: for half a minute, evenly
    - `keylane seed chat.in --dist zipf --zipf-s 1.3 --seed 7`: a few busy lanes, the same every time
    """
    try:
        load = Load(
            messages=messages,
            keys=keys,
            dist=dist,
            zipf_s=zipf_s,
            value_size=value_size,
            event_ids=event_ids,
            seed=secrets.randbelow(2**31) if number is None else number,
        )
        target = Target(
            topic=topic,
            bootstrap=bootstrap,
            partitions=partitions,
            replication=replication,
            rate=rate,
            client=dict(_setting(text) for text in client or ()),
        )
        report = _send(load, target)
    except KeylaneError as error:
        typer.echo(f"keylane: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(asdict(report)) if as_json else _text(report))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingsError(f"--kafka takes NAME=VALUE, not {text!r}")
    return name.removeprefix("kafka."), value


def _send(load: Load, target: Target) -> Report:
    if not _on_a_terminal():
        return send(load, target)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(target.topic, total=load.messages)
        tell: Callable[[int], None] = lambda done: bar.update(task, completed=done)  # noqa: E731 - a name for its type
        return send(load, target, tell)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")


def _on_a_terminal() -> bool:
    return sys.stderr.isatty()


def _text(report: Report) -> str:
    made = f"created with {report.partitions}" if report.created else f"{report.partitions}"
    late = f", at most {report.behind_ms:.1f} ms late" if report.behind_ms else ""
    return (
        f"{report.topic} ({made} partitions): {report.messages:,} messages, {report.keys:,} keys, seed {report.seed}, "
        f"in {report.seconds:.1f} s ({report.per_second:,.0f}/s{late})"
    )
