"""Runner of an app whose stage takes batches of one lane."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from keylane.engine.admission import NotAdmittedError
from keylane.engine.message_runner import RUN_MESSAGES_MAX, MessageRunner
from keylane.engine.output import SentAloneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.lane_batch_stage import LaneBatchStage
    from keylane.lanes.lane_table import Lane
    from keylane.spec import AppSpec


class LaneBatchRunner(MessageRunner):
    """What each runner does in an app whose stage takes batches of one lane.

    The lane's head and messages behind it are the arguments of one call. Then they pass one after another, in order.
    When one of them fails, those behind it in the batch count as not run: they run again behind it. When the call
    raises, its messages are called alone, so that the next error is of one message.
    """

    def __init__(self, app: AppSpec, **parts: Any) -> None:
        super().__init__(app, **parts)
        self._alone: set[tuple[int, int]] = set()  # messages of a call that raised

    async def run(self) -> None:
        """Run the first messages of ready lanes until the engine ends."""
        table, pool, life = self._table, self._pool, self._life
        stage = self._pipeline.steps[0].lane_batch
        assert stage is not None  # noqa: S101 - this runner is for such an app
        pool.scheduled, passed = False, 0
        while not life.ended:
            lane = table.take()
            if lane is None:
                idle = pool.idle()
                life.changed()
                await idle
                pool.scheduled = False
                continue
            pool.ensure_runner()
            head: Delivery = lane.head  # type: ignore[assignment]  # a lane that was taken has one
            if self._is_checked(lane, head) and not self._may_start(lane, head):
                passed += 1
            else:
                batch = self._batch(lane, head, stage)
                passed += len(batch)
                await self._run_batch(lane, batch, stage)
            if passed >= RUN_MESSAGES_MAX:
                passed = 0
                if pool.scheduled:  # that runner takes over
                    await pool.idle()
                else:
                    pool.scheduled = True
                    await asyncio.sleep(0)
                pool.scheduled = False

    def _is_checked(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """Whether something is known about the message or its lane, so that it runs alone or not at all."""
        records, redrives = self._stopped_lanes.records, self._stopped_lanes.redriving
        return (
            delivery.failure_state is not None
            or (delivery.partition, delivery.offset) in self._duplicates.waiting
            or (
                (bool(records) or bool(redrives))
                and (lane.key is None or lane.key in records or lane.key in redrives)
            )
        )

    def _batch(self, lane: Lane[Delivery], head: Delivery, stage: LaneBatchStage) -> list[Delivery]:
        batch = [head]
        if head.attempts or head.stage or self._is_checked(lane, head) or self._is_alone(head):
            return batch
        following: Delivery | None = head.next
        while following is not None and len(batch) < stage.max_size:
            if self._is_alone(following) or following.begun or self._is_checked(lane, following):
                break
            if following.key != head.key and self._pauses.active:
                break  # a key may be paused
            try:
                self._pipeline.decode_value(following)
            except Exception:
                break  # it fails when it is the head
            batch.append(following)
            following = following.next
        return batch

    def _is_alone(self, delivery: Delivery) -> bool:
        return bool(self._alone) and (delivery.partition, delivery.offset) in self._alone

    async def _run_batch(self, lane: Lane[Delivery], batch: list[Delivery], stage: LaneBatchStage) -> None:
        head, wall = batch[0], self._clock.wall()
        for delivery in batch:
            delivery.attempts += 1
            if delivery.attempts == 1:
                delivery.started = wall
        if self._observer is not None:
            self._observer.started(head, head.attempts)
        if len(batch) > 1:
            self._table.begin_batch(lane, batch[-1])
        outcomes: list[Any] = [head.value]
        if not head.stage:
            batch, outcomes = await self._call(lane, batch, stage)
        for place, (delivery, outcome) in enumerate(zip(batch, outcomes, strict=False)):
            if place:
                self._table.advance(lane)
                if self._observer is not None:
                    self._observer.started(delivery, delivery.attempts)
            rest = batch[place + 1 :]
            if isinstance(outcome, BaseException):
                self._fail(lane, delivery, outcome, rest)
                return
            if not await self._finish(lane, delivery, outcome, rest):
                return
        self._end(lane, batch[len(outcomes) :])
        self._table.passed(lane)

    async def _call(
        self, lane: Lane[Delivery], batch: list[Delivery], stage: LaneBatchStage
    ) -> tuple[list[Delivery], list[Any]]:
        """The outcomes of the batch, or of its first message alone if the call raises."""
        while True:
            head = batch[0]
            problem: BaseException | None = None
            try:
                if self._pauses.active:
                    self._pauses.check(head, stage.name)
                self._pipeline.decode_value(head)
                outcomes = await stage.outcomes(batch)
            except NotAdmittedError as error:
                return batch, [error]
            except asyncio.CancelledError:
                if self._life.stopping:
                    raise
                problem = RuntimeError("the stage was cancelled from inside")
            except (Exception, SystemExit) as error:
                problem = error
            if problem is None or len(batch) == 1:
                self._alone.discard((head.partition, head.offset))
                return batch, outcomes if problem is None else [problem]
            self._alone.update((each.partition, each.offset) for each in batch)
            self._end(lane, batch[1:])
            batch = batch[:1]

    async def _finish(
        self, lane: Lane[Delivery], delivery: Delivery, result: Any, rest: Sequence[Delivery]
    ) -> bool:
        """Hand over the result of the lane's head; False if the lane does not continue now."""
        steps, hand_over = self._pipeline.steps, self._pipeline.hand_over
        delivery.value = result
        delivery.stage = max(1, delivery.stage)
        delivery.attempt = 1 if delivery.failure_state is None else delivery.attempt
        try:
            while delivery.stage < len(steps):  # a sink of the user's own
                delivery.value = await steps[delivery.stage].call(delivery)
                delivery.stage += 1
            value = delivery.value
            if hand_over is None or value is None:
                self._acks.add(delivery)
            elif type(value) is bytes:
                hand_over(delivery, value)
            else:
                self._pipeline.deliver(delivery, value)
        except SentAloneError:
            self._end(lane, rest)
            self._acks.expect_answer()
            return False
        except asyncio.CancelledError:
            if self._life.stopping:
                raise
            self._fail(lane, delivery, RuntimeError("the stage was cancelled from inside"), rest)
            return False
        except (Exception, SystemExit) as error:
            self._fail(lane, delivery, error, rest)
            return False
        self._failures.ended(delivery, delivery.outcome)
        if delivery.failure_state is not None:
            self._failures.succeeded(delivery)
        self._counters.passed += 1
        return True

    def _fail(
        self, lane: Lane[Delivery], delivery: Delivery, error: BaseException, rest: Sequence[Delivery]
    ) -> None:
        self._end(lane, rest)
        self._failures.failed(lane, delivery, error)

    def _end(self, lane: Lane[Delivery], rest: Sequence[Delivery]) -> None:
        """The batch is over; ``rest`` counts as not run."""
        for delivery in rest:
            delivery.attempts -= 1
        self._table.end_batch(lane)
