"""``keylane doctor``: whether everything is there that an app needs, and what to do where it is not."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from keylane.cli.arguments import Json, Options, client
from keylane.doctor import judge, judge_kafka
from keylane.doctor.finding import Finding, Level
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from keylane.doctor.facts import App

_STYLES = {
    Level.OK: ("ok     ", "green"),
    Level.NOTE: ("note   ", "cyan"),
    Level.WARNING: ("WARNING", "yellow"),
    Level.FAULT: ("FAULT  ", "bold red"),
    Level.UNKNOWN: ("unknown", "magenta"),
}


def doctor(
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="[APP]", help="MODULE:APP, or the name of an app; nothing: this machine and the broker."
        ),
    ] = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            envvar="KEYLANE_BOOTSTRAP", help="The broker's address, host:port. Or set KEYLANE_BOOTSTRAP."
        ),
    ] = None,
    master: Annotated[
        str, typer.Option(help="Spark's master: a small job asks its workers what they have.")
    ] = "local[*]",
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Whether to start Spark at all.")] = True,
    source: Annotated[str | None, typer.Option(help="With the name of an app: the topic it reads.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="As for 'keylane run'.")] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Look at everything that an app needs, and say what to do where something is wrong. Changes nothing.

    Python, Java, Spark and the packages, here and on the workers; the broker, the app's topics and their settings, the
    group, the lag against the retention, clocks, rights. What could not be looked at is said, with the reason.

    \b
    Exit codes:
      0  no fault (there may be warnings)
      1  at least one fault
      2  wrong usage, or an app that does not import

    \b
    keylane doctor
    keylane doctor shop.orders:app --bootstrap localhost:9092
    keylane doctor shop --source orders --no-spark --json
    keylane doctor shop.orders:app --master spark://host:7077
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    app = _app(reference, source, tasks)
    if app is not None and not bootstrap:
        client(bootstrap, option)  # raises, and says what to do
    findings = list(_examine(app, bootstrap, option, master if spark else None, show=not as_json))
    faults = [one for one in findings if one.level is Level.FAULT]
    if as_json:
        typer.echo(
            json.dumps(
                {"sound": not faults, "faults": len(faults), "findings": [asdict(one) for one in findings]}
            )
        )
    else:
        warnings = sum(one.level is Level.WARNING for one in findings)
        typer.echo(f"\n{len(faults)} faults, {warnings} warnings, {len(findings)} findings")
    raise typer.Exit(1 if faults else 0)


def _examine(
    app: App | None, bootstrap: str | None, option: list[str] | None, master: str | None, *, show: bool
) -> list[Finding]:
    from keylane.doctor.facts import Cluster, Spark  # noqa: PLC0415
    from keylane.doctor.finding import note  # noqa: PLC0415
    from keylane.doctor.probe_host import bounds, probe_host, probe_spark  # noqa: PLC0415
    from keylane.doctor.probe_kafka import probe_cluster  # noqa: PLC0415 - takes a moment to import

    console = Console(highlight=False)
    found: list[Finding] = []

    def tell(findings: object) -> None:
        for finding in findings:  # type: ignore[attr-defined]
            found.append(finding)
            if show:
                _print(console, finding)

    needed = bounds()
    host, java = probe_host(needed)
    tell(judge.judge_host(host, java, needed))
    cluster = Cluster(bootstrap=bootstrap or "", fault="no broker was named")
    if bootstrap:
        cluster = probe_cluster(client(bootstrap, option), app)
        tell(judge.judge_cluster(cluster))
        if app is not None and not cluster.fault:
            tell(judge_kafka.judge_topics(app, cluster))
            tell(judge_kafka.judge_progress(app, cluster))
            tell(judge_kafka.judge_rights(app, cluster))
    else:
        tell([note("broker", "no broker was named, so none was looked at", "--bootstrap host:port")])
    if master is None:
        tell([note("spark", "Spark was not started, as asked: its workers were not looked at")])
        return found
    if java.fault:
        tell([note("spark", "without Java there is no Spark: its workers were not looked at")])
        return found
    with console.status(f"asking the workers of {master} …") if show else Console(quiet=True).status(""):
        spark: Spark = probe_spark(master, list(host.packages))
    tell(judge.judge_spark(spark, host))
    if app is not None:
        tell(judge.judge_slots(app, spark, cluster))
    return found


def _app(reference: str | None, source: str | None, tasks: int | None) -> App | None:
    from keylane.doctor.facts import App  # noqa: PLC0415

    if reference is None:
        if source is not None:
            raise SettingsError("--source needs the name of an app: keylane doctor APP --source TOPIC")
        return None
    if ":" not in reference:
        return App(name=reference, source=source, tasks=tasks)
    if source is not None:
        raise SettingsError("--source: the app names its source itself; leave it out")
    sys.path.insert(0, str(Path.cwd()))
    from keylane.spark.parcel import load  # noqa: PLC0415 - takes seconds to import

    app = load(reference)
    app.check()
    return App(
        name=app.name,
        source=app.source,
        sink=app.sink,
        order=app.order,
        ledger=app.ledger is not None,
        tasks=tasks,
    )


def _print(console: Console, finding: Finding) -> None:
    word, style = _STYLES[finding.level]
    line = Text.assemble((word, style), f"  {finding.check}: {finding.found}")
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"         → {finding.remedy}", style="dim"), soft_wrap=True)
