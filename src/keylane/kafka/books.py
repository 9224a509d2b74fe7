"""A task's books: what is done, and what of it was written down."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from keylane.core.progress import LIMIT, encode
from keylane.core.record import Kept, Stop, encode_kept
from keylane.core.ring import ALL
from keylane.core.standing import (
    RangeMark,
    Standing,
    group_watermark,
    in_common,
    inherit,
    next_version,
    outdated,
)
from keylane.core.watermark import Progress, Watermark
from keylane.engine.versionstore import VersionStore
from keylane.errors import FloodError
from keylane.kafka.state import (
    ATTEMPTS,
    ELSEWHERE,
    EPOCH,
    GROUPED,
    MAX_PROGRESS,
    NOTHING,
    PROGRESS,
    RANGE,
    RANGES,
    VERSION,
    Proposal,
    part_of,
)
from keylane.kafka.transactions import LASTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from keylane.app import App
    from keylane.core.record import LaneRecord
    from keylane.core.ring import Slots
    from keylane.core.standing import Strip
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
        self.watermarks: dict[int, Watermark | RangeMark] = {}
        self.restored: dict[int, int] = {}
        """The watermarks as they were found: what comes from below was read for its event ids only."""
        self.rest = 0.0
        """Seconds for which to write nothing more, because the last record was a large one."""
        self._app = app
        self._exact = app.delivery == "exactly_once"
        self._by_epoch = app.commit == "epoch"
        self._epoch = ("", 0)
        self._committed: dict[int, Progress] = {}
        self._slots: dict[int, Slots] = {}
        self._written: dict[int, Standing] = {}  # of ranges
        self._cuts: dict[int, int] = {}  # the versions of what it writes about ranges
        self._moved: dict[
            int, int
        ] = {}  # where somebody had moved the group, of partitions that are shared out
        self._group: dict[int, int] = {}  # of those whose owners it leads: the offset that was committed
        self._attempts: dict[int, dict[int, Kept]] = {}  # as they were written down last
        self._not_before: dict[int, float] = {}  # when a partition's large progress is written next
        self._withheld: set[int] = set()  # partitions whose progress was not written this time
        self._seat: Seat
        self._state: State
        self._claims: Claims
        self._engine: Engine
        self._desk: Desk

    def restore(self, seat: Seat, claims: Claims, state: State, plan: TaskPlan) -> dict[int, int]:
        """Where each partition's reading begins: the group's progress, or the plan's. Blocks.

        Raises FloodError when this run was stopped by its flood guard, TakenOverError when another one goes on.
        """
        self._seat, self._state, self._claims = seat, state, claims
        self._epoch, self._slots = (plan.run, plan.epoch), plan.slots
        if state.flooded:
            raise FloodError(state.flooded)
        clean = claims.claim(plan.slots)
        if clean and not plan.cuts and seat.stands(plan.epoch, plan.starts):
            self._committed = dict(seat.committed)
            self.watermarks = {p: Watermark(found) for p, found in seat.committed.items()}
            begins = {p: found.watermark for p, found in seat.committed.items()}
        else:
            seat.seen = seat.versions = None
            begins = self._read(seat, state, plan.starts)
        seat.epoch = -1
        if self._app.versions is not None and seat.versions is None:
            seat.versions = self._restore_versions(state)
        state.versions = None  # from here on the task knows them best
        self.restored = {p: mark.value for p, mark in self.watermarks.items()}
        return begins

    def _read(self, seat: Seat, state: State, starts: Mapping[int, int]) -> dict[int, int]:
        """From where on each partition is read: below its progress for the event ids that were seen."""
        app = self._app
        found = seat.cluster.committed(app.name, app.source, starts, settled=True)
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
            strips = self._inherit(partition, restored.progress, moved=None if metadata else offset)
            strips = tuple(
                replace(
                    strip, progress=self._fitting(where, strip.progress, begins[partition], ends[partition])
                )
                for strip in strips
            )
            if self._slots[partition] == ALL and len(strips) == 1:
                mark: Watermark | RangeMark = Watermark(strips[0].progress)
                if partition in found and not state.standings.get(partition):
                    # Else it is written down as soon as there is anything to write.
                    self._committed[partition] = restored.progress
            else:
                mark = RangeMark(self._slots[partition], strips, app.slot_of)
            self.watermarks[partition] = mark
            if app.idempotency is not None and partition in found:
                begins[partition] = max(begins[partition], app.idempotency.since(mark.value))
            else:
                begins[partition] = mark.value
        return begins

    def _inherit(self, partition: int, whole: Progress, moved: int | None) -> tuple[Strip, ...]:
        """What this task's slots begin with: what their owners wrote before, or what the group says.

        A group that somebody has moved overrules what was written before that; not what was written since.
        """
        standings = list(self._state.standings.get(partition, {}).values())
        slots = self._slots[partition]
        self._cuts[partition] = next_version(slots, standings)
        if moved is not None:
            self._moved[partition] = moved
            standings = [standing for standing in standings if standing.moved == moved]
        return inherit(slots, standings, whole)

    def _restore_versions(self, state: State) -> VersionStore:
        """How far the entities are. A version counts when its message is done, also when the group was moved."""
        if state.versions is None:
            state.restore_versions()
        store = state.versions or VersionStore()
        for partition, mark in self.watermarks.items():
            gone = store.keep_done(partition, mark.value, partial(self._was_done, mark))
            if gone:
                log.info("partition %d: %d versions were set by messages that run again", partition, gone)
        return store

    def _was_done(self, mark: Watermark | RangeMark, key: bytes, offset: int) -> bool:
        """Whether the message of this key was done before; what is in the slots of others is their concern."""
        if not isinstance(mark, RangeMark):
            return not mark.wanted(offset)
        slot = self._app.slot_of(key, offset)
        return slot not in mark.slots or mark.is_done(slot, offset)

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

    def restore_lanes(self, engine: Engine, output: KafkaOutput) -> None:
        """Attempts, stopped lanes and standing orders, as they were written down."""
        state, kept = self._state, dict[tuple[int, int], Kept]()
        for partition, records in state.attempts.items():
            for found in records.values():
                for offset, one in found.items():  # an older record may know of fewer attempts
                    known = kept.get((partition, offset))
                    if known is None or one.attempts > known.attempts:
                        kept[partition, offset] = one
            self._attempts[partition] = records.get(part_of(ATTEMPTS, self._slots[partition]), {})
        lanes = []
        for (partition, name), record in state.lanes.items():
            if self._app.slot_of(record.key, record.offset) not in self._slots[partition]:
                continue
            if record.stop is Stop.PARKED or not self._is_done(partition, record):
                lanes.append(record)
            else:  # its message was done, or the group was moved past it
                output.note(partition, name, None, lambda _problem: None)
        redrives = [
            engine.lane_key(order.key, order.partition)
            for order in state.orders.values()
            if order.do == "redrive"
            and self._app.slot_of(order.key, order.offset) in self._slots[order.partition]
        ]
        engine.restore(kept, lanes, [lane for lane in redrives if lane is not None])

    def _is_done(self, partition: int, record: LaneRecord) -> bool:
        mark = self.watermarks[partition]
        if isinstance(mark, RangeMark):
            return mark.is_done(self._app.slot_of(record.key, record.offset), record.offset)
        return not mark.wanted(record.offset)

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
        standings: dict[int, Standing] = {}
        groups: dict[int, int] = {}
        attempts: dict[int, dict[int, Kept]] = {}
        versions: dict[Name, Entry] = {}

        def close() -> list[TopicPartition]:
            self._engine.settle()
            attempts.update(self._note_attempts())
            if self._by_epoch:
                offsets = self._propose(changed) if last else []
            else:
                self._desk.write_down()
                offsets = self._offsets(changed, standings, groups, last=last)
                versions.update(self._note_versions())
            closing()
            return offsets

        await self._seat.scribe.commit(close)
        self._attempts |= attempts
        self._committed |= changed
        for partition in changed:
            self._written.pop(partition, None)
        self._written |= standings
        self._group |= groups
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
            proposal = Proposal(self._epoch[1], progress.watermark, text, redriven)
            self._seat.scribe.note(partition, EPOCH, proposal.encode())
        return []

    def _offsets(
        self,
        changed: dict[int, Progress],
        standings: dict[int, Standing],
        groups: dict[int, int],
        *,
        last: bool,
    ) -> list[TopicPartition]:
        offsets = []
        self.rest = 0.0
        self._withheld.clear()
        for partition, mark in self.watermarks.items():
            if isinstance(mark, RangeMark):
                strips = mark.strips()
                if mark.slots != ALL or len(strips) > 1:
                    self._stand(partition, strips, standings, last=last)
                    offsets += self._of_group(partition, groups, standings.get(partition))
                    continue
                progress = strips[0].progress
            else:
                progress = mark.progress()
            if progress == self._committed.get(partition):
                continue
            metadata = encode(progress, MAX_PROGRESS) or NOTHING
            if len(metadata) > LIMIT:
                if not self._has_room(partition, len(metadata), last=last):
                    continue
                self._seat.scribe.note(partition, PROGRESS, f"{progress.watermark} {metadata}".encode())
                metadata = ELSEWHERE
            ranges = dict(self._state.standings.get(partition, {}))
            if (own := self._written.get(partition)) is not None:  # it may not have been read back yet
                ranges[own.slots] = own
            self._forget_ranges(partition, ranges.values())
            changed[partition] = progress
            offsets.append(TopicPartition(self._app.source, partition, progress.watermark, metadata=metadata))
        return offsets

    def _has_room(self, partition: int, size: int, *, last: bool) -> bool:
        """Whether a record of this size may be written now; then the next one has to wait."""
        now, wait = time.monotonic(), size / _STATE_RATE
        if self._exact:  # what is in the transaction must be in its progress: the next one comes later
            self.rest = max(self.rest, min(wait, LASTS / 4))
        elif not last and now < self._not_before.get(partition, 0.0):
            self._withheld.add(partition)
            return False
        self._not_before[partition] = now + wait
        return True

    # Of partitions that are shared out between tasks.

    def _stand(
        self, partition: int, strips: tuple[Strip, ...], standings: dict[int, Standing], *, last: bool
    ) -> None:
        slots = self._slots[partition]
        if self._state.grouped.get(partition) == list(self._epoch):
            self._moved.pop(partition, None)
        standing = Standing(slots, self._cuts[partition], strips, self._moved.get(partition))
        if standing == self._written.get(partition):
            return
        text = standing.encode(MAX_PROGRESS)
        if len(text) > LIMIT and not self._has_room(partition, len(text), last=last):
            return
        self._seat.scribe.note(partition, RANGE + str(slots).encode(), text)
        standings[partition] = standing

    def _of_group(self, partition: int, groups: dict[int, int], own: Standing | None) -> list[TopicPartition]:
        """The group's offset is the least of all ranges'. The leader of their owners writes it, once all are known."""
        slots = self._slots[partition]
        if not self._claims.leads(partition):
            return []
        known = dict(self._state.standings.get(partition, {}))
        own = own or self._written.get(partition)
        if own is not None:
            known[slots] = own
        watermark = group_watermark(known.values())
        if watermark is None or watermark == self._group.get(partition):
            return []
        self._forget_ranges(partition, outdated(known.values()))
        if partition in self._moved:
            self._seat.scribe.note(partition, GROUPED, json.dumps(self._epoch).encode())
        groups[partition] = watermark
        return [TopicPartition(self._app.source, partition, watermark, metadata=RANGES)]

    def _forget_ranges(self, partition: int, standings: Iterable[Standing]) -> None:
        for standing in standings:
            self._seat.scribe.note(partition, RANGE + str(standing.slots).encode(), None)
            if standing.slots != self._slots[partition]:
                self._seat.scribe.note(partition, part_of(ATTEMPTS, standing.slots), None)

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
                name = part_of(ATTEMPTS, self._slots[partition])
                self._seat.scribe.note(partition, name, encode_kept(now, MAX_PROGRESS) if now else None)
                changed[partition] = now
        return changed

    def _is_committed(self, partition: int, offset: int) -> bool:
        standing = self._written.get(partition)
        found = self._committed.get(partition) if standing is None else in_common(standing.strips)
        return found is not None and found.is_done(offset)
