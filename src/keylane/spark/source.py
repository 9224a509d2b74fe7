"""The data source ``keylane``: the planner that cuts epochs into tasks, and the read that runs them."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark import SparkFiles, TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from keylane import logs
from keylane.core.murmur2 import partition_of
from keylane.core.plan import Plan, make_plan
from keylane.core.ring import ALL
from keylane.errors import SettingsError
from keylane.kafka.cluster import Cluster, patient
from keylane.kafka.seat import seated
from keylane.kafka.settler import Settler
from keylane.kafka.state import PLAN, State
from keylane.kafka.task import Task, TaskPlan
from keylane.spark.outcomes import DDL, to_arrow
from keylane.spark.places import choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from confluent_kafka import Producer
    from pyspark.sql.types import StructType

    from keylane.app import App
    from keylane.core.plan import Load
    from keylane.kafka.settings import KafkaSettings
    from keylane.spark.parcel import Parcel

log = logging.getLogger("keylane.task")

EARLIEST, LATEST = -2, -1
_ENOUGH = 1000
"""Messages that an epoch must have seen for its load to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is the same in every epoch of a run. Travels inside the data source's class."""

    run: str
    since: Mapping[int, int]
    """Where the state topic says that the app is this run's, by partition."""
    app: str
    topic: str
    parcel: Parcel
    settings: KafkaSettings
    starting: str | Mapping[int, int]
    epoch: float
    tasks: int
    there: int
    """Partitions that the topic had when the run began."""
    order: str
    split: bool
    """Whether several tasks may share a partition."""
    sink_limit: int
    sink_stamps: bool
    outcomes: str
    commit: str
    local: bool = False
    """Whether all tasks are on one machine, and share Spark's folder there."""
    log_format: str = "text"


