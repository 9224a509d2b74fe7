"""``keylane doctor``: check everything that an app needs, and say how to fix what is wrong."""

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
from keylane.cli.layout import StatusLine, safe
from keylane.doctor import judge, judge_kafka
from keylane.doctor.finding import Finding, Level, counted
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from keylane.doctor.facts import AppFacts

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
            metavar="[APP]",
            help="MODULE:APP, or an app's name. Without it: only this machine and the broker.",
        ),
    ] = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            envvar="KEYLANE_BOOTSTRAP", help="The broker's address, host:port. Or set KEYLANE_BOOTSTRAP."
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="Spark's master: a small job checks its workers.")] = "local[*]",
    spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="Start Spark to check its workers.")
    ] = True,
    source: Annotated[str | None, typer.Option(help="With an app's name: the topic it reads.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="As for 'keylane run'.")] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Check everything that an app needs, and say how to fix what is wrong. Changes nothing.

    Checks Python, Java, Spark and the packages, here and on the workers; the broker, the app's topics and their
    settings, the group, lag against retention, clocks and permissions. Reports what it could not check, and why.

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
        client(bootstrap, option)  # raises with instructions
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
        typer.echo(
            f"\n{counted(len(faults), 'fault')}, {counted(warnings, 'warning')}, {counted(len(findings), 'finding')}"
        )
    raise typer.Exit(1 if faults else 0)


def _examine(
    app: AppFacts | None, bootstrap: str | None, option: list[str] | None, master: str | None, *, show: bool
) -> list[Finding]:
    from keylane.dlq.spool import default_folder, folder_of, foreign  # noqa: PLC0415
    from keylane.doctor.facts import ClusterFacts, SparkFacts  # noqa: PLC0415
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
    cluster = ClusterFacts(bootstrap=bootstrap or "", fault="no broker address was given")
    if bootstrap:
        cluster = probe_cluster(client(bootstrap, option), app)
        tell(judge.judge_cluster(cluster))
        if app is not None and not cluster.fault:
            tell(judge_kafka.judge_topics(app, cluster))
            tell(judge_kafka.judge_progress(app, cluster))
            tell(judge_kafka.judge_rights(app, cluster))
            if cluster.id:
                own = folder_of(app.spool or default_folder(), app.name, cluster.id)
                tell(judge.judge_spool(sorted({path.parent for path in foreign(own)}), own))
    else:
        tell(
            [note("broker", "no broker address was given, so no broker was checked", "--bootstrap host:port")]
        )
    if master is None:
        tell([note("spark", "--no-spark: Spark's workers were not checked")])
        return found
    if java.fault:
        tell([note("spark", "Spark needs Java: its workers were not checked")])
        return found
    with StatusLine(console if show else Console(quiet=True), f"checking the workers of {master} …"):
        spark: SparkFacts = probe_spark(master, list(host.packages))
    tell(judge.judge_spark(spark, host))
    if app is not None:
        tell(judge.judge_slots(app, spark, cluster))
    return found


def _app(reference: str | None, source: str | None, tasks: int | None) -> AppFacts | None:
    from keylane.doctor.facts import AppFacts  # noqa: PLC0415

    if reference is None:
        if source is not None:
            raise SettingsError("--source needs an app's name: keylane doctor APP --source TOPIC")
        return None
    if ":" not in reference:
        return AppFacts(name=reference, source=source, tasks=tasks)
    if source is not None:
        raise SettingsError(
            "--source is only for an app's name: MODULE:APP declares its source. Leave it out"
        )
    sys.path.insert(0, str(Path.cwd()))
    from keylane.spark.packaging import load  # noqa: PLC0415 - takes seconds to import

    app = load(reference)
    app.check()
    return AppFacts(
        name=app.name,
        source=app.source,
        sinks=app.sinks,
        order=app.order,
        ledger=app.ledger is not None,
        states=app.keeps_state,
        spool=app.spool,
        tasks=tasks,
    )


def _print(console: Console, finding: Finding) -> None:
    word, style = _STYLES[finding.level]
    line = Text.assemble((word, style), f"  {finding.check}: {safe(finding.found)}")
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"         → {safe(finding.remedy)}", style="dim"), soft_wrap=True)
