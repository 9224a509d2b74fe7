"""A task's books: what is done, and what of it was written down."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from keylane.core.progress import LIMIT, encode
from keylane.core.record import Stop, encode_kept
from keylane.core.watermark import Progress, Watermark
from keylane.engine.versionstore import VersionStore
from keylane.errors import FloodError
from keylane.kafka.state import ATTEMPTS, ELSEWHERE, EPOCH, MAX_PROGRESS, NOTHING, PROGRESS, VERSION, Proposal
from keylane.kafka.transactions import LASTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.app import App
    from keylane.core.record import Kept
    from keylane.engine.engine import Engine
    from keylane.engine.versionstore import Entry, Name
    from keylane.kafka.claims import Claims
    from keylane.kafka.desk import Desk
    from keylane.kafka.output import KafkaOutput
    from keylane.kafka.seat import Seat
    from keylane.kafka.state import State
    from keylane.kafka.task import TaskPlan

log = logging.getLogger("keylane.task")

_STATE_RATE = 100_000.0
"""Characters of progress per second and partition that go to the state topic, about."""


class Books:
    """Restored once, opened with what it needs to write, then written now and then. Used on the loop's thread."""

    def __init__(self, app: App) -> None:
        self.watermarks: dict[int, Watermark] = {}
        self.restored: dict[int, int] = {}
        """The watermarks as they were found: what comes from below was read for its event ids only."""
        self.rest = 0.0
        """Seconds for which to write nothing more, because the last record was a large one."""
        self._app = app
        self._exact = app.delivery == "exactly_once"
        self._by_epoch = app.commit == "epoch"
        self._epoch = 0
        self._committed: dict[int, Progress] = {}
        self._attempts: dict[int, dict[int, Kept]] = {}  # as they were written down last
        self._not_before: dict[int, float] = {}  # when a partition's large progress is written next
        self._withheld: set[int] = set()  # partitions whose progress was not written this time
        self._seat: Seat
        self._engine: Engine
        self._desk: Desk

    def restore(self, seat: Seat, claims: Claims, state: State, plan: TaskPlan) -> dict[int, int]:
        """Where each partition's reading begins: the group's progress, or the plan's. Blocks.

        Raises FloodError when this run was stopped by its flood guard, TakenOverError when another one goes on.
        """
        self._seat = seat
        self._epoch = plan.epoch
        if state.flooded:
            raise FloodError(state.flooded)
        clean = claims.claim(plan.starts)
        if clean and seat.stands(plan.epoch, plan.starts):
            self._committed = progress = dict(seat.committed)
            begins = {p: found.watermark for p, found in progress.items()}
        else:
            seat.seen = seat.versions = None
            progress, begins = self._read(seat, state, plan.starts)
        seat.epoch = -1
        if self._app.versions is not None and seat.versions is None:
            seat.versions = self._versions(state, progress)
        state.versions = None  # from here on the task knows them best
        self.watermarks = {p: Watermark(found) for p, found in progress.items()}
        self.restored = {p: found.watermark for p, found in progress.items()}
        return begins

    def _read(
        self, seat: Seat, state: State, starts: Mapping[int, int]
    ) -> tuple[dict[int, Progress], dict[int, int]]:
        """Progress, and from where on each partition is read: below it for the event ids that were seen."""
        app = self._app
        progress = {}
        found = seat.cluster.committed(app.name, app.source, starts)
        begins = seat.cluster.ends(app.source, starts, earliest=True)
        ends = seat.cluster.ends(app.source, starts)
        for partition, fallback in starts.items():
            where = f"{app.source}/{partition}"
            offset, metadata = found.get(partition, (fallback, NOTHING))
            restored = state.progress(partition, offset, metadata)
            if partition not in found:
                log.info("%s: the group has no offset for it; it is read from %d on", where, offset)
            elif not metadata:
                log.warning(
                    "%s: offset %d was not committed by this app; somebody has moved its group. Everything below it "
                    "counts as done, everything from it on runs, also what ran before",
                    where,
                    offset,
                )
            if restored.problem:
                log.warning("%s: %s; messages after %d run again", where, restored.problem, offset)
            progress[partition] = self._fitting(where, restored.progress, begins[partition], ends[partition])
            if partition in found:  # else it is written down as soon as there is anything to write
                self._committed[partition] = restored.progress
                if app.idempotency is not None:
                    since = app.idempotency.since(progress[partition].watermark)
                    begins[partition] = max(begins[partition], since)
                    continue
            begins[partition] = progress[partition].watermark
        return progress, begins

    @staticmethod
    def _versions(state: State, progress: Mapping[int, Progress]) -> VersionStore:
        """How far the entities are. A version counts when its message is done, also when the group was moved."""
        if state.versions is None:
            state.restore_versions()
        store = state.versions or VersionStore()
        for partition, found in progress.items():
            gone = store.keep_done(partition, found.watermark, found.is_done)
            if gone:
                log.info("partition %d: %d versions were set by messages that run again", partition, gone)
        return store

    @staticmethod
    def _fitting(where: str, progress: Progress, begin: int, end: int) -> Progress:
        """The progress, or what is made of it when the log does not fit it any more."""
        if progress.watermark > end:
            log.error(
                "%s: %d messages were done, but the log ends at %d: it was truncated, or the topic was made anew. "
                "What is in it may be new, so all of it runs",
                where,
                progress.watermark,
                end,
            )
            return Progress(watermark=begin, position=begin)
        if progress.watermark < begin:
            log.error(
                "%s: the log begins at %d and messages from %d on were not done: their retention is over, they are "
                "lost. Retention must be longer than the lag",
                where,
                begin,
                progress.watermark,
            )
            if progress.position <= begin:
                return Progress(watermark=begin, position=begin)
        return progress

    def restore_lanes(self, state: State, engine: Engine, output: KafkaOutput) -> None:
        """Attempts, stopped lanes and standing orders, as they were written down."""
        kept = {
            (partition, offset): one
            for partition, found in state.attempts.items()
            for offset, one in found.items()
        }
        self._attempts = dict(state.attempts)
        lanes = []
        for (partition, name), record in state.lanes.items():
            if record.stop is Stop.PARKED or self.watermarks[partition].wanted(record.offset):
                lanes.append(record)
            else:  # its message was done, or the group was moved past it
                output.note(partition, name, None, lambda _problem: None)
        redrives = [order.key for order in state.orders.values() if order.do == "redrive"]
        engine.restore(kept, lanes, [key for key in redrives if key is not None])

    def open(self, engine: Engine, desk: Desk) -> None:
        """Whom to ask for what has changed."""
        self._engine, self._desk = engine, desk
        desk.before_letters = self.note_redriven_versions

    async def write(self, closing: Callable[[], None], *, last: bool) -> None:
        """Write down what has changed, in one transaction. Raises AbortedError when it was not taken, or FencedError.

        ``closing`` is called when its progress is settled: what is done by then is in it, what is put then too.
        What does not fit beside an offset goes to the state topic. Such a large record is not written every time, but
        at the end (``last``): behind a stuck lane there are megabytes of them.
        """
        changed: dict[int, Progress] = {}
        attempts: dict[int, dict[int, Kept]] = {}
        versions: dict[Name, Entry] = {}

        def close() -> list[TopicPartition]:
            self._engine.settle()
            attempts.update(self._note_attempts())
            if self._by_epoch:
                offsets = self._propose(changed) if last else []
            else:
                self._desk.write_down()
                offsets = self._offsets(changed, last=last)
                versions.update(self._note_versions())
            closing()
            return offsets

        await self._seat.scribe.commit(close)
        self._attempts |= attempts
        self._committed |= changed
        if self._engine.versions is not None:
            self._engine.versions.written(versions)
        if not self._by_epoch:
            self._engine.stops.committed(self._is_committed)

    def leave(self, epoch: int) -> None:
        """The epoch ended as planned; what was written last stands."""
        self._seat.epoch, self._seat.committed = epoch, self._committed

    def _propose(self, changed: dict[int, Progress]) -> list[TopicPartition]:
        """Of every partition, changed or not: what an attempt that failed has proposed must not stand."""
        for partition, mark in self.watermarks.items():
            progress = changed[partition] = mark.progress()
            redriven = self._desk.redriven(partition)
            text = encode(progress, MAX_PROGRESS - len(redriven))
            proposal = Proposal(self._epoch, progress.watermark, text, redriven)
            self._seat.scribe.note(partition, EPOCH, proposal.encode())
        return []

    def _offsets(self, changed: dict[int, Progress], *, last: bool) -> list[TopicPartition]:
        offsets = []
        self.rest = 0.0
        self._withheld.clear()
        now = time.monotonic()
        for partition, mark in self.watermarks.items():
            progress = mark.progress()
            if progress == self._committed.get(partition):
                continue
            metadata = encode(progress, MAX_PROGRESS) or NOTHING
            if len(metadata) > LIMIT:
                wait = len(metadata) / _STATE_RATE
                if (
                    self._exact
                ):  # what is in the transaction must be in its progress: the next one comes later
                    self.rest = max(self.rest, min(wait, LASTS / 4))
                elif not last and now < self._not_before.get(partition, 0.0):
                    self._withheld.add(partition)
                    continue
                self._not_before[partition] = now + wait
                self._seat.scribe.note(partition, PROGRESS, f"{progress.watermark} {metadata}".encode())
                metadata = ELSEWHERE
            changed[partition] = progress
            offsets.append(TopicPartition(self._app.source, partition, progress.watermark, metadata=metadata))
        return offsets

    def _note_versions(self) -> dict[Name, Entry]:
        """The versions that belong to the progress which is just being written; not more, or they would be ahead."""
        if self._engine.versions is None:
            return {}
        found = self._engine.versions.changed(self._withheld)
        for (partition, key), (mark, offset) in found.items():
            self._seat.scribe.note(partition, VERSION + key, mark.encode(offset))
        return found

    def note_redriven_versions(self) -> None:
        """The versions of redriven messages, whose progress in the source was written before: with their letters."""
        if self._engine.versions is None:
            return
        for (partition, key), (mark, offset) in self._engine.versions.changed().items():
            if self._is_committed(partition, offset):
                self._seat.scribe.note(partition, VERSION + key, mark.encode(offset))

    def _note_attempts(self) -> dict[int, dict[int, Kept]]:
        kept = self._engine.kept()
        changed = {}
        for partition in kept.keys() | self._attempts.keys():
            now = kept.get(partition, {})
            if now != self._attempts.get(partition, {}):
                self._seat.scribe.note(partition, ATTEMPTS, encode_kept(now, MAX_PROGRESS) if now else None)
                changed[partition] = now
        return changed

    def _is_committed(self, partition: int, offset: int) -> bool:
        found = self._committed.get(partition)
        return found is not None and found.is_done(offset)
