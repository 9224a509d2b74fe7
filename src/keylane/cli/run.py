"""``keylane run``: an app in the foreground until it is stopped."""

from __future__ import annotations

import json as jsonlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from keylane import logs
from keylane.cli.arguments import from_files
from keylane.cli.layout import JsonConsole, say
from keylane.cli.signals import AbandonedError, StopSignals, last_resort, leave
from keylane.errors import SettingsError
from keylane.redaction import redact
from keylane.wording import counted

if TYPE_CHECKING:
    from keylane.cli.runner import RunEnd
    from keylane.lanes.ordering import OrderName


def run(
    reference: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="The app's module and name, such as shop.orders:app")
    ],
    bootstrap: Annotated[
        str | None,
        typer.Option(
            help="The broker's address, host:port. Or set KEYLANE_BOOTSTRAP.", envvar="KEYLANE_BOOTSTRAP"
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="Spark's master: local[N] or spark://host:7077.")] = "local[*]",
    epoch: Annotated[
        float, typer.Option(help="Seconds per epoch; then it drains and the next one is planned.")
    ] = 300.0,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="Process what the source holds now, then exit.",
        ),
    ] = False,
    tasks: Annotated[
        int | None, typer.Option(help="Largest number of tasks; by default Spark's number of slots.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Process only the I-th of N shares of the partitions, e.g. 3/8. Start one run for each share.",
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Overrides the app's ordering: key, partition, global or none. 'global' is one message at a time."
        ),
    ] = None,
    py_files: Annotated[
        str | None,
        typer.Option(
            "--py-files",
            metavar="FILES",
            help="Modules for a cluster's executors: .py, .zip or .egg files, separated by commas.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Spark's checkpoint folder; a temporary one by default.")
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(metavar="text|json", help="Log format of the driver and the tasks, on stderr."),
    ] = "text",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve metrics for Prometheus on this port: see 'keylane metrics'."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address to serve them on; 0.0.0.0 means all addresses of this machine.")
    ] = "127.0.0.1",
    web_console: Annotated[
        bool, typer.Option("--console", help="Serve the web console too: see 'keylane console'.")
    ] = False,
    console_port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --console: its port; 0 takes any free one.")
    ] = 8600,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="With --console: let its users release, skip and redrive.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="A further option, e.g. -o kafka.security.protocol=SSL; @FILE reads options from a file.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the final result as one JSON object.")] = False,
) -> None:
    """Run an app until Ctrl-C or SIGTERM, then drain it: messages in flight are finished and committed first.

    The module is imported from the current folder or the installed packages. Progress is committed to the Kafka group
    named after the app, so the next run continues where this one ended. A failed query is restarted, unless the failure
    is the app's own or another run has taken over. A second signal ends the run at once, without a drain.

    With --shard 3/8 the run processes the third of eight shares of the partitions: those whose number leaves the
    remainder 2 when divided by 8. Start all eight, on one machine or several. Each has its own Spark and is stopped,
    restarted and scaled by itself; the group, the state and the dead letters are the app's. A run that starts takes its
    partitions over, and every other run that had one of them ends: a second run of the same shard, a run without
    --shard, or one with another number of shares.

    \b
    Exit codes:
      0  stopped, or caught up
      1  not everything is done: lanes have stopped, or the app failed
      2  not started: wrong usage, an app that does not import, no broker, no Spark
      3  another run of the app has taken over
      4  stopped before everything was drained; the rest runs again next time
      130, 143  ended by a second signal

    \b
    keylane run shop.orders:app --bootstrap localhost:9092
    keylane run shop.orders:app --console
    keylane run shop.orders:app --until-caught-up --json
    keylane run shop.orders:app --master 'local[4]' -o startingOffsets=latest
    keylane run shop.orders:app --master spark://host:7077 --py-files shop.zip
    keylane run shop.orders:app --order global --until-caught-up
    keylane run shop.orders:app --shard 3/8
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    stopper = StopSignals(lambda line: say(console, line))
    console = JsonConsole() if log_format == "json" else Console(stderr=True)
    began, name = time.monotonic(), None
    try:
        given = _options(option or [])
        given |= {"epoch": epoch, "availableNow": until_caught_up}
        given |= {
            k: v
            for k, v in {"bootstrap": bootstrap, "tasks": tasks, "checkpointLocation": checkpoint}.items()
            if v
        }
        if shard is not None:
            given["shard"] = shard
        given["logFormat"] = log_format
        if allow_actions and not web_console:
            raise SettingsError("--allow-actions needs --console")
        if log_format not in logs.FORMATS:
            raise SettingsError(f"--log-format must be text or json, got {log_format}")
        logs.set_up(logging.WARNING, log_format)
        folder = str(Path.cwd())
        shipped = _files(py_files)
        sys.path[:0] = [folder, *(str(file if file.suffix != ".py" else file.parent) for file in shipped)]

        from keylane.spark.options import Options  # noqa: PLC0415 - takes seconds to import; bad usage is told first
        from keylane.spark.packaging import AppPackage, load  # noqa: PLC0415

        app = load(reference)
        named = cast("OrderName | None", order)
        if named is not None:
            app = app.with_order(named)
        app.check()
        name = app.name
        options = Options.parse(given, app.source)
        settings = options.settings

        from keylane.cli.runner import Runner  # noqa: PLC0415

        package = AppPackage(reference=reference, path=(folder,), order=named)
        runner = Runner(
            app,
            settings,
            package,
            given,
            master=master,
            files=shipped,
            stopper=stopper,
            console=console,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            shard=options.shard,
            console_port=console_port if web_console else None,
            console_actions=allow_actions,
        )
        result = stopper.guard(runner.run)
    except AbandonedError as left:
        last_resort(left.code)
        say(console, str(left))
        if json:
            _echo(name, {"ended": "stopped", "drained": not left.code}, time.monotonic() - began)
        leave(left.code)
    last_resort(result.code)
    if json:
        facts = {
            "ended": result.ended,
            "drained": result.drained,
            "processed": result.processed,
            "lag": result.lag,
            "stopped_lanes": result.stopped_lanes,
            "parked_lanes": result.parked_lanes,
            "dead_letters": result.dead_letters,
            "error": None if result.failure is None else redact(result.failure.line),
        }
        _echo(name, facts, result.seconds)
    _conclude(console, app.name, settings.bootstrap, result, quiet=json)
    raise typer.Exit(result.code)


def _echo(app: str | None, facts: dict[str, Any], seconds: float) -> None:
    known = {
        "processed": None,
        "lag": None,
        "stopped_lanes": 0,
        "parked_lanes": 0,
        "dead_letters": 0,
        "error": None,
    }
    typer.echo(jsonlib.dumps({"app": app, **known, **facts, "seconds": round(seconds, 3)}))


def _conclude(console: Console, app: str, bootstrap: str, result: RunEnd, *, quiet: bool) -> None:
    """Print the result: what was done, what was not, and what the user can do."""
    failure = result.failure
    if failure is None and not quiet:
        done = "an unknown number of" if result.processed is None else f"{result.processed:,}"
        left = "unknown" if result.lag is None else f"{result.lag:,}"
        messages = "message" if result.processed == 1 else "messages"
        line = f"{result.ended}: {done} {messages} done in {result.seconds:.1f} s, lag {left}"
        if result.dead_letters:
            line += f", {counted(result.dead_letters, 'dead letter')} (keylane dlq list {app})"
        if result.parked_lanes:
            line += f", {counted(result.parked_lanes, 'lane')} parked (keylane lanes list {app})"
        if result.hidden:
            line += f"; {counted(result.hidden, 'offset')} in open transactions of other producers"
        say(console, line)
    if result.ended == "failed" and failure is not None:
        say(console, f"error: {failure.line}", "bold red")
        say(console, failure.remedy, "bold red")
    elif result.ended == "stopped" and not result.drained:
        why = "" if failure is None else f" ({failure.line})"
        say(
            console,
            f"not everything was drained{why}. Nothing is lost: messages in flight run again next time",
        )
    if result.stopped_lanes:
        say(
            console,
            f"not everything is done: {counted(result.stopped_lanes, 'lane')} stopped and waiting for an operator. "
            f"See: keylane lanes list {app} --bootstrap {bootstrap}",
            "bold red",
        )


def _files(names: str | None) -> list[Path]:
    found = [Path(name.strip()).resolve() for name in (names or "").split(",") if name.strip()]
    for file in found:
        if file.suffix not in (".py", ".zip", ".egg"):
            raise SettingsError(f"--py-files: expected .py, .zip or .egg files, got {file.name}")
        if not file.is_file():
            raise SettingsError(f"--py-files: file {file} does not exist")
    return found


def _options(pairs: list[str]) -> dict[str, Any]:
    given = {}
    for pair in from_files(pairs):
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise SettingsError(
                f"--option: expected NAME=VALUE, such as startingOffsets=latest, got {pair!r}"
            )
        given[name] = value
    return given
