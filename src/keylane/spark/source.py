"""The data source ``keylane``: the planner that cuts epochs into tasks, and the read that runs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from keylane.core.plan import Plan, make_plan
from keylane.core.ring import ALL
from keylane.kafka.cluster import Cluster, patient
from keylane.kafka.settler import Settler
from keylane.kafka.state import State
from keylane.kafka.task import Task, TaskPlan
from keylane.spark.outcomes import DDL, to_arrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from keylane.kafka.settings import KafkaSettings
    from keylane.spark.parcel import Parcel

log = logging.getLogger("keylane.task")

EARLIEST, LATEST = -2, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is the same in every epoch of a run. Travels inside the data source's class."""

    run: str
    app: str
    topic: str
    parcel: Parcel
    settings: KafkaSettings
    starting: str | Mapping[int, int]
    epoch: float
    tasks: int
    split: bool
    """Whether several tasks may share a partition."""
    sink_limit: int
    outcomes: str
    commit: str


class TaskPartition(InputPartition):
    """Spark's unit of work: one task's plan for one epoch."""

    def __init__(self, plan: TaskPlan) -> None:
        super().__init__(plan)
        self.plan = plan


class LaneSource(DataSource):
    """Subclassed for every run, with its plan in it."""

    plan: ClassVar[RunPlan]

    @classmethod
    def name(cls) -> str:
        """As in ``spark.readStream.format("keylane")``."""
        return "keylane"

    def schema(self) -> str:
        """One row per message that is done."""
        return DDL

    def streamReader(self, schema: StructType) -> LaneReader:  # noqa: N802, ARG002 - Spark's names
        """The reader of this run."""
        return LaneReader(self.plan)


class LaneReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner (in a Python process beside the driver) and the tasks (on the executors).

    An offset is an epoch's number and where each partition stood when it began: the fallback for progress that the
    group has lost. Kafka's group is the truth.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._target: dict[int, int] | None = None
        # Made in the planner's process, where they are used; never pickled.
        self._cluster: Cluster | None = None
        self._settler: Settler | None = None

    # The planner.

    @patient
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where the first epoch begins when the group has no progress: ``startingOffsets``, as numbers."""
        plan, cluster = self._plan, self._connect()
        partitions = range(cluster.partitions(plan.topic))
        beginnings = cluster.ends(plan.topic, partitions, earliest=True)
        if plan.starting == "earliest":
            starts = beginnings
        else:
            ends = cluster.ends(plan.topic, partitions)
            chosen = {} if isinstance(plan.starting, str) else plan.starting
            default = LATEST if plan.starting == "latest" else EARLIEST
            named = {EARLIEST: beginnings, LATEST: ends}
            starts = {}
            for p in partitions:
                offset = chosen.get(p, default)
                starts[p] = named[offset][p] if offset in named else offset
        return _offset(0, starts)

    @patient
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember where the source ends now; nothing beyond is read."""
        cluster = self._connect()
        self._target = cluster.ends(self._plan.topic, range(cluster.partitions(self._plan.topic)))

    @patient
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802, ARG002
        """The next epoch; ``start`` again when everything there was is done."""
        self.commit(start)
        cluster = self._connect()
        starts = self._positions(cluster, start)
        if self._target is not None and self._rested(starts, self._target):
            return start
        before = Plan.decode(start["plan"]) if "plan" in start else None
        shared = make_plan(sorted(starts), self._plan.tasks, before=before, split=self._plan.split)
        return _offset(start["epoch"] + 1, starts, shared)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[TaskPartition]:
        """The epoch, cut into at most as many tasks as there are slots."""
        if start == end:
            return []
        self.commit(start)  # an epoch that a crash cut off is planned again without being asked for
        plan = self._plan
        starts = {int(p): offset for p, offset in end["starts"].items()}
        shared = (
            Plan.decode(end["plan"]) if "plan" in end else make_plan(sorted(starts), plan.tasks, split=False)
        )
        return [
            TaskPartition(
                TaskPlan(
                    run=plan.run,
                    epoch=end["epoch"],
                    task=task,
                    settings=plan.settings,
                    starts={one.partition: starts[one.partition] for one in ranges},
                    cuts={one.partition: one.slots for one in ranges if one.slots != ALL},
                    until=None
                    if self._target is None
                    else {r.partition: self._target.get(r.partition, 0) for r in ranges},
                    seconds=plan.epoch,
                    sink_limit=plan.sink_limit,
                    outcomes=plan.outcomes,
                )
            )
            for task, ranges in enumerate(shared.tasks)
        ]

    @patient
    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed this epoch and all before it."""
        plan = self._plan
        if plan.commit == "epoch":
            if self._settler is None:
                self._settler = Settler(plan.settings, plan.app, plan.topic, plan.run)
            self._settler.settle(end["epoch"])

    def _rested(self, starts: Mapping[int, int], target: Mapping[int, int]) -> bool:
        """Whether everything up to the target is done, but what stands in lanes that have stopped."""
        left = [p for p, end in target.items() if starts.get(p, 0) < end]
        if not left:
            return True
        plan = self._plan
        state = State(plan.settings, plan.app, f"{plan.app}.state", left, plan.run)
        try:
            state.restore()
        finally:
            state.close()
        rested = {
            p: [slots for slots, end in state.rests.get(p, {}).items() if end >= target[p]] for p in left
        }
        return not any(ALL.without(slots) for slots in rested.values())

    def _connect(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(self._plan.settings)
        return self._cluster

    def _positions(self, cluster: Cluster, start: dict[str, Any]) -> dict[int, int]:
        """Where each partition stands: the group's offset, else what the last epoch began with, else the beginning."""
        plan = self._plan
        partitions = range(cluster.partitions(plan.topic))
        positions = {int(p): int(offset) for p, offset in start["starts"].items()}
        missing = [p for p in partitions if p not in positions]
        if missing:  # partitions that were added to the topic: everything in them is new
            positions |= cluster.ends(plan.topic, missing, earliest=True)
        committed = cluster.committed(plan.app, plan.topic, partitions)
        return positions | {p: offset for p, (offset, _) in committed.items()}

    # The tasks.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task's epoch."""
        if not isinstance(partition, TaskPartition):
            raise TypeError(f"not a task's plan: {partition!r}")
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO)
        context = TaskContext.get()
        if context is not None and context.attemptNumber():
            log.warning(
                "task %d of epoch %d runs again after a failure (attempt %d): it goes on from the last commit",
                partition.plan.task,
                partition.plan.epoch,
                context.attemptNumber() + 1,
            )
        task = Task(self._plan.parcel.open(), partition.plan)
        results = self._plan.commit == "epoch"
        for deliveries in task.outcomes():
            yield to_arrow(deliveries, task.owner, partition.plan.epoch, results=results)


def _offset(epoch: int, starts: Mapping[int, int], plan: Plan | None = None) -> dict[str, Any]:
    offset: dict[str, Any] = {"epoch": epoch, "starts": {str(p): at for p, at in sorted(starts.items())}}
    return offset if plan is None else offset | {"plan": plan.encode()}
