"""Decides what happens to a failed message: retry later, wait for its stage, or the app's policy.

The lane keeps its order in every case: while it waits, stops or writes a dead letter, nothing in it moves.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from keylane.engine.admission import NotAdmittedError
from keylane.engine.delivery import FailureState, TimerDelivery
from keylane.errors import FailureGuardError, KeylaneError
from keylane.lanes.lane_record import LaneRecord, LaneStatus, RetryState
from keylane.logs import short, where
from keylane.outcome import Outcome
from keylane.policies.classify import FailureKind, classify
from keylane.policies.failure_guard import FailureRate
from keylane.policies.failure_info import FAILURES_KEPT, FailedAttempt, FailureInfo
from keylane.policies.known_errors import asks_all_to_wait
from keylane.safe_text import valid

if TYPE_CHECKING:
    from keylane.engine.attempts import RetryAttempts
    from keylane.engine.clock import Clock
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.engine.duplicates import Duplicates
    from keylane.engine.hooks import Hooks
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.pauses import Pauses
    from keylane.engine.pipeline import Pipeline
    from keylane.engine.scheduler import LaneScheduler
    from keylane.engine.stages import Step
    from keylane.engine.stopped_lanes import StoppedLanes
    from keylane.engine.timers import TimerQueue
    from keylane.lanes.lane_table import Lane
    from keylane.policies.breaker import CircuitState
    from keylane.policies.failure_policy import FailurePolicy
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.engine")

Ended = Callable[["Delivery", str], None]

_SHORT_ERROR_CHARACTERS_MAX = 200
_ERROR_CHARACTERS_MAX = 2000
_TRACEBACK_CHARACTERS_MAX = 8000


class FailureHandler:
    """Decides for one engine. Used on its loop only."""

    def __init__(
        self,
        app: AppSpec,
        pipeline: Pipeline,
        *,
        lanes: LaneScheduler,
        stopped_lanes: StoppedLanes,
        attempts: RetryAttempts,
        duplicates: Duplicates,
        counters: MessageCounters,
        hooks: Hooks,
        clock: Clock,
        life: Lifecycle,
        pauses: Pauses,
        rng: Callable[[], float],
    ) -> None:
        self.hooks = hooks
        self.timers: TimerQueue | None = None  # written by the engine, once
        self._pauses = pauses
        self._pipeline = pipeline
        self._lanes = lanes
        self._stopped_lanes = stopped_lanes
        self._attempts = attempts
        self._duplicates = duplicates
        self._counters = counters
        self._clock = clock
        self._life = life
        self._app = app
        self._policy = app.on_failure
        self._rng = rng
        self._failure_rate = FailureRate(app.failure_guard) if app.failure_guard is not None else None
        self._observer = app.observer
        self._retries = {step.name: step.retry for step in pipeline.opened}
        for step in pipeline.opened:
            if step.gate is not None:
                step.gate.attach(resume=lanes.resume, tell=self._breaker)

    def failed(
        self, lane: Lane[Delivery], delivery: Delivery, error: BaseException, step: Step | None = None
    ) -> None:
        """An attempt at the lane's head raised this error. With ``step`` it failed before that stage was called."""
        if isinstance(error, NotAdmittedError):
            self.ended(delivery, "held")
            delivery.attempts -= 1  # the stage was not reached
            self._lanes.wait_for_stage(lane)
            error.gate.wait(lane)
            return
        ended = self.ended if step is None else _untold
        step = step or self._pipeline.step_of(delivery)
        wall = self._clock.wall()
        verdict = classify(error, step.rules)
        failure_state = self._note(delivery, step.name, error, wall)
        if verdict.failure is FailureKind.TRANSIENT:
            if verdict.delay and asks_all_to_wait(error):
                self._pauses.hold_stage(step.name, min(verdict.delay, step.retry.wait_asked_max))
            wait = step.retry.wait(
                delivery.attempt, self._rng, elapsed=wall - failure_state.since, asked=verdict.delay
            )
            if wait is not None:
                ended(delivery, "retry")
                self._retry(lane, delivery, failure_state, error, wait)
                return
        self._give_up(lane, delivery, _letter(step.name, error, delivery, failure_state, wall), ended)

    def succeeded(self, delivery: Delivery) -> None:
        """A message that had failed before succeeded."""
        if delivery.failure_state is not None and delivery.failure_state.letter is not None:
            self._duplicates.came_through(delivery)

    def may_start(self, lane: Lane[Delivery], delivery: Delivery, failure_state: FailureState) -> bool:
        """True if a message with earlier attempts may run now; if not, its lane waits."""
        if failure_state.due:
            wall = self._clock.wall()
            retry = self._retries.get(failure_state.stage) or self._pipeline.step_of(delivery).retry
            wait = min(
                failure_state.due - wall, retry.longest
            )  # the time may come from another machine's clock
            failure_state.due = 0.0
            if wait > 0:
                self._attempts.postpone(delivery, wall + wait)
                self._lanes.retry_after(lane, wait)
                return False
        delivery.attempt = failure_state.attempt_at(self._pipeline.step_of(delivery).name)
        return True

    def _note(self, delivery: Delivery, stage: str, error: BaseException, wall: float) -> FailureState:
        failure_state = delivery.failure_state
        if failure_state is None:
            failure_state = delivery.failure_state = FailureState()
        if failure_state.stage != stage:
            failure_state.stage, failure_state.since = stage, wall
        failure_state.attempt = delivery.attempt + 1
        failure_state.failures.append(
            FailedAttempt(
                stage=stage,
                attempt=delivery.attempt,
                at=wall,
                error=_text(error, _SHORT_ERROR_CHARACTERS_MAX),
            )
        )
        del failure_state.failures[:-FAILURES_KEPT]
        return failure_state

    def _retry(
        self,
        lane: Lane[Delivery],
        delivery: Delivery,
        failure_state: FailureState,
        error: BaseException,
        wait: float,
    ) -> None:
        self._counters.retries += 1
        self.hooks.call("retry", delivery, error, wait)
        delivery.attempt = failure_state.attempt
        if (
            failure_state.letter is None and delivery.timer is None
        ):  # else a redrive, or the timer, begins again
            state = RetryState(
                stage=failure_state.stage,
                attempt=failure_state.attempt,
                attempts=delivery.attempts,
                since=failure_state.since,
                due=self._clock.wall() + wait,
                slot=self._app.slot_of(delivery.key, delivery.offset),
                waited=failure_state.waited,
                lives=failure_state.lives,
            )
            self._attempts.record(delivery, state)
        self._lanes.retry_after(lane, wait)

    def _give_up(self, lane: Lane[Delivery], delivery: Delivery, letter: FailureInfo, ended: Ended) -> None:
        """Apply the app's policy. A redriven message is a dead letter already; its lane has continued without it."""
        if isinstance(delivery, TimerDelivery) and self.timers is not None:
            log.warning(
                "timer %r of lane %r failed for good: %s", delivery.timer, short(delivery.key), letter.message
            )
            self.hooks.call("dead", delivery, letter)
            self.timers.failed(lane, delivery, letter)
            return
        policy = self._policy
        delivery.error = f"{letter.error.rpartition('.')[2]}: {letter.message}"[:_ERROR_CHARACTERS_MAX]
        redriven = delivery.failure_state is not None and delivery.failure_state.letter is not None
        if self._failure_rate is not None and not redriven:
            why = self._failure_rate.failed(
                delivery.key if delivery.key is not None else delivery.offset, self._counters.passed
            )
            if why is not None:
                ended(delivery, "held")
                self._lanes.stop(lane)
                self._life.fail(_guard_error(self._app, why, delivery, letter))
                return
        log.warning(
            "%s: %s key=%r stage=%s attempts=%d: %s",
            "failed again" if redriven else f"failed for good ({policy})",
            delivery.position,
            short(delivery.key),
            letter.stage,
            letter.attempts,
            delivery.error,
            extra=where(delivery, stage=letter.stage, attempts=letter.attempts, error=delivery.error),
        )
        if redriven and self._stopped_lanes.is_parked(lane.key):  # type: ignore[arg-type]  # letters of parked lanes have one
            ended(delivery, "retry")
            self._stopped_lanes.park_again(lane, delivery, letter)
        else:
            failed = _Failed(self, self._stopped_lanes, policy, lane, delivery, letter, ended)
            if redriven:
                failed.skip()
            else:
                policy.decide(failed)
            failed.check()

    def ended(self, delivery: Delivery, outcome: str) -> None:
        """Notify the observer."""
        if self._observer is not None and delivery.timer is None:
            self._observer.ended(delivery, delivery.attempts, outcome)

    def _breaker(self, stage: str, state: CircuitState) -> None:
        log.warning("breaker of stage %r: %s", stage, state.value)
        self.hooks.call("breaker", stage, state)


