"""The data source ``keylane``: the planner that divides epochs into tasks, and the reader that runs them."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from keylane import logs
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster, wait_for_cluster
from keylane.offsets.assignment import Assignment, make_plan
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.shard import WHOLE, Shard
from keylane.offsets.slots import ALL
from keylane.spark.outcomes import DDL, to_arrow
from keylane.state.labels import Labels
from keylane.state.topic import FORMER, PLAN, StateTopic
from keylane.worker.epoch_commit import EpochCommitter
from keylane.worker.epoch_plan import EpochPlan, homes
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from keylane.kafka.client import Producer
    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.assignment import Load
    from keylane.offsets.identity import AppIdentity, TopicIdentity
    from keylane.spark.packaging import AppPackage

log = logging.getLogger("keylane.task")

EARLIEST, LATEST = -2, -1
_REUSES_WORKERS = "SPARK_REUSE_WORKER"
"""What Spark sets in the environment of Python workers that run more than one task."""
GROWTH_EPOCH_SECONDS = 2.0
"""Length of the epochs while added partitions wait for the old ones: then the next one is planned."""
_LOAD_MESSAGES_MIN = 1000
"""Fewest messages of an epoch for its load to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Settings that are the same in every epoch of a run. Shipped inside the data source's class."""

    run: str
    since: Mapping[int, int]
    """Where the state topic says that the app is this run's, by partition."""
    app: str
    topic: str
    package: AppPackage
    settings: KafkaSettings
    starting: str | Mapping[int, int]
    epoch: float
    tasks: int
    there: int
    """Partitions that the topic had when the run began."""
    source: TopicIdentity
    """The topic, when the run began."""
    split: bool
    """Whether several tasks may share a partition."""
    sink_limit: int
    sink_stamps: bool
    outcomes: str
    commit: str
    max_tasks: int | None = None
    """How many tasks the app's order allows."""
    by_key: bool = True
    """Whether the app's lanes are keys."""
    read_committed: bool = True
    """Whether tasks see committed messages only: then a partition ends where its first open transaction begins."""
    keep_alive: float = 0.0
    """Seconds that lanes keep running without a Spark task; 0: every epoch ends with a drain."""
    moves_ranges: bool = True
    """Whether a worker takes and releases ranges while its other ranges run."""
    log_format: str = "text"
    shard: Shard = WHOLE
    """The share of the partitions that the run processes."""

    def own(self, partitions: int) -> list[int]:
        """The run's partitions of so many."""
        return self.shard.of(range(partitions))


