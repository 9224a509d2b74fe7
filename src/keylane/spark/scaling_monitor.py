"""Monitor of executors and partitions: ends the epoch when slots or partitions change.

It also ends the epoch when the source is deleted and created again: tasks would continue at offsets of the old topic.

Spark plans an epoch once. The tasks of a lost executor would wait for free slots until the end of the epoch, and an
added executor would be idle until then. So the monitor ends the epoch, and the next one is planned for what exists.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from keylane.errors import KeylaneError
from keylane.kafka.cluster import Cluster
from keylane.state.topic import order_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from keylane.spark.source import RunPlan

log = logging.getLogger("keylane.query")

CHECK_SECONDS = 2
"""Seconds between two checks."""


def tasks_for(spark: SparkSession, *most: int | None) -> int:
    """Return how many tasks can run at the same time now, at most any of ``most``."""
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - what Spark itself asks before it starts a barrier stage
    profile = context.resourceProfileManager().defaultResourceProfile()
    slots = max(1, int(context.maxNumConcurrentTasks(profile)))
    return min([slots, *(limit for limit in most if limit is not None)])


class ScalingMonitor:
    """Monitor of one query; ends with it."""

    def __init__(self, query: StreamingQuery, spark: SparkSession, plan: RunPlan, most: int | None) -> None:
        self._query = query
        self._spark = spark
        self._plan = plan
        self._most = most
        self._cluster = Cluster(plan.settings)
        self._thread = threading.Thread(target=self._main, name="keylane-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _main(self) -> None:
        plan = self._plan
        told = plan.tasks, plan.there, plan.source
        missing = number = 0
        try:
            while not self._query.awaitTermination(CHECK_SECONDS):
                try:
                    tasks = tasks_for(self._spark, self._most, plan.max_tasks)
                    source = self._cluster.identity(plan.topic).source
                    now = tasks, self._cluster.partitions(plan.topic), source
                    # A replaced executor is back soon: act on a loss only when it is seen twice.
                    missing = missing + 1 if tasks < told[0] else 0
                    if now != told and missing != 1:
                        log.warning(
                            "app %r: replanning for %d slots and %d partitions of topic %s (before: %d, %d, %s)",
                            plan.app,
                            *now,
                            *told,
                        )
                        topic = f"{plan.app}.state"
                        state = self._cluster.partitions(topic)
                        number += 1
                        order_plan(
                            plan.settings,
                            topic,
                            state,
                            plan.run,
                            number=number,
                            tasks=tasks,
                            shard=plan.shard,
                        )
                        told = now
                except KeylaneError as error:
                    log.info("app %r: could not read executor and partition counts: %s", plan.app, error)
        except (Py4JError, ConnectionError, OSError):
            pass  # Spark ended, and the query with it
        except Exception as error:
            if self._query.isActive:
                log.warning("app %r: stopped monitoring executors and partitions: %s", plan.app, error)
