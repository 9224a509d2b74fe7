"""Timers of one engine: fires those that are due, as messages of their lanes.

A timer is a value of its lane with a time. Only committed timers fire. The queue in memory holds the next few seconds
of them, as hints: what counts is the value when the timer's turn comes. When its handler has ended, the timer's removal
is committed together with what the handler has changed.
"""

from __future__ import annotations

import heapq
import json
import logging
from math import inf
from typing import TYPE_CHECKING

from keylane.engine.delivery import FailureState, TimerDelivery
from keylane.engine.lane_state import TIMER, StoredValue
from keylane.lanes.lane_table import LaneState
from keylane.logs import short
from keylane.message import EVENT_ID, PlainRecord
from keylane.outcome import Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from keylane.engine.acknowledgements import Acknowledgements
    from keylane.engine.clock import Clock
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.engine.lane_state import LaneStates, Name
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.output import Output
    from keylane.engine.scheduler import LaneScheduler
    from keylane.engine.stopped_lanes import StoppedLanes
    from keylane.lanes.lane_table import Lane, LaneTable
    from keylane.policies.failure_info import FailureInfo
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.engine")

TIMER_HEADER = "keylane-timer"
"""The header of a timer's message, with the timer's name."""
_AHEAD_MS = 5_000
"""How far ahead timers are in memory."""
_LOADED_AT_ONCE = 5_000
_FIRED_IN_WINDOW, _WINDOW_SECONDS = 500, 0.05
"""At most so many timers fire in this time: 10,000 in a second."""
_IN_FLIGHT_MAX = 2_000
_STOPPED_SECONDS = 1.0
"""Until a timer of a lane that cannot take it is tried again."""
_SLEEP_SECONDS_MAX = 60.0
"""The wall clock may be set: how soon a timer notices."""
_SLEEP_SECONDS_MIN = 0.001
"""Times are in milliseconds: a shorter sleep may end before the timer's."""
_RETRY_LETTER_SECONDS = 5.0


