"""Starting an app on Spark, and stopping it with a drain."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.sql.streaming.query import StreamingQuery

from keylane.errors import KeylaneError, SettingsError
from keylane.kafka.cluster import Cluster
from keylane.spark.listener import OBSERVED, observed
from keylane.spark.options import Options
from keylane.spark.packaging import AppPackage, pack
from keylane.spark.scaling_monitor import ScalingMonitor, tasks_for
from keylane.spark.source import LaneSource, RunPlan
from keylane.spark.spark_session import refuse_speculation, use_this_python
from keylane.state.ownership import take_over
from keylane.state.topic import order_stop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.spec import AppSpec

log = logging.getLogger("keylane.query")


class LaneQuery(StreamingQuery):
    """A ``StreamingQuery`` of an app. :meth:`stop` drains first."""

    def __init__(self, query: StreamingQuery, app: AppSpec, plan: RunPlan) -> None:
        super().__init__(query._jsq)  # noqa: SLF001 - the one way to extend Spark's own object
        self._app = app
        self._plan = plan
        self.drained = False
        """Whether :meth:`stop` saw every task drain. Written by its caller."""

    def stop(self, timeout: float | None = None) -> None:
        """Stop fetching, finish messages in flight, commit, and end the query.

        Returns when this is done, or after ``timeout`` seconds (the app's ``drain_timeout`` and a few more): then the
        query is ended as it is, and unfinished messages run again next time.
        """
        if self.isActive:
            try:
                self.drained = self._drain(self._app.drain_timeout + 15 if timeout is None else timeout)
            except KeylaneError as error:
                log.warning("stopping without a drain: %s", error)
        super().stop()

    def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        partitions = Cluster(self._plan.settings).partitions(self._app.state)  # the topic may have grown
        order_stop(self._plan.settings, self._app.state, partitions, self._plan.run, shard=self._plan.shard)
        # The epoch that ran when the stop request was written is reported next, or the one after it if the report of
        # its predecessor was still on its way. Epochs that start after the request end at once.
        last = self._batch() + 2
        while self.isActive and self._batch() < last:
            if time.monotonic() > deadline:
                log.warning("app %r did not drain within %g s", self._app.name, timeout)
                return False
            time.sleep(0.05)
        return self.exception() is None

    def _batch(self) -> int:
        progress = self.lastProgress
        return -1 if progress is None else int(progress["batchId"])


def dead_letters(query: StreamingQuery) -> int:
    """Count dead letters, parked ones too, in the epochs that Spark remembers (the last 100)."""
    try:
        metrics = [progress["observedMetrics"].get(OBSERVED) for progress in query.recentProgress]
    except (Py4JError, ConnectionError):  # Spark died
        return 0
    return sum(int(row["dead"] or 0) + int(row["parked"] or 0) for row in metrics if row)


def start(app: AppSpec, spark: SparkSession, *, package: AppPackage | None = None, **given: Any) -> LaneQuery:
    """See :meth:`keylane.App.start`."""
    if app.commit == "epoch":
        if given.get("outcomes", "all") != "all":
            raise SettingsError("commit='epoch' needs outcomes='all': the results are among them")
        if "checkpointLocation" not in given:
            raise SettingsError(
                "commit='epoch' needs checkpointLocation: it records which epochs Spark committed to its sink"
            )
        given = {"outcomes": "all", **given}
    options, plan = _plan(app, spark, package, given)
    default = app.name if plan.shard.whole else f"{app.name} {plan.shard}"
    writer = (
        observed(_read(spark, plan)).writeStream.format(options.format).queryName(options.name or default)
    )
    if options.path:
        writer = writer.option("path", options.path)
    if options.checkpoint:
        own = "" if plan.shard.whole else f"/shard-{plan.shard.number}-of-{plan.shard.count}"
        writer = writer.option("checkpointLocation", str(options.checkpoint).rstrip("/") + own)
    if options.available_now:
        writer = writer.trigger(availableNow=True)
    query = LaneQuery(writer.start(), app, plan)
    if not options.available_now:
        ScalingMonitor(query, spark, plan, options.tasks).start()
    return query


def outcomes(
    app: AppSpec, spark: SparkSession, *, package: AppPackage | None = None, **given: Any
) -> DataFrame:
    """See :meth:`keylane.App.outcomes`."""
    for name in ("checkpointLocation", "queryName", "availableNow", "format", "path"):
        if name in given:
            raise SettingsError(
                f"option {name!r} is not valid here: set it on the writeStream that you start yourself"
            )
    return _read(spark, _plan(app, spark, package, {"outcomes": "all", **given})[1])


def _plan(
    app: AppSpec, spark: SparkSession, package: AppPackage | None, given: dict[str, Any]
) -> tuple[Options, RunPlan]:
    app.check()
    options = Options.parse(given, app.source)
    shard = options.shard
    if not shard.whole and app.order.max_tasks is not None:
        raise SettingsError(
            f"order={app.order.name!r} has lanes over all partitions, so app {app.name!r} cannot run in shards: leave "
            f"out shard={shard}"
        )
    refuse_speculation(spark)
    use_this_python(spark)
    cluster = Cluster(options.settings)
    topics = cluster.prepare(app)
    run = uuid.uuid4().hex
    if not shard.of(range(topics.partitions)):
        raise SettingsError(
            f"shard {shard} has no partition: app {app.name!r} reads {topics.partitions} partitions of topic "
            f"{app.source!r}. Take at most that many shards"
        )
    since = take_over(
        options.settings, app.name, app.state, topics.partitions, run, shard, commits=app.commit == "epoch"
    )
    plan = RunPlan(
        run=run,
        since=since,
        app=app.name,
        topic=app.source,
        package=package or pack(app),
        settings=options.settings,
        starting=options.starting,
        epoch=options.epoch,
        tasks=tasks_for(spark, options.tasks, app.order.max_tasks),
        there=cluster.partitions(app.source),
        source=cluster.identity(app.source).source,
        max_tasks=app.order.max_tasks,
        moves_ranges=app.moves_ranges,
        by_key=app.order.by_key,
        split=app.order.splittable and app.commit == "live",
        sink_limit=topics.sink_limit,
        sink_stamps=topics.sink_stamps,
        outcomes=options.outcomes,
        commit=app.commit,
        read_committed=options.settings.reads_committed(app.delivery),
        keep_alive=options.keep_alive if app.commit == "live" and not options.available_now else 0.0,
        log_format=options.log_format,
        shard=shard,
    )
    return options, plan


def _read(spark: SparkSession, plan: RunPlan) -> DataFrame:
    spark.dataSource.register(type("LaneSource", (LaneSource,), {"plan": plan}))
    return spark.readStream.format("keylane").load()
