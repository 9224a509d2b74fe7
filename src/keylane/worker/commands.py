"""Carries out operators' commands in the task that owns the lane: release, skip, redrive, reset, cancel.

One task decides about a command and about its cancellation, so it is always clear which of them came first.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.dlq.disk_table import DiskSorter
from keylane.dlq.reader import (
    NewestDeadLetters,
    SeenDeadLetters,
    read_all_dead_letters,
    read_dead_letters_at,
)
from keylane.dlq.record import DeadLetter, DeadLetterKind, DeadLetterMessage, ExpectedOrigin
from keylane.engine.redrive import RedriveItem, RedriveRounds
from keylane.errors import AbortedError, KeylaneError
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.offset_runs import OffsetRuns
from keylane.offsets.slots import ALL
from keylane.outcome import Outcome
from keylane.state.answers import CommandAnswer, RedriveCounts
from keylane.state.commands import audit_name
from keylane.state.topic import REDRIVEN, VERSION, part_of
from keylane.worker.commit import Contributor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping

    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.engine.redrive import DoneLanes, Redriver
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_writer import StateRecord
    from keylane.offsets.identity import TopicIdentity
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.state.commands import Command
    from keylane.worker.commit import CommitBatch
    from keylane.worker.output import KafkaOutput
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_REDRIVEN_AT_ONCE_MESSAGES = 1000
"""Dead letters that one round redrives at once, at most: they are in memory."""
_RETRY_SECONDS = 5.0
_COMMIT_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _InSourceOrder:
    """The letters of one redrive, before the first of them runs."""

    rows: DiskSorter = field(default_factory=DiskSorter)
    """Whether the letter's message is in the current source, its offset there, and the letter's position."""
    last: dict[bytes | None, tuple[int, int, int]] = field(default_factory=dict)
    """The last row of each lane."""
    newest: NewestDeadLetters = field(default_factory=NewestDeadLetters)


class CommandExecutor(Contributor):
    """Executes commands for one task. Used on its loop's thread.

    ``redriven`` are the dead letters already redriven, by partition, from the state topic. ``slots`` are those that
    the worker owns, by partition; they change while it runs. ``commit`` commits what was written so far, ``source`` is
    the identity of the current source topic.
    """

    def __init__(
        self,
        engine: Engine,
        output: KafkaOutput,
        settings: KafkaSettings,
        app: AppSpec,
        owner: str,
        redriven: dict[int, OffsetRuns],
        slots: Mapping[int, Slots],
        wall: Callable[[], float],
        *,
        source: TopicIdentity,
        commit: Callable[[], Awaitable[None]],
        plan: TaskPlan,
    ) -> None:
        self._engine = engine
        self._output = output
        self._settings = settings
        self._app = app
        self._owner = owner
        self._home = ExpectedOrigin(app=app.name, source=source)
        self._slots = slots
        self._wall = wall
        self._source = source
        self._commit = commit
        self._plan = plan
        self._rounds = RedriveRounds(engine, self._begin)
        self._known = redriven
        self._redriven = dict(redriven)  # a copy: the state's own follows the topic, which lags behind
        self._changed: set[int] = set()  # partitions whose redriven letters are not recorded yet
        self._pending: dict[str, Command] = {}  # redrives by id
        self._running: set[str] = set()  # ids of redrives that have begun
        self._cancels: dict[str, Command] = {}  # cancels of running redrives, by the id of the redrive
        self._answers: dict[int, dict[bytes, bytes | None]] = {}  # with commit="epoch", by partition and name
        self._collected: set[int] = set()  # partitions whose redriven letters are in the batch
        self.redriven_versions: Callable[[], list[StateRecord]] = list
        """Returns records for the transaction that records redriven letters."""

    def carry_out(self, commands: Iterable[Command]) -> None:
        """Carry out or start new commands. A command that is cancelled by another one among them is not started."""
        fresh = {command.id: command for command in commands}
        for cancel in [command for command in fresh.values() if command.do == "cancel"]:
            del fresh[cancel.id]
            self._cancel(cancel, fresh.pop(cancel.withdraws, None))
        for command in fresh.values():
            if command.do == "redrive":
                self._take_redrive(command)
            elif command.do in ("pause", "resume"):
                self._take_pause(command)
            elif command.do == "reset":
                problem = self._reset(command)
                log.warning("reset by %s of lane %r: %s", command.who, command.key, problem or "done")
                self._answer(command, ok=problem is None, why=problem or "done")
            else:
                self._take_stop(command)

    def _take_stop(self, command: Command) -> None:
        stops = self._engine.stopped_lanes
        act = stops.release if command.do == "release" else stops.skip
        assert command.offset is not None  # noqa: S101 - release and skip name their message
        lane = command.key if command.key is not None else (command.partition, command.offset)
        problem = act(lane, command.partition, command.offset)
        log.warning(
            "%s by %s of message %d/%d in lane %r: %s",
            command.do,
            command.who,
            command.partition,
            command.offset,
            command.key,
            problem or "done",
        )
        self._answer(command, ok=problem is None, why=problem or "done")

    def _take_pause(self, command: Command) -> None:
        """Confirm it: the pause itself is a record, which every task of the app follows."""
        stages = [stage.name for stage in self._app.stages]
        problem = None
        if command.do == "pause" and command.scope == "stage" and command.stage not in stages:
            problem = f"the app has no stage {command.stage!r}; it has {', '.join(map(repr, stages))}"
        what = command.stage or (command.key if command.key is not None else command.partition)
        log.warning(
            "%s by %s of %s %r: %s",
            command.do,
            command.who,
            command.scope,
            what,
            problem or command.reason or "done",
        )
        self._answer(command, ok=problem is None, why=problem or "done")

    def _take_redrive(self, command: Command) -> None:
        if self._app.order.reads_messages:
            self._answer(
                command,
                ok=False,
                why=f"order={self._app.order!r} has several lanes for a key, and a redrive is by key: it could run "
                "beside newer messages of its lane. 'keylane dlq show' has the message: send it to the source again",
            )
            return
        elsewhere = self._elsewhere(command)
        if elsewhere is not None:
            lane = self._lane(command)
            if lane is not None and not self._is_wanted(lane):
                self._engine.stopped_lanes.end_redrive(lane)
            self._answer(
                command,
                ok=False,
                why=f"its key moved from partition {command.partition} to {elsewhere} when the source grew, and "
                "another task runs its newer messages: they would run at the same time. Start the app with one "
                "task (tasks=1) and redrive again",
            )
            return
        self._pending[command.id] = command
        begun = json.dumps({"owner": self._owner, "at": self._wall()}).encode()
        self._output.note(command.partition, audit_name(command.id, begun=True), begun, _unheard)
        lane = self._lane(command)
        if lane is not None:
            self._engine.stopped_lanes.begin_redrive(lane)
        self._rounds.look()

    def _cancel(self, cancel: Command, fresh: Command | None) -> None:
        """Withdraw a command: one that has just come in (``fresh``), or a redrive that has not ended."""
        command = fresh or self._pending.get(cancel.withdraws)
        if command is None or command.id in self._cancels:
            why = "nothing to do: the order was carried out or cancelled before"
            self._answer(cancel, ok=False, why=why)
        elif command.id in self._running:  # its running messages end first
            self._cancels[command.id] = cancel
            lane = self._lane(command)
            if lane is not None:
                self._engine.stopped_lanes.cancel_redrive(lane)
        else:
            self._cancelled(command, cancel, None)

    def _cancelled(self, command: Command, cancel: Command, counts: RedriveCounts | None) -> None:
        self._pending.pop(command.id, None)
        self._running.discard(command.id)
        lane = self._lane(command)
        if command.do == "redrive" and lane is not None and not self._is_wanted(lane):
            self._engine.stopped_lanes.cancel_redrive(lane)
            self._engine.stopped_lanes.end_redrive(lane)
        log.warning("%s by %s of lane %r: cancelled by %s", command.do, command.who, command.key, cancel.who)
        self._answer(command, ok=False, why=f"cancelled by {cancel.who}", counts=counts)
        self._answer(cancel, ok=True, why="done")

    def _is_wanted(self, lane: bytes) -> bool:
        """True if another command redrives this lane."""
        return lane in map(self._lane, self._pending.values())

    def _reset(self, command: Command) -> str | None:
        """Set the versions of an entity; returns the problem, or None."""
        versions = self._engine.versions
        if versions is None or command.key is None:
            return "the app has no versions (App(versions=…))"
        mark = versions.reset(command.partition, command.key, command.to)
        value = None if mark is None else mark.encode()
        self._output.note(command.partition, VERSION + command.key, value, _unheard)
        return None

    def _elsewhere(self, command: Command) -> int | None:
        """Return the partition of new messages of the command's key if another task owns it."""
        key, plan = command.key, self._plan
        if key is None or not self._app.order.by_key:
            return None
        home = partition_of(key, plan.partitions)
        moved = any(partition_of(key, count) == command.partition for count in plan.former)
        if home == command.partition or not moved:
            return None
        slots = self._slots.get(home)
        return None if slots is not None and self._app.slot_of(key, 0) in slots else home

    def _lane(self, command: Command) -> bytes | None:
        return self._engine.lane_key(command.key, command.partition)

    def plan(self, plan: TaskPlan) -> None:
        """The next epoch has begun; partitions may have been added to the source."""
        self._plan = plan

    def take(self, ranges: Mapping[int, Slots], /) -> None:
        """The worker owns these ranges now: the letters that were redriven are known."""
        for partition in ranges:
            self._redriven[partition] = self._known.get(partition, OffsetRuns()).union(OffsetRuns())

    def release(self, ranges: Mapping[int, Slots], /) -> None:
        """Another worker owns these ranges now."""
        for partition in ranges:
            self._redriven.pop(partition, None)
            self._answers.pop(partition, None)
            self._changed.discard(partition)

    def is_ours(self, command: Command) -> bool:
        """Whether the worker owns the slot that the command is about."""
        slots = self._slots.get(command.partition)
        if slots is None:
            return False
        if command.key is None and command.offset is None:
            return 0 in slots  # letters of messages without a key, which any owner may run
        return self._app.slot_of(command.key, command.offset or 0) in slots

    def has_redrives(self, partition: int) -> bool:
        """Whether letters of this partition are being redriven, or are to be."""
        return any(command.partition == partition for command in self._pending.values())

    @property
    def idle(self) -> bool:
        """True if there is nothing to redrive."""
        return not self._pending

    def done(self, delivery: Delivery) -> None:
        """A redriven message is done."""
        assert delivery.failure_state is not None  # noqa: S101 - redriven messages have a letter
        assert delivery.failure_state.letter is not None  # noqa: S101
        if delivery.outcome is not Outcome.PARKED:
            self._mark(delivery.partition, delivery.failure_state.letter)
        self._rounds.done(delivery)

    def collect(self, batch: CommitBatch, /) -> None:
        """Add which letters were redriven, if that has changed."""
        self._collected = self._take_changed()
        batch.notes.extend(self._records(self._collected))

    def committed(self) -> None:
        """The redriven letters in the batch are recorded."""
        self._collected = set()

    def aborted(self) -> None:
        """Add them to the next batch again."""
        self._changed |= self._collected
        self._collected = set()

    def _note_redriven(self) -> None:
        """Put the redriven letters into the open transaction: the answers that follow say that they ran.

        Not with lane state: then a commit has recorded them, together with what they have changed.
        """
        if self._engine.states is not None:
            return
        changed = self._take_changed()

        def written(problem: str | None) -> None:
            if problem is not None:
                self._changed.update(changed)

        for partition, name, value in self._records(changed):
            self._output.note(partition, name, value, written)

    def _take_changed(self) -> set[int]:
        if self._app.commit == "epoch":  # proposed with the epoch's progress
            return set()
        changed, self._changed = self._changed, set()
        return changed

    def _records(self, changed: Iterable[int]) -> list[StateRecord]:
        records = [
            (
                partition,
                part_of(REDRIVEN, self._slots.get(partition, ALL)),
                self._redriven[partition].encode(),
            )
            for partition in sorted(changed)
        ]
        return [*self.redriven_versions(), *records] if records else []

    def redriven(self, partition: int) -> str:
        """Return the redriven letters as text."""
        found = self._redriven.get(partition)
        return "" if found is None else found.encode().decode()

    def answers(self, partition: int) -> tuple[tuple[str, str | None], ...]:
        """Results of redrives, and the removal of their commands: records that count with the epoch."""
        found = self._answers.get(partition, {})
        return tuple((name.hex(), None if value is None else value.decode()) for name, value in found.items())

    async def run(self) -> None:
        """Redrive as commanded, until cancelled. An interrupted command stays, and the next task continues it."""
        await self._rounds.run()

    def _begin(self, redriver: Redriver) -> Coroutine[None, None, None] | None:
        """The next round: commands about one partition, one of each key, whose lanes are not redriven now."""
        busy = {self._place(self._pending[command_id]) for command_id in self._running}
        free = [command for command in self._pending.values() if self._place(command) not in busy]
        if not free:
            return None
        partition = min(command.partition for command in free)
        commands: dict[bytes | None, Command] = {}  # another one of the same key comes after it
        for command in free:
            if command.partition == partition:
                commands.setdefault(command.key, command)
        self._running |= {command.id for command in commands.values()}
        return self._round(redriver, partition, list(commands.values()))

    def _place(self, command: Command) -> bytes | int:
        """The lane, which letters of several partitions may share; else the partition."""
        lane = self._lane(command)
        return command.partition if lane is None else lane

    async def _round(self, redriver: Redriver, partition: int, commands: list[Command]) -> None:
        ids = [command.id for command in commands]
        try:
            await self._redrive(redriver, partition, commands)
        except KeylaneError as error:
            log.warning("redrive of partition %d: %s; tried again in %g s", partition, error, _RETRY_SECONDS)
            for command_id in ids:
                if command_id in self._cancels:
                    self._cancelled(self._pending[command_id], self._cancels.pop(command_id), None)
            await asyncio.sleep(_RETRY_SECONDS)
        self._running.difference_update(ids)
        self._rounds.look()

    async def _redrive(self, redriver: Redriver, partition: int, commands: list[Command]) -> None:
        stops = self._engine.stopped_lanes
        lanes: dict[bytes | None, list[Command]] = {}  # those that have not ended
        for command in commands:
            lanes.setdefault(self._lane(command), []).append(command)
        await redriver.wait_until_quiet([lane for lane in lanes if lane is not None])
        if self._app.delivery == "exactly_once":  # letters may be in this task's open transaction
            await self._commit()
        by_key = {command.key: command for command in commands}
        counts: dict[bytes | None, Counter[Outcome]] = {command.key: Counter() for command in commands}
        copies = OffsetRuns()
        before = self._redriven.setdefault(partition, OffsetRuns()).union(OffsetRuns())
        # The thread gets a copy, because other rounds may change the original meanwhile.
        wanted = self._wanted(partition, by_key, before, copies)
        in_order = await asyncio.to_thread(self._in_source_order, wanted)
        if len(copies):
            self._redriven[partition] = self._redriven[partition].union(copies)
            self._changed.add(partition)
        self._end(lanes, lanes.keys() - in_order.last.keys(), counts)
        ends: list[asyncio.Future[None]] = []
        while rows := await asyncio.to_thread(in_order.rows.take, _REDRIVEN_AT_ONCE_MESSAGES):
            positions = [position for *_, position in rows]
            chunk = await asyncio.to_thread(
                read_dead_letters_at, self._settings, self._app.dlq, partition, positions
            )
            found = []
            for letter in chunk:
                if letter.offset in self._redriven[partition]:
                    redriver.ran_before(DeadLetterMessage(letter))
                    continue
                if by_key[letter.key].id in self._cancels:
                    continue
                if in_order.newest.replaced(letter):
                    self._mark(partition, letter.offset)
                    continue
                lane = self._engine.lane_key(letter.key, partition)
                if stops.is_over(lane):  # an earlier one failed again: this one stays a dead letter
                    counts[letter.key][Outcome.PARKED] += 1
                else:
                    found.append(
                        RedriveItem(
                            letter=letter.offset,
                            record=DeadLetterMessage(letter),
                            redrives=letter.redrives,
                            in_source=letter.identity == self._source,
                        )
                    )
            complete = {lane for lane, last in in_order.last.items() if last <= rows[-1]}

            def count(done: DoneLanes, complete: Collection[bytes | None] = complete) -> None:
                for deliveries in done.values():
                    for delivery in deliveries:
                        counts[delivery.key][delivery.outcome] += 1
                if self._engine.states is None:
                    self._end(lanes, done.keys() & complete, counts)
                else:
                    ends.append(
                        asyncio.ensure_future(self._end_committed(lanes, done.keys() & complete, counts))
                    )

            running = {self._engine.lane_key(item.record.key(), partition) for item in found}
            await self._end_committed(lanes, complete - running, counts)
            await redriver.run(found, count)
        await asyncio.gather(*ends)
        await self._end_committed(lanes, set(lanes), counts)

    async def _end_committed(
        self,
        lanes: dict[bytes | None, list[Command]],
        ended: Collection[bytes | None],
        counts: Mapping[bytes | None, Counter[Outcome]],
    ) -> None:
        """:meth:`_end`; with lane state, when that is committed together with the letters that changed it."""
        if self._engine.states is not None and ended:
            while True:
                try:
                    await self._commit()
                    break
                except AbortedError:
                    if self._app.delivery == "exactly_once":
                        raise
                    await asyncio.sleep(_COMMIT_RETRY_SECONDS)
        self._end(lanes, ended, counts)

    def _end(
        self,
        lanes: dict[bytes | None, list[Command]],
        ended: Collection[bytes | None],
        counts: Mapping[bytes | None, Counter[Outcome]],
    ) -> None:
        """All letters of these lanes are done: end their redrives at once, and answer their commands.

        Others may wait until reading has come to their place, and nothing is read when waiting lanes fill the task.
        """
        over = [lane for lane in lanes if lane in ended]
        if over:
            self._note_redriven()
        for lane in over:
            for command in lanes.pop(lane):
                counted = RedriveCounts.of(counts[command.key])
                if (cancel := self._cancels.pop(command.id, None)) is not None:
                    self._cancelled(command, cancel, counted)
                    continue
                del self._pending[command.id]
                self._running.discard(command.id)
                if lane is not None and not self._is_wanted(lane):
                    self._engine.stopped_lanes.end_redrive(lane)
                log.warning("redrive by %s of lane %r: %s", command.who, command.key, counted)
                self._answer(command, ok=not (counted.dead or counted.parked), counts=counted)
            self._rounds.look()

    def _in_source_order(self, letters: Iterable[DeadLetter]) -> _InSourceOrder:
        """Sort the positions of these letters; find the last one of each lane, and the newest of each message.

        Letters of a former source come first, then they follow the offsets of their messages. They are in another order
        in the topic: a letter may have waited in the spool while newer ones were written.
        """
        found = _InSourceOrder()
        for letter in letters:
            row = letter.identity == self._source, letter.source_offset, letter.offset
            found.rows.add(*row)
            lane = self._engine.lane_key(letter.key, letter.partition)
            found.last[lane] = max(row, found.last.get(lane, row))
            found.newest.add(letter)
        return found

    def _wanted(
        self,
        partition: int,
        by_key: dict[bytes | None, Command],
        redriven: OffsetRuns,
        copies: OffsetRuns,
    ) -> Iterator[DeadLetter]:
        """Yield the letters to redrive, and those redriven before: messages with their ids need not run again.

        A copy of a letter, redriven or not, counts as the same letter. Those not redriven are added to ``copies``.
        """
        repeats = SeenDeadLetters()
        for letter, chosen in self._letters(partition, by_key):
            seen = repeats.seen(letter)
            if letter.offset in redriven:
                if not seen:
                    yield letter
            elif chosen and seen:
                copies.add(letter.offset)
            elif chosen:
                yield letter

    def _letters(
        self, partition: int, by_key: dict[bytes | None, Command]
    ) -> Iterator[tuple[DeadLetter, bool]]:
        """Yield the letters of these lanes, and whether the command includes them.

        Letters about an earlier source topic are included only if the command names them.
        """
        chosen = {
            key: None if command.letters is None else frozenset(command.letters)
            for key, command in by_key.items()
        }
        for found in read_all_dead_letters(self._settings, self._app.dlq, partition):
            named = chosen.get(found.key)
            letter = self._home.check(found, former=named is not None and found.offset in named)
            if (
                isinstance(letter, DeadLetter)
                and letter.kind is not DeadLetterKind.ARCHIVED
                and letter.key in chosen
            ):
                yield letter, named is None or letter.offset in named

    def _mark(self, partition: int, letter: int) -> None:
        self._redriven.setdefault(partition, OffsetRuns()).add(letter)
        self._changed.add(partition)

    def _answer(
        self, command: Command, *, ok: bool, why: str = "", counts: RedriveCounts | None = None
    ) -> None:
        answer = CommandAnswer(ok=ok, why=why, counts=counts, owner=self._owner, at=self._wall())
        audit, value = audit_name(command.id, done=True), answer.encode()
        if counts is not None and self._app.commit == "epoch":  # it counts with the epoch, like its rows
            self._answers.setdefault(command.partition, {}).update({audit: value, command.name: None})
            return
        self._output.note(command.partition, audit, value, _unheard)
        self._output.note(command.partition, command.name, None, _unheard)


def _unheard(problem: str | None) -> None:
    if problem is not None:
        log.warning("an answer to an operator could not be written: %s", problem)
