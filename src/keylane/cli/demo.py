"""``keylane demo``: a broker, a load, an app and a check of the results, on this machine, in a minute."""

from __future__ import annotations

import json as jsonlib
import logging
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from keylane.cli.layout import StatusLine
from keylane.demo.reader import percentile
from keylane.errors import KeylaneError, SettingsError
from keylane.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from keylane.demo.reader import ResultReader
    from keylane.demo.seed import SeedLoad
    from keylane.kafka.settings import KafkaSettings
    from keylane.spark.query import LaneQuery

PARTITIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFacts:
    """Measurements of one demo run."""

    messages: int
    keys: int
    offered_per_second: float
    results: int
    throughput_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    clean_p99_ms: float
    stages_p50_ms: float
    failed_at_first: int
    retries: int
    dead_letters: int
    dead_letters_expected: int
    ordering_violations: int
    duplicates: int
    lost: int
    affinity: float
    tasks: int
    epochs: int

    @property
    def sound(self) -> bool:
        """Whether every guarantee was kept."""
        kept = self.dead_letters == self.dead_letters_expected and self.affinity == 1.0
        return kept and not (self.ordering_violations or self.duplicates or self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Figures that Spark computed."""

    retries: int
    dead: int
    tasks: int
    epochs: int
    affinity: float


def demo(
    messages: Annotated[int, typer.Option(help="Number of chat messages.")] = 20_000,
    keys: Annotated[int, typer.Option(help="Number of chats they belong to.")] = 4_000,
    rate: Annotated[float, typer.Option(help="Messages per second.")] = 1_000.0,
    master: Annotated[str, typer.Option(help="Spark's master.")] = "local[2]",
    epoch: Annotated[
        float, typer.Option(help="Seconds per epoch; try 5 to see lanes move between tasks.")
    ] = 300.0,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="On a broker with TLS, where the app has its documented rights and no others."
        ),
    ] = False,
    web_console: Annotated[
        bool,
        typer.Option("--console", help="Serve the web console, and keep it and the broker until Ctrl-C."),
    ] = False,
    console_port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --console: its port; 0 takes any free one.")
    ] = 8600,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Run thousands of chats through a four-stage pipeline in which one message in ten fails at first.

    Starts a real Kafka broker, sends the load, runs the app on Spark, reads the results back and checks them: order
    inside each chat, losses, duplicates, latency. Stops everything it started. Takes about a minute; the first run
    takes another minute to fetch Kafka's jars.

    \b
    keylane demo
    keylane demo --console
    keylane demo --messages 60000 --rate 2000 --keys 2000
    keylane demo --secure
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if messages < 1 or keys < 1 or rate <= 0:
        raise SettingsError("--messages and --keys must be at least 1, --rate greater than 0")
    console = Console(stderr=True)

    def report(facts: DemoFacts) -> None:
        if json:
            typer.echo(jsonlib.dumps({**asdict(facts), "sound": facts.sound}))
        else:
            _show(Console(), facts)

    port = console_port if web_console else None
    facts = _Demo(console, messages, keys, rate, master, epoch, report, port, secure=secure).run()
    if not facts.sound:
        raise KeylaneError("a guarantee was broken: see the figures above. Please report this")


class _Demo:
    """One run of the demo."""

    def __init__(
        self,
        console: Console,
        messages: int,
        keys: int,
        rate: float,
        master: str,
        epoch: float,
        report: Callable[[DemoFacts], None],
        console_port: int | None,
        *,
        secure: bool,
    ) -> None:
        from keylane.demo.seed import SeedLoad  # noqa: PLC0415 - the Kafka client is not needed for --help

        self._console = console
        self._report = report
        self._console_port = console_port
        self._load: SeedLoad = SeedLoad(
            messages=messages, keys=keys, key_prefix="chat-", value_size=200, seed=1
        )
        self._rate = rate
        self._master = master
        self._epoch = epoch
        self._secure = secure
        self._client: dict[str, str] = {}  # written by run(): the settings of the administrator

    def run(self) -> DemoFacts:
        from keylane.broker import Broker, shown  # noqa: PLC0415
        from keylane.broker.access import ADMIN_USER  # noqa: PLC0415
        from keylane.demo.chat import SINK, SOURCE, app, failures, is_poison, stage_seconds  # noqa: PLC0415
        from keylane.demo.reader import ResultReader  # noqa: PLC0415
        from keylane.kafka.cluster import Cluster  # noqa: PLC0415
        from keylane.kafka.settings import KafkaSettings  # noqa: PLC0415
        from keylane.rights import app_rights  # noqa: PLC0415
        from keylane.spark.spark_session import session  # noqa: PLC0415

        logging.getLogger("keylane").setLevel(logging.ERROR)
        console, load = self._console, self._load
        ids = [f"{load.seed}-{n}" for n in range(load.messages)]
        poison = sum(map(is_poison, ids))
        with ExitStack() as stack:
            console.print("starting Kafka …")
            with shown() as progress:
                broker = stack.enter_context(Broker(progress=progress, secure=self._secure))
            own: dict[str, Any] = {}
            if self._secure:
                rights = app_rights(app.name, SOURCE, [SINK], ledger=False)
                broker.access.add_user(app.name, rights)
                own = {f"kafka.{n}": v for n, v in broker.access.client(app.name).items()}
                self._client = broker.access.client(ADMIN_USER)
                console.print(f"user {app.name!r} has these rights and no others:")
                for right in rights:
                    console.print(f"  {right}", highlight=False)
            console.print(f"Kafka runs at {broker.bootstrap}; starting Spark on {self._master} …")
            settings = KafkaSettings(broker.bootstrap, tuple(self._client.items()))
            if self._console_port is not None:
                self._serve(stack, settings, self._console_port)
            cluster = Cluster(settings)
            for topic in (SOURCE, SINK):
                cluster.ensure(topic, PARTITIONS, {})
            spark = session(self._master, "keylane demo", lanes_only=True)
            stack.callback(spark.stop)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keylane-demo-")))
            query = app.start(
                spark,
                bootstrap=broker.bootstrap,
                epoch=self._epoch,
                format="parquet",
                path=str(folder / "outcomes"),
                checkpoint_location=str(folder / "checkpoint"),
                **own,
            )
            reader = ResultReader(broker.bootstrap, SINK, PARTITIONS, lambda e: failures(e) > 0, self._client)
            reader.start()
            stack.callback(reader.close)
            self._warm_up(query, broker.bootstrap, SOURCE, reader)
            self._offer(broker.bootstrap, SOURCE, reader, query, load.messages - poison)
            console.print("draining …")
            query.stop()
            seen = self._outcomes(spark, folder / "outcomes")
            clean = [stage_seconds(e) * 1000 for e in ids if not failures(e) and not is_poison(e)]
            facts = DemoFacts(
                messages=load.messages,
                keys=load.keys,
                offered_per_second=self._rate,
                results=reader.count,
                throughput_per_second=round(reader.count / max(reader.last - reader.first, 1e-9), 1),
                p50_ms=round(percentile(reader.all_latencies, 0.5), 1),
                p95_ms=round(percentile(reader.all_latencies, 0.95), 1),
                p99_ms=round(percentile(reader.all_latencies, 0.99), 1),
                clean_p99_ms=round(percentile(reader.latencies, 0.99), 1),
                stages_p50_ms=round(percentile(clean, 0.5), 1),
                failed_at_first=sum(1 for e in ids if failures(e)),
                retries=seen.retries,
                dead_letters=seen.dead,
                dead_letters_expected=poison,
                ordering_violations=reader.violations,
                duplicates=reader.duplicates,
                lost=load.messages - poison - reader.count + reader.duplicates,
                affinity=seen.affinity,
                tasks=seen.tasks,
                epochs=seen.epochs,
            )
            self._report(facts)
            if self._console_port is not None:
                self._console.print("the console and the broker are still there; Ctrl-C ends them")
                with suppress(KeyboardInterrupt):
                    while True:
                        time.sleep(3600)
            return facts

    def _serve(self, stack: ExitStack, settings: KafkaSettings, port: int) -> None:
        """Serve the console until the demo ends. It may give commands: everything here is thrown away."""
        from keylane.cli.console import make_server  # noqa: PLC0415 - needs the extra

        def say(line: str) -> None:
            self._console.print(line, soft_wrap=True, highlight=False)

        page = stack.enter_context(make_server(settings, [], say=say, port=port, allow_actions=True))
        say(f"console: {page.link}")

    def _warm_up(self, query: LaneQuery, bootstrap: str, topic: str, reader: ResultReader) -> None:
        """Wait for the app's first results: Spark's start is not part of the measurement."""
        from keylane.demo.seed import SeedLoad, Target, send  # noqa: PLC0415

        send(
            SeedLoad(messages=16, keys=16, key_prefix="warm-", seed=0),
            Target(topic=topic, bootstrap=bootstrap, client=self._client),
        )
        deadline = time.monotonic() + 120
        with StatusLine(self._console, "waiting for the first results …"):
            while reader.count < 16 and query.isActive and time.monotonic() < deadline:
                time.sleep(0.1)
        self._check(query)
        reader.forget()

    def _offer(
        self, bootstrap: str, topic: str, reader: ResultReader, query: LaneQuery, expected: int
    ) -> None:
        """Send the load at its rate and show the results until all have arrived."""
        from keylane.demo.seed import Target, send  # noqa: PLC0415

        target = Target(topic=topic, bootstrap=bootstrap, rate=self._rate, client=self._client)
        failed: list[KeylaneError] = []

        def offer() -> None:
            try:
                send(self._load, target)
            except KeylaneError as error:
                failed.append(error)

        sender = threading.Thread(target=offer, daemon=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        quiet_since = time.monotonic()
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            task = bar.add_task("answers", total=expected)
            sender.start()
            seen = told = 0
            while reader.count < expected and not failed:
                time.sleep(0.1)
                self._check(query)
                if reader.count > seen:
                    seen, quiet_since = reader.count, time.monotonic()
                elif not sender.is_alive() and time.monotonic() - quiet_since > 30:
                    break  # results missing by now are lost; the figures will say so
                bar.update(
                    task,
                    completed=seen,
                    description=f"results · p99 {percentile(reader.all_latencies[-2000:], 0.99):.0f} ms",
                )
                if not self._console.is_terminal and seen - told >= 5000:
                    told = seen
                    self._console.print(f"{seen:,} of {expected:,} results")
        sender.join(10)
        if failed:
            raise failed[0]

    @staticmethod
    def _check(query: LaneQuery) -> None:
        if not query.isActive:
            from keylane.spark.failure_report import cause  # noqa: PLC0415 - not needed for --help

            raise KeylaneError(f"the app ended too early: {cause(query.exception()).line}")

    @staticmethod
    def _outcomes(spark: SparkSession, path: Path) -> Outcomes:
        """Compute retries, dead letters and affinity with Spark SQL from the query's outcome rows."""
        spark.read.parquet(str(path)).where("key LIKE 'chat-%'").createOrReplaceTempView("outcomes")
        total = spark.sql(
            "SELECT sum(attempts - 1) AS retries, count_if(outcome = 'dead') AS dead, "
            "count(DISTINCT owner) AS tasks, count(DISTINCT epoch) AS epochs FROM outcomes"
        ).first()
        owners = spark.sql(
            "SELECT avg(CAST(owners = 1 AS INT)) AS affinity FROM "
            "(SELECT key, epoch, count(DISTINCT owner) AS owners FROM outcomes GROUP BY key, epoch)"
        ).first()
        if total is None or owners is None:
            raise KeylaneError("expected outcome rows from Spark, found none")
        return Outcomes(
            retries=total.retries,
            dead=total.dead,
            tasks=total.tasks,
            epochs=total.epochs,
            affinity=owners.affinity,
        )


def _show(console: Console, facts: DemoFacts) -> None:
    table = Table(
        title=f"{facts.messages:,} messages of {facts.keys:,} chats, {facts.offered_per_second:,.0f}/s sent"
    )
    for column in ("", "measured", "expected", "source"):
        table.add_column(column, justify="right" if column in ("measured", "expected") else "left")
    rows = [
        ("results", f"{facts.results:,}", f"{facts.messages - facts.dead_letters_expected:,}", "read back"),
        ("throughput", f"{facts.throughput_per_second:,.0f}/s", f"{facts.offered_per_second:,.0f}/s", "first to last"),
        ("end to end p50", f"{facts.p50_ms:.0f} ms", f"{facts.stages_p50_ms:.0f} ms in stages", "due to arrival"),
        ("end to end p95", f"{facts.p95_ms:.0f} ms", "", "the same; includes the backoff of retries"),
        ("end to end p99", f"{facts.p99_ms:.0f} ms", "", "the same"),
        ("p99 without failure", f"{facts.clean_p99_ms:.0f} ms", "", "messages that did not fail"),
        ("retries", f"{facts.retries:,}", f"{facts.failed_at_first:,} fail at first", "outcome rows, by Spark SQL"),
        ("dead letters", f"{facts.dead_letters:,}", f"{facts.dead_letters_expected:,}", "the same, and in chat.dlq"),
        ("ordering violations", f"{facts.ordering_violations:,}", "0", "sequence of each chat in chat.out"),
        ("duplicates", f"{facts.duplicates:,}", "0", "the same"),
        ("lost", f"{facts.lost:,}", "0", "sent, not dead, and not in chat.out"),
        ("lane affinity", f"{facts.affinity:.0%}", "100%", "one owner per chat and epoch, Spark SQL"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        "Stages: 5 + 20 + 50 to 80 + 10 ms. Broker, load and Spark shared this machine, and the first seconds, in "
        "which Java warms up, count in all latencies; "
        f"{counted(facts.tasks, 'task')}, {counted(facts.epochs, 'epoch')}. "
        f"{'Every guarantee was kept.' if facts.sound else 'A GUARANTEE WAS BROKEN.'}"
    )
