"""Version ordering in an engine: stale messages are passed over, early ones wait for the missing versions.

An early message leaves its lane, which continues without it. It returns to the front of the lane as soon as the version
before it is done, or when it has waited long enough. So a lane runs in the order of versions where it can, and still
one message at a time. A waiting message is not done: after a crash it is read again and waits again.

Only versions of messages that are *done* are durable: the task commits them together with the progress.
"""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

from keylane.engine.delivery import Delivery
from keylane.engine.stages import Step
from keylane.errors import Poison
from keylane.handlers.fields import Field
from keylane.lanes.lane_record import RetryState
from keylane.lanes.lane_table import Lane, LaneState, LaneTable
from keylane.outcome import Outcome
from keylane.policies.versions import VersionFit, VersionMark, VersionOrdering, mark_at, parse_version

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Mapping, Sequence

    from keylane.engine.clock import Clock
    from keylane.engine.failure_handler import FailureHandler
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.pipeline import Pipeline
    from keylane.engine.refetch import Refetches
    from keylane.engine.scheduler import LaneScheduler
    from keylane.engine.stopped_lanes import StoppedLanes
    from keylane.engine.version_store import Name, VersionStore
    from keylane.message import Message
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.engine")

VERSION = "(version)"
"""The stage named when a message fails because of its version, or waits for an earlier one."""
_RECORDED_WAITS_MAX = 2_000
"""Waiting messages whose waiting time is recorded; the others start waiting from zero after a restart."""
_EVICTED_MESSAGES_MAX = 1_000_000
"""Waiting messages of which only offsets are kept. Above this they stay in memory, and reading stops."""
_RESTORED_GRACE_SECONDS = 1.0
_RESTORED_GRACES_MAX = 4
"""After a restart the missing version may be in the log: waiting messages get this time, this often, to see it."""
_WENT_BY = (Outcome.OK, Outcome.IGNORED, Outcome.DEAD, Outcome.SKIPPED)
_RAN = (Outcome.OK, Outcome.IGNORED)

Place = tuple[int, int, int | None]
"""Partition, offset and, for a redriven message, its dead letter's offset. The log may contain the message again."""


class VersionedTable(LaneTable[Delivery]):
    """Lanes in which a message with a lower version may overtake."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.on_passed: Callable[[Any, Delivery], None] = lambda _key, _entry: None

    def passed(self, lane: Lane[Delivery]) -> None:
        """The head has passed: bring back the message that waited for it."""
        entry: Delivery = lane.head  # type: ignore[assignment]  # a lane that runs has a head
        super().passed(lane)
        self.on_passed(lane.key, entry)

    def turn(self, lane: Lane[Delivery]) -> Lane[Delivery] | None:
        """Finish the head's turn; calls :meth:`passed`."""
        self.passed(lane)
        return self.take()


