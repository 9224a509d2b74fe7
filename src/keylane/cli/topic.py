"""`keylane topic create|list|describe`: the topics that an app reads and writes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from keylane.cli.arguments import Bootstrap, Json, Options, client
from keylane.cli.layout import cell, print_table, safe, table
from keylane.demo.seed import DEFAULT_PARTITIONS
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import Cluster
from keylane.wording import counted

_SETTINGS = ("cleanup.policy", "retention.ms", "max.message.bytes", "message.timestamp.type")
"""Topic settings that `describe` shows: those that matter to an app."""

app = typer.Typer(
    name="topic",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Topics: create, list and describe them.",
)


@app.command()
def create(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="The topics to create.")],
    partitions: Annotated[
        int,
        typer.Option(min=1, help="Partitions of each topic. The keys of a partition share a task at first."),
    ] = DEFAULT_PARTITIONS,
    replication: Annotated[
        int | None,
        typer.Option(min=1, show_default="the broker's default", help="Replicas of each partition."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of the topic, e.g. retention.ms=86400000."),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave existing topics unchanged, without an error.")
    ] = False,
    bootstrap: Bootstrap = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Create topics, and wait until the broker lists them.

    An app needs its source and sink. It creates its own topics (APP.dlq, APP.state …) itself.

    \b
    keylane topic create orders receipts --partitions 4
    keylane topic create orders --if-not-exists --config retention.ms=86400000
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    settings = dict(_pair(text) for text in config or ())
    cluster = Cluster(client(bootstrap, option))
    there = cluster.topics()
    if not if_not_exists and (taken := [name for name in names if name in there]):
        raise SettingsError(
            f"topic {taken[0]!r} exists already, with {counted(there[taken[0]], 'partition')}; nothing was created. "
            "Use --if-not-exists to leave it unchanged"
        )
    for name in dict.fromkeys(names):
        made = name not in there and cluster.create(name, partitions, settings, replication=replication or -1)
        if not made and not if_not_exists:
            raise BrokerError(f"topic {name!r} was created by another client in the meantime")
        have = partitions if made else cluster.topics().get(name, 0)
        if as_json:
            typer.echo(json.dumps({"topic": name, "created": made, "partitions": have}))
        elif made:
            typer.echo(f"created topic {name} with {counted(have, 'partition')}")
        else:
            differs = "" if have == partitions else f", not {partitions:,}"
            typer.echo(f"topic {name} exists, with {counted(have, 'partition')}{differs}; left unchanged")


@app.command("list")
def list_(
    bootstrap: Bootstrap = None,
    every: Annotated[
        bool, typer.Option("--all", help="Include Kafka's own topics, such as __consumer_offsets.")
    ] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """List the topics with their number of partitions.

    \b
    keylane topic list
    keylane topic list --json | jq -r '.[].topic'
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    found = Cluster(client(bootstrap, option)).topics()
    shown = {name: found[name] for name in sorted(found) if every or not name.startswith("__")}
    if as_json:
        typer.echo(json.dumps([{"topic": name, "partitions": count} for name, count in shown.items()]))
        return
    if not shown:
        typer.echo("no topics; `keylane topic create NAME` creates one")
        return
    made = table("TOPIC", "PARTITIONS")
    made.columns[1].justify = "right"
    for name, count in shown.items():
        made.add_row(cell(name), f"{count:,}")
    print_table(made)


@app.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The topic.")],
    bootstrap: Bootstrap = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show a topic: the first and the next offset of each partition, and the settings that matter to an app.

    \b
    keylane topic describe orders
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    cluster = Cluster(client(bootstrap, option))
    count = cluster.partitions(name)
    begins, ends = cluster.ends(name, range(count), earliest=True), cluster.ends(name, range(count))
    settings = {setting: cluster.setting(name, setting) for setting in _SETTINGS}
    if as_json:
        facts: dict[str, Any] = {
            "topic": name,
            "partitions": [{"partition": p, "first": begins[p], "next": ends[p]} for p in range(count)],
            "settings": settings,
        }
        typer.echo(json.dumps(facts))
        return
    made = table("PARTITION", "FIRST OFFSET", "NEXT OFFSET", "OFFSETS")
    for column in made.columns:
        column.justify = "right"
    for p in range(count):
        made.add_row(str(p), f"{begins[p]:,}", f"{ends[p]:,}", f"{ends[p] - begins[p]:,}")
    print_table(made)
    typer.echo(safe(", ".join(f"{setting}={value}" for setting, value in settings.items())))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingsError(f"--config: expected NAME=VALUE, such as retention.ms=86400000, got {text!r}")
    return name, value
