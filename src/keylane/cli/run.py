"""``keylane run``: an app in the foreground until it is told to stop."""

from __future__ import annotations

import json as jsonlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keylane.errors import KafkaError, SettingsError

if TYPE_CHECKING:
    from keylane.kafka.lag import Lag, LagMeter
    from keylane.kafka.settings import KafkaSettings
    from keylane.spark.query import LaneQuery

_EVERY = 10.0
"""Seconds between two lines of progress when the output is no terminal."""


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
            help="Process what is in the source now, then exit: with 0, or with 1 if lanes have stopped.",
        ),
    ] = False,
    tasks: Annotated[
        int | None, typer.Option(help="At most so many tasks; as many as Spark has slots.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Spark's checkpoint folder; a temporary one if not given.")
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
    after the app, so the next run goes on where this one ended.

    \b
    keylane run shop.orders:app --bootstrap localhost:9092
    keylane run shop.orders:app --until-caught-up --json
    keylane run shop.orders:app --master 'local[4]' -o startingOffsets=latest
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    given = _options(option or [])
    given |= {"epoch": epoch, "availableNow": until_caught_up}
    given |= {
        k: v
        for k, v in {"bootstrap": bootstrap, "tasks": tasks, "checkpointLocation": checkpoint}.items()
        if v
    }
    folder = str(Path.cwd())
    sys.path.insert(0, folder)

    from keylane.kafka.cluster import Cluster  # noqa: PLC0415 - the rest takes seconds to import; bad usage is told first
    from keylane.kafka.lag import LagMeter  # noqa: PLC0415
    from keylane.spark.options import Options  # noqa: PLC0415
    from keylane.spark.parcel import Parcel, load  # noqa: PLC0415

    app = load(reference)
    app.check()
    settings = Options.parse(given, app.source).settings
    Cluster(settings).prepare(app)  # before Spark is started: its errors would come half a minute later

    stop = _Stop()
    from keylane.spark.query import start  # noqa: PLC0415
    from keylane.spark.session import session  # noqa: PLC0415

    console = Console(stderr=True)
    with console.status(f"starting Spark on {master} …"):
        spark = session(master, f"keylane {app.name}")
        stop.install()  # again: Spark has put its own handler in place
        query = start(app, spark, parcel=Parcel(reference=reference, path=(folder,)), **given)
    console.print(
        f"app {app.name!r} runs: {app.source} → {app.sink or 'no sink'} at {settings.bootstrap}. Ctrl-C drains it."
    )
    meter = LagMeter(settings, app.name, app.source)
    began, first = time.monotonic(), meter.read()
    try:
        _watch(query, meter, stop, console, first, began)
        ended = "failed" if query.exception() else "stopped" if stop.asked else "caught up"
        if stop.asked and query.isActive:
            console.print("draining …")
            query.stop()
        last = meter.read()
        stopped = _stopped(settings, app.name) if ended == "caught up" and last.lag else 0
    finally:
        failure = query.exception()
        spark.stop()
    seconds = time.monotonic() - began
    if json:
        result = {
            "app": app.name,
            "ended": ended,
            "processed": last.committed - first.committed,
            "lag": last.lag,
            "stopped_lanes": stopped,
            "seconds": round(seconds, 3),
            "error": None if failure is None else explain(failure),
        }
        typer.echo(jsonlib.dumps(result))
    elif failure is None:
        console.print(
            f"{ended}: {last.committed - first.committed:,} messages done in {seconds:.1f} s, lag {last.lag:,}"
        )
    if stopped:
        console.print(
            f"not everything is done: {stopped:,} lanes have stopped and wait for an operator. "
            f"See: keylane lanes list {app.name} --bootstrap {settings.bootstrap}",
            style="bold red",
        )
        raise typer.Exit(1)
    if failure is not None:
        console.print(f"error: {explain(failure)}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1)


class _Stop:
    """SIGTERM and Ctrl-C ask for a drain; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.install()

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            print("stopped at once; what was running runs again next time", file=sys.stderr)  # noqa: T201
            os._exit(128 + number)
        self.asked = True


def _watch(
    query: LaneQuery, meter: LagMeter, stop: _Stop, console: Console, first: Lag, began: float
) -> None:
    """Wait for the query's end or the order to stop, and say how far it is."""
    shown, before, at = time.monotonic(), first, began
    with console.status("waiting for messages …") as status:
        while query.isActive and not stop.asked:
            time.sleep(0.2)
            now = time.monotonic()
            if now - shown < (1.0 if console.is_terminal else _EVERY):
                continue
            shown = now
            try:
                lag = meter.read()
            except KafkaError as error:
                status.update(f"{error}")
                continue
            rate = (lag.committed - before.committed) / (now - at)
            line = f"{lag.committed - first.committed:,} done, {rate:,.0f}/s, lag {lag.lag:,}"
            before, at = lag, now
            if console.is_terminal:
                status.update(line)
            else:
                console.print(line)


def _stopped(settings: KafkaSettings, app: str) -> int:
    from keylane.core.record import Stop  # noqa: PLC0415 - needed at the end only
    from keylane.kafka.operator import Operator  # noqa: PLC0415

    with Operator(settings, app) as operator:
        return sum(record.stop is Stop.BLOCKED for record in operator.lanes())


def _options(pairs: list[str]) -> dict[str, Any]:
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise SettingsError(f"--option {pair!r}: needs NAME=VALUE, for example startingOffsets=latest")
        given[name] = value
    return given


def explain(failure: Any) -> str:
    """The one sentence that matters in Spark's report of a failed query: our own error when it is in there."""
    lines = [line.strip() for line in str(failure).splitlines()]
    for line in reversed(lines):
        name, colon, rest = line.partition(": ")
        if colon and name.startswith("keylane.errors."):
            return rest
    for line in reversed(lines):
        name, colon, _ = line.partition(": ")
        if (
            colon
            and name.replace(".", "").replace("_", "").isalnum()
            and name.endswith(("Error", "Exception"))
        ):
            return line
    return lines[0] if lines else "the query failed"