class TaskPartition(InputPartition):
    """Spark's unit of work: one task's plan for one epoch.

    ``shared``: the encoded :class:`EpochPlan`, when the task may take another's plan.
    """

    def __init__(self, plan: TaskPlan, shared: bytes | None = None) -> None:
        super().__init__(plan)
        self.plan = plan
        self.shared = shared


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

    An offset is an epoch's number, where each partition stood when it began, and of which topic: the fallback for
    progress that the group has lost. Kafka's group is the truth. A source that was deleted and created again is read
    from its start.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._target: dict[int, int] | None = None
        self._hidden: dict[int, int] = {}  # where transactions end that were open when the target was taken
        self._tasks = plan.tasks
        # Made in the planner's process, where they are used; never pickled.
        self._cluster: Cluster | None = None
        self._epoch_committer: EpochCommitter | None = None
        self._producer: Producer | None = None
        self._warned_of_moves = False
        self._told = False  # whether a plan of this run is in the state topic
        self._view: StateTopic | None = None
        self._viewed: list[int] = []
        self._former: tuple[int, ...] = ()  # as in the state topic, for a shard without partition 0
        self._labels: Labels = Labels(None)
        self._starts: dict[int, int] = {}  # of the last epoch that was planned
        self._ends: dict[int, int] = {}  # of the source, when it was planned

    # The planner.

    @wait_for_cluster
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where the first epoch begins when the group has no progress: ``startingOffsets``, as numbers."""
        plan, cluster = self._plan, self._connect()
        partitions = plan.own(cluster.partitions(plan.topic))
        beginnings = cluster.ends(plan.topic, partitions, earliest=True)
        if plan.starting == "earliest":
            starts = beginnings
        else:
            ends = self._visible_ends(partitions)
            chosen = {} if isinstance(plan.starting, str) else plan.starting
            default = LATEST if plan.starting == "latest" else EARLIEST
            named = {EARLIEST: beginnings, LATEST: ends}
            starts = {}
            for p in partitions:
                offset = chosen.get(p, default)
                starts[p] = named[offset][p] if offset in named else offset
        return _offset(0, starts, self._identity())

    @wait_for_cluster
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember where the source ends now for its reader; nothing beyond is read."""
        cluster, topic = self._connect(), self._plan.topic
        partitions = self._plan.own(cluster.partitions(topic))
        self._target = self._visible_ends(partitions)
        ends = cluster.ends(topic, partitions)
        self._hidden = {p: end for p, end in ends.items() if end > self._target[p]}

    @wait_for_cluster
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802, ARG002
        """The next epoch; ``start`` again when everything there was is done, and no operator's command waits."""
        self.commit(start)
        plan, cluster = self._plan, self._connect()
        identity, given = self._identity(), start
        if self._is_other(start, identity):
            start = self._start_over(start)
        known = cluster.topics()
        there = cluster.partitions(plan.topic, known=known)
        adopted = min(there, cluster.partitions(f"{plan.app}.state", known=known))
        partitions = plan.own(adopted)
        state = self._state(partitions, identity)
        until: Mapping[int, int] | None = None
        former = set(state.former if 0 in partitions else self._former)
        grown = GrownSource.decode(start, partitions)
        if grown is not None:  # a second growth comes after this one
            there = min(there, grown.count)
        switch: GrownSource | None = None
        if adopted < there and not plan.shard.whole:
            self._leave_new_partitions(adopted, there)
        elif adopted < there:
            self._warn_of_moves(adopted, there)
            moving = self._in_the_way(cluster, state, start, there, identity)
            if moving is None:  # nothing of the old layout is left to be done
                former.add(adopted)
                self._note_former(former)
                for own in (
                    "dlq",
                    "ledger",
                    "lane-state",
                    "state",
                ):  # the last one says that the others are ready
                    if f"{plan.app}.{own}" in known:
                        cluster.ensure(f"{plan.app}.{own}", there, {})
                log.warning("topic %s: reading %d new partitions from now on", plan.topic, there - adopted)
                adopted, partitions = there, plan.own(there)
                state = self._state(partitions, identity)
            elif not moving:
                # The high watermark: a message in an open transaction is older than those in the new partitions.
                ends = cluster.ends(plan.topic, partitions)
                if self._needs_drain(state, adopted, there):
                    until = ends
                else:
                    switch = grown or GrownSource(there, ends)
            elif self._target is not None:
                raise SettingsError(f"{_grown(plan.topic, adopted, there)}, and {moving}")
            else:
                log.warning("%s, and %s", _grown(plan.topic, adopted, there), moving)
        starts = self._starts = self._positions(cluster, start, partitions, identity)
        if self._target is not None:
            if self._rested(state, starts, self._target) and not state.commands:
                return given  # an operator's command is carried out also when there is nothing to read
            until = (
                {p: min(self._target.get(p, 0), end) for p, end in until.items()} if until else self._target
            )
        self._tasks = int(state.wanted.get("tasks", plan.tasks))
        shared = self._share_out(state, start, partitions)
        offset = _offset(start["epoch"] + 1, starts, identity) | {
            "plan": shared.encode(),
            "of": adopted,
        }
        offset["replan"] = int(state.wanted.get("number", 0))
        offset["former"] = sorted(former)
        if until is not None:
            offset["until"] = {str(p): until.get(p, 0) for p in partitions}
        if switch is not None:
            offset |= switch.encode()
        self._tell(offset)
        return offset

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """For the query's progress: where the source ended when the epoch began, and how far the app was behind."""
        return {
            "ends": {str(p): end for p, end in sorted(self._ends.items())},
            "lag": sum(max(0, end - self._starts.get(p, end)) for p, end in self._ends.items()),
        }

    def _leave_new_partitions(self, before: int, there: int) -> None:
        """A shard does not read new partitions: it does not know how far the other shards are.

        Says so once. Raises SettingsError for a backlog, which would otherwise end as if everything were done.
        """
        plan = self._plan
        grown, app = _grown(plan.topic, before, there), plan.app
        remedy = (
            f"shards do not read new partitions. Stop all shards of app {app!r}, run the app without a shard until it "
            "says that it reads them, and start the shards again"
        )
        if self._target is not None:
            raise SettingsError(f"{grown}, and {remedy}")
        if not self._warned_of_moves:
            self._warned_of_moves = True
            log.warning("%s: %s", grown, remedy)

    def _warn_of_moves(self, before: int, there: int) -> None:
        """Say once that the order of keys that move between partitions which are read already is not known."""
        if self._plan.by_key and there % before and not self._warned_of_moves:
            self._warned_of_moves = True
            log.warning(
                "%s: %d is not a multiple of %d, so keys also move between partitions that are read already. What was "
                "not done when partitions were added may run beside newer messages of its key",
                _grown(self._plan.topic, before, there),
                there,
                before,
            )

    @staticmethod
    def _is_other(offset: dict[str, Any], identity: AppIdentity) -> bool:
        """Whether the offset is about another topic than the source as it is now."""
        return bool(offset.get("source") != str(identity.source))

    def _start_over(self, offset: dict[str, Any]) -> dict[str, Any]:
        """This offset of a topic that is no more, for the one that is there now: from its start, and up to its end."""
        plan, cluster = self._plan, self._connect()
        partitions = plan.own(cluster.partitions(plan.topic))
        log.warning(
            "reading source from its start topic=%s: it is not the topic that epoch %d was planned for (%s)",
            plan.topic,
            offset["epoch"],
            offset.get("source", "unknown"),
        )
        if self._target is not None:
            self._target = self._visible_ends(partitions)
        starts = cluster.ends(plan.topic, partitions, earliest=True)
        return {"epoch": offset["epoch"], "starts": {str(p): at for p, at in starts.items()}}

    def _in_the_way(
        self, cluster: Cluster, state: StateTopic, start: dict[str, Any], there: int, identity: AppIdentity
    ) -> str | None:
        """What keeps new partitions from being read: a key that is in one of them now was in another one before.

        None when nothing does. Empty when an epoch has to run up to where the old ones end now.
        """
        plan, partitions = self._plan, sorted(self._viewed)
        until = {int(p): int(end) for p, end in start.get("until", {}).items()}
        if (grown := GrownSource.decode(start, partitions)) is not None:
            until = dict(grown.ends)
        if sorted(until) != partitions:
            return ""
        found = cluster.progress(plan.app, identity.source, partitions)
        at = {p: committed.offset for p, committed in found.items()}
        if not self._rested(state, {p: at.get(p, 0) for p in partitions}, until):
            return ""
        if any(at.get(p, 0) < end for p, end in self._hidden.items() if p in partitions):
            return ""  # what those transactions hold is older than anything in the new partitions
        stopped = [
            record
            for record in state.lanes.values()
            if record.key is not None and partition_of(record.key, there) != record.partition
        ]
        if not stopped or not plan.by_key:
            return None
        names = ", ".join(repr(record.key) for record in stopped[:5])
        return (
            f"{len(stopped)} stopped lanes have their key there now ({names}). The new partitions are not read until "
            f"you release, skip or redrive them: see 'keylane lanes list {plan.app}'"
        )

    def _needs_drain(self, state: StateTopic, adopted: int, there: int) -> bool:
        """Whether the old partitions must be processed up to their end by an epoch that drains.

        Otherwise lanes keep running while their progress passes those ends. Messages of stopped lanes would never pass
        them, and with commit="epoch" and for a backlog every epoch drains anyway. If the new number is not a multiple,
        keys also move between the old partitions.
        """
        keeps_running = self._plan.keep_alive and self._plan.moves_ranges and self._target is None
        return not keeps_running or bool(state.lanes) or there % adopted != 0

    @wait_for_cluster
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[TaskPartition]:
        """The epoch, cut into at most as many tasks as there are slots."""
        if start == end:
            return []
        self.commit(start)  # an epoch that a crash cut off is planned again without being asked for
        plan = self._plan
        identity = self._identity()
        starts = {int(p): offset for p, offset in end["starts"].items()}
        until = self._target
        if "until" in end:
            until = {int(p): offset for p, offset in end["until"].items()}
        shared, now = Assignment.decode(end["plan"]), time.time()
        own = set(plan.shard.of(starts))
        if own != starts.keys():  # planned by a run of another shard, with the same checkpoint
            starts = {p: offset for p, offset in starts.items() if p in own}
            shared = make_plan(sorted(starts), self._tasks, split=plan.split)
        if self._is_other(end, identity):
            starts = {int(p): offset for p, offset in self._start_over(end)["starts"].items()}
            until = None if until is None else self._visible_ends(sorted(starts))
            shared = make_plan(sorted(starts), self._tasks, split=plan.split)
        # An epoch that was cut off may be planned again where there is less room; tasks that wait for others would
        # wait until the end of the epoch.
        if len(shared.tasks) > self._tasks:
            shared = make_plan(sorted(starts), self._tasks, before=shared, split=plan.split)
        plans = [
            TaskPlan(
                run=plan.run,
                since={
                    one.partition: plan.since[one.partition] for one in ranges if one.partition in plan.since
                },
                epoch=end["epoch"],
                task=task,
                settings=plan.settings,
                identity=identity,
                starts={one.partition: starts[one.partition] for one in ranges},
                cuts={one.partition: one.slots for one in ranges if one.slots != ALL},
                until=None
                if until is None
                else {one.partition: until.get(one.partition, 0) for one in ranges},
                seconds=min(plan.epoch, GROWTH_EPOCH_SECONDS) if "grows" in end else plan.epoch,
                planned=now,
                sink_limit=plan.sink_limit,
                sink_stamps=plan.sink_stamps,
                outcomes=plan.outcomes,
                partitions=end["of"],
                replan=end.get("replan", 0),
                former=tuple(end.get("former", ())),
                shard=plan.shard,
                keep_alive=plan.keep_alive if until is None else 0.0,
                spark_task=task,
            )
            for task, ranges in enumerate(shared.tasks)
        ]
        if until is not None or not plan.keep_alive:
            return [TaskPartition(one) for one in plans]
        owners = {} if self._view is None else self._view.owners
        whole = EpochPlan(
            assignment=shared, starts=starts, since=plan.since, homes=homes(shared, owners, plan.run)
        ).encode()
        return [TaskPartition(one, whole) for one in plans]

    @wait_for_cluster
    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed this epoch and all before it."""
        plan = self._plan
        if plan.commit == "epoch":
            identity = self._identity()
            if self._epoch_committer is not None and self._epoch_committer.identity != identity:
                self._epoch_committer.close()
                self._epoch_committer = None
            if self._epoch_committer is None:
                self._epoch_committer = EpochCommitter(
                    plan.settings, plan.app, plan.topic, plan.run, identity, plan.since, plan.shard
                )
            self._epoch_committer.settle(end["epoch"])

    def _share_out(self, state: StateTopic, start: dict[str, Any], partitions: Sequence[int]) -> Assignment:
        """The next epoch's plan, by the last one and the load that its tasks saw."""
        before = Assignment.decode(start["plan"]) if "plan" in start else None
        loads: dict[int, Load] = {}
        for partition, found in state.loads.items():
            seen = [load for epoch, load in found.values() if epoch == start["epoch"]]
            if seen and partition in partitions:
                loads[partition] = tuple(map(sum, zip(*seen, strict=True)))
        if sum(map(sum, loads.values())) < _LOAD_MESSAGES_MIN:  # of a few messages nothing can be told
            loads = {}
        return make_plan(partitions, self._tasks, loads=loads, before=before, split=self._plan.split)

    def _state(self, partitions: Sequence[int], identity: AppIdentity) -> StateTopic:
        """The state topic as it is now, and where the source ends. The planner keeps its view of it."""
        plan = self._plan
        topic = f"{plan.app}.state"
        ends = self._connect().all_ends([plan.topic, topic], partitions)
        self._ends = ends[plan.topic]
        if self._view is None or (list(partitions), identity) != (self._viewed, self._labels.identity):
            if self._view is not None:
                self._view.close()
            self._labels = Labels(identity)
            self._view = StateTopic(
                plan.settings,
                plan.app,
                topic,
                partitions,
                plan.run,
                since=plan.since,
                labels=self._labels,
                rests=True,
            )
            self._viewed = list(partitions)
            self._view.restore()
            if 0 not in partitions:
                self._former = self._read_former()
        else:
            self._view.catch_up(ends[topic])
        self._view.rest()
        return self._view

    def _read_former(self) -> tuple[int, ...]:
        """What is known of the app's earlier partitions, for a shard without partition 0, where it is recorded."""
        plan = self._plan
        state = StateTopic(plan.settings, plan.app, f"{plan.app}.state", [0], plan.run, labels=self._labels)
        try:
            state.restore()
            return state.former
        finally:
            state.close()

    def _note_former(self, former: Collection[int]) -> None:
        """Write down how many partitions the source had before: keys of then may be in others now."""
        if self._producer is None:
            self._producer = self._plan.settings.producer()
        topic, value = f"{self._plan.app}.state", json.dumps(sorted(former)).encode()
        headers: Any = self._labels.of(FORMER)
        self._producer.produce(topic, value, FORMER, partition=0, headers=headers)
        self._flush()

    def _tell(self, offset: dict[str, Any]) -> None:
        """Write the plan to the state topic. Operators' tools read the source from the run's first one.

        That one is durable before any task runs: a command's label names the source.
        """
        plan = self._plan
        if self._producer is None:
            self._producer = plan.settings.producer()
        value = {"run": plan.run, "epoch": offset["epoch"], "at": time.time(), "tasks": offset["plan"]}
        value |= {"source": plan.topic, "shard": str(plan.shard)}
        self._producer.produce(
            f"{plan.app}.state", json.dumps(value).encode(), PLAN, partition=plan.shard.first
        )
        if self._told:
            self._producer.poll(0)
        else:
            self._flush()
            self._told = True

    def _flush(self) -> None:
        assert self._producer is not None  # noqa: S101 - its callers have just used it
        if self._producer.flush(REQUEST_SECONDS):
            raise BrokerError(
                f"could not write to topic '{self._plan.app}.state' within {REQUEST_SECONDS:g} s"
            )

    @staticmethod
    def _rested(state: StateTopic, starts: Mapping[int, int], target: Mapping[int, int]) -> bool:
        """Whether everything up to the target is done, but what stands in lanes that have stopped."""
        for partition, end in target.items():
            if starts.get(partition, 0) < end:
                rests = state.rests.get(partition, {})
                if ALL.without(slots for slots, until in rests.items() if until >= end):
                    return False
        return True

    def _visible_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Where each partition of the source ends for a task: what lies beyond is in transactions that are open now."""
        plan = self._plan
        return self._connect().ends(plan.topic, partitions, committed=plan.read_committed)

    def _identity(self) -> AppIdentity:
        return self._connect().identity(self._plan.topic, f"{self._plan.app}.dlq")

    def _connect(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(self._plan.settings)
        return self._cluster

    def _positions(
        self, cluster: Cluster, start: dict[str, Any], partitions: Sequence[int], identity: AppIdentity
    ) -> dict[int, int]:
        """Where each partition stands: the group's offset, else what the last epoch began with, else the beginning."""
        plan = self._plan
        positions = {int(p): int(at) for p, at in start["starts"].items() if int(p) in partitions}
        missing = [p for p in partitions if p not in positions]
        if missing:  # partitions that were added to the topic: everything in them is new
            positions |= cluster.ends(plan.topic, missing, earliest=True)
        found = cluster.progress(plan.app, identity.source, partitions)
        return positions | {p: committed.offset for p, committed in found.items()}

    # The tasks.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task's epoch."""
        if not isinstance(partition, TaskPartition):
            raise TypeError(f"expected a task's plan, got {partition!r}")
        logs.set_up(_level(), self._plan.log_format)
        app, plan = self._plan.package.open(), partition.plan
        if not os.environ.get(_REUSES_WORKERS):  # the process ends with the task, and its lanes with it
            plan = replace(plan, keep_alive=0.0)
        shared = None
        if partition.shared is not None and plan.keep_alive:
            shared = EpochPlan.decode(partition.shared)
        context = TaskContext.get()
        attempt = 1 if context is None else context.attemptNumber() + 1
        task = Task(app, plan, attempt=attempt, shared=shared)
        results = self._plan.commit == "epoch"
        for deliveries in task.outcomes():
            yield to_arrow(deliveries, task.owner, plan.epoch, results=results, hot=task.hot)


