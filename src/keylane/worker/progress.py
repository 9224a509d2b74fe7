"""Progress of a task: what is done, what of it was committed, and how it is restored."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from keylane.errors import BrokerError, FailureGuardError, SourceChangedError
from keylane.kafka.client import TopicPartition
from keylane.kafka.cluster import REQUEST_SECONDS
from keylane.kafka.transactional_client import TRANSACTION_SECONDS
from keylane.lanes.lane_record import LaneStatus, RetryState
from keylane.offsets.metadata import METADATA_BYTES_MAX, encode, stamp
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
from keylane.worker.state_records import StateRecords
from keylane.worker.version_records import VersionRecords

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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

_LOGGED_PARTITIONS_MAX = 8
"""Partitions that one log line names."""
_STATE_CHARACTERS_PER_SECOND = 100_000.0
"""About how much progress of one partition may go to the state topic."""
_OPEN_TRANSACTIONS_SECONDS = 3 * REQUEST_SECONDS
"""How long a restore waits for transactions that are open in the state topic."""
_LOOK_SECONDS = 0.02
OFFSET_REFRESH_SECONDS = 3600.0
"""After this time an offset is committed again, even if it has not changed.

Tasks are not members of the group, so the broker deletes an offset ``offsets.retention.minutes`` after its last commit.
"""


@dataclass(frozen=True, slots=True)
class RestoredRange:
    """What Kafka knows about a range: the group's offset, where to start without one, and where the log begins."""

    partition: int
    slots: Slots
    group: Mapping[int, Committed]
    starts: Mapping[int, int]
    begins: dict[int, int]
    ends: Mapping[int, int]


@dataclass(slots=True)
class _Collected:
    """What the tracker added to the batch, by partition. It counts when the batch is committed."""

    progress: dict[int, PartitionProgress] = field(default_factory=dict)
    ranges: dict[int, RangeProgress] = field(default_factory=dict)
    group_offsets: dict[int, int] = field(default_factory=dict)
    partitions: list[int] = field(default_factory=list)
    """Those with an offset in the batch."""


