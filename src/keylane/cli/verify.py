"""`keylane verify`: an audit of an app's ledger."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client, moment
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import Cluster
from keylane.key_text import show_key
from keylane.state.admin import AdminClient
from keylane.topic_names import ledger_topic
from keylane.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.audit.audit import Audit
    from keylane.audit.violation import Violation
    from keylane.kafka.settings import KafkaSettings

_RECORDS_PER_PARTITION = 100_000
_SHUFFLE_PARTITIONS_MIN = 2
"""Every partition of a shuffle is a task: with few records, starting them takes longer than the audit."""


def verify(
    name: App,
    bootstrap: Bootstrap = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only attempts since: 30m, 2h, 7d ago, or a time.")
    ] = None,
    skew: Annotated[
        float, typer.Option(min=0.0, help="Largest clock difference between the app's machines, in seconds.")
    ] = 0.0,
    master: Annotated[str, typer.Option(help="Spark's master; this machine by default.")] = "local[*]",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Prove from the app's ledger that it kept its guarantees, or show where it did not.

    The ledger APP.ledger has a record of every attempt of an app with ledger=Ledger(). The audit looks for attempts of
    one key that overlap, messages that overtook an earlier one of their key, messages that were committed and never
    finished, and results that the same task produced twice. It also counts messages that finished again, and why, and
    keys that stayed with one task.

    Exit codes: 0 sound, 1 violations found, 2 the audit could not run.

    \b
    keylane verify shop
    keylane verify shop --since 2h --json
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    settings = client(bootstrap, option)
    began = None if since is None else int(moment(since, time.time(), "--since") * 1000)
    cluster = Cluster(settings)
    count = cluster.partitions(  # before Spark is started
        ledger_topic(name),
        f"the ledger of app {name!r}, topic",
        remedy="The app writes it with App(…, ledger=Ledger()), from its next start on",
    )
    from keylane.spark.spark_session import session  # noqa: PLC0415 - only now Spark is needed

    clock = time.monotonic()
    records = sum(cluster.ends(ledger_topic(name), range(count)).values())
    shuffled = min(64, max(_SHUFFLE_PARTITIONS_MIN, records // _RECORDS_PER_PARTITION))
    spark = session(master, f"keylane verify {name}", spark_sql_shuffle_partitions=str(shuffled))
    try:
        found = _audit(spark, settings, name, began, skew)
    finally:
        spark.stop()
    if as_json:
        typer.echo(json.dumps(_facts(name, found, time.monotonic() - clock)))
    else:
        _print(name, found, time.monotonic() - clock)
    raise typer.Exit(0 if found.ok else 1)


def _audit(spark: SparkSession, settings: KafkaSettings, name: str, began: int | None, skew: float) -> Audit:
    from keylane.audit.audit import audit, read_ledger  # noqa: PLC0415
    from keylane.spark.topic import register  # noqa: PLC0415

    register(spark)

    def topic(which: str, columns: str, **more: str) -> DataFrame:
        options = {"kafka.bootstrap.servers": settings.bootstrap, "subscribe": which, **more}
        options |= {f"kafka.{option}": value for option, value in settings.extra}
        if began is not None:
            options |= {"startingTimestamp": str(began), "startingOffsetsByTimestampStrategy": "latest"}
        return spark.read.format("keylane.topic").schema(columns).options(**options).load()

    cluster = Cluster(settings)
    planned = _planned_source(settings, name)
    source_id = cluster.identity(planned).source.id if planned else ""

    def ledger(**more: str) -> DataFrame:
        """All records, without those of a former source: it had the same positions. Malformed ones have no topic."""
        found = read_ledger(topic(ledger_topic(name), "key BINARY, value BINARY", **more))
        for column, value in (("topic", planned), ("source_id", source_id)):
            if value:
                found = found.where(found[column].isNull() | (found[column] == value))
        return found

    # A plan names the source. Otherwise, or for a part of the ledger that may be empty, its records are asked.
    first = None if planned and began is None else ledger().select("topic").where("topic > ''").first()
    source = planned if first is None else first.topic
    if not source or (first is None and began is not None):
        when = "" if began is None else " from --since on"
        raise SettingsError(
            f"the ledger {name}.ledger has no records{when}: the app has processed no messages, or ran without "
            "App(…, ledger=Ledger())"
        )
    try:
        count = cluster.partitions(source, "the source, topic")
    except BrokerError:
        typer.echo(f"topic {source!r} does not exist: lost messages cannot be detected", err=True)
        count = 0
    # Read the committed offsets before the ledger: everything committed by then is in it.
    until = {p: offset for p, (offset, _) in cluster.committed(name, source, range(count)).items()}
    return audit(
        spark,
        ledger(**{"kafka.isolation.level": "read_uncommitted"}),
        committed=ledger(),
        source=topic(source, "key BINARY, partition INT, offset BIGINT") if count else None,
        until=until,
        entire_source=began is not None,
        skew=skew,
    )


def _planned_source(settings: KafkaSettings, name: str) -> str:
    """The source of the app's last plan; empty if it is not known."""
    try:
        with AdminClient(settings, name) as operator:
            return operator.source
    except BrokerError:
        return ""


