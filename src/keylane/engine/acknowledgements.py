"""Acknowledgements of one engine: what the output has made durable, and what that means for progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.denial import broker_error, is_denied
from keylane.errors import BrokerError, KeylaneError
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from keylane.engine.attempts import RetryAttempts
    from keylane.engine.clock import Clock
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.engine.duplicates import Duplicates
    from keylane.engine.lane_state import LaneStates
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.runner_pool import RunnerPool
    from keylane.engine.timers import TimerQueue
    from keylane.engine.versions import Versions
    from keylane.lanes.lane_table import LaneTable


class Acknowledgements:
    """The acknowledgements of one engine. Used only on its loop.

    ``on_done`` is called with the deliveries that are done, in batches; those of a lane come in its order.
    """

    def __init__(
        self,
        *,
        table: LaneTable[Delivery],
        pool: RunnerPool,
        life: Lifecycle,
        clock: Clock,
        counters: MessageCounters,
        attempts: RetryAttempts,
        duplicates: Duplicates,
        on_done: Callable[[list[Delivery]], None],
        loop: asyncio.AbstractEventLoop,
        sinks: Sequence[str] = (),
    ) -> None:
        self.acknowledged: list[Delivery] = []
        """Messages whose results are durable. Always this list: delivery reports and runners append, settle() empties.

        Who appends the first one outside a delivery report schedules :meth:`settle`.
        """
        self.unanswered = (
            0  # written by expect_answer() and answered(): handed over, with a callback that is to come
        )
        self.refusals: list[
            tuple[Delivery, Any]
        ] = []  # written by refused(): what was not written, and the errors
        self.versions: Versions | None = None  # written by the engine, once
        self.states: LaneStates | None = None  # written by the engine, once
        self.timers: TimerQueue | None = None  # written by the engine, once
        self._table = table
        self._pool = pool
        self._life = life
        self._clock = clock
        self._counters = counters
        self._attempts = attempts
        self._duplicates = duplicates
        self._on_done = on_done
        self._loop = loop
        self._sinks = sinks

    def acknowledge(self, delivery: Delivery) -> None:
        """What the message caused is durable."""
        self.add(delivery)
        self._pool.ensure_runner()

    def add(self, delivery: Delivery) -> None:
        """Like :meth:`acknowledge`, but inside a runner, which continues without being woken."""
        if not self.acknowledged:
            self._loop.call_soon(self.settle)
        self.acknowledged.append(delivery)

    def expect_answer(self) -> None:
        """Something was handed over whose answer the engine waits for: it does not rest before."""
        self.unanswered += 1

    def answered(self) -> None:
        """That answer has come."""
        self.unanswered -= 1

    def refused(self, delivery: Delivery, error: Any) -> None:
        """The producer gave up on what the message caused: the message is not done, and the engine fails."""
        self.refusals.append((delivery, error))
        if self._life.ended:  # its loop may be closed
            return
        what = f"what message {delivery.position} caused could not be written"
        if is_denied(error):
            self._life.fail(
                broker_error(what, error, *(on_topic(sink, Operation.WRITE) for sink in self._sinks))
            )
        else:
            self._life.fail(BrokerError(f"{what}: {error}. Nothing after it counts as done; it runs again."))

    def settle(self) -> None:
        """Process the acknowledgements that have come in."""
        if not self.acknowledged:
            return
        deliveries = self.acknowledged[:]
        self.acknowledged.clear()
        now = self._clock.wall()
        for delivery in deliveries:
            delivery.finished = now
        done = self._table.settle(deliveries)
        if done:
            if self.states is not None:
                self.states.done(done)
                if self.timers is not None:
                    done = self.timers.done(done)
            for delivery in self._counters.add_done(done):
                if not delivery.redriven:  # the message of a dead letter may wait in its lane
                    self._duplicates.done(delivery)
            if self._attempts:
                self._attempts.forget_done(done)
            if self.versions is not None:
                for delivery in done:
                    self.versions.done(delivery)
            try:
                self._on_done(done)
            except Exception as error:
                self._life.fail(
                    error if isinstance(error, KeylaneError) else KeylaneError(f"internal error: {error!r}")
                )
        self._life.changed()
