"""The course of a message that failed: run again later, wait for its stage, or the app's policy.

One place decides. Whatever it decides, the lane keeps its order: a lane that waits, stops or writes a letter moves
nothing until that is over.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keylane.core.classify import Failure, classify
from keylane.core.flood import FloodWatch
from keylane.core.letter import FAILURES_KEPT, DeadLetter, Failed
from keylane.core.outcome import Outcome
from keylane.core.record import Kept, LaneRecord, Stop
from keylane.engine.delivery import Trouble
from keylane.engine.gate import GateShutError
from keylane.errors import FloodError
from keylane.logs import where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.app import App
    from keylane.core.breaker import CircuitState
    from keylane.core.lane import Lane
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.engine.pipeline import Step

log = logging.getLogger("keylane.engine")

Ended = Callable[["Delivery", str], None]

_ERROR_LIMIT = 2000
_TRACEBACK_LIMIT = 8000


class Course:
    """Decides for one engine. Used on its loop only."""

    def __init__(self, engine: Engine, app: App, steps: Sequence[Step], *, rng: Callable[[], float]) -> None:
        self.retries = 0
        self._engine = engine
        self._app = app
        self._rng = rng
        self._flood = FloodWatch(app.flood) if app.flood is not None else None
        self._observer = app.observer
        self.troubled: dict[tuple[int, int], Delivery] = {}  # failed, and neither through nor given up
        for step in steps:
            if step.gate is not None:
                step.gate.attach(resume=engine.resume, tell=self._breaker)

    def failed(
        self, lane: Lane[Delivery], delivery: Delivery, error: BaseException, step: Step | None = None
    ) -> None:
        """An attempt at the lane's head ended in this error. With ``step`` it failed there, before any attempt."""
        engine = self._engine
        if isinstance(error, GateShutError):
            self.ended(delivery, "held")
            delivery.attempts -= 1  # it did not get to the stage
            engine.table.hold(lane, engine.now())
            error.gate.wait(lane)
            return
        ended = self.ended if step is None else _untold
        step = step or engine.step_of(delivery)
        wall = engine.wall()
        verdict = classify(error, step.rules)
        trouble = self._note(delivery, step.name, error, wall)
        if verdict.failure is Failure.TRANSIENT:
            wait = step.retry.wait(
                delivery.attempt, self._rng, elapsed=wall - trouble.since, asked=verdict.delay
            )
            if wait is not None:
                ended(delivery, "retry")
                self._retry(lane, delivery, trouble, error, wait)
                return
        self._give_up(lane, delivery, _letter(step.name, error, delivery, trouble, wall), ended)

    def passed(self, delivery: Delivery) -> None:
        """A message in trouble came through."""
        self.troubled.pop((delivery.partition, delivery.offset), None)
        if delivery.trouble is not None and delivery.trouble.letter is not None:
            self._engine.seen.came_through(delivery)

    def may_start(self, lane: Lane[Delivery], delivery: Delivery, trouble: Trouble) -> bool:
        """Whether a message that came back with attempts from before may run now; if not, its lane waits."""
        if trouble.due:
            wait = trouble.due - self._engine.wall()
            trouble.wakes, trouble.due = trouble.due, 0.0
            if wait > 0:
                self.troubled[delivery.partition, delivery.offset] = delivery
                self._engine.sleep(lane, wait)
                return False
        delivery.attempt = trouble.attempt_at(self._engine.step_of(delivery).name)
        return True

    def kept(self) -> dict[int, dict[int, Kept]]:
        """The attempts to write down, by partition and offset."""
        kept: dict[int, dict[int, Kept]] = {}
        for (partition, offset), delivery in self.troubled.items():
            trouble = delivery.trouble
            if trouble is None or trouble.letter is not None:
                continue
            kept.setdefault(partition, {})[offset] = Kept(
                stage=trouble.stage,
                attempt=trouble.attempt,
                attempts=delivery.attempts,
                since=trouble.since,
                due=trouble.wakes,
            )
        return kept

    def hook(self, name: str, *given: Any) -> None:
        """Call the app's hooks of this name; what they raise is logged and changes nothing."""
        for function in self._app.hooks.get(name, ()):
            try:
                function(*given)
            except Exception:
                log.exception("hook %s of app %r failed", name, self._app.name)

    def _note(self, delivery: Delivery, stage: str, error: BaseException, wall: float) -> Trouble:
        trouble = delivery.trouble
        if trouble is None:
            trouble = delivery.trouble = Trouble()
        if trouble.stage != stage:
            trouble.stage, trouble.since = stage, wall
        trouble.attempt = delivery.attempt + 1
        trouble.failures.append(
            Failed(stage=stage, attempt=delivery.attempt, at=wall, error=_text(error)[:200])
        )
        del trouble.failures[:-FAILURES_KEPT]
        return trouble

    def _retry(
        self, lane: Lane[Delivery], delivery: Delivery, trouble: Trouble, error: BaseException, wait: float
    ) -> None:
        self.retries += 1
        self.hook("retry", delivery, error, wait)
        delivery.attempt = trouble.attempt
        trouble.wakes = self._engine.wall() + wait
        self.troubled[delivery.partition, delivery.offset] = delivery
        self._engine.sleep(lane, wait)

    def _give_up(self, lane: Lane[Delivery], delivery: Delivery, letter: DeadLetter, ended: Ended) -> None:
        """The app's policy. A redriven message lies among the dead letters, and its lane went on without it."""
        engine, policy = self._engine, self._app.on_failure
        self.troubled.pop((delivery.partition, delivery.offset), None)
        delivery.error = f"{letter.error.rpartition('.')[2]}: {letter.message}"[:_ERROR_LIMIT]
        redriven = delivery.trouble is not None and delivery.trouble.letter is not None
        if self._flood is not None and not redriven:
            why = self._flood.failed(
                delivery.key if delivery.key is not None else delivery.offset, engine.passed
            )
            if why is not None:
                ended(delivery, "held")
                engine.table.stop(lane, engine.now())
                engine.fail(FloodError(_flooded(self._app, why, delivery, letter)))
                return
        log.warning(
            "%s: %s key=%r stage=%s attempts=%d: %s",
            "failed again" if redriven else f"failed for good ({policy})",
            delivery.position,
            delivery.key,
            letter.stage,
            letter.attempts,
            delivery.error,
            extra=where(delivery, stage=letter.stage, attempts=letter.attempts, error=delivery.error),
        )
        if redriven and lane.key in engine.stops.held_parked:
            ended(delivery, "retry")
            engine.stops.park_again(lane, delivery, letter)
        elif policy == "skip" or redriven or (policy == "park" and lane.key is None):
            self.hook("dead", delivery, letter)
            engine.stops.bury(lane, delivery, letter, Outcome.DEAD, ended=ended)
        elif policy == "park":
            ended(delivery, "retry")
            self.hook("block", delivery, letter)
            engine.stops.park(lane, delivery, letter)
        else:
            ended(delivery, "retry")
            self.hook("block", delivery, letter)
            engine.stops.block(lane, delivery, letter, archive=policy == "block_and_dlq")

    def ended(self, delivery: Delivery, outcome: str) -> None:
        """Tell the observer."""
        if self._observer is not None:
            self._observer.ended(delivery, delivery.attempts, outcome)

    def _breaker(self, stage: str, state: CircuitState) -> None:
        log.warning("breaker of stage %r: %s", stage, state.value)
        self.hook("breaker", stage, state)


def _untold(_delivery: Delivery, _outcome: str) -> None:
    """Where nothing was begun, nothing ends."""


def record_of(delivery: Delivery, letter: DeadLetter, stop: Stop, since: float, why: str = "") -> LaneRecord:
    """What is written down about the lane of this message."""
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
    stage: str, error: BaseException, delivery: Delivery, trouble: Trouble, wall: float
) -> DeadLetter:
    return DeadLetter(
        stage=stage,
        error=f"{type(error).__module__}.{type(error).__qualname__}",
        message=_text(error)[:_ERROR_LIMIT],
        traceback="".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:],
        attempts=delivery.attempts,
        failed_at=wall,
        failures=tuple(trouble.failures),
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<no text: str() of {type(error).__name__} failed>"


def _flooded(app: App, why: str, delivery: Delivery, letter: DeadLetter) -> str:
    return (
        f"app {app.name!r} stopped: {why}. That is an outage or a bug, not a few bad messages, so no more dead letters "
        f"are written. The last: {delivery.position}, stage {letter.stage!r}: {delivery.error}. Mend the cause and "
        f"start the app again: it goes on with this message; 'keylane dlq redrive {app.name} --all' runs the letters "
        "again"
    )
