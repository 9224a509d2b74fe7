"""Lanes that do not go on as usual: blocked, parked, held for a redrive; and messages on their way to the dead letters.

What is promised to survive is durable before the lane moves: the record before the first parked letter, the letter
before the message counts as done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from keylane.core.lane import LaneState
from keylane.core.outcome import Outcome
from keylane.core.record import LaneRecord, Stop
from keylane.engine.course import record_of
from keylane.engine.lanes import GLOBAL
from keylane.logs import where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keylane.core.lane import Lane
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine, Output, Then

log = logging.getLogger("keylane.engine")

_AGAIN = 5.0
"""Seconds until the letter of a parked lane is tried again."""

Name = bytes | tuple[int, int]
"""A lane: its key, or partition and offset of a message without one."""


class Stops:
    """Of one engine; used on its loop only. ``records`` is what the state topic says, or is about to."""

    def __init__(self, engine: Engine, output: Output) -> None:
        self.records: dict[Name, LaneRecord] = {}
        self.held: set[bytes] = set()  # keys whose newer messages wait for a redrive
        self.held_parked: set[bytes] = set()  # those of them that are parked
        self._engine = engine
        self._is_global = engine.lane_key(None, 0) == GLOBAL
        self._output = output
        self._at: dict[Name, Lane[Delivery]] = {}  # blocked lanes that stand before their message

    def restore(self, records: Iterable[LaneRecord], held: Iterable[bytes] = ()) -> None:
        """What an earlier task wrote down. Before anything is accepted."""
        self.records.update((_name(record), record) for record in records)
        for key in held:
            self.hold(key)

    def may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """Whether the lane's head may run now; if not, it was dealt with."""
        engine = self._engine
        redriven = delivery.trouble is not None and delivery.trouble.letter is not None
        if lane.key in self.held and not redriven and not delivery.begun:
            engine.table.stop(lane, engine.now())
            return False
        key: bytes | None = lane.key  # type: ignore[assignment]  # the engine's lanes have no other keys
        name = key if key is not None else (delivery.partition, delivery.offset)
        record = self.records.get(name)
        if record is None:
            return True
        if record.stop is Stop.PARKED:
            if redriven:
                if lane.key in self.held_parked:
                    if not engine.seen.was_redriven(delivery):
                        return True
                    engine.pass_over(lane, delivery)
                    return False
                delivery.outcome = (
                    Outcome.PARKED
                )  # its lane was parked again before its turn: it stays where it lies
                engine.table.passed(lane)
                engine.acknowledge(delivery)
            elif self._ran_before(delivery, record):
                engine.pass_over(lane, delivery)
            else:
                self._park(lane, delivery, record)
            return False
        if (
            record.partition != delivery.partition
            and self._is_global
            and record.stop is Stop.BLOCKED
            and not redriven
        ):
            self._at[name] = lane  # what comes from another partition waits as well
            engine.table.stop(lane, engine.now())
            return False
        if redriven or record.partition != delivery.partition or delivery.offset < record.offset:
            return True
        if delivery.offset > record.offset:
            if record.stop is Stop.SKIPPING:
                return True
            log.warning(
                "lane %r was blocked at offset %d, which is gone; it goes on",
                delivery.key,
                record.offset,
                extra=where(delivery),
            )
            self._forget(name, record)
            return True
        if record.stop is Stop.SKIPPING:
            self.bury(lane, delivery, record.letter, Outcome.SKIPPED)
        else:
            self._at[name] = lane
            engine.table.stop(lane, engine.now())
        return False

    def _ran_before(self, delivery: Delivery, record: LaneRecord) -> bool:
        """Whether what it repeats had finished when its lane was parked; if that is parked too, they go together."""
        repeats = self._engine.seen.waiting.get((delivery.partition, delivery.offset))
        return repeats is not None and record.partition == delivery.partition and repeats < record.offset

    def _note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """Write a record; the engine does not rest before it is answered."""
        engine = self._engine
        engine.promised += 1

        def answered(problem: str | None) -> None:
            engine.promised -= 1
            then(problem)
            engine.changed()

        self._output.note(partition, name, value, answered)

    # The policies.

    def bury(
        self,
        lane: Lane[Delivery],
        delivery: Delivery,
        letter: DeadLetter,
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
            redriven = delivery.trouble is not None and delivery.trouble.letter is not None
            if problem is None or redriven:
                if problem is not None:  # the letter it came from is still there: it stays where it lies
                    log.error("%s failed again and has no new letter: %s", delivery.position, problem)
                    delivery.outcome = Outcome.PARKED
                self._engine.table.passed(lane)
                self._engine.acknowledge(delivery)
            else:
                delivery.outcome = Outcome.OK
                self._halt(lane, delivery, letter, f"its dead letter could not be written: {problem}")

        self._output.letter(delivery, letter, "dead", None, written)

    def block(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter, *, archive: bool) -> None:
        """Stop the lane at this message."""

        def archived(problem: str | None) -> None:
            why = f"its copy could not be written: {problem}" if problem else ""
            self._halt(lane, delivery, letter, why)

        if archive:
            self._output.letter(delivery, letter, "archived", None, archived)
        else:
            self._halt(lane, delivery, letter, "")

    def park(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter) -> None:
        """Stop the lane until its record is durable; then this message and all that follow go to the letters."""
        engine = self._engine
        record = record_of(delivery, letter, Stop.PARKED, engine.wall())
        engine.table.stop(lane, engine.now())

        def recorded(problem: str | None) -> None:
            if problem is not None:
                self._stay(lane, delivery, letter, f"its lane could not be parked: {problem}")
                return
            self.records[_name(record)] = record
            engine.resume(lane)

        self._note(record.partition, record.name, record.encode(), recorded)

    def park_again(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter) -> None:
        """A redriven message of a parked lane failed again: it and the rest stay where they lie."""
        engine = self._engine
        record = record_of(delivery, letter, Stop.PARKED, engine.wall(), why="it failed again when redriven")
        self.records[_name(record)] = record
        self.held_parked.discard(record.key or b"")
        delivery.outcome = Outcome.PARKED
        engine.table.passed(lane)
        engine.acknowledge(delivery)
        self._note(record.partition, record.name, record.encode(), _unheard)

    def _park(self, lane: Lane[Delivery], delivery: Delivery, record: LaneRecord) -> None:
        delivery.outcome = Outcome.PARKED
        letter = record.letter if delivery.offset == record.offset else None
        if letter is not None:
            delivery.error = f"{letter.error.rpartition('.')[2]}: {letter.message}"
            self._engine.course.hook("dead", delivery, letter)

        engine = self._engine

        def send() -> None:
            self._output.letter(delivery, letter, "parked", record.offset, written)

        def written(problem: str | None) -> None:
            if problem is None:
                engine.acknowledge(delivery)
                return
            # Nothing behind it is done before it is, and a redrive goes by the order of the source: it may come late.
            log.error(
                "lane %r is parked and %s could not be written: %s; tried again in %g s",
                delivery.key,
                delivery.position,
                problem,
                _AGAIN,
                extra=where(delivery, error=problem, stop="parked"),
            )
            engine.later(_AGAIN, send)

        send()
        engine.table.passed(lane)

    def _halt(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter, why: str) -> None:
        self._engine.table.stop(lane, self._engine.now())
        self._stay(lane, delivery, letter, why)

    def _stay(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter, why: str) -> None:
        """The lane has stopped and stays so until an operator acts. The record may come late: it would stop again."""
        record = record_of(delivery, letter, Stop.BLOCKED, self._engine.wall(), why)
        self.records[_name(record)] = record
        self._at[_name(record)] = lane
        log.error(
            "lane %r is blocked at %s: %s%s",
            delivery.key,
            delivery.position,
            letter.message,
            why and f" ({why})",
            extra=where(
                delivery, stage=letter.stage, attempts=letter.attempts, error=letter.message, stop="blocked"
            ),
        )
        self._note(record.partition, record.name, record.encode(), _unheard)
        self._engine.changed()

    # What an operator orders.

    def release(self, name: Name) -> str | None:
        """Run the blocked lane's message again, with all its attempts. Returns why not, or None."""
        record, lane = self.records.get(name), self._at.get(name)
        if record is None or record.stop is not Stop.BLOCKED:
            return "the lane is not blocked"
        self._forget(name, record)
        if lane is not None:  # else it has not come to its message yet
            delivery: Delivery | None = lane.head
            while delivery is not None and (delivery.partition, delivery.offset) != (
                record.partition,
                record.offset,
            ):
                delivery = delivery.next  # redriven messages were put before it
            if delivery is not None:
                delivery.trouble, delivery.attempt, delivery.error = None, 1, None
            del self._at[name]
            self._engine.resume(lane)
        return None

    def skip(self, name: Name) -> str | None:
        """Make the blocked lane's message a dead letter and go on behind it. Returns why not, or None."""
        record, lane = self.records.get(name), self._at.pop(name, None)
        if record is None or record.stop is not Stop.BLOCKED:
            return "the lane is not blocked"
        skipping = LaneRecord(
            stop=Stop.SKIPPING,
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
                self._engine.resume(lane)  # it meets its record, and is buried

        self._note(record.partition, record.name, skipping.encode(), recorded)
        return None

    def committed(self, is_done: Callable[[int, int], bool]) -> None:
        """Progress was committed: the records of skipped messages that it covers have served."""
        for name, record in list(self.records.items()):
            if record.stop is Stop.SKIPPING and is_done(record.partition, record.offset):
                self._forget(name, record)

    def _forget(self, name: Name, record: LaneRecord) -> None:
        del self.records[name]
        self._note(record.partition, record.name, None, _unheard)

    # A redrive.

    def hold(self, key: bytes) -> None:
        """Newer messages of this lane wait from now on."""
        self.held.add(key)
        record = self.records.get(key)
        if record is not None and record.stop is Stop.PARKED:
            self.held_parked.add(key)

    def settled(self, key: bytes) -> bool:
        """Whether nothing of this lane is on its way to the dead letters."""
        lane = self._engine.table.lanes.get(key)
        return lane is None or (lane.first is lane.head and lane.state is not LaneState.RUNNING)

    def redrive(self, key: bytes | None, deliveries: Sequence[Delivery]) -> None:
        """Put redriven messages before everything that waits in their lane."""
        table = self._engine.table
        self._pass_over_in_the_log(deliveries)
        lane = table.insert(key, deliveries)
        self._engine.took_in(len(deliveries))
        if lane.state is LaneState.STOPPED:
            self._engine.resume(lane)
        else:
            self._engine.changed()

    def _pass_over_in_the_log(self, deliveries: Sequence[Delivery]) -> None:
        """After a crash messages may come from the log once more that lie among the letters: they run from there."""
        engine = self._engine
        if engine.progress is None:
            return
        for partition in {delivery.partition for delivery in deliveries}:
            progress = engine.progress(partition)
            for delivery in deliveries:
                if delivery.partition == partition and not progress.is_done(delivery.offset):
                    engine.seen.waiting[partition, delivery.offset] = delivery.offset

    def let_go(self, key: bytes) -> None:
        """The redrive of this lane is over. A lane that was parked is so no more, unless it was parked again."""
        engine = self._engine
        record = self.records.get(key)

        def recorded(_problem: str | None) -> None:
            self.held.discard(key)
            lane = engine.table.lanes.get(key)
            if lane is not None:
                engine.resume(lane)
            if engine.versions is not None:
                engine.versions.go_on(key)

        if key in self.held_parked and record is not None:
            self.held_parked.discard(key)
            del self.records[key]
            self._note(record.partition, record.name, None, recorded)
        else:
            recorded(None)


def _name(record: LaneRecord) -> Name:
    return record.key if record.key is not None else (record.partition, record.offset)


def _unheard(problem: str | None) -> None:
    if problem is not None:
        log.warning("the record of a lane could not be written: %s", problem)
