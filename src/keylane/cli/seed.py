"""`keylane seed`: fill a topic with messages whose order can be checked."""

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

from keylane.cli.arguments import Bootstrap, Json, Options, client
from keylane.cli.layout import safe
from keylane.demo.seed import DEFAULT_PARTITIONS, Distribution, SeedLoad, SeedReport, Target, send
from keylane.errors import KeylaneError
from keylane.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable


def seed(
    topic: Annotated[str, typer.Argument(help="The topic to fill; created if it does not exist.")],
    bootstrap: Bootstrap = None,
    messages: Annotated[int, typer.Option(min=0, help="Number of messages.")] = 10_000,
    keys: Annotated[int, typer.Option(min=1, help="Number of different keys: k0, k1, k2 ...")] = 1_000,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=f"those of the topic, {DEFAULT_PARTITIONS} for a new one",
            help="Partitions of the topic.",
        ),
    ] = None,
    replication: Annotated[
        int | None,
        typer.Option(min=1, show_default="the broker's default", help="Replicas, if the topic is created."),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages per second; 0 sends as fast as possible.")
    ] = 0.0,
    dist: Annotated[
        Distribution, typer.Option(help="How messages are distributed over keys.")
    ] = Distribution.UNIFORM,
    zipf_s: Annotated[float, typer.Option(help="With zipf: larger means hotter first keys.")] = 1.1,
    value_size: Annotated[int, typer.Option(min=1, help="Bytes of a value.")] = 200,
    event_ids: Annotated[
        bool, typer.Option("--event-ids/--no-event-ids", help="Send the header event-id.")
    ] = True,
    number: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            show_default="a random one",
            help="The same number produces the same keys and event IDs.",
        ),
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Fill a topic with messages whose order can be checked.

    Every value starts with its sequence number in its key, its due time and an event ID.

    \b
    keylane seed chat.in --messages 100000 --keys 1000
    keylane seed chat.in --messages 60000 --rate 2000
    keylane seed chat.in --dist zipf --zipf-s 1.3 --seed 7
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    try:
        settings = client(bootstrap, option)
        load = SeedLoad(
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
            bootstrap=settings.bootstrap,
            partitions=partitions,
            replication=replication,
            rate=rate,
            client=dict(settings.extra),
        )
        report = _send(load, target)
    except KeylaneError as error:
        typer.echo(safe(f"keylane: {error}"), err=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(asdict(report)) if as_json else _text(report))


def _send(load: SeedLoad, target: Target) -> SeedReport:
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


def _text(report: SeedReport) -> str:
    made = f"{'created with ' if report.created else ''}{counted(report.partitions, 'partition')}"
    late = f", at most {report.behind_ms:.1f} ms late" if report.behind_ms else ""
    return (
        f"{report.topic} ({made}): {counted(report.messages, 'message')}, {counted(report.keys, 'key')}, "
        f"seed {report.seed}, in {report.seconds:.1f} s ({report.per_second:,.0f}/s{late})"
    )