class _Failed:
    """A message that failed for good, for the app's policy: see :class:`keylane.FailedMessage`."""

    __slots__ = ("_decided", "_ended", "_handler", "_lane", "_policy", "_stopped_lanes", "info", "message")

    def __init__(
        self,
        handler: FailureHandler,
        stopped_lanes: StoppedLanes,
        policy: FailurePolicy,
        lane: Lane[Delivery],
        delivery: Delivery,
        letter: FailureInfo,
        ended: Ended,
    ) -> None:
        self.message = delivery
        self.info = letter
        self._handler = handler
        self._stopped_lanes = stopped_lanes
        self._policy = policy
        self._lane = lane
        self._ended = ended
        self._decided = False

    @property
    def has_lane(self) -> bool:
        return self._lane.key is not None

    def skip(self) -> None:
        self._decide("skip", allowed=True)
        self._handler.hooks.call("dead", self.message, self.info)
        self._stopped_lanes.bury(self._lane, self.message, self.info, Outcome.DEAD, ended=self._ended)

    def block(self, *, archive: bool = False) -> None:
        self._decide("block", allowed=self._policy.blocks)
        self._stop()
        self._stopped_lanes.block(self._lane, self.message, self.info, archive=archive)

    def park(self) -> None:
        self._decide("park", allowed=self._policy.parks and self.has_lane)
        self._stop()
        self._stopped_lanes.park(self._lane, self.message, self.info)

    def check(self) -> None:
        """Raise :class:`KeylaneError` when nothing was decided."""
        if not self._decided:
            raise KeylaneError(
                f"on_failure={self._policy!r} decided nothing about {self.message.position}: decide() must call skip, "
                "block or park"
            )

    def _stop(self) -> None:
        self._ended(self.message, "retry")
        self._handler.hooks.call("block", self.message, self.info)

    def _decide(self, what: str, *, allowed: bool) -> None:
        if self._decided or not allowed:
            why = (
                "decided already"
                if self._decided
                else "not declared (blocks, parks), or the message has no lane"
            )
            raise KeylaneError(
                f"on_failure={self._policy!r} called {what} for {self.message.position}: {why}"
            )
        self._decided = True


