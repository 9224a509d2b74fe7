"""Message runner of one engine: passes the heads of lanes through the pipeline, one after another."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from keylane.engine.delivery import TimerDelivery
from keylane.engine.output import SentAloneError
from keylane.errors import Poison

if TYPE_CHECKING:
    from keylane.engine.acknowledgements import Acknowledgements
    from keylane.engine.clock import Clock
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.engine.duplicates import Duplicates
    from keylane.engine.failure_handler import FailureHandler
    from keylane.engine.lane_state import LaneStates
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.pauses import Pauses
    from keylane.engine.pipeline import Pipeline
    from keylane.engine.runner_pool import RunnerPool
    from keylane.engine.scheduler import LaneScheduler
    from keylane.engine.stopped_lanes import StoppedLanes
    from keylane.engine.timers import TimerQueue
    from keylane.engine.versions import Versions
    from keylane.lanes.lane_table import Lane, LaneTable
    from keylane.spec import AppSpec

RUN_MESSAGES_MAX = 256
"""Messages that a runner may process before it yields: limits how long acknowledgements and timers wait."""


class MessageRunner:
    """What each runner of one engine's pool does. Used only on its loop; has no state of its own."""

    def __init__(
        self,
        app: AppSpec,
        *,
        pipeline: Pipeline,
        table: LaneTable[Delivery],
        pool: RunnerPool,
        lanes: LaneScheduler,
        acks: Acknowledgements,
        failures: FailureHandler,
        stopped_lanes: StoppedLanes,
        duplicates: Duplicates,
        versions: Versions | None,
        states: LaneStates | None,
        timers: TimerQueue | None,
        counters: MessageCounters,
        clock: Clock,
        life: Lifecycle,
        pauses: Pauses,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._observer = app.observer
        self._pipeline = pipeline
        self._table = table
        self._pool = pool
        self._lanes = lanes
        self._acks = acks
        self._failures = failures
        self._stopped_lanes = stopped_lanes
        self._duplicates = duplicates
        self._versions = versions
        self._states = states
        self._timers = timers
        self._counters = counters
        self._clock = clock
        self._life = life
        self._pauses = pauses
        self._loop = loop

    async def run(self) -> None:
        """Run the heads of ready lanes until the engine ends."""
        # The hot path: one function, with local names for what other parts own, to save calls for each message.
        table, pool, life, counters = self._table, self._pool, self._life, self._counters
        steps, decode, hand_over = self._pipeline.steps, self._pipeline.decode, self._pipeline.hand_over
        deliver, observer, wall = self._pipeline.deliver, self._observer, self._clock.wall
        acknowledged, call_soon, settle = self._acks.acknowledged, self._loop.call_soon, self._acks.settle
        # Almost always empty.
        records, redrives, repeated = (
            self._stopped_lanes.records,
            self._stopped_lanes.redriving,
            self._duplicates.waiting,
        )
        pauses = self._pauses
        paused = pauses.active  # almost always empty, too
        versioned, states = self._versions is not None, self._states
        last, turns = len(steps), 0
        lane: Lane[Delivery] | None = None
        pool.scheduled = False
        while not life.ended:  # also when its stage swallowed the cancellation
            if lane is None and (lane := table.take()) is None:
                idle = pool.idle()
                life.changed()
                await idle
                pool.scheduled = False
                turns = 0
                continue
            if not pool.scheduled and (table.ready or table.again):
                pool.ensure_runner()
            turns += 1
            delivery: Delivery = lane.head  # type: ignore[assignment]
            if (
                versioned
                or delivery.failure_state is not None
                or (repeated and (delivery.partition, delivery.offset) in repeated)
                or (
                    (records or redrives) and ((key := lane.key) is None or key in records or key in redrives)
                )
            ) and not self._may_start(lane, delivery):
                lane = None
                if turns % RUN_MESSAGES_MAX == 0:  # a long lane that is parked must not block the loop
                    await asyncio.sleep(0)
                continue
            delivery.attempts += 1
            if observer is not None and delivery.timer is None:
                observer.started(delivery, delivery.attempts)
            try:
                if not delivery.decoded:
                    if delivery.attempts == 1:
                        delivery.started = wall()
                    if decode is not None and delivery.value is not None:
                        delivery.value = decode(delivery.value)
                    delivery.decoded = True
                stage = delivery.stage
                while stage < last:
                    if paused:
                        pauses.check(delivery, steps[stage].name)
                    delivery.value = await steps[stage].call(delivery)
                    stage = delivery.stage = stage + 1
                    delivery.attempt = 1
                    if delivery.failure_state is not None and stage < last:
                        delivery.attempt = delivery.failure_state.attempt_at(steps[stage].name)
                value = delivery.value
                if hand_over is None or value is None:
                    if not acknowledged:
                        call_soon(settle)
                    acknowledged.append(delivery)
                elif type(value) is bytes:
                    hand_over(delivery, value)
                else:
                    deliver(delivery, value)
            except SentAloneError:
                self._acks.expect_answer()
                lane = None
            except (Exception, SystemExit) as error:
                self._failures.failed(lane, delivery, error)
                lane = None
            except asyncio.CancelledError:
                if life.stopping:
                    raise
                if lane in pool.cut:  # its range is released, and this took too long
                    pool.cut.discard(lane)
                    self._lanes.retry_after(lane, inf)
                    lane = None
                    continue
                self._failures.failed(lane, delivery, RuntimeError("the stage was cancelled from inside"))
                lane = None
            else:
                if observer is not None and delivery.timer is None:
                    observer.ended(delivery, delivery.attempts, delivery.outcome)
                if delivery.failure_state is not None:
                    self._failures.succeeded(delivery)
                if states is not None:
                    states.passed(delivery)
                counters.passed += 1
                if turns < RUN_MESSAGES_MAX:
                    lane = table.turn(lane)
                    continue
                table.passed(lane)  # takes nothing that would not start at once
                lane = None
            if turns >= RUN_MESSAGES_MAX:
                turns = 0
                if pool.scheduled:  # that runner takes over
                    await pool.idle()
                else:
                    pool.scheduled = True
                    await asyncio.sleep(0)
                pool.scheduled = False

    def answered(self, delivery: Delivery, problem: str | None) -> None:
        """The sink's answer to a result that was sent alone: None when it is durable, or why the sink rejects it.

        A rejected one fails as if the message's last stage had raised :class:`keylane.Poison`.
        """
        lane: Lane[Delivery] = delivery.lane  # type: ignore[assignment]  # it has waited as its lane's head
        self._acks.answered()
        if problem is not None:
            self._failures.failed(lane, delivery, Poison(problem))
        else:
            self._failures.ended(delivery, delivery.outcome)
            if delivery.failure_state is not None:
                self._failures.succeeded(delivery)
            if self._states is not None:
                self._states.passed(delivery)
            self._counters.passed += 1
            self._lanes.finish(lane, delivery)
        self._life.changed()

    def _may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """Whether a head that needs a check may run now; if not, its lane was dealt with."""
        if isinstance(delivery, TimerDelivery):
            assert self._timers is not None  # noqa: S101 - who else has made it
            return self._timers.may_start(lane, delivery) and self._may_try(lane, delivery)
        if not self._stopped_lanes.may_start(lane, delivery):
            return False
        repeats = not delivery.redriven and (delivery.partition, delivery.offset) in self._duplicates.waiting
        if repeats and self._stopped_lanes.repeats(delivery):
            self._lanes.pass_over(lane, delivery)
            return False
        if self._versions is not None and not self._versions.may_start(lane, delivery):
            return False
        return self._may_try(lane, delivery)

    def _may_try(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        failure_state = delivery.failure_state
        return failure_state is None or self._failures.may_start(lane, delivery, failure_state)
