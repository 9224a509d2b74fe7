"""The planner and its tasks in the test's own process, against a real broker, without Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from keylane.kafka.cluster import Cluster
from keylane.offsets.shard import WHOLE
from keylane.spark.packaging import AppPackage
from keylane.spark.source import LaneReader, RunPlan
from keylane.state.ownership import take_over
from keylane.worker.task import Task

if TYPE_CHECKING:
    from keylane import App
    from keylane.engine.delivery import Delivery
    from support.topics import Log


def run_plan(log: Log, app: App, **changes: Any) -> RunPlan:
    """The plan of a new run of this app, as ``app.start`` makes it."""
    topics = Cluster(log.settings).prepare(app.spec)
    run, shard = changes.pop("run", "r1"), changes.get("shard", WHOLE)
    settings: dict[str, Any] = {
        "run": run,
        "since": take_over(
            log.settings,
            app.name,
            app.spec.state,
            topics.partitions,
            run,
            shard,
            commits=app.spec.commit == "epoch",
        ),
        "app": app.name,
        "topic": app.source,
        "package": AppPackage(),
        "settings": log.settings,
        "starting": "earliest",
        "epoch": 20,
        "tasks": 1,
        "there": topics.partitions,
        "source": log.cluster.identity(app.source).source,
        "split": False,
        "sink_limit": topics.sink_limit,
        "sink_stamps": False,
        "outcomes": "all",
        "commit": app.spec.commit,
        "read_committed": False,
    }
    return RunPlan(**settings | changes)


class Planned:
    """Epochs over the backlog, as Spark runs them: plan, run, commit."""

    def __init__(self, log: Log, app: App, **changes: Any) -> None:
        self.app, self.reader = app, LaneReader(run_plan(log, app, **changes))
        self.at = self.reader.initialOffset()
        self.planned = self.at
        self.reader.prepareForTriggerAvailableNow()

    def plan(self) -> bool:
        """Whether there is another epoch to run."""
        self.planned = self.reader.latestOffset(self.at, None)
        return self.planned != self.at

    def attempt(self) -> list[Delivery]:
        """Run the planned epoch, which Spark may throw away."""
        plans = [one.plan for one in self.reader.partitions(self.at, self.planned)]
        with ThreadPoolExecutor(len(plans)) as pool:
            batches = list(pool.map(lambda plan: list(Task(self.app.spec, plan).outcomes()), plans))
        return [done for task in batches for batch in task for done in batch]

    def commit(self) -> None:
        self.at = self.planned
        self.reader.commit(self.at)
