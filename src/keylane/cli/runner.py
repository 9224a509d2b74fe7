"""Runner of an app on Spark in the foreground: starts, watches, restarts and stops it, and reports the result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.cli.console import make_server
from keylane.cli.layout import say
from keylane.cli.progress import RunProgress
from keylane.cli.signals import OVERDUE_EXIT_CODE
from keylane.kafka.cluster import Cluster
from keylane.lanes.lane_record import LaneStatus
from keylane.offsets.shard import WHOLE
from keylane.spark import jvm
from keylane.spark.failure_report import QueryFailure, QueryFailureKind
from keylane.spark.query import dead_letters, start
from keylane.spark.spark_session import session
from keylane.spark.supervisor import supervise
from keylane.state.admin import AdminClient
from keylane.state.ownership import check_still_ours, remember_newest_run
from keylane.telemetry.prometheus import HOST, Exporter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from rich.console import Console

    from keylane.cli.signals import StopSignals
    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.shard import Shard
    from keylane.spark.packaging import AppPackage
    from keylane.spark.query import LaneQuery
    from keylane.spec import AppSpec

_START_SECONDS_MAX = 60.0
"""Seconds that Spark may take to start a query after a stop was requested."""
_DRAIN_GRACE_SECONDS = 5.0
"""Seconds for a drain beyond the app's own: for the stop request, the last commit and Spark's report."""
_END_SECONDS_MAX = 15.0
"""Seconds that Spark may take to end a query after its drain or the drain's time-out."""
_CLOSE_SECONDS_MAX = 30.0
"""Seconds for the rest: the final lag, and stopping Spark."""
_FAILED_TASKS_SECONDS_MAX = 20.0
"""Seconds to wait for tasks of a failed query; then Spark is stopped, and they with it."""
_CODES = {
    QueryFailureKind.AGAIN: 1,
    QueryFailureKind.APP: 1,
    QueryFailureKind.DENIED: 1,
    QueryFailureKind.FAILURE_GUARD: 1,
    QueryFailureKind.TAKEN_OVER: 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The result of a run."""

    ended: str
    """``stopped``, ``caught up`` or ``failed``."""
    seconds: float
    processed: int | None = None
    lag: int | None = None
    hidden: int = 0
    """Offsets of the source in open transactions of other producers."""
    stopped_lanes: int = 0
    parked_lanes: int = 0
    dead_letters: int = 0
    failure: QueryFailure | None = None
    drained: bool = True

    @property
    def code(self) -> int:
        """The exit code."""
        if self.ended == "stopped":
            return 0 if self.drained else OVERDUE_EXIT_CODE
        if self.failure is not None:
            return _CODES[self.failure.kind]
        return 1 if self.stopped_lanes else 0


class Runner:
    """One ``keylane run``. :meth:`run` is the work that the signal guard runs."""

    def __init__(
        self,
        app: AppSpec,
        settings: KafkaSettings,
        package: AppPackage,
        given: dict[str, Any],
        *,
        master: str,
        files: Sequence[Path] = (),
        stopper: StopSignals,
        console: Console,
        metrics_port: int | None = None,
        metrics_host: str = HOST,
        shard: Shard = WHOLE,
        console_port: int | None = None,
        console_actions: bool = False,
    ) -> None:
        self._app = app
        self._settings = settings
        self._package = package
        self._given = given
        self._master = master
        self._files = files
        self._stopper = stopper
        self._console = console
        self._metrics_port, self._metrics_host = metrics_port, metrics_host
        self._console_port, self._console_actions = console_port, console_actions
        self._spark: SparkSession | None = None
        self._shard = shard
        self._progress = RunProgress(
            settings, app, console, until_caught_up=bool(given.get("availableNow")), shard=shard
        )
        self._used = False  # the session: tasks of a failed query may still run in it
        self._drained = True
        self._dead = 0  # dead letters of all queries

    def run(self) -> RunEnd:
        """Run everything, from the first check of the cluster to Spark's end."""
        cluster = Cluster(self._settings)
        cluster.prepare(self._app)  # before Spark: otherwise errors would come half a minute later
        remember_newest_run(cluster, self._app.name, self._app.state, self._shard)
        if self._metrics_port is not None:
            exporter = Exporter(self._settings, self._app.name, self._app.source)
            taken = exporter.serve(self._metrics_port, self._metrics_host)
            exporter.start()
            self._say(f"metrics at http://{self._metrics_host}:{taken}/metrics")
        if self._console_port is not None:
            page = make_server(
                self._settings,
                [self._app.name],
                say=self._say,
                port=self._console_port,
                allow_actions=self._console_actions,
            )
            page.start()  # its threads end with the process
            self._say(f"console: {page.link}")
        self._progress.begin()
        self._spark = self._session()
        began = time.monotonic()
        try:
            failure = supervise(self._start, self._watch, say=self._say, asked=lambda: self._stopper.asked)
            self._stopper.runs(_CLOSE_SECONDS_MAX, always=True)
            return self._result(failure, time.monotonic() - began)
        finally:
            if not jvm.end() and self._spark is not None:
                self._spark.stop()

    def _result(self, failure: QueryFailure | None, seconds: float) -> RunEnd:
        ended = "caught up"
        if failure is not None and (failure.final or not self._stopper.asked):
            ended = "failed"
        elif self._stopper.asked:
            ended = "stopped"
        last = self._progress.end()
        lanes = self._lanes() if ended == "caught up" else []
        return RunEnd(
            ended=ended,
            seconds=seconds,
            processed=None if last is None else last.committed - self._progress.first.committed,
            lag=None if last is None else last.lag,
            hidden=0 if last is None else last.hidden,
            stopped_lanes=lanes.count(LaneStatus.BLOCKED),
            parked_lanes=lanes.count(LaneStatus.PARKED),
            dead_letters=self._dead,
            failure=failure,
            drained=self._drained and failure is None,
        )

    # Called by the supervisor.

    def _start(self) -> LaneQuery:
        spark = self._fit()
        if self._used:
            check_still_ours(
                self._settings, self._app.name, self._app.state, self._shard
            )  # otherwise the two would replace each other endlessly
        self._stopper.runs(_START_SECONDS_MAX)
        app, again, self._used = self._app, " again" if self._used else "", True
        query = start(app, spark, package=self._package, **self._given)
        self._stopper.runs(app.drain_timeout + _DRAIN_GRACE_SECONDS + _END_SECONDS_MAX)
        part = "" if self._shard.whole else f" as shard {self._shard}"
        sink = ", ".join(app.sinks) or (
            "no sink" if app.custom_sink is None else type(app.custom_sink).__name__
        )
        self._say(
            f"app {app.name!r} runs{again}{part}: {app.source} → {sink} at {self._settings.bootstrap}. "
            "Ctrl-C drains it."
        )
        return query

    def _watch(self, query: LaneQuery) -> BaseException | None:
        with self._progress.shown():
            while query.isActive and not self._stopper.asked:
                time.sleep(0.1)
        if self._stopper.asked and query.isActive:
            self._drained = False
            query.stop(self._drain_time(query))
            self._drained = query.drained
        self._dead += dead_letters(query)
        return query.exception()

    def _drain_time(self, query: LaneQuery) -> float:
        seconds = self._app.drain_timeout + _DRAIN_GRACE_SECONDS
        if query.lastProgress is None and self._spark is not None and not jvm.running(self._spark):
            seconds += _START_SECONDS_MAX  # the first tasks are still to start, and only need to see the stop request
            self._stopper.runs(seconds + _END_SECONDS_MAX)
        return seconds

    def _fit(self) -> SparkSession:
        """Return a usable session: alive, and without tasks of the query before."""
        if self._spark is not None and not self._used:
            return self._spark
        self._stopper.nothing_runs()
        if self._spark is not None:
            if jvm.is_alive(self._spark):
                if jvm.await_idle(self._spark, _FAILED_TASKS_SECONDS_MAX):
                    return self._spark
                self._say("tasks of the failed query do not end: restarting Spark")
            jvm.discard(self._spark)
            self._spark = None
        self._spark = self._session()
        return self._spark

    def _session(self) -> SparkSession:
        self._say(f"starting Spark on {self._master} …")
        with jvm.noted():
            spark = session(self._master, f"keylane {self._app.name}", lanes_only=True)
        jvm.silence(spark)
        for file in self._files:
            spark.sparkContext.addPyFile(str(file))
        return spark

    def _say(self, line: str) -> None:
        say(self._console, line)

    def _lanes(self) -> list[LaneStatus]:
        """Return why each stopped lane of the run's partitions has stopped."""
        with AdminClient(self._settings, self._app.name) as operator:
            found = operator.lanes()
        own = set(self._shard.of({record.partition for record in found}))
        return [record.stop for record in found if record.partition in own]
