"""`keylane broker start|stop|status`: real Kafka on this machine, in the background."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table

from keylane.broker import Broker, BrokerError, State, shown
from keylane.errors import KeylaneError

P = ParamSpec("P")

app = typer.Typer(
    name="broker",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Real Kafka on this machine, for development, demos and tests.

    Kafka 4.3 in KRaft mode, listening on 127.0.0.1 only. Its jars (45 MB) are fetched once and checked
    against known hashes; after that a broker is up in about two seconds. All it needs is Java 17 or newer.
    """,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def _friendly(command: Callable[P, None]) -> Callable[P, None]:
    """Turns an error that a user can act on into a sentence on stderr and exit code 2."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeylaneError as error:
            typer.echo(f"keylane: {error}", err=True)
            raise typer.Exit(2) from error

    return wrapped


@app.command()
@_friendly
def start(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            show_default="any free port",
            help="Port for clients. With several nodes: the first node's; the others have the following ports.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=9,
            show_default="1, or as many as --data has",
            help="Nodes, each a process of its own. With 3, topics have three replicas and one node may fail.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="a temporary folder",
            help="Folder for the data: a new or empty one, or one with the data of an earlier broker.",
        ),
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            show_default="--keep with --data, otherwise --no-keep",
            help="Whether the data stays when the broker is stopped.",
        ),
    ] = None,
    heap: Annotated[str, typer.Option(help="Java's heap for each node, such as 512m or 2g.")] = "512m",
    as_json: Json = False,
) -> None:
    """Start a broker in the background, and print how to reach it.

    It runs until `keylane broker stop`; closing the terminal does not end it.
    Topics are not created by themselves: a misspelt name is an error.

    **Examples**

    - `keylane broker start`: one node on a free port, data thrown away at the stop
    - `keylane broker start --port 9092 --data ./kafka`: always the same port, and the data stays
    - `keylane broker start --nodes 3`: three nodes, for trying what happens when one fails
    - `keylane broker start --json | jq -r .bootstrap`: for scripts
    """
    with shown() as progress:
        broker = Broker(
            nodes=nodes, data=data, keep=keep, port=port, heap=heap, detached=True, progress=progress
        )
        broker.start()
    if as_json:
        _print_json(
            {
                "id": broker.id,
                "bootstrap": broker.bootstrap,
                "data": str(broker.data),
                "nodes": [{"pid": node.pid, "port": node.port} for node in broker.nodes],
            }
        )
        return
    fate = "stays after the stop" if broker.keep else "thrown away at the stop"
    typer.echo(f"broker     {broker.id}")
    typer.echo(f"bootstrap  {broker.bootstrap}")
    typer.echo(f"data       {broker.data} ({fate})")
    typer.echo(f"stop with  keylane broker stop {broker.id}")


@app.command()
@_friendly
def stop(
    broker_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="Which broker; may be left out if only one runs.", show_default=False
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Stop all that were started with `keylane broker start`.")
    ] = False,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--discard",
            show_default="as said at the start",
            help="Keep the data, or throw it away.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Stop a broker, and throw its data away unless it is to be kept.

    A broker that died is cleaned up the same way. Brokers that belong to a running program, such as a test,
    end with that program; they are stopped from here only if named.

    **Examples**

    - `keylane broker stop`: the only one
    - `keylane broker stop k7f3q2 --keep`: this one, and its data stays
    - `keylane broker stop --all`
    """
    stopped = []
    for broker in _chosen(broker_id, every=every):
        fact = {"id": broker.id, "data": str(broker.data), "kept": broker.keep if keep is None else keep}
        broker.stop(keep=keep)
        stopped.append(fact)
        if not as_json:
            fate = f"its data is in {fact['data']}" if fact["kept"] else "its data is gone"
            typer.echo(f"stopped {fact['id']}; {fate}")
    if as_json:
        _print_json(stopped)
    elif not stopped:
        typer.echo("no broker is running")


@app.command()
@_friendly
def status(
    broker_id: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Which broker; all if left out.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the brokers of this user: which run, which died, where they listen and what they hold.

    `degraded` means that some of a broker's nodes run and others do not; `dead` that none does.
    A dead broker keeps its data until `keylane broker stop ID`.

    **Examples**

    - `keylane broker status`
    - `keylane broker status k7f3q2 --json`
    """
    brokers = Broker.list() if broker_id is None else (Broker.find(broker_id),)
    if as_json:
        _print_json([_facts(broker) for broker in brokers])
        return
    if not brokers:
        typer.echo("no broker is running; `keylane broker start` starts one")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("ID", "STATE", "BOOTSTRAP", "UP", "DATA", "FOLDER", "OWNER"):
        table.add_column(heading, overflow="fold")
    for broker in brokers:
        up = _duration(broker.uptime) if broker.state is not State.DEAD else "-"
        owner = "-" if broker.owner is None else f"process {broker.owner}"
        addresses = broker.bootstrap.replace(",", "\n")
        table.add_row(
            broker.id, broker.state.value, addresses, up, _bytes(broker.size()), str(broker.data), owner
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _chosen(broker_id: str | None, *, every: bool) -> tuple[Broker, ...]:
    """The brokers to stop. Raises BrokerError if that is not clear."""
    if broker_id is not None:
        if every:
            raise BrokerError("give an id or --all, not both")
        return (Broker.find(broker_id),)
    ours = tuple(broker for broker in Broker.list() if broker.owner is None)
    if every:
        return ours
    running = tuple(broker for broker in ours if broker.state is not State.DEAD)
    if len(running) == 1:
        return running
    if running:
        names = ", ".join(f"{broker.id} ({broker.bootstrap})" for broker in running)
        raise BrokerError(f"{len(running)} brokers run: {names}; say which one, or --all")
    if ours:
        names = ", ".join(broker.id for broker in ours)
        raise BrokerError(f"no broker runs; dead: {names}; `keylane broker stop ID` or --all cleans up")
    raise BrokerError("no broker runs that was started with `keylane broker start`")


def _facts(broker: Broker) -> dict[str, Any]:
    return {
        "id": broker.id,
        "state": broker.state.value,
        "bootstrap": broker.bootstrap,
        "uptime_seconds": round(broker.uptime, 1) if broker.state is not State.DEAD else None,
        "data": str(broker.data),
        "data_bytes": broker.size(),
        "keep": broker.keep,
        "owner": broker.owner,
        "nodes": [
            {"id": node.id, "pid": node.pid, "port": node.port, "alive": node.alive, "log": str(node.log)}
            for node in broker.nodes
        ],
    }


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value))


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
