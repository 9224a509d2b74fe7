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

from keylane.broker import Broker, BrokerState, EmbeddedBrokerError, shown
from keylane.cli.layout import safe
from keylane.errors import KeylaneError, SettingsError
from keylane.rights import Right, app_rights, operator_rights

P = ParamSpec("P")

app = typer.Typer(
    name="broker",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Real Kafka on this machine, for development, demos and tests.

    Kafka 4.3 in KRaft mode, listening on 127.0.0.1 only. Its jars (45 MB) are fetched once and checked
    against known hashes; after that a broker starts in about two seconds. It needs Java 17 or newer.
    """,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def _friendly(command: Callable[P, None]) -> Callable[P, None]:
    """Print an error that a user can act on to stderr, and exit with code 2."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeylaneError as error:
            typer.echo(safe(f"keylane: {error}"), err=True)
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
            help="Port for clients. With several nodes, the first one's; the others use the ports after it.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=9,
            show_default="1, or as many as --data has",
            help="Number of nodes, one process each. With 3, topics have three replicas and one node may fail.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="a temporary folder",
            help="Folder for the data: new, empty, or with the data of an earlier broker.",
        ),
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            show_default="--keep with --data, otherwise --no-keep",
            help="Keep the data when the broker is stopped.",
        ),
    ] = None,
    heap: Annotated[str, typer.Option(help="Java heap size of each node, such as 512m or 2g.")] = "512m",
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS, users with passwords, and no rights but those you give them."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a broker in the background, and print how to reach it.

    It runs until 'keylane broker stop'; closing the terminal does not end it.
    Topics are not created automatically, so a misspelt name is an error. Use 'keylane topic create'.

    \b
    keylane broker start
    keylane broker start --port 9092 --data ./kafka
    keylane broker start --nodes 3
    keylane broker start --secure
    keylane broker start --json | jq -r .bootstrap
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    with shown() as progress:
        broker = Broker(
            nodes=nodes,
            data=data,
            keep=keep,
            port=port,
            heap=heap,
            secure=secure,
            detached=True,
            command_folder=Path.cwd(),
            progress=progress,
        )
        broker.start()
    if as_json:
        _print_json(
            {
                "id": broker.id,
                "bootstrap": broker.bootstrap,
                "data": str(broker.data),
                "nodes": [{"pid": node.pid, "port": node.port} for node in broker.nodes],
                "admin_options": str(broker.admin_file) if secure else None,
                "certificate_bootstrap": broker.access.certificate_bootstrap if secure else None,
            }
        )
        return
    fate = "kept when the broker stops" if broker.keep else "deleted when the broker stops"
    typer.echo(f"broker     {broker.id}")
    typer.echo(f"bootstrap  {broker.bootstrap}")
    typer.echo(f"data       {broker.data} ({fate})")
    if secure:
        typer.echo(f"admin      -o @{broker.admin_file}")
        typer.echo("app users  keylane broker user MODULE:APP")
    typer.echo(f"stop with  keylane broker stop {broker.id}")


@app.command()
@_friendly
def user(
    reference: Annotated[
        str, typer.Argument(metavar="APP", help="MODULE:APP, or an app's name with --source and --sink.")
    ],
    broker_id: Annotated[
        str | None,
        typer.Option("--broker", metavar="ID", help="Which broker; optional if only one secured one runs."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="With an app's name: the topic it reads.")] = None,
    sink: Annotated[str | None, typer.Option(help="With an app's name: the topic it writes to.")] = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator", help="An operator's rights instead of the app's; the name gets '-operator'."
        ),
    ] = False,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="A certificate instead of a password.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a user of a secured broker with exactly the rights that the app needs, and print its settings file.

    An existing user gets a new password or certificate, and keeps its rights. The rights are those of
    'keylane doctor' and of docs/operations.md. The file can only be read by you.

    \b
    keylane broker user shop.orders:app
    keylane broker user shop --source orders --sink receipts
    keylane broker user shop.orders:app --operator
    keylane broker user shop.orders:app --certificate
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    broker = _secured(broker_id)
    name, rights = _rights_of(reference, source, sink, operator=operator)
    if operator:
        name += "-operator"
    add = broker.access.add_certificate if certificate else broker.access.add_user
    path = add(name, rights)
    bootstrap = broker.access.certificate_bootstrap if certificate else broker.bootstrap
    if as_json:
        _print_json({"user": name, "bootstrap": bootstrap, "options": str(path)})
        return
    typer.echo(f"user       {name}")
    typer.echo(f"settings   --bootstrap {bootstrap} -o @{path}")


def _secured(broker_id: str | None) -> Broker:
    if broker_id is not None:
        return Broker.find(broker_id)
    running = [each for each in Broker.list() if each.secure and each.state is not BrokerState.DEAD]
    if len(running) != 1:
        known = ", ".join(each.id for each in running) or "none"
        raise EmbeddedBrokerError(
            f"expected one running secured broker, found {known}: give --broker ID, or start one with "
            "`keylane broker start --secure`"
        )
    return running[0]


