"""A task's books: what is done, and what of it was written down."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from keylane.errors import BrokerError, FailureGuardError, SourceChangedError
from keylane.kafka.client import TopicPartition
from keylane.kafka.cluster import REQUEST_SECONDS
from keylane.kafka.transactional_client import TRANSACTION_SECONDS
from keylane.lanes.lane_record import LaneStatus, RetryState
from keylane.offsets.metadata import LIMIT, encode, stamp
from keylane.offsets.range_progress import RangeProgress, RangeWatermark, SharedPartition, in_common
from keylane.offsets.slots import ALL
from keylane.offsets.watermark import PartitionProgress, Watermark
from keylane.state.commands import outdated
from keylane.state.topic import (
    ATTEMPTS,
    ELSEWHERE,
    EPOCH,
    GROUPED,
    LOAD,
    NOTHING,
    PROGRESS,
    RANGE,
    RANGES,
    REDRIVEN,
    REST,
    Proposal,
    part_of,
    stale_parts,
)
from keylane.worker.attempt_records import AttemptRecords
from keylane.worker.commit import Contributor
from keylane.worker.version_records import VersionRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.engine.engine import Engine
    from keylane.kafka.cluster import Cluster
    from keylane.offsets.metadata import Committed
    from keylane.offsets.range_progress import RangeSegment
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.state.ownership import Ownership
    from keylane.state.topic import StateTopic
    from keylane.worker.commands import CommandExecutor
    from keylane.worker.commit import CommitBatch
    from keylane.worker.output import KafkaOutput
    from keylane.worker.session import WorkerSession
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_NAMED = 8
"""Partitions that a line names."""
_STATE_RATE = 100_000.0
"""Characters of progress per second and partition that go to the state topic, about."""
_STATE_WAIT = 3 * REQUEST_SECONDS
"""Seconds for the transactions that are open in the state topic to end."""
OFFSET_REFRESH_SECONDS = 3600.0
"""After this time an offset is committed again though it has not changed.

