"""An app's figures where Spark shows its own: in the progress of the query, and per epoch to whoever listens.

A Python data source has no metrics of its own in Spark's progress (4.3: its stream takes no ``ReportsSourceMetrics``).
What there is: ``sources[0].latestOffset`` with the source's ends and the lag when the epoch began, and
``observedMetrics["keylane"]`` with counts over the outcome rows. The rest comes from the app's telemetry.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's custom
from pyspark.sql.streaming.listener import StreamingQueryListener

from keylane.core.telemetry import Histogram
from keylane.core.totals import Totals
from keylane.errors import KafkaError, SettingsError
from keylane.kafka.lag import LagMeter
from keylane.kafka.settings import given_settings
from keylane.kafka.telemetry_log import TelemetryLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from keylane.core.telemetry import Snapshot

log = logging.getLogger("keylane.query")

OBSERVED = "keylane"
_LAST_WORDS = 3.0
"""Seconds to wait for what the tasks of an epoch said last."""


def observed(outcomes: DataFrame) -> DataFrame:
    """The outcome rows, counted as they pass: ``observedMetrics["keylane"]`` of the query's progress."""

    def is_(outcome: str) -> Any:
        return F.count_if(F.col("outcome") == outcome).alias(outcome)

    return outcomes.observe(
        OBSERVED,
        F.count(F.lit(1)).alias("rows"),
        is_("ok"),
        is_("dead"),
        is_("parked"),
        is_("duplicate"),
        F.count_if(F.col("attempts") > 1).alias("retried"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """One epoch that is over. Of an app without telemetry, or whose tasks did not speak in time, less is known."""

    app: str
    epoch: int
    tasks: int
    """That were planned; ``told`` of them have said how they ended."""
    told: int
    processed: int
    dead: int
    parked: int
    duplicates: int
    retries: int
    lag: int | None
    """When this was put together, a moment after the end; None when the broker did not answer."""
    latency: Histogram
    """Seconds from a message's timestamp until it was done."""


class EpochListener(StreamingQueryListener):
    """Tells what came of every epoch of an app: ``spark.streams.addListener(EpochListener("shop", "orders", …))``.

    ``tell`` is called with the :class:`EpochFigures`, in a thread of its own; without it they are a line in the log.
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
            raise SettingsError(f"EpochListener(tell={tell!r}): needs a function that takes EpochFigures")
        self._app = app
        self._source = source
        self._settings = given_settings(
            bootstrap, options, known=("tell", "bootstrap"), what="EpochListener(…)"
        )
        self._tell = tell or _say
        self._epochs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="keylane-epochs", daemon=True)
        self._thread.start()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Nothing is known so far."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """An epoch is over. What is to be found out about it is left to the thread: Spark waits for this call."""
        for source in event.progress.sources:
            try:
                end = json.loads(source.endOffset)
                self._epochs.put((int(end["epoch"]), len(end["plan"])))
            except (ValueError, KeyError, TypeError):
                continue  # another source

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing happened."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Its epochs were told."""

    def _follow(self) -> None:
        totals = Totals(since=0.0)
        records = TelemetryLog(self._settings, self._app)
        while True:
            epoch, tasks = self._epochs.get()
            try:
                self._tell(self._figures(records, totals, epoch, tasks))
            except Exception:  # a listener must not end because of one epoch
                log.exception("app %r: epoch %d could not be told", self._app, epoch)

    def _figures(self, records: TelemetryLog, totals: Totals, epoch: int, tasks: int) -> EpochFigures:
        last: list[Snapshot] = []
        deadline = time.monotonic() + _LAST_WORDS
        while time.monotonic() < deadline:
            try:
                totals.take(records.read(0.1))
            except KafkaError:
                time.sleep(0.5)
            run = max(totals.of_epoch(epoch), key=lambda one: one.began, default=None)
            last = [one for one in totals.of_epoch(epoch) if run and one.run == run.run and one.final]
            if len(last) >= tasks:
                break
        lag = None
        try:
            lag = LagMeter(self._settings, self._app, self._source).read().lag
        except KafkaError as error:
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
            dead=sum(one.dead for one in last),
            parked=sum(one.parked for one in last),
            duplicates=sum(one.duplicates for one in last),
            retries=sum(one.retries for one in last),
            lag=lag,
            latency=latency,
        )


def _say(figures: EpochFigures) -> None:
    log.info(
        "app %r, epoch %d: %d processed, %d dead, %d retries, lag %s, %d of %d tasks have told",
        figures.app,
        figures.epoch,
        figures.processed,
        figures.dead,
        figures.retries,
        "unknown" if figures.lag is None else figures.lag,
        figures.told,
        figures.tasks,
    )
