"""An app on Spark in the foreground: started, watched, started again, stopped, and what came of it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.cli.layout import say
from keylane.cli.progress import Progress
from keylane.cli.stopper import OVERDUE
from keylane.core.record import Stop
from keylane.kafka.claims import check_still_ours
from keylane.kafka.cluster import Cluster
from keylane.kafka.exporter import Exporter
from keylane.kafka.operator import Operator
from keylane.spark import jvm
from keylane.spark.failure import Failure, Kind
from keylane.spark.query import start
from keylane.spark.session import session
from keylane.spark.supervisor import supervise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from rich.console import Console

    from keylane.app import App
    from keylane.cli.stopper import Stopper
    from keylane.kafka.settings import KafkaSettings
    from keylane.spark.parcel import Parcel
    from keylane.spark.query import LaneQuery

_START = 60.0
"""Seconds that Spark may take to start a query once a stop was asked for."""
_DRAIN = 5.0
"""Seconds beyond the app's own for a drain: for the order to stop, the last commit and Spark's report."""
_END = 15.0
"""Seconds that Spark may take to end a query that is drained, or was not in time."""
_CLOSE = 30.0
"""Seconds for everything after that: the last look at the lag, and the end of Spark itself."""
_ZOMBIES = 20.0
"""Seconds to wait for tasks of a query that has failed; then Spark is ended, and they with it."""
_CODES = {Kind.AGAIN: 1, Kind.APP: 1, Kind.FLOOD: 1, Kind.TAKEN_OVER: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run has ended."""

    ended: str
    """``stopped``, ``caught up`` or ``failed``."""
    seconds: float
    processed: int | None = None
    lag: int | None = None
    stopped_lanes: int = 0
    failure: Failure | None = None
    drained: bool = True

    @property
    def code(self) -> int:
        """The exit code."""
        if self.ended == "stopped":
            return 0 if self.drained else OVERDUE
        if self.failure is not None:
            return _CODES[self.failure.kind]
        return 1 if self.stopped_lanes else 0


class Runner:
    """One ``keylane run``. :meth:`run` is the work that the stopper guards."""

    def __init__(
        self,
        app: App,
        settings: KafkaSettings,
        parcel: Parcel,
        given: dict[str, Any],
        *,
        master: str,
        files: Sequence[Path] = (),
        stopper: Stopper,
        console: Console,
        metrics_port: int | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._parcel = parcel
        self._given = given
        self._master = master
        self._files = files
        self._stopper = stopper
        self._console = console
        self._metrics_port = metrics_port
        self._spark: SparkSession | None = None
        self._progress = Progress(settings, app, console)
        self._used = False  # the session: tasks of a query that failed may still be there
        self._drained = True

    def run(self) -> Result:
        """Everything from the first look at the cluster to Spark's end."""
        Cluster(self._settings).prepare(
            self._app
        )  # before Spark is started: its errors would come half a minute later
        if self._metrics_port is not None:
            exporter = Exporter(self._settings, self._app.name, self._app.source)
            taken = exporter.serve(self._metrics_port)
            exporter.start()
            self._say(f"metrics at http://{socket.gethostname()}:{taken}/metrics")
        self._progress.begin()
        self._spark = self._session()
        began = time.monotonic()
        try:
            failure = supervise(self._start, self._watch, say=self._say, asked=lambda: self._stopper.asked)
            self._stopper.runs(_CLOSE, always=True)
            return self._result(failure, time.monotonic() - began)
        finally:
            if not jvm.end() and self._spark is not None:
                self._spark.stop()

    def _result(self, failure: Failure | None, seconds: float) -> Result:
        ended = "caught up"
        if failure is not None and (failure.final or not self._stopper.asked):
            ended = "failed"
        elif self._stopper.asked:
            ended = "stopped"
        last = self._progress.end()
        return Result(
            ended=ended,
            seconds=seconds,
            processed=None if last is None else last.committed - self._progress.first.committed,
            lag=None if last is None else last.lag,
            stopped_lanes=self._stopped_lanes()
            if ended == "caught up" and last is not None and last.lag
            else 0,
            failure=failure,
            drained=self._drained and failure is None,
        )

    # Called by the supervisor.

    def _start(self) -> LaneQuery:
        spark = self._fit()
        if self._used:
            check_still_ours(
                self._settings, self._app.name, self._app.state
            )  # or the two would take turns for ever
        self._stopper.runs(_START)
        app, again, self._used = self._app, " again" if self._used else "", True
        query = start(app, spark, parcel=self._parcel, **self._given)
        self._stopper.runs(app.drain_timeout + _DRAIN + _END)
        self._say(
            f"app {app.name!r} runs{again}: {app.source} → {app.sink or 'no sink'} at {self._settings.bootstrap}. "
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
        return query.exception()

    def _drain_time(self, query: LaneQuery) -> float:
        seconds = self._app.drain_timeout + _DRAIN
        if query.lastProgress is None and self._spark is not None and not jvm.running(self._spark):
            seconds += _START  # the first tasks are still to come, and need not do anything but see the order
            self._stopper.runs(seconds + _END)
        return seconds

    def _fit(self) -> SparkSession:
        """A session that is fit for a query: it lives, and no task of the query before runs any more."""
        if self._spark is not None and not self._used:
            return self._spark
        self._stopper.nothing_runs()
        if self._spark is not None:
            if jvm.is_alive(self._spark):
                if jvm.await_idle(self._spark, _ZOMBIES):
                    return self._spark
                self._say("tasks of the query that failed do not end: Spark is ended with them")
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

    def _stopped_lanes(self) -> int:
        with Operator(self._settings, self._app.name) as operator:
            return sum(record.stop is Stop.BLOCKED for record in operator.lanes())
