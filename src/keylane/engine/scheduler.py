"""Lane scheduler of one engine: moves lanes in the table, and makes sure that a runner takes those that are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lanes.lane_table import Lane, LaneState
from keylane.outcome import Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from keylane.engine.acknowledgements import Acknowledgements
    from keylane.engine.clock import Clock
    from keylane.engine.delivery import Delivery
    from keylane.engine.lifecycle import Lifecycle
    from keylane.engine.runner_pool import RunnerPool
    from keylane.lanes.lane_table import LaneTable


class LaneScheduler:
    """What the parts of one engine do with lanes. Used only on its loop."""

    def __init__(
        self,
        *,
        table: LaneTable[Delivery],
        pool: RunnerPool,
        acks: Acknowledgements,
        life: Lifecycle,
        clock: Clock,
    ) -> None:
        self._table = table
        self._pool = pool
        self._acks = acks
        self._life = life
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = (
            None  # written by _arm() and _wake(): for the earliest backoff
        )
        self._timer_due = 0.0  # written by _arm(): time of the loop

    @property
    def draining(self) -> bool:
        """Whether nothing new is started."""
        return self._table.closed

    def get(self, key: bytes | None) -> Lane[Delivery] | None:
        """The lane of this key, if it has messages."""
        return self._table.lanes.get(key)

    def stop(self, lane: Lane[Delivery]) -> None:
        """Nothing in the lane runs until :meth:`resume`."""
        self._table.stop(lane, self._clock.now())

    def wait_for_stage(self, lane: Lane[Delivery]) -> None:
        """The head's stage may not be called until :meth:`resume`: its breaker, its rate, or a pause."""
        self._table.suspend(lane, self._clock.now())

    def resume(self, lane: Lane[Delivery]) -> None:
        """A lane that waited or was stopped may run again."""
        self._table.resume(lane)
        self._life.changed()
        self._pool.ensure_runner()

    def retry_after(self, lane: Lane[Delivery], seconds: float) -> None:
        """The head runs again after this time."""
        now = self._clock.now()
        self._table.retry(lane, now + seconds, now)
        self._arm()

    def insert(self, key: bytes | None, deliveries: Sequence[Delivery]) -> bool:
        """Insert these before everything in the lane that has not begun; True if the lane was stopped: it resumes."""
        before = None if key is None else self._table.lanes.get(key)
        if before is not None and before.state is LaneState.STOPPED and before.head is not None:
            before.head.overtaken()
        lane = self._table.insert(key, deliveries)
        stopped = lane.state is LaneState.STOPPED
        if stopped:
            self.resume(lane)
        else:
            self._life.changed()
            self._pool.ensure_runner()
        return stopped

    def passed(self, lane: Lane[Delivery]) -> None:
        """The head has had its turn; it is done when it is acknowledged and all before it is done."""
        self._table.passed(lane)

    def finish(self, lane: Lane[Delivery], delivery: Delivery) -> None:
        """The head has had its turn, and what it caused is durable."""
        self._table.passed(lane)
        self._acks.acknowledge(delivery)

    def pass_over(
        self, lane: Lane[Delivery], delivery: Delivery, outcome: Outcome = Outcome.DUPLICATE
    ) -> None:
        """The head does not run: it repeats another message, or is stale. Called by a runner, which then continues."""
        delivery.outcome = outcome
        self._table.passed(lane)
        self._acks.add(delivery)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        due = self._table.next_due()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._clock.at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        # The loop's clock may be a little before the due time: wake what this timer was for nevertheless.
        self._table.wake(max(self._clock.now(), self._timer_due))
        self._arm()
        self._pool.ensure_runner()
