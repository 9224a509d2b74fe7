"""Lanes that do not go on as usual: blocked, parked, held for a redrive; and messages on their way to the dead letters.

What is promised to survive is durable before the lane moves: the record before the first parked letter, the letter
before the message counts as done.
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
    from collections.abc import Callable, Iterable, Sequence

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
    from keylane.lanes.lane_table import Lane
    from keylane.offsets.watermark import PartitionProgress
    from keylane.policies.failure_info import FailureInfo

log = logging.getLogger("keylane.engine")

_AGAIN = 5.0
"""Seconds until the letter of a parked lane is tried again."""

FULL_RECORDS = 1000
"""Stopped lanes of a task whose records say all about the failure; later ones leave out the traceback and attempts."""
BRIEF_CHARACTERS = 300
"""Of the error's message in those."""
STOPPED_LANES_MAX = 100_000
"""Of one task; each takes about 1 kB in memory and in the state topic. One more, and the app stops."""

Name = bytes | tuple[int, int]
"""A lane: its key, or partition and offset of a message without one."""


class StoppedLanes:
    """Of one engine; used on its loop only. ``records`` is what the state topic says, or is about to."""

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
        self.held: dict[bytes, LaneRedrive[Delivery]] = {}  # lanes that are redriven
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
        self._at: dict[Name, Lane[Delivery]] = {}  # blocked lanes that stand before their message
        self._kept_back: set[bytes] = set()  # lanes that have stopped for their redrive, and for nothing else
        self._parking: set[bytes | None] = set()  # lanes whose record is not durable yet
        self._repeats: dict[
            tuple[int, int], Delivery
        ] = {}  # letters whose message may come from the log again
        self._full: dict[Name, FailureInfo] = {}  # of parked messages whose records leave things out

    def restore(self, records: Iterable[LaneRecord], held: Iterable[bytes] = ()) -> None:
        """What an earlier task wrote down. Before anything is accepted."""
        for record in records:
            self.records[_name(record)] = record
            if record.stop is LaneStatus.BLOCKED:
                self._attempts.forget(record.partition, record.offset)
        for key in held:
            self.hold(key)

    def may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """Whether the lane's head may run now; if not, it was dealt with."""
        redriven = delivery.redriven
        key: bytes | None = lane.key  # type: ignore[assignment]  # the engine's lanes have no other keys
        redrive = None if key is None else self.held.get(key)
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
        record = self.records.get(name)
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
            self._at[name] = lane  # what comes from another partition waits as well
            self._lanes.stop(lane)
            return False
        if redriven or record.partition != delivery.partition or delivery.offset < record.offset:
            return True
        if delivery.offset > record.offset:
            if record.stop is LaneStatus.SKIPPING:
                return True
            log.warning(
                "lane %r was blocked at offset %d, which is gone; it goes on",
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
        """The letter does not run: its lane stopped again before its turn. It stays a dead letter."""
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
        """Write a record; the engine does not rest before it is answered."""
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
        """Write the dead letter; the lane goes on when it is safe, and stops when it cannot be written.

        An attempt that made it dead has ``ended`` when that is known.
        """
        delivery.outcome = outcome
        delivery.error = delivery.error or f"{letter.error.rpartition('.')[2]}: {letter.message}"

        def written(problem: str | None) -> None:
            ended(delivery, outcome if problem is None else "retry")
            redriven = delivery.failure_state is not None and delivery.failure_state.letter is not None
            if problem is None or redriven:
                if problem is not None:  # the letter it came from is still there: it stays where it lies
                    log.error("%s failed again and has no new letter: %s", delivery.position, problem)
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
        """Stop the lane until its record is durable; then this message and all that follow go to the letters."""
        self._lanes.stop(lane)
        record = self._record(delivery, letter, LaneStatus.PARKED)
        if record is None:
            return
        self._parking.add(record.key)
        if record.key is not None and record.key in self.held:
            self.held[record.key].give_up()

        def recorded(problem: str | None) -> None:
            self._parking.discard(record.key)
            if problem is not None:
                self._stay(lane, delivery, letter, f"its lane could not be parked: {problem}")
                return
            self.records[_name(record)] = record
            if record.letter is not letter:
                self._full[_name(record)] = letter
            self._lanes.resume(lane)

        self._note(record.partition, record.name, record.encode(), recorded)

    def park_again(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo) -> None:
        """A redriven message of a parked lane failed again: it and the rest stay where they lie."""
        record = record_of(
            delivery, letter, LaneStatus.PARKED, self._clock.wall(), why="it failed again when redriven"
        )
        self.records[_name(record)] = record
        if record.key is not None and record.key in self.held:
            self.held[record.key].give_up()
        self._leave(lane, delivery)
        self._note(record.partition, record.name, record.encode(), _unheard)

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
            # Nothing behind it is done before it is, and a redrive goes by the order of the source: it may come late.
            log.error(
                "lane %r is parked and %s could not be written: %s; tried again in %g s",
                short(delivery.key),
                delivery.position,
                problem,
                _AGAIN,
                extra=where(delivery, error=problem, stop="parked"),
            )
            self._clock.after(_AGAIN, send)

        send()
        self._lanes.passed(lane)

    def _halt(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, why: str) -> None:
        self._lanes.stop(lane)
        self._stay(lane, delivery, letter, why)

    def _stay(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, why: str) -> None:
        """The lane has stopped and stays so until an operator acts. The record may come late: it would stop again."""
        record = self._record(delivery, letter, LaneStatus.BLOCKED, why)
        if record is None:
            return
        self.records[_name(record)] = record
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
        self._note(record.partition, record.name, record.encode(), _unheard)
        self._attempts.forget(record.partition, record.offset)  # in the record's transaction, or a later one
        self._life.changed()

    def _record(
        self, delivery: Delivery, letter: FailureInfo, stop: LaneStatus, why: str = ""
    ) -> LaneRecord | None:
        """What is written down about a lane that has just stopped. None when there are too many: then the task ends.

        Its message is not done, so it runs again, when lanes have been released, skipped or redriven.
        """
        stopped = len(self.records) + len(self._parking)
        if stopped >= STOPPED_LANES_MAX:
            self._life.fail(
                FailureGuardError(
                    f"{stopped:,} lanes have stopped, which is all that one task keeps; the next one failed "
                    f"at {delivery.position}: {letter.message[:BRIEF_CHARACTERS]}.",
                    "Mend the cause; release or redrive lanes ('keylane lanes release APP --all', 'keylane dlq redrive "
                    "APP --all'): that is carried out when the app starts. Then start it again",
                )
            )
            return None
        if stopped >= FULL_RECORDS:
            letter = replace(letter, message=letter.message[:BRIEF_CHARACTERS], traceback="", failures=())
        return record_of(delivery, letter, stop, self._clock.wall(), why)

    # What an operator orders.

    def release(self, name: Name, partition: int, offset: int) -> str | None:
        """Run the message at which the lane is blocked again, with all its attempts. Returns why not, or None."""
        record, lane = self.records.get(name), self._at.get(name)
        if record is None or not _is_blocked_at(record, partition, offset):
            return _not_blocked(partition, offset)
        self._forget(name, record)
        if lane is not None:  # else it has not come to its message yet
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
        """Make the message at which the lane is blocked a dead letter; go on behind it. Returns why not, or None."""
        record = self.records.get(name)
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
        self.records[name] = skipping

        def recorded(_problem: str | None) -> None:
            if lane is not None:
                self._lanes.resume(lane)  # it meets its record, and is buried

        self._note(record.partition, record.name, skipping.encode(), recorded)
        return None

    def committed(self, is_done: Callable[[int, int], bool]) -> None:
        """Progress was committed: the records of skipped messages that it covers have served."""
        for name, record in list(self.records.items()):
            if record.stop is LaneStatus.SKIPPING and is_done(record.partition, record.offset):
                self._forget(name, record)

    def _forget(self, name: Name, record: LaneRecord) -> None:
        del self.records[name]
        self._note(record.partition, record.name, None, _unheard)

    # A redrive.

    def hold(self, key: bytes) -> None:
        """Newer messages of this lane wait from now on; nothing of it starts before its letters are known."""
        if key not in self.held:
            self.renew(key)

    def renew(self, key: bytes) -> None:
        """The lane's letters are read from the beginning: whether one failed in an earlier redrive does not count."""
        record = self.records.get(key)
        self.held[key] = LaneRedrive(parked=record is not None and record.stop is LaneStatus.PARKED)

    def settled(self, key: bytes) -> bool:
        """Whether nothing of this lane runs, or is on its way to the dead letters."""
        lane = self._lanes.get(key)
        if key in self._parking:
            return False
        return lane is None or (lane.first is lane.head and lane.state is not LaneState.RUNNING)

    def is_over(self, key: bytes | None) -> bool:
        """Whether a message of this lane failed and what is left of its letters stays where it is."""
        return key is not None and key in self.held and self.held[key].state is RedriveState.OVER

    def is_parked(self, key: bytes) -> bool:
        """Whether this lane is parked, and being redriven."""
        return key in self.held and self.held[key].parked

    def redrive(self, key: bytes | None, deliveries: Sequence[Delivery]) -> None:
        """Run redriven messages, oldest first, each in its place: :meth:`offer` until all of them are in their lane."""
        if key is None:
            for delivery in deliveries:
                self._insert(None, [delivery])
            return
        self.held[key].give(deliveries)
        self.offer(key)

    def offer(self, key: bytes) -> None:
        """Let the redriven messages into their lane whose turn it is; those of a lane that moves come at its turns."""
        redrive, lane = self.held[key], self._lanes.get(key)
        if lane is not None and lane.head is not None and lane.state is not LaneState.STOPPED:
            return
        if lane is not None and lane.state is LaneState.RETURNING:
            return
        if key in self._parking or self._lanes.draining:
            return
        blocked = lane is not None and self._at.get(key) is lane
        due = redrive.due(lambda letter: self._comes_next(lane, letter))
        if not due and blocked:  # what is left comes behind the message at which the lane is blocked
            redrive.give_up()
            due = redrive.due(lambda _letter: True)
        if due:
            self._insert(key, due)
        elif key in self._kept_back and redrive.may_pass:
            self._go_on(key)

    def _go_on(self, key: bytes) -> None:
        """A lane goes on that had stopped for its redrive."""
        lane = self._lanes.get(key)
        if key in self._kept_back and lane is not None:
            self._lanes.resume(lane)
        self._kept_back.discard(key)

    def _comes_next(self, lane: Lane[Delivery] | None, letter: Delivery) -> bool:
        """Whether all older messages of the letter's lane have had their turn."""
        assert letter.failure_state is not None  # noqa: S101 - redriven messages have a letter
        if (
            not letter.failure_state.in_source
        ):  # from another topic, or the one before: older than all there is
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
        """Put these before everything in the lane that has not begun."""
        self._pass_over_in_the_log(letters)
        self._counters.accepted += len(letters)
        if self._lanes.insert(key, letters) and key is not None:
            self._kept_back.discard(key)

    def _pass_over_in_the_log(self, letters: Sequence[Delivery]) -> None:
        """After a crash messages may come from the log again that have letters: they run from there."""
        if self._progress is None:
            return
        for partition in {letter.partition for letter in letters}:
            if self._read_to(partition) is None:  # another task's
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
        """Whether a message that is to be passed over is the one that it seems to be.

        The letter at its offset may be of a topic that had the name before.
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

    def withdraw(self, key: bytes) -> None:
        """The redrive of this lane was cancelled: letters that have not begun stay where they are."""
        if key in self.held:
            self.held[key].give_up()

    def let_go(self, key: bytes) -> None:
        """The redrive of this lane is over. A lane that was parked is so no more, unless it was parked again."""
        record = self.records.get(key)

        def recorded(_problem: str | None) -> None:
            self.held.pop(key, None)
            self._go_on(key)
            self.on_redriven(key)

        if self.is_parked(key) and record is not None:
            self.held[key].parked = False
            lane = self._lanes.get(key)
            if lane is not None and lane.head is not None:
                self._begin_again(lane.head, record)
            del self.records[key]
            self._note(record.partition, record.name, None, recorded)
        else:
            recorded(None)


def _name(record: LaneRecord) -> Name:
    return record.key if record.key is not None else (record.partition, record.offset)


def _is_blocked_at(record: LaneRecord, partition: int, offset: int) -> bool:
    return record.stop is LaneStatus.BLOCKED and (record.partition, record.offset) == (partition, offset)


def _not_blocked(partition: int, offset: int) -> str:
    return f"nothing to do: message {partition}@{offset} is not blocked any more"


def _unheard(problem: str | None) -> None:
    if problem is not None:
        log.warning("the record of a lane could not be written: %s", problem)
