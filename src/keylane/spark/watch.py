"""Watches, beside the driver, what the planner cannot see: slots that come and go, and partitions that are added.

Spark plans an epoch once. When an executor is lost, its tasks wait until another one has room, which would be at the
end of the epoch; when one is added it has nothing to do until then. So the epoch is ended, and the next one is planned
for what is there.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from keylane.errors import KeylaneError
from keylane.kafka.cluster import Cluster
from keylane.kafka.state import order_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from keylane.spark.source import RunPlan

log = logging.getLogger("keylane.query")

EVERY = 2
"""Seconds between two looks."""


def tasks_for(spark: SparkSession, most: int | None) -> int:
    """How many tasks can run at the same time now, and no more than ``most``."""
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - what Spark itself asks before it starts a barrier stage
    profile = context.resourceProfileManager().defaultResourceProfile()
    slots = max(1, int(context.maxNumConcurrentTasks(profile)))
    return slots if most is None else min(most, slots)


class Watch:
    """Of one query; ends with it."""

    def __init__(self, query: StreamingQuery, spark: SparkSession, plan: RunPlan, most: int | None) -> None:
        self._query = query
        self._spark = spark
        self._plan = plan
        self._most = most
        self._cluster = Cluster(plan.settings)
        self._thread = threading.Thread(target=self._main, name="keylane-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _main(self) -> None:
        plan = self._plan
        told = plan.tasks, plan.there
        missing = number = 0
        try:
            while not self._query.awaitTermination(EVERY):
                try:
                    tasks = 1 if plan.order == "global" else tasks_for(self._spark, self._most)
                    now = tasks, self._cluster.partitions(plan.topic)
                    # An executor that is being replaced is back soon: a loss is believed when it is seen twice.
                    missing = missing + 1 if tasks < told[0] else 0
                    if now != told and missing != 1:
                        log.warning(
                            "app %r: room for %d tasks and %d partitions now (%d and %d before); planned anew",
                            plan.app,
                            *now,
                            *told,
                        )
                        topic = f"{plan.app}.state"
                        state = self._cluster.partitions(topic)
                        number += 1
                        order_plan(plan.settings, topic, state, plan.run, number=number, tasks=tasks)
                        told = now
                except KeylaneError as error:
                    log.info("app %r: what there is cannot be seen now: %s", plan.app, error)
        except (Py4JError, ConnectionError, OSError):
            pass  # Spark has ended, and the query with it
        except Exception as error:
            if self._query.isActive:
                log.warning(
                    "app %r: nobody watches for executors and partitions any more: %s", plan.app, error
                )