class ProgressTracker(Contributor):
    """The offsets and progress records of one task.

    :meth:`restore` reads them, :meth:`connect` says what is to be committed, and then the tracker takes part in every
    commit. Used on the loop's thread, but for :meth:`restore`, which runs before it.
    """

    def __init__(self, app: AppSpec) -> None:
        self.watermarks: dict[int, Watermark | RangeWatermark] = {}
        self.restored: dict[int, int] = {}
        """The watermarks at the start. Messages below them are read only for their event ids."""
        self.pause_seconds = 0.0
        """How long to wait before the next commit, because the last one had a large record."""
        self.withheld: set[int] = set()
        """Partitions whose progress is left out of the current batch. What belongs to that progress must wait, too."""
        self.versions: VersionRecords | None = None
        self.states: StateRecords | None = None
        self._app = app
        self._exact = app.delivery == "exactly_once"
        self._by_epoch = app.commit == "epoch"
        self._epoch = ("", 0)
        self._committed: dict[int, PartitionProgress] = {}
        self.slots: dict[int, Slots] = {}
        """The slots that the worker owns, by partition. Always this object; ranges come and go while it runs."""
        self.leaving: set[int] = set()
        """Partitions that are being released: their last progress is written whatever its size."""
        self._committed_ranges: dict[int, RangeProgress] = {}  # of partitions that tasks share
        self._sharing: dict[int, SharedPartition] = {}
        self._group_offsets: dict[int, int] = {}  # committed, of partitions whose owners this task leads
        self._committed_at: dict[int, float] = {}  # when each partition's offset was committed last
        self._attempts: dict[int, dict[int, RetryState]] = {}  # as last committed
        self._not_before: dict[int, float] = {}  # when large progress may be written again
        self._collected = _Collected()
        self._worker_session: WorkerSession
        self._state: StateTopic
        self._ownership: Ownership
        self._engine: Engine
        self._commands: CommandExecutor
        self._output: KafkaOutput

    def restore(
        self,
        worker_session: WorkerSession,
        ownership: Ownership,
        state: StateTopic,
        plan: TaskPlan,
        *,
        patient: bool = True,
    ) -> dict[int, int]:
        """Return the offset where each partition is read from: the group's progress, or the plan's start. Blocks.

        Unless it is ``patient``, partitions whose owner may be alive are left out; they are taken when they are free.
        Raises FailureGuardError when the failure guard stopped this run, TakenOverError when another run has taken
        over, SourceChangedError when the source is not the topic that was planned for.
        """
        self._worker_session, self._state, self._ownership = worker_session, state, ownership
        self._epoch = plan.run, plan.epoch
        if self._app.versions is not None:
            self.versions = VersionRecords(self._app, worker_session, state, plan)
        if state.guard_reason:
            raise FailureGuardError(state.guard_reason)
        clean = ownership.claim(plan.slots, patient=patient)
        self.slots.update(ownership.owned)
        unchanged = clean and not plan.cuts and worker_session.has_progress_for(plan.epoch, plan.starts)
        if unchanged:
            self._committed = dict(worker_session.committed)
            self._committed_at = dict(worker_session.committed_at)
            self.watermarks = {p: Watermark(found) for p, found in worker_session.committed.items()}
            begins = {p: found.watermark for p, found in worker_session.committed.items()}
            for p, slots in plan.slots.items():
                self._sharing[p] = SharedPartition(slots, state.grouped[p], version=0)
        else:
            worker_session.duplicates = worker_session.versions = None
            begins = self._read(worker_session, state, {p: plan.starts[p] for p in self.slots})
        worker_session.epoch = -1
        if self.versions is not None:
            self.versions.restore(self.watermarks)
        state.versions = None  # from now on the task has the newest
        if self._app.keeps_state:
            self.states = StateRecords(
                self._app, worker_session.lane_values(), state, self.slots, plan.partitions
            )
            self.states.restore(unchanged=unchanged)
        self.restored = {p: mark.value for p, mark in self.watermarks.items()}
        return begins

    def _read(
        self, worker_session: WorkerSession, state: StateTopic, starts: Mapping[int, int]
    ) -> dict[int, int]:
        """Read the progress from Kafka. Reading starts below it where event ids have to be remembered."""
        if not starts:
            return {}
        log_range = self._log_range(starts)
        return self._restore_all(
            self._group_progress(worker_session.cluster, state, starts), starts, *log_range
        )

    def _log_range(self, partitions: Collection[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Where the source's partitions begin and end. Blocks. Raises SourceChangedError."""
        app, worker_session = self._app, self._worker_session
        source = worker_session.cluster.identity(app.source).source
        if source != worker_session.identity.source:
            raise SourceChangedError(
                f"expected source topic {worker_session.identity.source}, found {source}: it was recreated. "
                "The next epoch reads it from its start"
            )
        begins = worker_session.cluster.ends(app.source, partitions, earliest=True)
        return begins, worker_session.cluster.ends(app.source, partitions)

    def _restore_all(
        self,
        found: Mapping[int, Committed],
        starts: Mapping[int, int],
        begins: dict[int, int],
        ends: Mapping[int, int],
    ) -> dict[int, int]:
        """Restore what was found for these partitions; returns where each is read from."""
        app, state = self._app, self._state
        uncommitted: dict[int, int] = {}  # start offsets of partitions without a committed one
        for partition, fallback in starts.items():
            where = f"{app.source}/{partition}"
            committed = found.get(partition)
            offset = fallback if committed is None else committed.offset
            text = None if committed is None else committed.text
            restored = state.progress(partition, offset, text)
            problem = restored.problem if committed is None else committed.problem or restored.problem
            if committed is None:
                uncommitted[partition] = offset
            elif text is None and problem is None:
                log.warning(
                    "the committed offset was changed outside Keylane: messages below it count as done, messages "
                    "from it on run, even if they ran before partition=%s offset=%d",
                    where,
                    offset,
                )
            if problem:
                log.warning(
                    "ignoring the stored progress, messages run again partition=%s from=%d reason=%s",
                    where,
                    offset,
                    problem,
                )
            range_progresses = state.range_progresses.get(partition, {}).values()
            sharing = self._sharing[partition] = SharedPartition.begin(
                self.slots[partition],
                range_progresses,
                state.grouped[partition],
                ours=text is not None,
                offset=None if committed is None else committed.offset,
            )
            segments = sharing.inherit(range_progresses, restored.progress)
            segments = tuple(
                replace(
                    segment,
                    progress=self._fit_to_log(where, segment.progress, begins[partition], ends[partition]),
                )
                for segment in segments
            )
            if self.slots[partition] == ALL and len(segments) == 1:
                mark: Watermark | RangeWatermark = Watermark(segments[0].progress)
                if partition in found and not state.range_progresses.get(partition):
                    # Otherwise the next commit writes it in the new form.
                    self._committed[partition] = restored.progress
            else:
                mark = RangeWatermark(self.slots[partition], segments, app.slot_of)
            self.watermarks[partition] = mark
            if app.idempotency is not None and partition in found:
                begins[partition] = max(begins[partition], app.idempotency.since(mark.value))
            else:
                begins[partition] = mark.value
        if uncommitted:
            starting = sorted(uncommitted.items())[:_LOGGED_PARTITIONS_MAX]
            log.info(
                "the group has no committed offsets yet topic=%s partitions=%d reading_from=%s%s",
                app.source,
                len(uncommitted),
                ",".join(f"{p}@{offset}" for p, offset in starting),
                ",…" if len(uncommitted) > len(starting) else "",
            )
        return begins

    def _group_progress(
        self, cluster: Cluster, state: StateTopic, partitions: Iterable[int]
    ) -> dict[int, Committed]:
        """The group's offsets. For shared partitions, the state topic has then been read at least as far.

        An offset and a generation from before and after a move of the group do not belong together: messages that
        were done before the move would count as done after it.
        """
        found = self._query(partitions)
        shared = [p for p in partitions if self.slots[p] != ALL or state.range_progresses.get(p)]
        while shared:
            ends = cluster.ends(state.topic, shared)
            if not state.read_through({p: end - 1 for p, end in ends.items()}, _OPEN_TRANSACTIONS_SECONDS):
                raise _hidden(state.topic)
            latest = self._query(partitions)
            if all(_moved_to(found.get(p)) == _moved_to(latest.get(p)) for p in shared):
                return latest
            found = latest
        return found

    @staticmethod
    def _fit_to_log(where: str, progress: PartitionProgress, begin: int, end: int) -> PartitionProgress:
        """The progress, corrected where the log is shorter or begins later than it says."""
        if progress.position > end:
            log.error(
                "the log is shorter than the progress: it was truncated or recreated, so all of it runs "
                "partition=%s log_end=%d read_before=%d",
                where,
                end,
                progress.position,
            )
            return PartitionProgress(watermark=begin, position=begin)
        if progress.watermark < begin:
            log.error(
                "messages were lost: retention deleted them before they were done. Set retention longer than the lag "
                "partition=%s log_start=%d first_lost=%d",
                where,
                begin,
                progress.watermark,
            )
            if progress.position <= begin:
                return PartitionProgress(watermark=begin, position=begin)
        return progress

    def _query(self, partitions: Iterable[int]) -> dict[int, Committed]:
        """The group's offsets. Blocks."""
        source = self._worker_session.identity.source
        return self._worker_session.cluster.progress(self._app.name, source, partitions, stable=True)

    # Ranges that are taken and released while others stay.

    async def look_up(self, partition: int, slots: Slots, fallback: int) -> RestoredRange:
        """What Kafka knows about a range that this worker has just come to own. On the loop, which is not blocked.

        Raises SourceChangedError and BrokerError.
        """
        found = await asyncio.to_thread(self._query, [partition])
        while slots != ALL or self._state.range_progresses.get(partition):
            await self._read_to_end(partition)
            latest = await asyncio.to_thread(self._query, [partition])
            if _moved_to(found.get(partition)) == _moved_to(latest.get(partition)):
                found = latest
                break
            found = latest
        begins, ends = await asyncio.to_thread(self._log_range, [partition])
        return RestoredRange(partition, slots, found, {partition: fallback}, begins, ends)

    async def _read_to_end(self, partition: int) -> None:
        state = self._state
        ends = await asyncio.to_thread(self._worker_session.cluster.ends, state.topic, [partition])
        deadline = time.monotonic() + _OPEN_TRANSACTIONS_SECONDS
        while not state.has_read(ends):
            if time.monotonic() > deadline:
                raise _hidden(state.topic)
            await asyncio.sleep(_LOOK_SECONDS)
            state.poll()

    def begin(self, found: RestoredRange) -> int:
        """Track the progress of this range from now on. Returns the offset where its partition is read from."""
        partition = found.partition
        self.slots[partition] = found.slots
        begin = self._restore_all(found.group, found.starts, found.begins, found.ends)[partition]
        self.restored[partition] = self.watermarks[partition].value
        return begin

    def release(self, ranges: Mapping[int, Slots], /) -> None:
        """The last progress of these ranges is committed with their release."""
        known: tuple[dict[int, Any], ...] = (
            *(self.slots, self.watermarks, self.restored, self._committed, self._committed_ranges),
            *(self._sharing, self._group_offsets, self._committed_at, self._attempts, self._not_before),
        )
        for partition in ranges:
            self.leaving.discard(partition)
            self.withheld.discard(partition)
            for one in known:
                one.pop(partition, None)
        self._engine.forget(ranges)

    def take(self, ranges: Mapping[int, Slots], /) -> None:
        """Restore attempts, stopped lanes and pending redrives of these ranges from the state topic."""
        state, kept = self._state, dict[tuple[int, int], RetryState]()
        for partition, slots in ranges.items():
            records = state.attempts.get(partition, {})
            for found in records.values():
                for offset, one in found.items():  # an older record may have fewer attempts
                    if one.slot not in slots or self._is_done(partition, one.slot, offset):
                        continue
                    other = kept.get((partition, offset))
                    if other is None or one.attempts > other.attempts:
                        kept[partition, offset] = one
            self._attempts[partition] = records.get(part_of(ATTEMPTS, slots), {})
        lanes = []
        for (partition, name), record in state.lanes.items():
            slot = self._app.slot_of(record.key, record.offset)
            if partition not in ranges or slot not in ranges[partition]:
                continue
            if record.stop is LaneStatus.PARKED or not self._is_done(partition, slot, record.offset):
                lanes.append(record)
            else:  # its message is done, or the group was moved past it
                self._output.note(partition, name, None, lambda _problem: None)
        redrives = [
            self._engine.lane_key(command.key, command.partition)
            for command in state.commands.values()
            if command.do == "redrive"
            and command.partition in ranges
            and self._app.slot_of(command.key, 0) in ranges[command.partition]
        ]
        self._engine.restore(kept, lanes, [lane for lane in redrives if lane is not None])

    def _is_done(self, partition: int, slot: int, offset: int) -> bool:
        mark = self.watermarks[partition]
        if isinstance(mark, RangeWatermark):
            return mark.is_done(slot, offset)
        return not mark.wanted(offset)

    def connect(self, engine: Engine, commands: CommandExecutor, output: KafkaOutput) -> list[Contributor]:
        """Set what is to be committed. Return the contributors that belong to the progress, in their order."""
        self._engine, self._commands, self._output = engine, commands, output
        contributors: list[Contributor] = [self, AttemptRecords(self.slots, self._attempts, engine.kept)]
        if self.states is not None and engine.states is not None:
            self.states.connect(engine.states)
            contributors.append(self.states)
        if self.versions is not None and engine.versions is not None:
            self.versions.connect(engine.versions, self)
            commands.redriven_versions = self.versions.redriven_versions
            contributors.append(self.versions)
        return contributors

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the progress. A commit that tidies up also deletes records that are superseded.

        Progress that does not fit into an offset's metadata goes to the state topic. Such a large record is written
        now and then, and at the end: with every commit it would be megabytes behind a stuck lane.
        """
        self._engine.settle()
        self._collected = _Collected()
        if not self._by_epoch:
            self._collect_offsets(batch)
        elif batch.last:
            self._collect_proposals(batch)
        if batch.tidy:
            self._delete_superseded_records(batch)
            self._delete_old_audit_records(batch)

    def committed(self) -> None:
        """Remember what is committed now, and let stopped lanes continue that waited for it."""
        collected, self._collected = self._collected, _Collected()
        self._committed |= collected.progress
        for partition in collected.progress:
            self._committed_ranges.pop(partition, None)
        self._committed_ranges |= collected.ranges
        self._group_offsets |= collected.group_offsets
        self._committed_at |= dict.fromkeys(collected.partitions, time.monotonic())
        if not self._by_epoch:
            self._engine.stopped_lanes.committed(self.is_committed)

    def aborted(self) -> None:
        """The next batch gets everything that has changed since the last commit."""
        self._collected = _Collected()

    def save_to_session(self, epoch: int) -> None:
        """The epoch ended as planned: the next one here can start from this progress without reading it."""
        self._worker_session.epoch, self._worker_session.committed = epoch, self._committed
        self._worker_session.committed_at = self._committed_at

    def _collect_proposals(self, batch: CommitBatch) -> None:
        """Propose every partition, changed or not: this replaces what a failed attempt has proposed."""
        for partition, mark in self.watermarks.items():
            progress = self._collected.progress[partition] = mark.progress()
            redriven = self._commands.redriven(partition)
            notes = self._commands.answers(partition)
            size = len(redriven) + sum(len(name) + len(value or "") + 16 for name, value in notes)
            text = encode(progress, max(0, batch.room - size))
            proposal = Proposal(self._epoch[1], progress.watermark, text, redriven, notes)
            batch.note(partition, EPOCH, proposal.encode())

    def _collect_offsets(self, batch: CommitBatch) -> None:
        self.pause_seconds = 0.0
        self.withheld.clear()
        for partition, mark in self.watermarks.items():
            if isinstance(mark, RangeWatermark):
                segments = mark.segments()
                if mark.slots != ALL or len(segments) > 1:
                    self._collect_range(batch, partition, segments)
                    self._collect_group_offset(batch, partition)
                    continue
                progress = segments[0].progress
            else:
                progress = mark.progress()
            if progress == self._committed.get(partition) and not self._needs_refresh(partition):
                continue
            text = encode(progress, batch.room) or NOTHING
            if len(stamp(text, self._worker_session.identity.source)) > METADATA_BYTES_MAX:
                if not self._may_write_large(partition, len(text), last=self._is_last(batch, partition)):
                    continue
                batch.note(partition, PROGRESS, f"{progress.watermark} {text}".encode())
                text = ELSEWHERE
            ranges = dict(self._state.range_progresses.get(partition, {}))
            if (own := self._committed_ranges.get(partition)) is not None:  # perhaps not read back yet
                ranges[own.slots] = own
            if ranges:
                self._delete_ranges(batch, partition, ranges.values())
                self._note_generation(batch, partition)
            self._collected.progress[partition] = progress
            self._add_offset(batch, partition, progress.watermark, text)

    def _needs_refresh(self, partition: int) -> bool:
        """Whether to commit an unchanged offset again, so that the broker does not delete it."""
        return time.monotonic() - self._committed_at.get(partition, -inf) > OFFSET_REFRESH_SECONDS

    def _is_last(self, batch: CommitBatch, partition: int) -> bool:
        """Whether this is the worker's last chance to write the progress of this partition."""
        return batch.last or partition in self.leaving

    def _may_write_large(self, partition: int, size: int, *, last: bool) -> bool:
        """Whether a record of this size may be written now. If so, the next one has to wait."""
        now, wait = time.monotonic(), size / _STATE_CHARACTERS_PER_SECOND
        # With exactly_once, and beside lane state, progress must not be left out: delay the next transaction instead.
        if self._exact or self.states is not None:
            self.pause_seconds = max(self.pause_seconds, min(wait, TRANSACTION_SECONDS / 4))
        elif not last and now < self._not_before.get(partition, 0.0):
            self.withheld.add(partition)
            return False
        self._not_before[partition] = now + wait
        return True

    # Partitions that several tasks share.

    def _collect_range(self, batch: CommitBatch, partition: int, segments: tuple[RangeSegment, ...]) -> None:
        progress = self._sharing[partition].range_progress(segments)
        if progress == self._committed_ranges.get(partition):
            return
        text = progress.encode(batch.room)
        if len(text) > METADATA_BYTES_MAX and not self._may_write_large(
            partition, len(text), last=self._is_last(batch, partition)
        ):
            return
        batch.note(partition, RANGE + str(progress.slots).encode(), text)
        self._collected.ranges[partition] = progress

    def _collect_group_offset(self, batch: CommitBatch, partition: int) -> None:
        """Add the lowest watermark of all ranges, once all are known, if this task leads their owners."""
        sharing = self._sharing[partition]
        if not self._ownership.leads(partition):
            return
        known = dict(self._state.range_progresses.get(partition, {}))
        own = self._collected.ranges.get(partition) or self._committed_ranges.get(partition)
        if own is not None:
            known[sharing.slots] = own
        watermark = sharing.group_watermark(known.values())
        if watermark is None:
            return
        if watermark == self._group_offsets.get(partition) and not self._needs_refresh(partition):
            return
        self._delete_ranges(batch, partition, sharing.superseded(known.values()))
        self._note_generation(batch, partition)
        self._collected.group_offsets[partition] = watermark
        self._add_offset(batch, partition, watermark, RANGES)

    def _note_generation(self, batch: CommitBatch, partition: int) -> None:
        generation = self._sharing[partition].generation
        if generation != self._state.grouped[partition]:
            batch.note(partition, GROUPED, json.dumps(generation).encode())

    def _add_offset(self, batch: CommitBatch, partition: int, watermark: int, text: str) -> None:
        source = self._worker_session.identity.source
        self._collected.partitions.append(partition)
        batch.offsets.append(TopicPartition(source.topic, partition, watermark, metadata=stamp(text, source)))

    def _delete_ranges(
        self, batch: CommitBatch, partition: int, range_progresses: Iterable[RangeProgress]
    ) -> None:
        for progress in range_progresses:
            batch.note(partition, RANGE + str(progress.slots).encode(), None)
            if progress.slots != self.slots[partition]:
                batch.note(partition, part_of(ATTEMPTS, progress.slots), None)

    def _delete_superseded_records(self, batch: CommitBatch) -> None:
        """Delete the records of ranges that had these slots before. What still counts is written first."""
        for partition, slots in self.slots.items():
            names = self._state.parts.get(partition, set())
            for record in (LOAD, REST):
                for name in stale_parts(names, record, slots):
                    batch.note(partition, name, None)
            old = stale_parts(names, REDRIVEN, slots)
            if old and not self._by_epoch:  # otherwise the planner writes them
                batch.note(partition, part_of(REDRIVEN, slots), self._commands.redriven(partition).encode())
                for name in old:
                    batch.note(partition, name, None)

    def _delete_old_audit_records(self, batch: CommitBatch) -> None:
        """Delete audit records of commands that were answered long ago, when there are very many."""
        pending = {command.id for command in self._state.commands.values()}
        for partition in self.slots:
            audits = [(name, value) for name, (p, value) in self._state.audits.items() if p == partition]
            for name in outdated(audits, pending, time.time()):
                batch.note(partition, name, None)

    def is_committed(self, partition: int, offset: int) -> bool:
        """Whether a message is done in the last committed progress."""
        shared = self._committed_ranges.get(partition)
        found = self._committed.get(partition) if shared is None else in_common(shared.segments)
        return found is not None and found.is_done(offset)


def _hidden(topic: str) -> BrokerError:
    return BrokerError(
        f"expected to read topic {topic!r} to its end within {_OPEN_TRANSACTIONS_SECONDS:g} s, but "
        "an open transaction hides records. The task starts again"
    )


def _moved_to(committed: Committed | None) -> int | None:
    """The offset committed outside Keylane; None if it is the app's own, -1 if there is none."""
    if committed is None:
        return -1
    return committed.offset if committed.text is None else None