class _WaitingMessage:
    """A message that waits for an earlier version. ``delivery`` is None while it is evicted."""

    __slots__ = (
        "delivery",
        "lives",
        "name",
        "offset",
        "over",
        "partition",
        "place",
        "redriven",
        "since",
        "slot",
        "version",
        "waits",
    )

    def __init__(self, delivery: Delivery, version: int, since: float, name: Name, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.version = version
        self.partition = delivery.partition
        self.offset = delivery.offset
        self.place = _place(delivery)
        self.since = since
        self.redriven = delivery.redriven
        self.delivery: Delivery | None = delivery
        self.lives = 1  # tasks it has waited in
        self.waits = True
        self.over = False  # it has waited long enough

    def __lt__(self, other: _WaitingMessage) -> bool:
        return (self.version, self.offset) < (other.version, other.offset)


class Versions:
    """Version ordering of one engine; used on its loop only. ``store`` knows the versions of finished messages."""

    def __init__(
        self,
        rule: VersionOrdering,
        app: AppSpec,
        table: VersionedTable,
        store: VersionStore,
        *,
        pipeline: Pipeline,
        lanes: LaneScheduler,
        failures: FailureHandler,
        stopped_lanes: StoppedLanes,
        refetches: Refetches,
        clock: Clock,
        life: Lifecycle,
    ) -> None:
        self.waiting_count = 0  # messages that wait or are being read again
        self._rule = rule
        self._pipeline = pipeline
        self._lanes = lanes
        self._failures = failures
        self._stopped_lanes = stopped_lanes
        self._refetches = refetches
        self._clock = clock
        self._life = life
        self._table = table
        self._store = store
        self._read = reader_of(rule)
        self._header = isinstance(rule.version_from, str)
        self._slot_of = app.slot_of
        self._step = Step(
            name=VERSION,
            call=_never,
            retry=app.retry,
            rules=() if app.classify is None else (app.classify,),
            gate=None,
            threads=set(),
        )
        self._numbers: dict[Place, int | None] = {}  # versions of messages in their lanes that are not done
        self._ahead: dict[
            Name, tuple[VersionMark, int]
        ] = {}  # entities with messages that passed and are not done: how many
        self._marks: dict[Place, VersionMark] = {}  # the marks of those messages
        self._waiting: dict[bytes, list[_WaitingMessage]] = {}  # by key, ascending
        self._back: dict[bytes, Place] = {}  # by key, the message that came back and has not had its turn
        self._over: dict[Place, _WaitingMessage] = {}  # those of them that have waited long enough
        self._in_memory = 0
        self._memory = max(1, app.max_buffered // 4)
        self._due: list[tuple[float, int, bytes, _WaitingMessage]] = []
        self._numbering = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._changed: dict[Name, VersionMark] = {}  # done, and not committed yet
        table.on_passed = self._passed

    # Called by the engine.

    def may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """True if the lane's head may run now. If not, it has been failed, passed over or set aside."""
        if lane.key is None:
            return True
        place = _place(delivery)
        if place not in self._numbers:
            try:
                self._numbers[place] = self._number(delivery)
            except (Exception, SystemExit) as error:
                self._fail(lane, delivery, error)
                return False
        version = self._numbers[place]
        if version is None:
            return self._starts(delivery)
        mark = self._mark(self._name(delivery))
        fits = self._rule.judge(version, mark, redriven=delivery.redriven)
        if fits is VersionFit.NEXT:
            return self._starts(delivery)
        if fits is VersionFit.STALE:
            if self._rule.on_stale == "skip":
                self._lanes.pass_over(lane, delivery, Outcome.STALE)
            else:
                passed = "" if mark is None else f": version {mark.passed} has passed"
                self._fail(lane, delivery, Poison(f"version {version} is stale{passed}"))
            return False
        if fits is VersionFit.LATE or (
            fits is VersionFit.FAR and not self._follows(delivery.key or b"", version)
        ):
            self._fail(lane, delivery, Poison(self._refusal(fits, version, mark)))
            return False
        return self._early(lane, delivery, version, mark)

    def done(self, delivery: Delivery) -> None:
        """The message is done: its version may be committed."""
        place = _place(delivery)
        self._numbers.pop(place, None)
        mark = self._marks.pop(place, None)
        if mark is None:
            return
        name = self._name(delivery)
        newest, left = self._ahead[name]
        if left > 1:
            self._ahead[name] = newest, left - 1
        else:
            del self._ahead[name]
        self._store.put(name, mark)
        self._changed[name] = mark

    def changed(self, without: Collection[int] = ()) -> dict[Name, VersionMark]:
        """Versions to commit with the current progress; without these partitions, whose progress is waiting back."""
        if not without:
            return dict(self._changed)
        return {name: entry for name, entry in self._changed.items() if name[0] not in without}

    def written(self, entries: Mapping[Name, VersionMark]) -> None:
        """These entries are durable."""
        if len(entries) == len(self._changed) and entries == self._changed:
            self._changed = {}
            return
        for name, entry in entries.items():
            if self._changed.get(name) == entry:
                del self._changed[name]

    def note_waits(self, kept: dict[int, dict[int, RetryState]]) -> None:
        """Add when messages started waiting, by partition and offset, so that a restart does not reset it."""
        waits = (one for waiting in self._waiting.values() for one in waiting)
        for one in chain(islice(waits, _RECORDED_WAITS_MAX), self._over.values()):
            if not one.redriven:
                found = kept.setdefault(one.partition, {})
                found[one.offset] = _waiting(found.get(one.offset), one)

    def known(self, delivery: Delivery) -> int | None:
        """Return the version of a message in its lane."""
        return self._numbers.get(_place(delivery))

    @property
    def resting(self) -> bool:
        """True if no waiting message will move without help: there is none, or its lane has stopped."""
        if not self._waiting:
            return not self.waiting_count  # otherwise some are being read again
        if self.waiting_count != sum(map(len, self._waiting.values())):
            return False
        return all(self._stopped(key) for key in self._waiting)

    def resume(self, key: bytes) -> None:
        """The waiting messages of this lane may come back again."""
        self._bring_next(key)

    def reset(self, partition: int, key: bytes, to: int | None) -> VersionMark | None:
        """Set the version of an entity for an operator: the version after ``to`` is next; None: it starts over.

        Returns the mark to record as soon as possible.
        """
        name = partition, key
        lane = self._table.lanes.get(key)
        passed = lane.first if lane is not None else None
        while lane is not None and passed is not None and passed is not lane.head:
            if self._name(passed) == name:  # its mark no longer counts
                self._marks.pop(_place(passed), None)
            passed = passed.next
        self._ahead.pop(name, None)
        self._changed.pop(name, None)
        mark = None if to is None else mark_at(to)
        if mark is None:
            self._store.forget(name)
        else:
            self._store.put(name, mark)
        self._bring_next(key)
        return mark

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    # A message's turn.

    def _number(self, delivery: Delivery) -> int | None:
        if not self._header:
            self._pipeline.decode_value(delivery)
        return self._read(delivery)

    def _starts(self, delivery: Delivery) -> bool:
        if delivery.decoded and not delivery.attempts:
            delivery.started = self._clock.wall()
        return True

    def _early(
        self, lane: Lane[Delivery], delivery: Delivery, version: int, mark: VersionMark | None
    ) -> bool:
        rule, place = self._rule, _place(delivery)
        if rule.on_gap == "process":
            return self._starts(delivery)
        over = place in self._over
        if over and self._waits_below(delivery.key or b"", version):
            del self._over[place]  # an earlier version was given another chance: this one waits with it
            over = False
        if over and rule.on_timeout == "process":
            return self._starts(delivery)
        if over or rule.on_gap == "fail":
            self._over.pop(place, None)
            self._fail(lane, delivery, Poison(self._vain(version, mark, waited=over)))
            return False
        self._set_aside(lane, delivery, version)
        return False

    def _waits_below(self, key: bytes, version: int) -> bool:
        """True if a lower version waits and may come back."""
        return any(
            one.version < version and not self._kept_back(key, one) for one in self._waiting.get(key, ())
        )

    def _follows(self, key: bytes, version: int) -> bool:
        """True if a message waits from which this version is not too far away: both wait for the same gap."""
        reach = (self._rule.max_gap or 0) + 1
        return any(0 < version - one.version <= reach for one in self._waiting.get(key, ()))

    def _refusal(self, fits: VersionFit, version: int, mark: VersionMark | None) -> str:
        """Explain why this version does not run."""
        missing = self._rule.missing(mark)
        if fits is VersionFit.LATE:
            return f"version {version} came too late: it was given up before it came, and version {missing} is next"
        return (
            f"version {version} is too far ahead: version {missing} is next, and at most max_gap={self._rule.max_gap} "
            "versions may be missing. Nothing else of its key changes. If the version is right, see 'keylane versions "
            "reset'; if versions do not count up by one, say VersionOrdering(max_gap=None)"
        )

    def _vain(self, version: int, mark: VersionMark | None, *, waited: bool) -> str:
        missing = self._rule.missing(mark)
        text = f"version {version} came, and version {missing} did not"
        if waited:
            text += f" within {self._rule.wait:g} s, or {self._rule.max_waiting} others came"
        if mark is None:
            text += "; if entities may begin with any version, say VersionOrdering(first=None)"
        return text

    def _fail(self, lane: Lane[Delivery], delivery: Delivery, error: BaseException) -> None:
        self._failures.failed(lane, delivery, error, self._step)

    def _name(self, delivery: Delivery) -> Name:
        """Return the entity of a message. A redriven one belongs where its key is now, perhaps in another partition."""
        key = delivery.key or b""
        if delivery.redriven and (home := self._store.home(key)) is not None:
            return home, key
        return delivery.partition, key

    def _mark(self, name: Name) -> VersionMark | None:
        ahead = self._ahead.get(name)
        return ahead[0] if ahead is not None else self._store.get(name)

    def _passed(self, key: Any, delivery: Delivery) -> None:
        """The head of this lane has had its turn."""
        place = _place(delivery)
        version = self._numbers.get(place)
        if key is None or version is None:
            return
        self._over.pop(place, None)
        if self._back.get(key) == place:
            del self._back[key]
        if delivery.outcome in _WENT_BY:
            name = self._name(delivery)
            before, applied = self._mark(name), delivery.outcome in _RAN
            if applied or self._rule.judge(version, before, redriven=delivery.redriven) is not VersionFit.FAR:
                offset = delivery.offset if name[0] == delivery.partition else -1
                mark = self._rule.after(before, version, offset, applied=applied)
                self._marks[place] = mark
                self._ahead[name] = mark, self._ahead.get(name, (mark, 0))[1] + 1
        self._bring_next(key)

    # Waiting.

    def _set_aside(self, lane: Lane[Delivery], delivery: Delivery, version: int) -> None:
        failure_state = delivery.failure_state
        key, place = delivery.key or b"", _place(delivery)
        self._table.set_aside(lane)
        del self._numbers[place]
        if self._back.get(key) == place:
            del self._back[key]
        waiting = _WaitingMessage(
            delivery,
            version,
            self._clock.wall(),
            self._name(delivery),
            self._slot_of(delivery.key, delivery.offset),
        )
        due = self._clock.now() + self._rule.wait
        if failure_state is not None and failure_state.waited:  # from before a restart
            waiting.since, waiting.lives = failure_state.waited, failure_state.lives + 1
            grace = (
                min(_RESTORED_GRACE_SECONDS, self._rule.wait)
                if waiting.lives <= _RESTORED_GRACES_MAX
                else 0.0
            )
            due = self._clock.now() + max(waiting.since + self._rule.wait - self._clock.wall(), grace)
        self.waiting_count += 1
        self._in_memory += 1
        self._keep(key, waiting)
        heappush(self._due, (due, next(self._numbering), key, waiting))
        self._arm()
        if self._in_memory > self._memory and self.waiting_count - self._in_memory < _EVICTED_MESSAGES_MAX:
            self._evict(waiting)
        if len(self._waiting[key]) > self._rule.max_waiting:
            self._give_up(key, self._waiting[key][0].version)

    def _keep(self, key: bytes, waiting: _WaitingMessage) -> None:
        insort(self._waiting.setdefault(key, []), waiting)

    def _evict(self, waiting: _WaitingMessage) -> None:
        """Keep only its offset: the missing version must still be read."""
        delivery = waiting.delivery
        if delivery is None or waiting.redriven or delivery.attempts or not self._refetches.possible:
            return
        waiting.delivery = None
        self._in_memory -= 1
        self._refetches.evicted(delivery)

    def _kept_back(self, key: bytes, waiting: _WaitingMessage) -> bool:
        """True if its lane does not take it now: it has stopped, or is being redriven and this is not a dead letter."""
        return not waiting.redriven and (key in self._stopped_lanes.redriving or self._stopped(key))

    def _stopped(self, key: bytes) -> bool:
        lane = self._table.lanes.get(key)
        return lane is not None and lane.state is LaneState.STOPPED

    def _give_up(self, key: bytes, version: int) -> None:
        """Stop waiting for the versions missing below this one."""
        for waiting in self._waiting[key]:
            if waiting.version <= version:
                waiting.over = True
        self._bring_next(key)

    def _bring_next(self, key: bytes) -> None:
        """Bring back the lowest message that need not wait longer. One at a time, or they would overtake each other."""
        if self._table.closed or key in self._back:
            return
        for waiting in self._waiting.get(key, ()):
            if self._kept_back(key, waiting):
                continue
            mark = self._mark(waiting.name)
            if (
                waiting.over
                or self._rule.judge(waiting.version, mark, redriven=waiting.redriven) is not VersionFit.GAP
            ):
                self._bring_back(key, waiting)
            return

    def _bring_back(self, key: bytes, waiting: _WaitingMessage) -> None:
        left = self._waiting[key]
        left.remove(waiting)
        if not left:
            del self._waiting[key]
        waiting.waits = False
        self._back[key] = waiting.place
        if waiting.delivery is not None:
            self._in_memory -= 1
            self._insert(key, waiting, waiting.delivery)
        else:
            self._refetches.request(
                key,
                waiting.partition,
                [waiting.offset],
                lambda found, _gone: self._returned(key, waiting, found),
            )

    def _returned(self, key: bytes, waiting: _WaitingMessage, found: Sequence[Delivery]) -> None:
        """An evicted message was read again, or it is no longer in the log and never ran."""
        if found and not self._table.closed and not self._kept_back(key, waiting):
            self._insert(key, waiting, found[0])
            return
        del self._back[key]
        if found:
            waiting.delivery, waiting.waits = found[0], True
            self._in_memory += 1
            self._keep(key, waiting)
            heappush(self._due, (self._clock.now() + self._rule.wait, next(self._numbering), key, waiting))
        else:
            self.waiting_count -= 1
            self._bring_next(key)
        self._arm()
        self._life.changed()

    def _insert(self, key: bytes, waiting: _WaitingMessage, delivery: Delivery) -> None:
        place = waiting.place
        self._numbers[place] = waiting.version
        if waiting.over:
            self._over[place] = waiting
        waiting.delivery = None  # the timers may refer to it for a while
        self.waiting_count -= 1
        self._arm()
        self._lanes.insert(key, [delivery])

    # Timers.

    def _arm(self) -> None:
        if len(self._due) > 2 * self.waiting_count + 100:  # most timers are no longer needed
            self._due = [one for one in self._due if one[3].waits]
            heapify(self._due)
        while self._due and not self._due[0][3].waits:
            heappop(self._due)
        due = self._due[0][0] if self._due else None
        if self._timer is not None and (due is None or due < self._timer_due):
            self._timer.cancel()
            self._timer = None
        if due is not None and self._timer is None:
            self._timer_due = due
            self._timer = self._clock.at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = max(self._clock.now(), self._timer_due)
        while self._due and self._due[0][0] <= now:
            _, _, key, waiting = heappop(self._due)
            if not waiting.waits:
                continue
            if self._kept_back(key, waiting):
                heappush(self._due, (now + self._rule.wait, next(self._numbering), key, waiting))
            else:
                self._give_up(key, waiting.version)
        if not self._table.closed:
            self._arm()


def reader_of(rule: VersionOrdering) -> Callable[[Message], int | None]:
    """Make a function from a message with a decoded value to its version. It raises :class:`Poison`."""
    where: str | Callable[[Message], Any] = rule.version_from
    if isinstance(where, str):
        name = where
        return lambda msg: _version(msg.header(name), f"header {name!r}")
    read, needed = where, where if isinstance(where, Field) else None

    def of(msg: Message) -> int | None:
        found = read(msg)
        return (
            None
            if found is None and needed is None
            else _version(found, f"field {getattr(needed, 'path', '')!r}")
        )

    return of


def _place(delivery: Delivery) -> Place:
    failure_state = delivery.failure_state
    return delivery.partition, delivery.offset, None if failure_state is None else failure_state.letter


def _version(found: object, where: str) -> int:
    if found is None:
        raise Poison(f"no version: {where} is missing")
    try:
        return parse_version(found)
    except ValueError as error:
        raise Poison(str(error)) from error


def _waiting(kept: RetryState | None, waiting: _WaitingMessage) -> RetryState:
    """The record of a message that waits, or has waited; its attempts are unchanged."""
    if kept is not None:
        return replace(kept, waited=waiting.since, lives=waiting.lives)
    return RetryState(
        stage=VERSION,
        attempt=1,
        attempts=0,
        since=waiting.since,
        due=0.0,
        slot=waiting.slot,
        waited=waiting.since,
        lives=waiting.lives,
    )


async def _never(_message: Message) -> Any:
    raise AssertionError("not a stage")