def _facts(name: str, found: Audit, seconds: float) -> dict[str, Any]:
    return {
        "app": name,
        "sound": found.ok,
        "attempts": found.attempts,
        "messages": found.messages,
        "keys": found.keys,
        "owners": found.owners,
        "share": found.share,
        "retried": found.retried,
        "unfinished": found.unfinished,
        "unreadable": found.unreadable,
        "checked_for_loss": found.checked,
        "no_longer_in_source": found.gone,
        "repeats": dict(found.repeats),
        "affinity": round(found.affinity, 6),
        "violations": {flaw.value: count for flaw, count in found.tally.items()},
        "counterexamples": [_shown(violation) for violation in found.violations],
        "seconds": round(seconds, 1),
    }


def _shown(violation: Violation) -> dict[str, Any]:
    return {
        "flaw": violation.flaw.value,
        "detail": violation.detail,
        "key": None if violation.key is None else show_key(violation.key),
        "partition": violation.partition,
        "offset": violation.offset,
        "timeline": str(violation).splitlines()[1:],
    }


def _print(name: str, found: Audit, seconds: float) -> None:
    say = typer.echo
    share = "" if found.share == 1 else f" ({found.share:.3g} of the keys)"
    say(
        f"{name}: {counted(found.attempts, 'attempt')} at {counted(found.messages, 'message')} of "
        f"{counted(found.keys, 'key')}{share}, by {counted(found.owners, 'task')}"
    )
    rows = [
        ("overlapping in a key", "overlap"),
        ("overtaken in a key", "order"),
        ("lost", "lost"),
        ("repeated by one task", "repeat"),
    ]
    for text, flaw in rows:
        count = sum(number for kind, number in found.tally.items() if kind.value == flaw)
        more = f" of {found.checked:,} committed" if flaw == "lost" else ""
        say(f"  {text:<28}{count:>12,}{more}")
    again = sum(found.repeats.values())
    say(f"  {'finished again':<28}{again:>12,}")
    for why, count in sorted(found.repeats.items(), key=lambda pair: -pair[1]):
        say(f"    {why:<26}{count:>12,}")
    say(f"  {'retried':<28}{found.retried:>12,}")
    say(f"  {'started, not finished':<28}{found.unfinished:>12,}")
    say(f"  {'keys with one owner':<28}{found.affinity:>12.1%}")
    if found.unreadable:
        say(f"  {'unreadable, left out':<28}{found.unreadable:>12,}")
    for violation in found.violations:
        say("")
        say(str(violation))
    say("")
    say("no violations found" if found.ok else "NOT SOUND: see the counterexamples above")
    say(f"checked in {seconds:.0f} s, including Spark's start")