class TaskPartition(InputPartition):
    """Spark's unit of work: one task's plan for one epoch.

    ``among``: the plans of all tasks, when this one may change its own for another.
    """

    def __init__(self, plan: TaskPlan, among: Sequence[TaskPlan] = ()) -> None:
        super().__init__(plan)
        self.plan = plan
        self.among = among


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
        self._tasks = plan.tasks
        # Made in the planner's process, where they are used; never pickled.
        self._cluster: Cluster | None = None
        self._settler: Settler | None = None
        self._producer: Producer | None = None
        self._view: State | None = None
        self._viewed: list[int] = []
        self._starts: dict[int, int] = {}  # of the last epoch that was planned
        self._ends: dict[int, int] = {}  # of the source, when it was planned

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
        plan, cluster = self._plan, self._connect()
        known = cluster.topics()
        there = cluster.partitions(plan.topic, among=known)
        adopted = min(there, cluster.partitions(f"{plan.app}.state", among=known))
        partitions = range(adopted)
        state = self._state(partitions)
        until = None
        if adopted < there:
            moving = self._in_the_way(cluster, state, start, there)
            if moving is None:  # nothing of the old layout is left to be done
                for own in ("dlq", "ledger", "state"):  # the last one says that the others are ready
                    if f"{plan.app}.{own}" in known:
                        cluster.ensure(f"{plan.app}.{own}", there, {})
                log.warning("%s: the %d new partitions are read from now on", plan.topic, there - adopted)
                partitions = range(there)
                state = self._state(partitions)
            elif not moving:
                until = cluster.ends(plan.topic, partitions)
            elif self._target is not None:
                raise SettingsError(f"{_grown(plan.topic, adopted, there)}, and {moving}")
            else:
                log.warning("%s, and %s", _grown(plan.topic, adopted, there), moving)
        starts = self._starts = self._positions(cluster, start, partitions)
        if self._target is not None:
            if self._rested(state, starts, self._target):
                return start
            until = (
                {p: min(self._target.get(p, 0), end) for p, end in until.items()} if until else self._target
            )
        self._tasks = int(state.wanted.get("tasks", plan.tasks))
        shared = self._share_out(state, start, partitions)
        offset = _offset(start["epoch"] + 1, starts) | {"plan": shared.encode(), "of": there}
        offset["order"] = int(state.wanted.get("number", 0))
        if until is not None:
            offset["until"] = {str(p): until.get(p, 0) for p in partitions}
        self._tell(offset)
        return offset

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """For the query's progress: where the source ended when the epoch began, and how far the app was behind."""
        return {
            "ends": {str(p): end for p, end in sorted(self._ends.items())},
            "lag": sum(max(0, end - self._starts.get(p, end)) for p, end in self._ends.items()),
        }

    def _in_the_way(self, cluster: Cluster, state: State, start: dict[str, Any], there: int) -> str | None:
        """What keeps new partitions from being read: a key that is in one of them now was in another one before.

        None when nothing does. Empty when an epoch has to run up to where the old ones end now.
        """
        plan = self._plan
        until = {int(p): int(end) for p, end in start.get("until", {}).items()}
        partitions = sorted(self._viewed)
        if sorted(until) != partitions:
            return ""
        found = cluster.committed(plan.app, plan.topic, partitions)
        at = {p: offset for p, (offset, _) in found.items()}
        if not self._rested(state, {p: at.get(p, 0) for p in partitions}, until):
            return ""
        stopped = [
            record
            for record in state.lanes.values()
            if record.key is not None and partition_of(record.key, there) != record.partition
        ]
        if not stopped or plan.order != "key":
            return None
        names = ", ".join(repr(record.key) for record in stopped[:5])
        return (
            f"{len(stopped)} stopped lanes have their key there now ({names}): release, skip or redrive them, see "
            f"'keylane lanes list {plan.app}'. Until then the new partitions are not read"
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[TaskPartition]:
        """The epoch, cut into at most as many tasks as there are slots."""
        if start == end:
            return []
        self.commit(start)  # an epoch that a crash cut off is planned again without being asked for
        plan = self._plan
        starts = {int(p): offset for p, offset in end["starts"].items()}
        until = self._target
        if "until" in end:
            until = {int(p): offset for p, offset in end["until"].items()}
        shared, now = Plan.decode(end["plan"]), time.time()
        # An epoch that was cut off may be planned again where there is less room; tasks that wait for others would
        # wait until the end of the epoch.
        if len(shared.tasks) > self._tasks:
            shared = make_plan(sorted(starts), self._tasks, before=shared, split=plan.split)
        plans = [
            TaskPlan(
                run=plan.run,
                since=plan.since,
                epoch=end["epoch"],
                task=task,
                settings=plan.settings,
                starts={one.partition: starts[one.partition] for one in ranges},
                cuts={one.partition: one.slots for one in ranges if one.slots != ALL},
                until=None
                if until is None
                else {one.partition: until.get(one.partition, 0) for one in ranges},
                seconds=plan.epoch,
                planned=now,
                sink_limit=plan.sink_limit,
                sink_stamps=plan.sink_stamps,
                outcomes=plan.outcomes,
                partitions=end["of"],
                order=end["order"],
            )
            for task, ranges in enumerate(shared.tasks)
        ]
        return [TaskPartition(one, plans if plan.local and len(plans) > 1 else ()) for one in plans]

    @patient
    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed this epoch and all before it."""
        plan = self._plan
        if plan.commit == "epoch":
            if self._settler is None:
                self._settler = Settler(plan.settings, plan.app, plan.topic, plan.run, plan.since)
            self._settler.settle(end["epoch"])

    def _share_out(self, state: State, start: dict[str, Any], partitions: Sequence[int]) -> Plan:
        """The next epoch's plan, by the last one and the load that its tasks saw."""
        before = Plan.decode(start["plan"]) if "plan" in start else None
        loads: dict[int, Load] = {}
        for partition, found in state.loads.items():
            seen = [load for epoch, load in found.values() if epoch == start["epoch"]]
            if seen and partition in partitions:
                loads[partition] = tuple(map(sum, zip(*seen, strict=True)))
        if sum(map(sum, loads.values())) < _ENOUGH:  # of a few messages nothing can be told
            loads = {}
        return make_plan(partitions, self._tasks, loads=loads, before=before, split=self._plan.split)

    def _state(self, partitions: Sequence[int]) -> State:
        """The state topic as it is now, and where the source ends. The planner keeps its view of it."""
        plan = self._plan
        topic = f"{plan.app}.state"
        ends = self._connect().all_ends([plan.topic, topic], partitions)
        self._ends = ends[plan.topic]
        if self._view is None or list(partitions) != self._viewed:
            if self._view is not None:
                self._view.close()
            self._view = State(
                plan.settings, plan.app, topic, partitions, plan.run, since=plan.since, rests=True
            )
            self._viewed = list(partitions)
            self._view.restore()
        else:
            self._view.catch_up(ends[topic])
        self._view.rest()
        return self._view

    def _tell(self, offset: dict[str, Any]) -> None:
        """Write the plan down, for people who ask for it."""
        plan = self._plan
        if self._producer is None:
            self._producer = plan.settings.producer()
        value = {"run": plan.run, "epoch": offset["epoch"], "at": time.time(), "tasks": offset["plan"]}
        value["source"] = plan.topic
        self._producer.produce(f"{plan.app}.state", json.dumps(value).encode(), PLAN, partition=0)
        self._producer.poll(0)

    @staticmethod
    def _rested(state: State, starts: Mapping[int, int], target: Mapping[int, int]) -> bool:
        """Whether everything up to the target is done, but what stands in lanes that have stopped."""
        for partition, end in target.items():
            if starts.get(partition, 0) < end:
                rests = state.rests.get(partition, {})
                if ALL.without(slots for slots, until in rests.items() if until >= end):
                    return False
        return True

    def _connect(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(self._plan.settings)
        return self._cluster

    def _positions(
        self, cluster: Cluster, start: dict[str, Any], partitions: Sequence[int]
    ) -> dict[int, int]:
        """Where each partition stands: the group's offset, else what the last epoch began with, else the beginning."""
        plan = self._plan
        positions = {int(p): int(at) for p, at in start["starts"].items() if int(p) in partitions}
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
        logs.set_up(_level(), self._plan.log_format)
        app = self._plan.parcel.open()
        plan = _chosen(app, partition)
        context = TaskContext.get()
        if context is not None and context.attemptNumber():
            log.warning(
                "task %d of epoch %d runs again after a failure (attempt %d): it goes on from the last commit",
                plan.task,
                plan.epoch,
                context.attemptNumber() + 1,
            )
        task = Task(app, plan)
        results = self._plan.commit == "epoch"
        for deliveries in task.outcomes():
            yield to_arrow(deliveries, task.owner, plan.epoch, results=results, hot=task.hot)


def _chosen(app: App, partition: TaskPartition) -> TaskPlan:
    """The plan of this task: the one with the partitions that its worker knows, if it may choose."""
    own, among = partition.plan, partition.among
    if not among:
        return own
    known = seated(own.settings, app, own.partitions)
    wanted = [plan.task for plan in among if sorted(plan.starts) == known]
    folder = Path(SparkFiles.getRootDirectory())
    return among[choose(folder, own.run, own.planned, own.task, len(among), wanted)]


def _level() -> int:
    """What a task logs at the least, by the environment's ``KEYLANE_LOG``: INFO unless that names another level."""
    return logging.getLevelNamesMapping().get(os.environ.get("KEYLANE_LOG", "").upper(), logging.INFO)


def _offset(epoch: int, starts: Mapping[int, int]) -> dict[str, Any]:
    return {"epoch": epoch, "starts": {str(p): offset for p, offset in sorted(starts.items())}}


def _grown(topic: str, before: int, now: int) -> str:
    return f"topic {topic!r} has {now} partitions and had {before}"