@dataclass(frozen=True, slots=True)
class GrownSource:
    """Partitions were added to the source and are not read yet.

    They are read when all of the old ones are done up to where they ended when this was seen: then whatever is older
    than a message in a new partition is done. Part of the offset of the epochs until then.
    """

    count: int
    """How many partitions there are."""
    ends: Mapping[int, int]
    """Where the old ones ended."""

    def encode(self) -> dict[str, Any]:
        """The entry for Spark's offset."""
        return {"grows": {"count": self.count, "ends": {str(p): end for p, end in sorted(self.ends.items())}}}

    @classmethod
    def decode(cls, offset: Mapping[str, Any], partitions: Sequence[int]) -> GrownSource | None:
        """The entry in this offset; None if there is none about these old partitions."""
        found = offset.get("grows")
        if found is None:
            return None
        ends = {int(p): int(end) for p, end in found["ends"].items()}
        return cls(int(found["count"]), ends) if sorted(ends) == sorted(partitions) else None


def _level() -> int:
    """What a task logs at the least, by the environment's ``KEYLANE_LOG``: INFO unless that names another level."""
    return logging.getLevelNamesMapping().get(os.environ.get("KEYLANE_LOG", "").upper(), logging.INFO)


def _offset(epoch: int, starts: Mapping[int, int], identity: AppIdentity) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "starts": {str(p): offset for p, offset in sorted(starts.items())},
        "source": str(identity.source),
    }


def _grown(topic: str, before: int, now: int) -> str:
    return f"topic {topic!r} has {now} partitions and had {before}"
