"""``keylane run``: an app in the foreground until it is told to stop."""

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
from keylane.cli.layout import JsonConsole, say
from keylane.cli.stopper import AbandonedError, Stopper, last_resort, leave
from keylane.core.redact import redact
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from keylane.app import Order
    from keylane.cli.runner import Result


def run(
    reference: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the app is, e.g. shop.orders:app")
    ],
    bootstrap: Annotated[
        str | None,
        typer.Option(
            help="The broker's address, host:port. Or set KEYLANE_BOOTSTRAP.", envvar="KEYLANE_BOOTSTRAP"
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="Spark's master: local[N] or spark://host:7077.")] = "local[*]",
    epoch: Annotated[
        float, typer.Option(help="Seconds until an epoch ends, drains and is planned anew.")
    ] = 300.0,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="Process what is in the source now, then exit.",
        ),
    ] = False,
    tasks: Annotated[
        int | None, typer.Option(help="At most so many tasks; as many as Spark has slots.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Instead of the app's own: key, partition, global or none. 'partition' is the sequential baseline."
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
        str | None, typer.Option(help="Spark's checkpoint folder; a temporary one if not given.")
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(metavar="text|json", help="How the driver and the tasks write their logs, to stderr."),
    ] = "text",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve metrics for Prometheus at this port: see 'keylane metrics'."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="A further option, e.g. -o kafka.security.protocol=SSL",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the end result as one JSON object.")] = False,
) -> None:
    """Run an app until Ctrl-C or SIGTERM, which drain it: what is running is finished and committed first.

    The module is looked for in the current folder and in the installed packages. Progress goes to the Kafka group named
    after the app, so the next run goes on where this one ended. A query that fails is started again, unless the failure
    is the app's own or another run has taken over. A second signal ends it now, without the drain.

    \b
    Exit codes:
      0  stopped, or caught up
      1  not everything is done: lanes have stopped, or the app's own failure ended it
      2  nothing was begun: wrong usage, an app that does not import, no broker, no Spark
      3  another run of the app has taken over
      4  stopped, but not everything was drained; it runs again next time
      130, 143  ended by a second signal

    \b
    keylane run shop.orders:app --bootstrap localhost:9092
    keylane run shop.orders:app --until-caught-up --json
    keylane run shop.orders:app --master 'local[4]' -o startingOffsets=latest
    keylane run shop.orders:app --master spark://host:7077 --py-files shop.zip
    keylane run shop.orders:app --order partition --until-caught-up
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    stopper = Stopper(lambda line: say(console, line))
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
        given["logFormat"] = log_format
        if log_format not in logs.FORMATS:
            raise SettingsError(f"--log-format {log_format}: needs text or json")
        logs.set_up(logging.WARNING, log_format)
        folder = str(Path.cwd())
        shipped = _files(py_files)
        sys.path[:0] = [folder, *(str(file if file.suffix != ".py" else file.parent) for file in shipped)]

        from keylane.spark.options import Options  # noqa: PLC0415 - takes seconds to import; bad usage is told first
        from keylane.spark.parcel import Parcel, load  # noqa: PLC0415

        app = load(reference)
        if order is not None:
            app = app.with_order(cast("Order", order))
        app.check()
        name = app.name
        settings = Options.parse(given, app.source).settings

        from keylane.cli.runner import Runner  # noqa: PLC0415

        parcel = Parcel(reference=reference, path=(folder,), order=None if order is None else app.order)
        runner = Runner(
            app,
            settings,
            parcel,
            given,
            master=master,
            files=shipped,
            stopper=stopper,
            console=console,
            metrics_port=metrics_port,
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
            "error": None if result.failure is None else redact(result.failure.line),
        }
        _echo(name, facts, result.seconds)
    _conclude(console, app.name, settings.bootstrap, result, quiet=json)
    raise typer.Exit(result.code)


def _echo(app: str | None, facts: dict[str, Any], seconds: float) -> None:
    known = {"processed": None, "lag": None, "stopped_lanes": 0, "error": None}
    typer.echo(jsonlib.dumps({"app": app, **known, **facts, "seconds": round(seconds, 3)}))


def _conclude(console: Console, app: str, bootstrap: str, result: Result, *, quiet: bool) -> None:
    """The last words: what was done, what was not, and what the user can do about it."""
    failure = result.failure
    if failure is None and not quiet:
        done = "an unknown number of" if result.processed is None else f"{result.processed:,}"
        left = "unknown" if result.lag is None else f"{result.lag:,}"
        say(console, f"{result.ended}: {done} messages done in {result.seconds:.1f} s, lag {left}")
    if result.ended == "failed" and failure is not None:
        say(console, f"error: {failure.line}", "bold red")
        say(console, failure.remedy, "bold red")
    elif result.ended == "stopped" and not result.drained:
        why = "" if failure is None else f" ({failure.line})"
        say(
            console,
            f"not everything was drained{why}. Nothing is lost: what was running runs again next time",
        )
    if result.stopped_lanes:
        say(
            console,
            f"not everything is done: {result.stopped_lanes:,} lanes have stopped and wait for an operator. "
            f"See: keylane lanes list {app} --bootstrap {bootstrap}",
            "bold red",
        )


def _files(names: str | None) -> list[Path]:
    found = [Path(name.strip()).resolve() for name in (names or "").split(",") if name.strip()]
    for file in found:
        if file.suffix not in (".py", ".zip", ".egg"):
            raise SettingsError(f"--py-files {file.name}: needs .py, .zip or .egg files")
        if not file.is_file():
            raise SettingsError(f"--py-files: there is no file {file}")
    return found


def _options(pairs: list[str]) -> dict[str, Any]:
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise SettingsError(f"--option {pair!r}: needs NAME=VALUE, for example startingOffsets=latest")
        given[name] = value
    return given
