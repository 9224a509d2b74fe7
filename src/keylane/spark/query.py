"""Starting an app on Spark, and stopping it so that nothing is left half done."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.query import StreamingQuery

from keylane.errors import KeylaneError, SettingsError
from keylane.kafka.claims import take_over
from keylane.kafka.cluster import Cluster
from keylane.kafka.state import order_stop
from keylane.spark.listener import observed
from keylane.spark.options import Options
from keylane.spark.parcel import Parcel, pack
from keylane.spark.session import refuse_speculation, use_this_python, with_retries
from keylane.spark.source import LaneSource, RunPlan
from keylane.spark.watch import Watch, tasks_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.app import App

log = logging.getLogger("keylane.query")


class LaneQuery(StreamingQuery):
    """A ``StreamingQuery`` of an app. :meth:`stop` drains first."""

    def __init__(self, query: StreamingQuery, app: App, plan: RunPlan) -> None:
        super().__init__(query._jsq)  # noqa: SLF001 - the one way to extend Spark's own object
        self._app = app
        self._plan = plan
        self.drained = False
        """Whether :meth:`stop` has seen every task drain. Written by who calls it."""

    def stop(self, timeout: float | None = None) -> None:
        """Stop fetching, finish what is running, commit, and end the query.

        Returns when all that has happened, or after ``timeout`` seconds (the app's ``drain_timeout`` and a few more):
        then the query is ended as it is, and what was not done runs again next time.
        """
        if self.isActive:
            try:
                self.drained = self._drain(self._app.drain_timeout + 15 if timeout is None else timeout)
            except KeylaneError as error:
                log.warning("stopping without a drain: %s", error)
        super().stop()

    def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        partitions = Cluster(self._plan.settings).partitions(self._app.state)  # it may have grown
        order_stop(self._plan.settings, self._app.state, partitions, self._plan.run)
        # The epoch that was running when the order was written is the next to be reported or the one after it (when
        # its predecessor's report was still on its way). Epochs that begin after the order end at once.
        last = self._batch() + 2
        while self.isActive and self._batch() < last:
            if time.monotonic() > deadline:
                log.warning("app %r was not drained within %g s", self._app.name, timeout)
                return False
            time.sleep(0.05)
        return self.exception() is None

    def _batch(self) -> int:
        progress = self.lastProgress
        return -1 if progress is None else int(progress["batchId"])


def start(app: App, spark: SparkSession, *, parcel: Parcel | None = None, **given: Any) -> LaneQuery:
    """See :meth:`keylane.App.start`."""
    if app.commit == "epoch":
        if given.get("outcomes", "all") != "all":
            raise SettingsError("commit='epoch' needs outcomes='all': the results are among them")
        if "checkpointLocation" not in given:
            raise SettingsError(
                "commit='epoch' needs checkpointLocation: it says which epochs Spark has committed to its sink"
            )
        given = {"outcomes": "all", **given}
    options, plan = _plan(app, spark, parcel, given)
    writer = (
        observed(_read(spark, plan)).writeStream.format(options.format).queryName(options.name or app.name)
    )
    if options.path:
        writer = writer.option("path", options.path)
    if options.checkpoint:
        writer = writer.option("checkpointLocation", options.checkpoint)
    if options.available_now:
        writer = writer.trigger(availableNow=True)
    query = LaneQuery(writer.start(), app, plan)
    if not options.available_now:
        Watch(query, spark, plan, options.tasks).start()
    return query


def outcomes(app: App, spark: SparkSession, *, parcel: Parcel | None = None, **given: Any) -> DataFrame:
    """See :meth:`keylane.App.outcomes`."""
    for name in ("checkpointLocation", "queryName", "availableNow", "format", "path"):
        if name in given:
            raise SettingsError(f"option {name!r} belongs to the writeStream that you start yourself")
    return _read(spark, _plan(app, spark, parcel, {"outcomes": "all", **given})[1])


def _plan(
    app: App, spark: SparkSession, parcel: Parcel | None, given: dict[str, Any]
) -> tuple[Options, RunPlan]:
    app.check()
    options = Options.parse(given, app.source)
    refuse_speculation(spark)
    use_this_python(spark)
    cluster = Cluster(options.settings)
    topics = cluster.prepare(app)
    run = uuid.uuid4().hex
    since = take_over(options.settings, app.name, app.state, topics.partitions, run)
    plan = RunPlan(
        run=run,
        since=since,
        app=app.name,
        topic=app.source,
        parcel=parcel or pack(app),
        settings=options.settings,
        starting=options.starting,
        epoch=options.epoch,
        tasks=1 if app.order == "global" else tasks_for(spark, options.tasks),
        there=cluster.partitions(app.source),
        order=app.order,
        split=app.order in ("key", "none") and app.commit == "live",
        sink_limit=topics.sink_limit,
        sink_stamps=topics.sink_stamps,
        outcomes=options.outcomes,
        commit=app.commit,
        local=with_retries(spark.sparkContext.master or "") is not None,
        log_format=options.log_format,
    )
    return options, plan


def _read(spark: SparkSession, plan: RunPlan) -> DataFrame:
    spark.dataSource.register(type("LaneSource", (LaneSource,), {"plan": plan}))
    return spark.readStream.format("keylane").load()