class TimerQueue:
    """The timers of one engine. Used on its loop only."""

    def __init__(
        self,
        app: AppSpec,
        states: LaneStates,
        *,
        engine: Engine,
        table: LaneTable[Delivery],
        lanes: LaneScheduler,
        acks: Acknowledgements,
        stopped_lanes: StoppedLanes,
        output: Output,
        clock: Clock,
        life: Lifecycle,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.fired = 0
        """Timers whose handlers have ended."""
        self._topic = app.source
        self._by_key = app.order.by_key
        self._known = frozenset(app.timers)
        self._states = states
        self._engine = engine
        self._table = table
        self._lanes = lanes
        self._acks = acks
        self._stopped_lanes = stopped_lanes
        self._output = output
        self._clock = clock
        self._life = life
        self._loop = loop
        self._heap: list[tuple[int, Name]] = []
        self._hinted: dict[Name, int] = {}  # the time of each one's hint that counts
        self._loaded_to = -1  # committed timers up to this time are in the heap
        self._running: dict[Name, TimerDelivery] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._window_at, self._fired_in_window = -inf, 0
        # With one clock for both, nobody sets it.
        self._sleep_seconds_max = inf if clock.wall == loop.time else _SLEEP_SECONDS_MAX
        self._begun = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Timers that are in their lanes."""
        return len(self._running)

    def begin(self) -> None:
        """Fire what is due from now on. Called when the ranges were restored, and again when others were."""
        self._begun = True
        self._loaded_to = -1
        self._look()

    def close(self) -> None:
        """Fire nothing more."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def written(self, changes: Mapping[Name, StoredValue]) -> None:
        """These changes are committed: timers among them may fire."""
        soonest = None
        for name, value in changes.items():
            if value.content is None or not name[2].startswith(TIMER):
                continue
            if value.due <= self._loaded_to:
                self._hint(name, value.due)
            soonest = value.due if soonest is None else min(soonest, value.due)
        if soonest is not None and self._begun:
            self._arm(soonest)

    def is_held_back(self, lane: bytes) -> bool:
        """Whether the lane is stopped or being redriven: its timers wait."""
        return lane in self._stopped_lanes.records or lane in self._stopped_lanes.redriving

    def next_due(self) -> float | None:
        """The unix time of the next committed timer; None if there is none."""
        found = self._next_due_ms()
        return None if found is None else found / 1000

    # In the lane.

    def may_start(self, lane: Lane[Delivery], delivery: TimerDelivery) -> bool:
        """True if the timer's handler may run now; if not, the timer has left its lane."""
        if self.is_held_back(lane.key):  # type: ignore[arg-type]  # the engine's lanes have no other keys
            delivery.dropped = True
            self._retry_later(delivery.name)
        elif not self._is_due(delivery):
            delivery.dropped = True
        if delivery.dropped:
            self._lanes.pass_over(lane, delivery, Outcome.IGNORED)
        return not delivery.dropped

    def done(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Take the timers out of what is done; the rest is returned."""
        if not self._running:
            return deliveries
        rest = []
        for delivery in deliveries:
            if isinstance(delivery, TimerDelivery):
                self._running.pop(delivery.name, None)
                self.fired += not delivery.dropped
            else:
                rest.append(delivery)
        if len(rest) < len(deliveries):
            self._arm_next()
        return rest

    def failed(self, lane: Lane[Delivery], delivery: TimerDelivery, letter: FailureInfo) -> None:
        """The timer's handler failed for good: a copy goes to the dead letters, and the lane continues."""
        delivery.outcome = Outcome.DEAD
        self._states.timer_failed(delivery)

        def send() -> None:
            self._output.letter(delivery, letter, "archived", None, written)

        def written(problem: str | None) -> None:
            if problem is None:
                self._acks.answered()
                self._lanes.finish(lane, delivery)
                self._life.changed()
                return
            log.error(
                "timer %r of lane %r failed and its dead letter could not be written: %s; tried again in %g s",
                delivery.timer,
                short(delivery.key),
                problem,
                _RETRY_LETTER_SECONDS,
            )
            self._clock.after(_RETRY_LETTER_SECONDS, send)

        self._acks.expect_answer()
        send()

    # When they are due.

    def _look(self) -> None:
        """Fire what is due, as far as there is room, and sleep until the next one."""
        self._alarm = None
        if self._closed or self._life.ended or self._table.closed:
            return
        now = int(self._clock.wall() * 1000)
        self._load(now + _AHEAD_MS)
        if self._clock.now() - self._window_at >= _WINDOW_SECONDS:
            self._window_at, self._fired_in_window = self._clock.now(), 0
        while (
            self._heap
            and self._heap[0][0] <= now
            and self._fired_in_window < _FIRED_IN_WINDOW
            and self.in_flight < _IN_FLIGHT_MAX
        ):
            due, name = heapq.heappop(self._heap)
            if self._hinted.get(name) == due:
                del self._hinted[name]
                self._fired_in_window += self._fire(name, now)
        if self._heap and self._heap[0][0] <= now:
            if self.in_flight < _IN_FLIGHT_MAX:
                self._arm_in(max(_SLEEP_SECONDS_MIN, self._window_at + _WINDOW_SECONDS - self._clock.now()))
            return  # else it continues when some of them are done
        if (following := self._next_due_ms()) is not None:
            self._arm(following)

    def _fire(self, name: Name, now: int) -> int:
        """Put the timer into its lane; 1 if it is there now."""
        _, key, tag = name
        if name in self._running:
            return 0
        value = self._states.current(name)
        if value is None or value.content is None or value.due > now or self._states.is_pending(name):
            return 0  # it was cancelled or replaced; what replaces it comes back when it is committed
        timer = tag.removeprefix(TIMER)
        if timer not in self._known:
            log.warning(
                "no handler for timer %r of lane %r: declare @app.on_timer(%r)", timer, short(key), timer
            )
            return 0
        lane = self._table.lanes.get(key)
        if self.is_held_back(key) or (
            lane is not None and lane.state in (LaneState.STOPPED, LaneState.RETURNING)
        ):
            self._retry_later(name)
            return 0
        delivery = self._delivery(name, timer, value)
        self._running[name] = delivery
        self._lanes.insert(key, [delivery])
        return 1

    def _delivery(self, name: Name, timer: str, value: StoredValue) -> TimerDelivery:
        partition, key, _ = name
        event_id = f"timer/{timer}/{partition}/{value.offset}/{value.due}"
        record = PlainRecord(
            topic=self._topic,
            partition=partition,
            offset=max(0, value.offset),
            key=key if self._by_key else None,
            value=value.content,
            headers=[(TIMER_HEADER, timer.encode()), (EVENT_ID, event_id.encode())],
            timestamp=value.due,
        )
        delivery = TimerDelivery(record, self._engine, timer, name, value)
        delivery.value = json.loads(value.content or b"null")
        delivery.failure_state = FailureState()  # it cannot be read again, so its lane never evicts it
        return delivery

    def _is_due(self, delivery: TimerDelivery) -> bool:
        """Whether the lane still has this timer: a message before it may have cancelled or replaced it."""
        value = self._states.current(delivery.name)
        return (
            value is not None
            and value.content == delivery.stored.content
            and (value.due, value.offset) == (delivery.stored.due, delivery.stored.offset)
        )

    def _retry_later(self, name: Name) -> None:
        self._hint(name, int((self._clock.wall() + _STOPPED_SECONDS) * 1000))

    def _hint(self, name: Name, due: int) -> None:
        if self._hinted.get(name) != due:
            self._hinted[name] = due
            heapq.heappush(self._heap, (due, name))

    def _load(self, until: int) -> None:
        """Take the committed timers up to this time into memory, the earliest first, some at a time."""
        if until - _AHEAD_MS // 2 <= self._loaded_to or len(self._heap) >= _LOADED_AT_ONCE:
            return
        limit = _LOADED_AT_ONCE
        while True:
            found = self._states.due(until, limit, after=self._loaded_to)
            if len(found) < limit:
                self._loaded_to = until
                break
            if found[-1][1].due > found[0][1].due:  # the last moment may be incomplete
                self._loaded_to = found[-1][1].due - 1
                break
            limit *= 4
        for name, value in found:
            if name not in self._running:
                self._hint(name, value.due)

    def _next_due_ms(self) -> int | None:
        if self._heap:  # what is not in memory is due later
            return self._heap[0][0]
        return self._states.next_due(after=self._loaded_to)

    def _arm(self, due: int) -> None:
        self._arm_in(min(self._sleep_seconds_max, max(_SLEEP_SECONDS_MIN, due / 1000 - self._clock.wall())))

    def _arm_next(self) -> None:
        """There is room for others."""
        if self._begun and self._heap:
            self._arm(self._heap[0][0])

    def _arm_in(self, seconds: float) -> None:
        when = self._clock.now() + seconds
        if self._closed or (self._alarm is not None and self._alarm_at <= when):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_at(when, self._look)