def _untold(_delivery: Delivery, _outcome: str) -> None:
    """Do nothing: nothing was started that could end."""


def record_of(
    delivery: Delivery, letter: FailureInfo, stop: LaneStatus, since: float, why: str = ""
) -> LaneRecord:
    """Make the record of this message's lane."""
    return LaneRecord(
        stop=stop,
        key=delivery.lane.key if delivery.lane is not None else None,  # type: ignore[arg-type]  # as above
        partition=delivery.partition,
        offset=delivery.offset,
        since=since,
        letter=letter,
        why=why,
    )


def _letter(
    stage: str, error: BaseException, delivery: Delivery, failure_state: FailureState, wall: float
) -> FailureInfo:
    return FailureInfo(
        stage=stage,
        error=valid(f"{type(error).__module__}.{type(error).__qualname__}", _SHORT_ERROR_CHARACTERS_MAX),
        message=_text(error, _ERROR_CHARACTERS_MAX),
        traceback=_traceback(error),
        attempts=delivery.attempts,
        failed_at=wall,
        failures=tuple(failure_state.failures),
    )


def _text(error: BaseException, limit: int) -> str:
    """Return text that can be printed and stored, whatever the error quotes."""
    try:
        return valid(str(error), limit)
    except Exception:
        return valid(f"<no text: str() of {type(error).__name__} failed>", limit)


def _traceback(error: BaseException) -> str:
    try:
        return valid("".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS_MAX:])[
            -_TRACEBACK_CHARACTERS_MAX:
        ]
    except Exception:  # an error's attributes may raise
        return ""


def _guard_error(app: AppSpec, why: str, delivery: Delivery, letter: FailureInfo) -> FailureGuardError:
    return FailureGuardError(
        f"app {app.name!r} stopped: {why}. That is an outage or a bug, not a few bad messages, so no more dead letters "
        f"are written. The last: {delivery.position}, stage {letter.stage!r}: {delivery.error}.",
        "Fix the cause and start the app again: it continues with this message. "
        f"'keylane dlq redrive {app.name} --all' runs the dead letters again",
    )