Tasks are not members of the group, so the broker deletes an offset ``offsets.retention.minutes`` after its last commit.
"""


@dataclass(slots=True)
class _Collected:
    """What the batch has of the tracker, by partition: it counts when the batch is committed."""

    progress: dict[int, PartitionProgress] = field(default_factory=dict)
    ranges: dict[int, RangeProgress] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)


class ProgressTracker(Contributor):
    """Restored once, opened with what it is to commit, then part of every commit. Used on the loop's thread."""

    def __init__(self, app: AppSpec) -> None:
        self.watermarks: dict[int, Watermark | RangeWatermark] = {}
        self.restored: dict[int, int] = {}
        """The watermarks as they were found: what comes from below was read for its event ids only."""
        self.rest = 0.0
        """Seconds for which to write nothing more, because the last record was a large one."""
        self.withheld: set[int] = set()
        """Partitions whose progress is not in the batch that is collected now: what belongs to it must wait, too."""
        self.versions: VersionRecords | None = None
        self._app = app
        self._exact = app.delivery == "exactly_once"
        self._by_epoch = app.commit == "epoch"
        self._epoch = ("", 0)
        self._committed: dict[int, PartitionProgress] = {}
        self._slots: dict[int, Slots] = {}
        self._written: dict[int, RangeProgress] = {}  # of ranges
        self._sharing: dict[int, SharedPartition] = {}
        self._group: dict[int, int] = {}  # of those whose owners it leads: the offset that was committed
        self._committed_at: dict[int, float] = {}  # when each partition's offset was committed last
        self._attempts: dict[int, dict[int, RetryState]] = {}  # as they were written down last
        self._not_before: dict[int, float] = {}  # when a partition's large progress is written next
        self._collected = _Collected()
        self._worker_session: WorkerSession
        self._state: StateTopic
        self._ownership: Ownership
        self._engine: Engine
        self._commands: CommandExecutor

    def restore(
        self, worker_session: WorkerSession, ownership: Ownership, state: StateTopic, plan: TaskPlan
    ) -> dict[int, int]:
        """Where each partition's reading begins: the group's progress, or the plan's. Blocks.

        Raises FailureGuardError when this run was stopped by its flood guard, TakenOverError when another one goes on,
        SourceChangedError when the source is not the one that was planned for.
        """
        self._worker_session, self._state, self._ownership = worker_session, state, ownership
        self._epoch, self._slots = (plan.run, plan.epoch), plan.slots
        if self._app.versions is not None:
            self.versions = VersionRecords(self._app, worker_session, state, plan)
        if state.flooded:
            raise FailureGuardError(state.flooded)
        clean = ownership.claim(plan.slots)
        if clean and not plan.cuts and worker_session.stands(plan.epoch, plan.starts):
            self._committed = dict(worker_session.committed)
            self._committed_at = dict(worker_session.committed_at)
            self.watermarks = {p: Watermark(found) for p, found in worker_session.committed.items()}
            begins = {p: found.watermark for p, found in worker_session.committed.items()}
            for p, slots in plan.slots.items():
                self._sharing[p] = SharedPartition(slots, state.grouped[p], version=0)
        else:
            worker_session.seen = worker_session.versions = None
            begins = self._read(worker_session, state, plan.starts)
        worker_session.epoch = -1
        if self.versions is not None:
            self.versions.restore(self.watermarks)
        state.versions = None  # from here on the task knows them best
        self.restored = {p: mark.value for p, mark in self.watermarks.items()}
        return begins

    def _read(
        self, worker_session: WorkerSession, state: StateTopic, starts: Mapping[int, int]
    ) -> dict[int, int]:
        """From where on each partition is read: below its progress for the event ids that were seen."""
        app = self._app
        source = worker_session.cluster.identity(app.source).source
        if source != worker_session.identity.source:
            raise SourceChangedError(
                f"expected source topic {worker_session.identity.source}, found {source}: it was recreated. "
                "The next epoch reads it from its start"
            )
        found = self._group_progress(worker_session.cluster, state, starts)
        begins = worker_session.cluster.ends(app.source, starts, earliest=True)
        ends = worker_session.cluster.ends(app.source, starts)
        unknown: dict[int, int] = {}  # where partitions without a committed offset are read from
        for partition, fallback in starts.items():
            where = f"{app.source}/{partition}"
            committed = found.get(partition)
            offset = fallback if committed is None else committed.offset
            text = None if committed is None else committed.text
            restored = state.progress(partition, offset, text)
            problem = restored.problem if committed is None else committed.problem or restored.problem
            if committed is None:
                unknown[partition] = offset
            elif text is None and problem is None:
                log.warning(
                    "%s: offset %d was not committed by this app; somebody has moved its group. Everything below it "
                    "counts as done, everything from it on runs, also what ran before",
                    where,
                    offset,
                )
            if problem:
                log.warning("%s: %s; messages after %d run again", where, problem, offset)
            range_progresses = state.range_progresses.get(partition, {}).values()
            sharing = self._sharing[partition] = SharedPartition.begin(
                self._slots[partition],
                range_progresses,
                state.grouped[partition],
                ours=text is not None,
                offset=None if committed is None else committed.offset,
            )
            segments = sharing.inherit(range_progresses, restored.progress)
            segments = tuple(
                replace(
                    segment,
                    progress=self._fitting(where, segment.progress, begins[partition], ends[partition]),
                )
                for segment in segments
            )
            if self._slots[partition] == ALL and len(segments) == 1:
                mark: Watermark | RangeWatermark = Watermark(segments[0].progress)
                if partition in found and not state.range_progresses.get(partition):
                    # Else it is written down as soon as there is anything to write.
                    self._committed[partition] = restored.progress
            else:
                mark = RangeWatermark(self._slots[partition], segments, app.slot_of)
            self.watermarks[partition] = mark
            if app.idempotency is not None and partition in found:
                begins[partition] = max(begins[partition], app.idempotency.since(mark.value))
            else:
                begins[partition] = mark.value
        if unknown:
            places = ", ".join(f"{p}@{offset}" for p, offset in sorted(unknown.items())[:_NAMED])
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            log.info("%s: the group has no committed offset yet: reading from %s%s", app.source, places, more)
        return begins

    def _group_progress(
        self, cluster: Cluster, state: StateTopic, partitions: Iterable[int]
    ) -> dict[int, Committed]:
        """The group's offsets; where tasks share partitions, the state topic is then known as far as they were written.

        An offset that was moved and the generation of the one that replaced it, or the other way round, would make
        what was done before the move count after it.
        """
        source = self._worker_session.identity.source

        def ask() -> dict[int, Committed]:
            return cluster.progress(self._app.name, source, partitions, stable=True)

        found = ask()
        shared = [p for p in partitions if self._slots[p] != ALL or state.range_progresses.get(p)]
        while shared:
            ends = cluster.ends(state.topic, shared)
            if not state.read_through({p: end - 1 for p, end in ends.items()}, _STATE_WAIT):
                raise BrokerError(f"topic {state.topic!r} was not read to its end within {_STATE_WAIT:g} s")
            again = ask()
            if all(_move(found.get(p)) == _move(again.get(p)) for p in shared):
                return again
            found = again
        return found

    @staticmethod
    def _fitting(where: str, progress: PartitionProgress, begin: int, end: int) -> PartitionProgress:
        """The progress, or what is made of it when the log does not fit it any more."""
        if progress.position > end:
            log.error(
                "%s: the log ends at %d and was read up to %d before: it was truncated, or the topic was made anew. "
                "What is in it may be new, so all of it runs",
                where,
                end,
                progress.position,
            )
            return PartitionProgress(watermark=begin, position=begin)
        if progress.watermark < begin:
            log.error(
                "%s: the log begins at %d and messages from %d on were not done: their retention is over, they are "
                "lost. Retention must be longer than the lag",
                where,
                begin,
                progress.watermark,
            )
            if progress.position <= begin:
                return PartitionProgress(watermark=begin, position=begin)
        return progress

    def restore_lanes(self, engine: Engine, output: KafkaOutput) -> None:
        """Attempts, stopped lanes and standing orders, as they were written down."""
        state, kept = self._state, dict[tuple[int, int], RetryState]()
        for partition, records in state.attempts.items():
            for found in records.values():
                for offset, one in found.items():  # an older record may know of fewer attempts
                    if one.slot not in self._slots[partition] or self._is_done(partition, one.slot, offset):
                        continue
                    known = kept.get((partition, offset))
                    if known is None or one.attempts > known.attempts:
                        kept[partition, offset] = one
            self._attempts[partition] = records.get(part_of(ATTEMPTS, self._slots[partition]), {})
        lanes = []
        for (partition, name), record in state.lanes.items():
            if self._app.slot_of(record.key, record.offset) not in self._slots[partition]:
                continue
            slot = self._app.slot_of(record.key, record.offset)
            if record.stop is LaneStatus.PARKED or not self._is_done(partition, slot, record.offset):
                lanes.append(record)
            else:  # its message was done, or the group was moved past it
                output.note(partition, name, None, lambda _problem: None)
        redrives = [
            engine.lane_key(order.key, order.partition)
            for order in state.commands.values()
            if order.do == "redrive" and self._app.slot_of(order.key, 0) in self._slots[order.partition]
        ]
        engine.restore(kept, lanes, [lane for lane in redrives if lane is not None])

    def _is_done(self, partition: int, slot: int, offset: int) -> bool:
        mark = self.watermarks[partition]
        if isinstance(mark, RangeWatermark):
            return mark.is_done(slot, offset)
        return not mark.wanted(offset)

    def open(self, engine: Engine, commands: CommandExecutor) -> list[Contributor]:
        """From here on it may be committed. Returns the contributors that belong to it, in their order."""
        self._engine, self._commands = engine, commands
        contributors: list[Contributor] = [self, AttemptRecords(self._slots, self._attempts, engine.kept)]
        if self.versions is not None and engine.versions is not None:
            self.versions.open(engine.versions, self)
            commands.versions_of_redriven = self.versions.of_redriven
            contributors.append(self.versions)
        return contributors

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the progress of what is done, and with the last commit what makes older records superfluous.

        What does not fit beside an offset goes to the state topic. Such a large record is not written every time, but
        at the end: behind a stuck lane there are megabytes of them.
        """
        self._engine.settle()
        self._collected = _Collected()
        if not self._by_epoch:
            self._offsets(batch)
        elif batch.last:
            self._propose(batch)
        if batch.last:
            self._forget_old_parts(batch)
            self._forget_old_orders(batch)

    def committed(self) -> None:
        """What was collected is durable."""
        collected, self._collected = self._collected, _Collected()
        self._committed |= collected.progress
        for partition in collected.progress:
            self._written.pop(partition, None)
        self._written |= collected.ranges
        self._group |= collected.groups
        self._committed_at |= dict.fromkeys(collected.offsets, time.monotonic())
        if not self._by_epoch:
            self._engine.stopped_lanes.committed(self.is_committed)

    def aborted(self) -> None:
        """The next commit collects again what has changed since the last one that was committed."""
        self._collected = _Collected()

    def leave(self, epoch: int) -> None:
        """The epoch ended as planned; what was written last stands."""
        self._worker_session.epoch, self._worker_session.committed = epoch, self._committed
        self._worker_session.committed_at = self._committed_at

    def _propose(self, batch: CommitBatch) -> None:
        """Of every partition, changed or not: what an attempt that failed has proposed must not stand."""
        for partition, mark in self.watermarks.items():
            progress = self._collected.progress[partition] = mark.progress()
            redriven = self._commands.redriven(partition)
            notes = self._commands.answers(partition)
            size = len(redriven) + sum(len(name) + len(value or "") + 16 for name, value in notes)
            text = encode(progress, max(0, batch.room - size))
            proposal = Proposal(self._epoch[1], progress.watermark, text, redriven, notes)
            batch.note(partition, EPOCH, proposal.encode())

    def _offsets(self, batch: CommitBatch) -> None:
        self.rest = 0.0
        self.withheld.clear()
        for partition, mark in self.watermarks.items():
            if isinstance(mark, RangeWatermark):
                segments = mark.segments()
                if mark.slots != ALL or len(segments) > 1:
                    self._stand(batch, partition, segments)
                    self._of_group(batch, partition)
                    continue
                progress = segments[0].progress
            else:
                progress = mark.progress()
            if progress == self._committed.get(partition) and not self._expires(partition):
                continue
            text = encode(progress, batch.room) or NOTHING
            if len(stamp(text, self._worker_session.identity.source)) > LIMIT:
                if not self._has_room(partition, len(text), last=batch.last):
                    continue
                batch.note(partition, PROGRESS, f"{progress.watermark} {text}".encode())
                text = ELSEWHERE
            ranges = dict(self._state.range_progresses.get(partition, {}))
            if (own := self._written.get(partition)) is not None:  # it may not have been read back yet
                ranges[own.slots] = own
            if ranges:
                self._forget_ranges(batch, partition, ranges.values())
                self._note_generation(batch, partition)
            self._collected.progress[partition] = progress
            self._add_offset(batch, partition, progress.watermark, text)

    def _expires(self, partition: int) -> bool:
        """Whether the partition's offset is to be committed again, so that the broker does not delete it."""
        return time.monotonic() - self._committed_at.get(partition, -inf) > OFFSET_REFRESH_SECONDS

    def _has_room(self, partition: int, size: int, *, last: bool) -> bool:
        """Whether a record of this size may be written now; then the next one has to wait."""
        now, wait = time.monotonic(), size / _STATE_RATE
        if self._exact:  # what is in the transaction must be in its progress: the next one comes later
            self.rest = max(self.rest, min(wait, TRANSACTION_SECONDS / 4))
        elif not last and now < self._not_before.get(partition, 0.0):
            self.withheld.add(partition)
            return False
        self._not_before[partition] = now + wait
        return True

    # Of partitions that are shared out between tasks.

    def _stand(self, batch: CommitBatch, partition: int, segments: tuple[RangeSegment, ...]) -> None:
        standing = self._sharing[partition].range_progress(segments)
        if standing == self._written.get(partition):
            return
        text = standing.encode(batch.room)
        if len(text) > LIMIT and not self._has_room(partition, len(text), last=batch.last):
            return
        batch.note(partition, RANGE + str(standing.slots).encode(), text)
        self._collected.ranges[partition] = standing

    def _of_group(self, batch: CommitBatch, partition: int) -> None:
        """The group's offset is the least of all ranges'. The leader of their owners writes it, once all are known."""
        sharing = self._sharing[partition]
        if not self._ownership.leads(partition):
            return
        known = dict(self._state.range_progresses.get(partition, {}))
        own = self._collected.ranges.get(partition) or self._written.get(partition)
        if own is not None:
            known[sharing.slots] = own
        watermark = sharing.group_watermark(known.values())
        if watermark is None:
            return
        if watermark == self._group.get(partition) and not self._expires(partition):
            return
        self._forget_ranges(batch, partition, sharing.superseded(known.values()))
        self._note_generation(batch, partition)
        self._collected.groups[partition] = watermark
        self._add_offset(batch, partition, watermark, RANGES)

    def _note_generation(self, batch: CommitBatch, partition: int) -> None:
        generation = self._sharing[partition].generation
        if generation != self._state.grouped[partition]:
            batch.note(partition, GROUPED, json.dumps(generation).encode())

    def _add_offset(self, batch: CommitBatch, partition: int, watermark: int, text: str) -> None:
        source = self._worker_session.identity.source
        self._collected.offsets.append(partition)
        batch.offsets.append(TopicPartition(source.topic, partition, watermark, metadata=stamp(text, source)))

    def _forget_ranges(
        self, batch: CommitBatch, partition: int, range_progresses: Iterable[RangeProgress]
    ) -> None:
        for standing in range_progresses:
            batch.note(partition, RANGE + str(standing.slots).encode(), None)
            if standing.slots != self._slots[partition]:
                batch.note(partition, part_of(ATTEMPTS, standing.slots), None)

    def _forget_old_parts(self, batch: CommitBatch) -> None:
        """Take back the records of ranges that these slots were in before; what still counts is written first."""
        for partition, slots in self._slots.items():
            names = self._state.parts.get(partition, set())
            for record in (LOAD, REST):
                for name in stale_parts(names, record, slots):
                    batch.note(partition, name, None)
            old = stale_parts(names, REDRIVEN, slots)
            if old and not self._by_epoch:  # else the planner writes them
                batch.note(partition, part_of(REDRIVEN, slots), self._commands.redriven(partition).encode())
                for name in old:
                    batch.note(partition, name, None)

    def _forget_old_orders(self, batch: CommitBatch) -> None:
        """Take back what was written down about orders that were answered long ago, where there are very many."""
        standing = {order.id for order in self._state.commands.values()}
        for partition in self._slots:
            audits = [(name, value) for name, (p, value) in self._state.audits.items() if p == partition]
            for name in outdated(audits, standing, time.time()):
                batch.note(partition, name, None)

    def is_committed(self, partition: int, offset: int) -> bool:
        """Whether a message is done in the progress that was committed last."""
        standing = self._written.get(partition)
        found = self._committed.get(partition) if standing is None else in_common(standing.segments)
        return found is not None and found.is_done(offset)


def _move(committed: Committed | None) -> int | None:
    """Where somebody has moved the group; None when its offset is the app's, -1 when there is none."""
    if committed is None:
        return -1
    return committed.offset if committed.text is None else None