def _rights_of(
    reference: str, source: str | None, sink: str | None, *, operator: bool
) -> tuple[str, tuple[Right, ...]]:
    """The app's name, and the rights of the app or of its operator."""
    if ":" not in reference:
        if source is None:
            raise SettingsError("an app's name needs --source TOPIC; or give MODULE:APP")
        sinks = [] if sink is None else [sink]
        give = operator_rights if operator else app_rights
        return reference, give(reference, source, sinks, ledger=False)
    if source is not None or sink is not None:
        raise SettingsError("--source and --sink are only for an app's name: MODULE:APP declares them")
    from keylane.spark.packaging import load  # noqa: PLC0415 - takes half a second; a plain name needs nothing of it

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found = load(reference)
    ledger = found.ledger is not None
    if operator:
        return found.name, operator_rights(found.name, found.source, found.sinks, ledger=ledger)
    rights = app_rights(found.name, found.source, found.sinks, ledger=ledger, states=bool(found.states))
    return found.name, rights


@app.command()
@_friendly
def stop(
    broker_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Which broker; optional if only one was started from this folder.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Stop every broker that was started with 'keylane broker start'.")
    ] = False,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--discard",
            show_default="as chosen at the start",
            help="Keep the data, or delete it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Stop a broker, and delete its data unless it was started with --keep.

    A broker that died is cleaned up the same way. Without an ID, this stops only a broker that 'keylane broker start'
    started from this folder: others may be in use elsewhere. To stop a broker that a program started, give its ID.

    \b
    keylane broker stop
    keylane broker stop k7f3q2 --keep
    keylane broker stop --all
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    stopped = []
    for broker in _chosen(broker_id, every=every):
        fact = {"id": broker.id, "data": str(broker.data), "kept": broker.keep if keep is None else keep}
        broker.stop(keep=keep)
        stopped.append(fact)
        if not as_json:
            fate = f"its data is in {fact['data']}" if fact["kept"] else "its data was deleted"
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
        typer.Argument(metavar="ID", help="Which broker; all by default.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this user's brokers: their state, address and size of data.

    'degraded' means that some of a broker's nodes are down, 'dead' that all of them are.
    A dead broker keeps its data until 'keylane broker stop ID'.

    \b
    keylane broker status
    keylane broker status k7f3q2 --json
    """  # noqa: D301 - the escape is click's: leave the lines as they are
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
        up = _duration(broker.uptime) if broker.state is not BrokerState.DEAD else "-"
        owner = "-" if broker.owner is None else f"process {broker.owner}"
        addresses = broker.bootstrap.replace(",", "\n")
        table.add_row(
            broker.id, broker.state.value, addresses, up, _bytes(broker.size()), str(broker.data), owner
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _chosen(broker_id: str | None, *, every: bool) -> tuple[Broker, ...]:
    """Return the brokers to stop. Raises EmbeddedBrokerError if the choice is ambiguous."""
    if broker_id is not None:
        if every:
            raise EmbeddedBrokerError("give an id or --all, not both")
        return (Broker.find(broker_id),)
    ours = tuple(broker for broker in Broker.list() if broker.command_folder is not None)
    if every:
        return ours
    here = str(Path.cwd())
    running = tuple(broker for broker in ours if broker.state is not BrokerState.DEAD)
    near = tuple(broker for broker in running if broker.command_folder == here)
    if len(near) == 1:
        return near
    if near:
        raise EmbeddedBrokerError(
            f"several brokers were started from this folder: {_named(near)}. Give an ID, or --all"
        )
    if running:
        raise EmbeddedBrokerError(
            f"no running broker was started from this folder ({here}); others: {_named(running)}. "
            "To stop one of them: `keylane broker stop ID`"
        )
    if ours:
        names = ", ".join(broker.id for broker in ours)
        raise EmbeddedBrokerError(
            f"no broker is running; dead: {names}. `keylane broker stop ID` or --all cleans up"
        )
    raise EmbeddedBrokerError("no running broker was started with `keylane broker start`")


def _named(brokers: tuple[Broker, ...]) -> str:
    return ", ".join(f"{broker.id} ({broker.bootstrap}, from {broker.command_folder})" for broker in brokers)


def _facts(broker: Broker) -> dict[str, Any]:
    return {
        "id": broker.id,
        "state": broker.state.value,
        "bootstrap": broker.bootstrap,
        "uptime_seconds": round(broker.uptime, 1) if broker.state is not BrokerState.DEAD else None,
        "data": str(broker.data),
        "data_bytes": broker.size(),
        "keep": broker.keep,
        "owner": broker.owner,
        "secure": broker.secure,
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
