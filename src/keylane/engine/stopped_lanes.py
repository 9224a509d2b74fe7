"""Lanes that do not run as usual: blocked, parked, or waiting for a redrive; and messages that become dead letters.

What must survive a crash is durable before the lane moves: the record before the first parked letter, the letter
before its message counts as done.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.engine.failure_handler import record_of
from keylane.errors import FailureGuardError
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.lanes.lane_table import LaneState
from keylane.lanes.redrive import LaneRedrive, RedriveState
from keylane.logs import short, where
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from keylane.engine.acknowledgements import Acknowledgements
    from keylane.engine.attempts import RetryAttempts
    from keylane.engine.clock import Clock
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.engine.duplicates import Duplicates
    from keylane.engine.hooks import Hooks
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.output import Output, Then
    from keylane.engine.scheduler import LaneScheduler
    from keylane.lanes.lane_table import Holds, Lane
    from keylane.offsets.watermark import PartitionProgress
    from keylane.policies.failure_info import FailureInfo

log = logging.getLogger("keylane.engine")

_RETRY_SECONDS = 5.0
"""Time until the dead letter of a parked lane is written again."""

FULL_RECORDS = 1000
"""Stopped lanes of a task with complete records; the records of later ones omit the traceback and the attempts."""
BRIEF_CHARACTERS = 300
"""Length of the error message in the shorter records."""
STOPPED_LANES_MAX = 100_000
"""Of one task; each takes about 1 kB in memory and in the state topic. With one more the app stops."""

Name = bytes | tuple[int, int]
"""A lane: its key, or partition and offset of a message without one."""


class StoppedLanes:
    """The stopped lanes of one engine; used on its loop only. ``records`` are in the state topic, or about to be."""

    def __init__(
        self,
        output: Output,
        *,
        lanes: LaneScheduler,
        acks: Acknowledgements,
        attempts: RetryAttempts,
        duplicates: Duplicates,
        counters: MessageCounters,
        hooks: Hooks,
        clock: Clock,
        life: Lifecycle,
        spans_partitions: bool,
        progress: Callable[[int], PartitionProgress] | None,
        read_to: Callable[[int], int | None],
    ) -> None:
        self.records: dict[Name, LaneRecord] = {}
        self._others: dict[Name, dict[int, LaneRecord]] = {}  # of a key that is blocked in several partitions
        self.redriving: dict[bytes, LaneRedrive[Delivery]] = {}  # lanes that are being redriven
        self._ending: dict[bytes, LaneRedrive[Delivery] | None] = {}  # ended, and that is not durable yet
        self.on_redriven: Callable[[bytes], None] = lambda _key: None  # written by the engine, once
        self._output = output
        self._lanes = lanes
        self._acks = acks
        self._attempts = attempts
        self._duplicates = duplicates
        self._counters = counters
        self._hooks = hooks
        self._clock = clock
        self._life = life
        self._spans_partitions = spans_partitions
        self._progress = progress
        self._read_to = read_to
        self._at: dict[Name, Lane[Delivery]] = {}  # blocked lanes that have reached their message
        self._kept_back: set[bytes] = set()  # lanes that wait only because of their redrive
        self._parking: set[bytes | None] = set()  # lanes whose record is not durable yet
        self._repeats: dict[
            tuple[int, int], Delivery
        ] = {}  # letters whose message may come from the log again
        self._full: dict[Name, FailureInfo] = {}  # complete failures of parked messages with shorter records

    def restore(self, records: Iterable[LaneRecord], redriving: Iterable[bytes] = ()) -> None:
        """Take over the records of earlier tasks. Call it before anything is accepted."""
        for record in records:
            self._set(record)
            if record.stop is LaneStatus.BLOCKED:
                self._attempts.forget(record.partition, record.offset)
        for key in redriving:
            self.begin_redrive(key)

    def may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """True if the lane's head may run now. If not, it has been dealt with."""
        redriven = delivery.redriven
        key: bytes | None = lane.key  # type: ignore[assignment]  # the engine's lanes have no other keys
        redrive = None if key is None else self.redriving.get(key)
        if redrive is not None and key is not None:
            if redriven and redrive.state is RedriveState.OVER:
                self._leave(lane, delivery)
                return False
            if not redriven:
                if due := redrive.due(lambda letter: self._comes_next(lane, letter)):
                    self._lanes.stop(lane)
                    self._insert(key, due)
                    return False
                if not (redrive.may_pass or self._need_not_wait(delivery)):
                    self._kept_back.add(key)
                    self._lanes.stop(lane)
                    return False
        name = key if key is not None else (delivery.partition, delivery.offset)
        record = self._record_in(name, delivery.partition)
        if record is None:
            return True
        if record.stop is LaneStatus.PARKED:
            redrive = redrive if redrive is not None and redrive.parked else None
            if redriven:
                if redrive is None:
                    self._leave(lane, delivery)
                    return False
                if not self._duplicates.was_redriven(delivery):
                    return True
                self._lanes.pass_over(lane, delivery)
                return False
            if redrive is not None:  # it is older than the next letter, and has none itself
                if not redrive.began_again:  # once, not at each of its attempts
                    redrive.began_again = self._begin_again(delivery, record)
                self._duplicates.came_through(delivery)  # a letter that repeats its event comes after it
                return True
            if self._ran_before(delivery, record):
                self._lanes.pass_over(lane, delivery)
            else:
                self._park(lane, delivery, record)
            return False
        if (
            record.partition != delivery.partition
            and self._spans_partitions
            and record.stop is LaneStatus.BLOCKED
            and not redriven
        ):
            self._at[name] = lane  # a lane whose messages come from another partition now waits as well
            self._lanes.stop(lane)
            return False
        if redriven or record.partition != delivery.partition or delivery.offset < record.offset:
            return True
        if delivery.offset > record.offset:
            if record.stop is LaneStatus.SKIPPING:
                return True
            log.warning(
                "lane %r was blocked at offset %d, which is no longer in the log; the lane continues",
                short(delivery.key),
                record.offset,
                extra=where(delivery),
            )
            self._forget(name, record)
            return True
        if record.stop is LaneStatus.SKIPPING:
            self.bury(lane, delivery, record.letter, Outcome.SKIPPED)
        else:
            self._at[name] = lane
            self._lanes.stop(lane)
        return False

    def _need_not_wait(self, delivery: Delivery) -> bool:
        """Whether a head from the log does not wait for letters: its own one ran, or there are letters behind it.

        Letters are in front of it, unless version ordering has put it before them because they wait for its version.
        """
        if (delivery.partition, delivery.offset) in self._repeats:
            return True
        behind = delivery.next
        while behind is not None and not behind.redriven:
            behind = behind.next
        return behind is not None

    def _leave(self, lane: Lane[Delivery], letter: Delivery) -> None:
        """Leave the letter a dead letter: its lane stopped again before its turn."""
        letter.outcome = Outcome.PARKED
        self._lanes.finish(lane, letter)

    def _begin_again(self, delivery: Delivery, record: LaneRecord) -> bool:
        """If this is the message at which the lane stopped, it has all its attempts again. False if it is another."""
        if (delivery.partition, delivery.offset) != (record.partition, record.offset):
            return False
        delivery.failure_state, delivery.attempt, delivery.error = None, 1, None
        self._attempts.forget(delivery.partition, delivery.offset)
        return True

    def _ran_before(self, delivery: Delivery, record: LaneRecord) -> bool:
        """Whether its event had finished when its lane was parked; if the event's message is parked, they go together.

        The message that it repeats may be a duplicate itself, which came later: the first one of the event decides.
        """
        first = self._duplicates.first(delivery)
        return first is not None and record.partition == delivery.partition and first < record.offset

    def _note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """Write a record; the engine is not idle until it is acknowledged."""
        self._acks.expect_answer()

        def answered(problem: str | None) -> None:
            self._acks.answered()
            then(problem)
            self._life.changed()

        self._output.note(partition, name, value, answered)

    # The policies.

    def bury(
        self,
        lane: Lane[Delivery],
        delivery: Delivery,
        letter: FailureInfo,
        outcome: Outcome,
        ended: Callable[[Delivery, str], None] = lambda _delivery, _outcome: None,
    ) -> None:
        """Write the dead letter. The lane continues when it is durable, and stops when it cannot be written.

        ``ended`` is the attempt that failed, if it is known.
        """
        delivery.outcome = outcome
        delivery.error = delivery.error or f"{letter.error.rpartition('.')[2]}: {letter.message}"

        def written(problem: str | None) -> None:
            ended(delivery, outcome if problem is None else "retry")
            redriven = delivery.failure_state is not None and delivery.failure_state.letter is not None
            if problem is None or redriven:
                if problem is not None:  # the letter it came from still exists and stays as it is
                    log.error(
                        "%s failed again, and its new dead letter could not be written: %s",
                        delivery.position,
                        problem,
                    )
                    delivery.outcome = Outcome.PARKED
                self._lanes.finish(lane, delivery)
            else:
                delivery.outcome = Outcome.OK
                self._halt(lane, delivery, letter, f"its dead letter could not be written: {problem}")

        self._output.letter(delivery, letter, "dead", None, written)

    def block(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, *, archive: bool) -> None:
        """Stop the lane at this message."""

        def archived(problem: str | None) -> None:
            why = f"its copy could not be written: {problem}" if problem else ""
            self._halt(lane, delivery, letter, why)

        if archive:
            self._output.letter(delivery, letter, "archived", None, archived)
        else:
            self._halt(lane, delivery, letter, "")

    def park(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo) -> None:
        """Stop the lane until its record is durable; then this message and all later ones become dead letters."""
        self._lanes.stop(lane)
        record = self._record(delivery, letter, LaneStatus.PARKED)
        if record is None:
            return
        self._parking.add(record.key)
        if record.key is not None and record.key in self.redriving:
            self.redriving[record.key].give_up()

        def recorded(problem: str | None) -> None:
            self._parking.discard(record.key)
            if problem is not None:
                self._stay(lane, delivery, letter, f"its lane could not be parked: {problem}")
                return
            self._set(record)
            if record.letter is not letter:
                self._full[_name(record)] = letter
            self._lanes.resume(lane)

        self._note(record.partition, record.name, record.encode(), recorded)

    def park_again(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo) -> None:
        """A redriven message of a parked lane failed again: it and the later ones stay dead letters."""
        record = record_of(
            delivery, letter, LaneStatus.PARKED, self._clock.wall(), why="it failed again when redriven"
        )
        self._set(record)
        if record.key is not None and record.key in self.redriving:
            self.redriving[record.key].give_up()
        self._leave(lane, delivery)
        self._note(record.partition, record.name, record.encode(), _log_problem)

    def _park(self, lane: Lane[Delivery], delivery: Delivery, record: LaneRecord) -> None:
        delivery.outcome = Outcome.PARKED
        letter = record.letter if delivery.offset == record.offset else None
        if letter is not None:
            letter = self._full.pop(_name(record), letter)
        if letter is not None:
            delivery.error = f"{letter.error.rpartition('.')[2]}: {letter.message}"
            self._hooks.call("dead", delivery, letter)

        def send() -> None:
            self._output.letter(delivery, letter, "parked", record.offset, written)

        def written(problem: str | None) -> None:
            if problem is None:
                self._acks.acknowledge(delivery)
                return
            # Nothing behind it is done before it is, and a redrive follows the order of the source: it may come late.
            log.error(
                "lane %r is parked and %s could not be written: %s; tried again in %g s",
                short(delivery.key),
                delivery.position,
                problem,
                _RETRY_SECONDS,
                extra=where(delivery, error=problem, stop="parked"),
            )
            self._clock.after(_RETRY_SECONDS, send)

        send()
        self._lanes.passed(lane)

    def _halt(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, why: str) -> None:
        self._lanes.stop(lane)
        self._stay(lane, delivery, letter, why)

    def _stay(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, why: str) -> None:
        """Stop the lane until an operator acts. The record may come late: without it the lane would stop again."""
        record = self._record(delivery, letter, LaneStatus.BLOCKED, why)
        if record is None:
            return
        self._set(record)
        self._at[_name(record)] = lane
        log.error(
            "lane %r is blocked at %s: %s%s",
            short(delivery.key),
            delivery.position,
            letter.message,
            why and f" ({why})",
            extra=where(
                delivery, stage=letter.stage, attempts=letter.attempts, error=letter.message, stop="blocked"
            ),
        )
        self._note(record.partition, record.name, record.encode(), _log_problem)
        self._attempts.forget(record.partition, record.offset)  # in the record's transaction or a later one
        self._life.changed()

    def _record(
        self, delivery: Delivery, letter: FailureInfo, stop: LaneStatus, why: str = ""
    ) -> LaneRecord | None:
        """Make the record of a lane that has just stopped. None when there are too many: then the task ends.

        Its message is not done, so it runs again once lanes have been released, skipped or redriven.
        """
        stopped = len(self.records) + len(self._parking)
        if stopped >= STOPPED_LANES_MAX:
            self._life.fail(
                FailureGuardError(
                    f"{stopped:,} lanes have stopped, which is all that one task keeps; the next one failed "
                    f"at {delivery.position}: {letter.message[:BRIEF_CHARACTERS]}.",
                    "Fix the cause, then release or redrive lanes ('keylane lanes release APP --all', 'keylane dlq "
                    "redrive APP --all'): the app does that when it starts. Then start it",
                )
            )
            return None
        if stopped >= FULL_RECORDS:
            letter = replace(letter, message=letter.message[:BRIEF_CHARACTERS], traceback="", failures=())
        return record_of(delivery, letter, stop, self._clock.wall(), why)

    # Operators' commands.

    def release(self, name: Name, partition: int, offset: int) -> str | None:
        """Run the message at which the lane is blocked again, with all its attempts. Returns why not, or None."""
        record, lane = self._record_in(name, partition), self._at.get(name)
        if record is None or not _is_blocked_at(record, partition, offset):
            return _not_blocked(partition, offset)
        self._forget(name, record)
        if lane is not None:  # otherwise it has not reached its message yet
            delivery: Delivery | None = lane.head
            while delivery is not None and (delivery.partition, delivery.offset) != (
                record.partition,
                record.offset,
            ):
                delivery = delivery.next  # redriven messages were put before it
            if delivery is not None:
                self._begin_again(delivery, record)
            del self._at[name]
            self._lanes.resume(lane)
        return None

    def skip(self, name: Name, partition: int, offset: int) -> str | None:
        """Make the message at which the lane is blocked a dead letter, and continue. Returns why not, or None."""
        record = self._record_in(name, partition)
        if record is None or not _is_blocked_at(record, partition, offset):
            return _not_blocked(partition, offset)
        lane = self._at.pop(name, None)
        skipping = LaneRecord(
            stop=LaneStatus.SKIPPING,
            key=record.key,
            partition=record.partition,
            offset=record.offset,
            since=record.since,
            letter=record.letter,
            why=record.why,
        )
        self._set(skipping)

        def recorded(_problem: str | None) -> None:
            if lane is not None:
                self._lanes.resume(lane)  # it meets its record and becomes a dead letter

        self._note(record.partition, record.name, skipping.encode(), recorded)
        return None

    def committed(self, is_done: Callable[[int, int], bool]) -> None:
        """Progress was committed: forget the records of skipped messages that it covers."""
        for name, record in list(self.records.items()):
            if record.stop is LaneStatus.SKIPPING and is_done(record.partition, record.offset):
                self._forget(name, record)

    def _set(self, record: LaneRecord) -> None:
        """Set the lane's record. One of another partition counts again when messages of that partition come."""
        name = _name(record)
        known = self.records.get(name)
        if known is not None and known.partition != record.partition:
            self._others.setdefault(name, {})[known.partition] = known
        if name in self._others:
            self._others[name].pop(record.partition, None)
        self.records[name] = record

    def _record_in(self, name: Name, partition: int) -> LaneRecord | None:
        """The lane's record: that of this partition, if it has one there."""
        if (found := self._others.get(name, {}).get(partition)) is not None:
            self._set(found)
        return self.records.get(name)

    def _parked_record(self, name: Name) -> LaneRecord | None:
        known = [self.records[name], *self._others.get(name, {}).values()] if name in self.records else []
        return next((record for record in known if record.stop is LaneStatus.PARKED), None)

    def _remove(self, name: Name) -> None:
        """Remove the lane's record. It may have another one, of another partition."""
        del self.records[name]
        if others := self._others.pop(name, None):
            _, self.records[name] = others.popitem()
            if others:
                self._others[name] = others

    def _forget(self, name: Name, record: LaneRecord) -> None:
        self._remove(name)
        self._note(record.partition, record.name, None, _log_problem)

    # A range that is released to another worker.

    def is_pinned(self, key: Hashable) -> bool:
        """Whether a record of this lane is being written: it decides about the message at which the lane stopped."""
        return key in self._parking or key in self._ending

    def forget_range(self, holds: Holds) -> None:
        """Another worker has these lanes, with their records."""
        for name in list(self.records):
            known = [*self._others.get(name, {}).values(), self.records[name]]
            kept = [record for record in known if not holds(record.partition, record.key, record.offset)]
            if len(kept) == len(known):
                continue
            self._others.pop(name, None)
            self._full.pop(name, None)
            del self.records[name]
            for record in kept:
                self._set(record)
            if not kept:
                self._at.pop(name, None)
        for place, letter in list(self._repeats.items()):
            if holds(place[0], letter.key, place[1]):
                del self._repeats[place]
        self._kept_back = {key for key in self._kept_back if self._lanes.get(key) is not None}

    # A redrive.

    def begin_redrive(self, key: bytes) -> None:
        """Make newer messages of this lane wait; none starts before the lane's letters are known."""
        if key not in self.redriving or self._ending.get(key) is self.redriving[key]:
            self.restart_redrive(key)

    def restart_redrive(self, key: bytes) -> None:
        """The lane's letters are read from the beginning: failures of an earlier redrive no longer count."""
        self.redriving[key] = LaneRedrive(parked=self._parked_record(key) is not None)

    def is_quiet(self, key: bytes) -> bool:
        """True if nothing of this lane runs, is becoming a dead letter, or is being recorded."""
        lane = self._lanes.get(key)
        if key in self._parking or key in self._ending:
            return False
        return lane is None or (lane.first is lane.head and lane.state is not LaneState.RUNNING)

    def is_over(self, key: bytes | None) -> bool:
        """True if a message of this lane failed and the remaining letters stay where they are."""
        return key is not None and key in self.redriving and self.redriving[key].state is RedriveState.OVER

    def is_parked(self, key: bytes) -> bool:
        """True if this lane is parked and being redriven."""
        return key in self.redriving and self.redriving[key].parked

    def redrive(self, key: bytes | None, deliveries: Sequence[Delivery]) -> None:
        """Run redriven messages, oldest first, each in its place: call :meth:`offer` until all are in their lane."""
        if key is None:
            for delivery in deliveries:
                self._insert(None, [delivery])
            return
        self.redriving[key].give(deliveries)
        self.offer(key)

    def offer(self, key: bytes) -> None:
        """Insert the redriven messages whose turn it is; while the lane is running this happens at its turns."""
        redrive, lane = self.redriving[key], self._lanes.get(key)
        if lane is not None and lane.head is not None and lane.state is not LaneState.STOPPED:
            return
        if lane is not None and lane.state is LaneState.RETURNING:
            return
        if key in self._parking or self._lanes.draining:
            return
        blocked = lane is not None and self._at.get(key) is lane
        due = redrive.due(lambda letter: self._comes_next(lane, letter))
        if not due and blocked:  # the others come behind the message at which the lane is blocked
            redrive.give_up()
            due = redrive.due(lambda _letter: True)
        if due:
            self._insert(key, due)
        elif key in self._kept_back and redrive.may_pass:
            self._resume(key)

    def _resume(self, key: bytes) -> None:
        """Resume a lane that waited because of its redrive."""
        lane = self._lanes.get(key)
        if key in self._kept_back and lane is not None:
            self._lanes.resume(lane)
        self._kept_back.discard(key)

    def _comes_next(self, lane: Lane[Delivery] | None, letter: Delivery) -> bool:
        """True if all older messages of the letter's lane have had their turn."""
        assert letter.failure_state is not None  # noqa: S101 - redriven messages have a letter
        if (
            not letter.failure_state.in_source
        ):  # from another topic, or an earlier one of the same name: older than everything here
            return True
        read_to = self._read_to(letter.partition)
        if read_to is not None and read_to < letter.offset:
            return False
        entry = None if lane is None else lane.head
        while entry is not None:
            if entry.partition == letter.partition and not entry.redriven:
                return entry.offset >= letter.offset
            entry = entry.next
        for partition, offsets in (lane.away if lane is not None else None) or ():
            if partition == letter.partition:
                return offsets[0] >= letter.offset
        return True

    def _insert(self, key: bytes | None, letters: Sequence[Delivery]) -> None:
        """Put these before all messages of the lane that have not started."""
        self._pass_over_in_the_log(letters)
        self._counters.accepted += len(letters)
        if self._lanes.insert(key, letters) and key is not None:
            self._kept_back.discard(key)

    def _pass_over_in_the_log(self, letters: Sequence[Delivery]) -> None:
        """Pass over messages that are read again after a crash and have letters: they run from their letters."""
        if self._progress is None:
            return
        for partition in {letter.partition for letter in letters}:
            if self._read_to(partition) is None:  # another task owns it
                continue
            progress = self._progress(partition)
            for letter in letters:
                place = letter.partition, letter.offset
                assert letter.failure_state is not None  # noqa: S101 - redriven messages have a letter
                if partition != letter.partition or not letter.failure_state.in_source:
                    continue
                if place not in self._duplicates.waiting and not progress.is_done(letter.offset):
                    self._duplicates.waiting[place] = letter.offset
                    self._repeats[place] = letter

    def repeats(self, delivery: Delivery) -> bool:
        """True if a message to be passed over is really the letter's message.

        The letter may be of an earlier topic with the same name.
        """
        place = delivery.partition, delivery.offset
        letter = self._repeats.pop(place, None)
        if letter is None:
            return True
        was, came = letter.record, delivery.record
        if (was.key(), was.value(), was.timestamp()) == (came.key(), came.value(), came.timestamp()):
            return True
        del self._duplicates.waiting[place]
        return False

    def cancel_redrive(self, key: bytes) -> None:
        """Cancel the redrive of this lane: letters that have not started stay where they are."""
        if key in self.redriving:
            self.redriving[key].give_up()

    def end_redrive(self, key: bytes) -> None:
        """End the redrive of this lane. A parked lane is no longer parked, unless it was parked again."""
        record, recording = self._parked_record(key), key in self._ending
        self._ending[key] = self.redriving.get(key)

        def recorded(_problem: str | None) -> None:
            if self._ending.pop(key) is not self.redriving.get(key):  # another one has begun
                return
            self.redriving.pop(key, None)
            self._resume(key)
            self.on_redriven(key)

        if recording:
            return
        if self.is_parked(key) and record is not None:
            self.redriving[key].parked = False
            self._set(record)
            lane = self._lanes.get(key)
            if lane is not None and lane.head is not None:
                self._begin_again(lane.head, record)
            self._remove(key)
            self._note(record.partition, record.name, None, recorded)
        else:
            recorded(None)


def _name(record: LaneRecord) -> Name:
    return record.key if record.key is not None else (record.partition, record.offset)


def _is_blocked_at(record: LaneRecord, partition: int, offset: int) -> bool:
    return record.stop is LaneStatus.BLOCKED and (record.partition, record.offset) == (partition, offset)


def _not_blocked(partition: int, offset: int) -> str:
    return f"nothing to do: message {partition}@{offset} is not blocked any more"


def _log_problem(problem: str | None) -> None:
    if problem is not None:
        log.warning("the record of a lane could not be written: %s", problem)
