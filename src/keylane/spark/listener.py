"""An app's figures in Spark's query progress, and per epoch for listeners.

A Python data source cannot add metrics to Spark's progress (4.3: its stream takes no ``ReportsSourceMetrics``).
Available are ``sources[0].latestOffset``, with the source's end offsets and the lag at the start of the epoch, and
``observedMetrics["keylane"]``, with counts over the outcome rows. The rest comes from the app's telemetry.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's custom
from pyspark.sql.streaming.listener import StreamingQueryListener

from keylane.errors import BrokerError, SettingsError
from keylane.histogram import Histogram
from keylane.kafka.settings import settings_from_options
from keylane.outcome import Outcome
from keylane.telemetry.aggregate import Totals
from keylane.telemetry.lag import LagMeter
from keylane.telemetry.reader import TelemetryLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from keylane.telemetry.snapshot import Snapshot

log = logging.getLogger("keylane.query")

OBSERVED = "keylane"
_LAST_TELEMETRY_SECONDS = 3.0
"""Seconds to wait for the final telemetry of an epoch's tasks."""


def observed(outcomes: DataFrame) -> DataFrame:
    """Counts over the outcome rows: ``observedMetrics["keylane"]`` of the query's progress."""

    def is_(outcome: str) -> Any:
        return F.count_if(F.col("outcome") == outcome).alias(outcome)

    return outcomes.observe(
        OBSERVED,
        F.count(F.lit(1)).alias("rows"),
        *(is_(outcome.value) for outcome in Outcome),
        F.count_if(F.col("attempts") > 1).alias("retried"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """Figures of a finished epoch; incomplete without telemetry, or if tasks did not report in time."""

    app: str
    epoch: int
    tasks: int
    """Planned tasks; ``told`` of them reported their end."""
    told: int
    processed: int
    outcomes: Counter[Outcome]
    """How those that were processed ended."""
    retries: int
    lag: int | None
    """When these figures were collected, just after the end; None if the broker did not answer."""
    latency: Histogram
    """Seconds from a message's timestamp until it was done."""


class EpochListener(StreamingQueryListener):
    """Listener for the figures of every epoch: ``spark.streams.addListener(EpochListener("shop", "orders", …))``.

    ``tell`` is called with the :class:`EpochFigures` in a separate thread; without it they are logged.
    ``kafka.*`` options as for :meth:`keylane.App.start`. Raises :class:`SettingsError` without a broker's address.
    """

    def __init__(
        self,
        app: str,
        source: str,
        *,
        tell: Callable[[EpochFigures], None] | None = None,
        bootstrap: str | None = None,
        **options: Any,
    ) -> None:
        if tell is not None and not callable(tell):
            raise SettingsError(f"tell must be a function that takes EpochFigures, got {tell!r}")
        self._app = app
        self._source = source
        self._settings = settings_from_options(
            bootstrap, options, known=("tell", "bootstrap"), what="EpochListener(…)"
        )
        self._tell = tell or _say
        self._epochs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="keylane-epochs", daemon=True)
        self._thread.start()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Queue the finished epoch for the thread: Spark waits for this call."""
        for source in event.progress.sources:
            try:
                end = json.loads(source.endOffset)
                self._epochs.put((int(end["epoch"]), len(end["plan"])))
            except (ValueError, KeyError, TypeError):
                continue  # another source

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Do nothing: its epochs were reported."""

    def _follow(self) -> None:
        totals = Totals(since=0.0)
        records = TelemetryLog(self._settings, self._app)
        while True:
            epoch, tasks = self._epochs.get()
            try:
                self._tell(self._figures(records, totals, epoch, tasks))
            except Exception:  # one epoch must not end the listener
                log.exception("app %r: could not report epoch %d", self._app, epoch)

    def _meter(self) -> LagMeter:
        committed = self._settings.reads_committed("")
        return LagMeter(self._settings, self._app, self._source, committed=committed)

    def _figures(self, records: TelemetryLog, totals: Totals, epoch: int, tasks: int) -> EpochFigures:
        last: list[Snapshot] = []
        deadline = time.monotonic() + _LAST_TELEMETRY_SECONDS
        while time.monotonic() < deadline:
            try:
                totals.take(records.read(0.1))
            except BrokerError:
                time.sleep(0.5)
            run = max(totals.of_epoch(epoch), key=lambda one: one.began, default=None)
            last = [one for one in totals.of_epoch(epoch) if run and one.run == run.run and one.final]
            if len(last) >= tasks:
                break
        lag = None
        try:
            lag = self._meter().read().lag
        except BrokerError as error:
            log.warning("app %r: %s", self._app, error)
        latency = Histogram()
        for one in last:
            latency = latency.plus(one.latency)
        return EpochFigures(
            app=self._app,
            epoch=epoch,
            tasks=tasks,
            told=len(last),
            processed=sum(one.done for one in last),
            outcomes=sum((one.outcomes for one in last), Counter[Outcome]()),
            retries=sum(one.retries for one in last),
            lag=lag,
            latency=latency,
        )


def _say(figures: EpochFigures) -> None:
    log.info(
        "app %r, epoch %d: %d processed (%s), %d retries, lag %s, %d of %d tasks reported",
        figures.app,
        figures.epoch,
        figures.processed,
        ", ".join(f"{figures.outcomes[one]} {one.value}" for one in Outcome if figures.outcomes[one])
        or "none",
        figures.retries,
        "unknown" if figures.lag is None else figures.lag,
        figures.told,
        figures.tasks,
    )
