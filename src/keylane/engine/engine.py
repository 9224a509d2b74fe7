"""The engine: runs the heads of lanes, as many at once as there are, and decides what happens next to each.

Runners are reused tasks. A runner takes ready lanes one after another; before it takes one while more are ready it
makes sure that another runner is scheduled. Stages that never wait cost no task at all; stages that wait get as many
runners as wait. There is no fixed number of them, and no lane is bound to one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from keylane.core.classify import Failure, classify
from keylane.core.lane import Lane, LaneStatistics, LaneTable
from keylane.core.outcome import Outcome
from keylane.engine.delivery import Delivery
from keylane.engine.pipeline import decoder, encode
from keylane.errors import KafkaError, KeylaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keylane.app import App
    from keylane.engine.pipeline import Step
    from keylane.message import Record

log = logging.getLogger("keylane.engine")

TURNS = 256
"""Messages a runner may finish without giving the loop back: bounds how long acknowledgements and timers wait."""
_ERROR_LIMIT = 2000
_TRACEBACK_LIMIT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Why a message is dead, for the dead-letter topic."""

    stage: str
    error: str
    message: str
    traceback: str
    attempts: int
    failed_at: float


class Output(Protocol):
    """Where results and dead letters go.

    Both calls hand over and return at once, in order. Later ``delivery(None, …)`` is called when it is durable, or
    ``delivery(error, …)`` when it never will be; always on the loop's thread, and never from inside these calls.
    """

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Raises :class:`keylane.Poison` when the sink can never take this value."""

    def dead(self, delivery: Delivery, letter: DeadLetter) -> None:
        """The message as it came, and why it is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot: how full the engine is and what it has done since it was made."""

    lanes: LaneStatistics
    held: int
    done: int
    dead: int
    retries: int
    runners: int


class Engine:
    """Runs one task's messages. Everything happens on the loop it was made on; nothing here is thread-safe.

    ``on_done`` is called with the deliveries that are done, in batches; the deliveries of a lane come in its order.
    :meth:`failed` becomes done with an exception when the engine can not go on.
    """

    def __init__(
        self,
        app: App,
        steps: Sequence[Step],
        output: Output,
        *,
        on_done: Callable[[list[Delivery]], None],
        wall: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.acknowledged: list[Delivery] = []  # written by the producer's reports, emptied by settle()
        self.done = 0
        self.dead = 0
        self.retries = 0
        self._app = app
        self._steps = tuple(steps)
        self._output = output
        self._on_done = on_done
        self._wall = wall
        self._rng = rng
        self._decode = decoder(app)
        self._has_sink = app.sink is not None
        self._observer = app.observer
        self._table: LaneTable[Delivery] = LaneTable()
        self._accepted = 0
        self._loop = asyncio.get_running_loop()
        self._runners: set[asyncio.Task[None]] = set()
        self._parked: deque[asyncio.Future[None]] = deque()  # runners with nothing to do
        self._standby = False  # a runner is scheduled and has not looked at the ready lanes yet
        self._cancelling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._changed = asyncio.Event()  # set when the engine may have come to rest
        self.failure: asyncio.Future[None] = self._loop.create_future()

    # What the task calls.

    def accept(self, records: Iterable[Record]) -> None:
        """Queue records, in the order of their partitions, into their lanes."""
        arrive = self._table.arrive
        count = 0
        for record in records:
            delivery = Delivery(record, self)
            arrive(delivery.key, delivery)
            count += 1
        self._accepted += count
        self._ensure_runner()

    def settle(self) -> None:
        """Work off the acknowledgements that have come in. Called after the producer was polled."""
        acknowledged = self.acknowledged
        if acknowledged:
            self.acknowledged = []
            self._settle(acknowledged)

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - it ends in a result, not an exception
        """Start nothing new and wait for what was started, retries included, until its results are durable.

        Returns False when ``timeout`` seconds were not enough: then what still ran was cancelled and is not done.
        """
        self._table.close()
        try:
            async with asyncio.timeout(timeout):
                await self._rest(lambda: self._table.quiet and not self._table.unsettled)
        except TimeoutError:
            return False
        else:
            return True
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Cancel what runs, without waiting for results. Nothing that was running is done."""
        self._cancelling = True
        runners = list(self._runners)
        for task in runners:
            task.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    async def finish(self) -> None:
        """Wait until everything accepted so far is done."""
        await self._rest(lambda: self.held == 0)

    @property
    def draining(self) -> bool:
        """Whether nothing new is started: what is offered now must be left for the next epoch."""
        return self._table.closed

    @property
    def held(self) -> int:
        """Messages accepted and not done."""
        return self._accepted - self.done

    def statistics(self) -> EngineStatistics:
        """How full it is."""
        return EngineStatistics(
            lanes=self._table.statistics(),
            held=self.held,
            done=self.done,
            dead=self.dead,
            retries=self.retries,
            runners=len(self._runners),
        )

    def refused(self, delivery: Delivery, error: Any) -> None:
        """The producer gave up on what this message caused: the message is not done, and the engine can not go on."""
        self.fail(
            KafkaError(
                f"what message {delivery.position} caused could not be written: {error}. "
                "Nothing after it counts as done; it runs again."
            )
        )

    def fail(self, error: BaseException) -> None:
        """Stop with this error; the first one counts."""
        self._cancelling = True  # from now on a runner that is cancelled is cancelled from outside
        if not self.failure.done():
            self.failure.set_exception(error)
        self._changed.set()

    # Runners.

    def _ensure_runner(self) -> None:
        if self._standby or not self._table.ready:
            return
        self._standby = True
        while self._parked:
            future = self._parked.pop()
            if not future.done():
                future.set_result(None)
                return
        task = self._loop.create_task(self._run())
        self._runners.add(task)
        task.add_done_callback(self._runner_ended)

    def _runner_ended(self, task: asyncio.Task[None]) -> None:
        self._runners.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _run(self) -> None:
        # The hot path. Kept in one function, to save calls per message.
        table, steps, wall, observer = self._table, self._steps, self._wall, self._observer
        decode, result_of = self._decode, self._output.result if self._has_sink else None
        last = len(steps)
        turns = 0
        self._standby = False
        while True:
            lane = table.take()
            if lane is None:
                if self._cancelling:  # the stage swallowed its cancellation
                    return
                parked: asyncio.Future[None] = self._loop.create_future()
                self._parked.append(parked)
                self._changed.set()
                await parked
                self._standby = False
                turns = 0
                continue
            if table.ready and not self._standby:
                self._ensure_runner()
            delivery: Delivery = lane.head  # type: ignore[assignment]
            delivery.attempts += 1
            if observer is not None:
                observer.started(delivery, delivery.attempts)
            try:
                if not delivery.decoded:
                    if delivery.attempts == 1:
                        delivery.started = wall()
                    if decode is not None and delivery.value is not None:
                        delivery.value = decode(delivery.value)
                        delivery.attempt = 1
                    delivery.decoded = True
                while delivery.stage < last:
                    delivery.value = await steps[delivery.stage].call(delivery)
                    delivery.stage += 1
                    delivery.attempt = 1
                value = delivery.value
                if result_of is None or value is None:
                    if not self.acknowledged:
                        self._loop.call_soon(self.settle)
                    self.acknowledged.append(delivery)
                else:
                    result_of(delivery, value if type(value) is bytes else encode(value, steps[-1].name))
            except (Exception, SystemExit) as error:
                self._failed(lane, delivery, error)
            except asyncio.CancelledError:
                if self._cancelling:
                    raise
                self._failed(lane, delivery, RuntimeError("the stage was cancelled from inside"))
            else:
                if observer is not None:
                    observer.ended(delivery, delivery.attempts, Outcome.OK)
                table.passed(lane)
            turns += 1
            if turns >= TURNS:
                turns = 0
                if self._standby:  # it goes on where this one stops
                    parked = self._loop.create_future()
                    self._parked.append(parked)
                    await parked
                else:
                    self._standby = True
                    await asyncio.sleep(0)
                self._standby = False

    # What happens next.

    def _failed(self, lane: Lane[Delivery], delivery: Delivery, error: BaseException) -> None:
        step = self._steps[min(delivery.stage, len(self._steps) - 1)]
        kind = classify(error)
        if kind is Failure.TRANSIENT:
            wait = step.retry.wait(delivery.attempt, self._rng)
            if wait is not None:
                if self._observer is not None:
                    self._observer.ended(delivery, delivery.attempts, "retry")
                self.retries += 1
                delivery.attempt += 1
                self._table.retry(lane, self._loop.time() + wait)
                self._arm()
                return
        try:
            message = str(error)
        except Exception:
            message = f"<no text: str() of {type(error).__name__} failed>"
        delivery.outcome = Outcome.DEAD
        delivery.error = f"{type(error).__name__}: {message}"[:_ERROR_LIMIT]
        letter = DeadLetter(
            stage=step.name,
            error=f"{type(error).__module__}.{type(error).__qualname__}",
            message=message[:_ERROR_LIMIT],
            traceback="".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:],
            attempts=delivery.attempts,
            failed_at=self._wall(),
        )
        log.warning(
            "dead letter: %s key=%r stage=%s attempts=%d: %s",
            delivery.position,
            delivery.key,
            step.name,
            delivery.attempts,
            delivery.error,
        )
        if self._observer is not None:
            self._observer.ended(delivery, delivery.attempts, Outcome.DEAD)
        self._output.dead(delivery, letter)
        self._table.passed(lane)

    def _arm(self) -> None:
        """One timer, for the earliest backoff."""
        due = self._table.next_due()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        # The loop's clock may stand a hair before the timer's due time; wake what this timer was for all the same.
        self._table.wake(max(self._loop.time(), self._timer_due))
        self._arm()
        self._ensure_runner()

    def _settle(self, deliveries: list[Delivery]) -> None:
        settle = self._table.settle
        now = self._wall()
        done: list[Delivery] = []
        for delivery in deliveries:
            delivery.finished = now
            settle(delivery, done)
        if done:
            self.done += len(done)
            self.dead += sum(1 for d in done if d.outcome is Outcome.DEAD)
            try:
                self._on_done(done)
            except Exception as error:
                self.fail(
                    error if isinstance(error, KeylaneError) else KeylaneError(f"internal error: {error!r}")
                )
        self._changed.set()

    async def _rest(self, rested: Callable[[], bool]) -> None:
        while not rested():
            if self.failure.done():
                self.failure.result()
            self._changed.clear()
            await self._changed.wait()
