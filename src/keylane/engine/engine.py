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
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.engine.attempts import RetryAttempts
from keylane.engine.capacity import BufferCapacity
from keylane.engine.clock import Clock
from keylane.engine.counters import MessageCounters
from keylane.engine.duplicates import Duplicates
from keylane.engine.failure_handler import FailureHandler
from keylane.engine.hooks import Hooks
from keylane.engine.hot_keys import HotKeyDetector
from keylane.engine.lifecycle import Lifecycle
from keylane.engine.output import SentAloneError
from keylane.engine.pipeline import pipeline_of
from keylane.engine.refetch import Refetches
from keylane.engine.stopped_lanes import StoppedLanes
from keylane.engine.version_store import VersionStore
from keylane.engine.versions import VersionedTable, Versions
from keylane.errors import BrokerError, KeylaneError, Poison
from keylane.lanes.lane_table import Lane, LaneState, LaneStatistics, LaneTable
from keylane.lanes.ordering import GLOBAL
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.output import Output
    from keylane.engine.pipeline import Pipeline
    from keylane.engine.stages import Step
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.message import Record
    from keylane.offsets.watermark import PartitionProgress
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.engine")

TURNS = 256
"""Messages a runner may finish without giving the loop back: bounds how long acknowledgements and timers wait."""

STUBBORN = 5.0
"""Seconds for which a stage that swallows its cancellation is cancelled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot: how full the engine is and what it has done since it was made."""

    lanes: LaneStatistics
    held: int
    done: int
    outcomes: Counter[Outcome]
    """How those that are done ended."""
    early: int
    """Of those held, the ones that wait for a version before theirs."""
    retries: int
    runners: int


class Engine:
    """Runs one task's messages. Everything happens on the loop it was made on; nothing here is thread-safe.

    ``on_done`` is called with the deliveries that are done, in batches; the deliveries of a lane come in its order.
    ``failure`` becomes done with an exception when the engine can not go on.

    ``fetch(ticket, partition, offsets)`` reads messages again that a stuck lane let go of; :meth:`returned` takes them.
    ``progress(partition)`` is what is done there, ``read_to(partition)`` how far it was accepted; None where that is
    not known. ``store`` are the versions that are done, for an app that has them.
    ``let_go(partition, count, size)`` is told how many are no longer held, and how many bytes; or, below zero, that
    room is needed for so many that are read again. Without ``fetch`` all are held.
    ``room()`` is how many there is room for in memory, ``app.capacity`` if not given; ``used()`` how many are there or
    on their way to it.
    """

    def __init__(
        self,
        app: AppSpec,
        steps: Sequence[Step],
        output: Output,
        *,
        on_done: Callable[[list[Delivery]], None],
        fetch: Callable[[int, int, Sequence[int]], None] | None = None,
        let_go: Callable[[int, int, int], None] = lambda _partition, _count, _size: None,
        progress: Callable[[int], PartitionProgress] | None = None,
        read_to: Callable[[int], int | None] = lambda _partition: None,
        room: Callable[[], int] | None = None,
        used: Callable[[], int] | None = None,
        store: VersionStore | None = None,
        duplicates: Duplicates | None = None,
        wall: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.acknowledged: list[Delivery] = []  # written by the producer's reports, emptied by settle()
        self._loop = asyncio.get_running_loop()
        self.clock = Clock(self._loop, wall)
        self.now, self.wall = self.clock.now, wall
        self.life = Lifecycle(self._loop)
        self.counters = MessageCounters()
        self.attempts = RetryAttempts()
        self.hooks = Hooks(app)
        self.duplicates = duplicates or Duplicates(app.idempotency, app.order)
        self.refetches = Refetches(
            fetch=None
            if app.order.max_tasks == 1
            else fetch,  # else a lane may have messages of several partitions
            on_evicted=let_go,
            make=self.make,
            order=app.order,
            counters=self.counters,
            attempts=self.attempts,
            duplicates=self.duplicates,
            life=self.life,
        )
        self.refusals: list[
            tuple[Delivery, Any]
        ] = []  # results that were not written, and the client's errors
        self.promised = 0  # records handed over and not answered yet
        self.stubborn = False  # a stage runs on although it was cancelled
        self._app = app
        self.pipeline: Pipeline = pipeline_of(app, steps, output)
        self._on_done = on_done
        # None where every key is a lane: the hot path.
        self._lane_key = None if app.order.by_key else app.order.lane_key
        self.spans_partitions = app.order.max_tasks == 1
        self._observer = app.observer
        self.progress = progress
        self.read_to = read_to
        self.table: LaneTable[Delivery]
        self.versions: Versions | None = None
        room = room or (lambda: app.max_buffered)
        used = used or (lambda: self.capacity.buffered + self.refetches.incoming)
        back = self._refetch if self.refetches.possible else None
        if app.versions is None:
            self.table = LaneTable(
                let_go=self.refetches.evicted, fetch=back, room=room, used=used, retry_share=app.retry_share
            )
        else:
            table = self.table = VersionedTable(
                let_go=self.refetches.evicted, fetch=back, room=room, used=used, retry_share=app.retry_share
            )
            self.versions = Versions(app.versions, self, app, table, store or VersionStore())
        self.capacity = BufferCapacity(
            self.table,
            self.counters,
            self.clock,
            room=room,
            # Messages that wait for a version have given up their places already.
            evicts=self.refetches.possible and app.versions is None,
        )
        self.skew = HotKeyDetector(self.table, tell=lambda hot: self.hooks.call("hot", hot))
        self._runners: set[asyncio.Task[None]] = set()
        self._parked: deque[asyncio.Future[None]] = deque()  # runners with nothing to do
        self._standby = False  # a runner is scheduled and has not looked at the ready lanes yet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self.stopped_lanes = StoppedLanes(self, output)
        self.failure_handler = FailureHandler(self, app, self.pipeline.opened, rng=rng)
        self._batchers = [step.batcher for step in self.pipeline.opened if step.batcher is not None]
        for batcher in self._batchers:
            batcher.attach(self.table, alone=app.order is GLOBAL)

    # What the task calls.

    def restore(
        self,
        kept: Mapping[tuple[int, int], RetryState],
        lanes: Iterable[LaneRecord] = (),
        held: Iterable[bytes] = (),
    ) -> None:
        """What was written down before: attempts by partition and offset, stopped lanes, lanes to be redriven."""
        self.attempts.restore(kept)
        self.stopped_lanes.restore(lanes, held)

    def note_done_before(self, records: Iterable[Record]) -> None:
        """Records that were done before a restart and are read again, so that what repeats them is recognised.

        For a partition whose progress the app has written: those from ``app.idempotency.since(watermark)`` on to the
        watermark, then those above it that are done. A partition's records come in its order, over this and
        :meth:`accept` together. They do not run, and are not held. Does nothing when the app has no ``idempotency``.
        """
        self.duplicates.note_done_before(records)

    def accept(self, records: Sequence[Record]) -> None:
        """Queue records, in the order of their partitions, into their lanes."""
        now, make = self.now(), self.pipeline.delivery
        deliveries = [make(record, self) for record in records]
        if self.attempts:
            self.attempts.recall(deliveries)
        lane_key = self._lane_key
        if lane_key is None:
            keys = [delivery.key for delivery in deliveries]
        else:
            try:
                keys = [lane_key(delivery) for delivery in deliveries]
            except Exception as error:
                self.fail(KeylaneError(f"order={self._app.order!r} cannot tell a message's lane: {error!r}"))
                return
        if self.duplicates.active:
            self.duplicates.arrived(records, deliveries, keys)
        self.table.arrive_all(keys, deliveries, now)
        self.counters.accepted += len(records)
        self.capacity.arrived(now)
        self._ensure_runner()

    def lane_key(self, key: bytes | None, partition: int) -> bytes | None:
        """The lane of a message with this key; None for one that has a lane to itself."""
        return self._app.order.lane_of(key, partition)

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
        table = self.table
        table.close()
        for batcher in self._batchers:
            batcher.hurry()
        deadline = self.now() + timeout

        def rested() -> bool:
            due = table.next_due()
            asleep = due is None or due > deadline  # a backoff that ends after it would be waited for in vain
            return asleep and not (table.running or table.startable or table.unsettled or self.promised)

        try:
            async with asyncio.timeout(timeout):
                await self.life.wait_until(rested)
        except TimeoutError:
            return False
        else:
            return True
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Cancel what runs, without waiting for results. Nothing that was running is done.

        A stage that swallows its cancellation is cancelled again and again; when that does not help either,
        ``stubborn`` is true, and only the end of the process ends it.
        """
        self.life.end()
        deadline = self.now() + STUBBORN
        runners = set(self._runners)
        while runners and not self.stubborn:
            for task in runners:
                task.cancel()
            _, runners = await asyncio.wait(runners, timeout=1.0)
            self.stubborn = bool(runners) and self.now() >= deadline
        if self._timer is not None:
            self._timer.cancel()
        self.capacity.close()
        self.clock.close()
        if self.versions is not None:
            self.versions.close()
        for step in self.pipeline.opened:
            if step.gate is not None:
                step.gate.close()

    async def finish(self) -> None:
        """Wait until everything accepted so far is done, or stands behind a lane that has stopped."""
        await self.life.wait_until(lambda: self.resting)

    @property
    def resting(self) -> bool:
        """Nothing is left to do, but what stands in stopped lanes."""
        if self.promised or not self.clock.idle or (self.versions is not None and not self.versions.resting):
            return False
        return self.held == 0 or (self.table.quiet and not self.table.unsettled)

    @property
    def draining(self) -> bool:
        """Whether nothing new is started: what is offered now must be left for the next epoch."""
        return self.table.closed

    @property
    def held(self) -> int:
        """Messages accepted and not done."""
        return self.counters.pending

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How the messages that are done ended."""
        return self.counters.outcomes

    @property
    def failure(self) -> asyncio.Future[None]:
        """Done with an exception when the engine cannot go on."""
        return self.life.failure

    def statistics(self) -> EngineStatistics:
        """How full it is."""
        return EngineStatistics(
            lanes=self.table.statistics(),
            held=self.held,
            done=self.counters.done,
            outcomes=self.outcomes,
            early=0 if self.versions is None else self.versions.holding,
            retries=self.counters.retries,
            runners=len(self._runners),
        )

    def refused(self, delivery: Delivery, error: Any) -> None:
        """The producer gave up on what this message caused: the message is not done, and the engine can not go on."""
        self.refusals.append((delivery, error))
        if self.life.ended:  # its loop may be closed
            return
        self.fail(
            BrokerError(
                f"what message {delivery.position} caused could not be written: {error}. "
                "Nothing after it counts as done; it runs again."
            )
        )

    def answered(self, delivery: Delivery, problem: str | None) -> None:
        """The sink's answer to a result that was sent alone: it is durable, or why the sink rejects it.

        A rejected one fails as if the message's last stage had raised :class:`keylane.Poison`.
        """
        lane: Lane[Delivery] = delivery.lane  # type: ignore[assignment]  # it has waited as its lane's head
        self.promised -= 1
        if problem is not None:
            self.failure_handler.failed(lane, delivery, Poison(problem))
        else:
            self.failure_handler.ended(delivery, delivery.outcome)
            if delivery.failure_state is not None:
                self.failure_handler.passed(delivery)
            self.counters.passed += 1
            self.table.passed(lane)
            self.acknowledge(delivery)
        self.life.changed()

    def fail(self, error: BaseException) -> None:
        """Stop with this error; the first one counts. What may be another task's by now is not started any more."""
        self.life.fail(error)

    def returned(self, ticket: int, records: Sequence[Record], missing: int) -> None:
        """Messages that were asked for again, in order, in one call or several; ``missing`` exist no more.

        The engine fails when one has another key than its lane: then these are not the messages that were let go of.
        """
        self.refetches.returned(ticket, records, missing)
        self.life.changed()
        self._ensure_runner()

    # What its own parts call.

    def make(self, record: Record) -> Delivery:
        """A message of this engine."""
        return self.pipeline.delivery(record, self)

    def step_of(self, delivery: Delivery) -> Step:
        """The stage or handler that the message is at."""
        return self.pipeline.step_of(delivery)

    def resume(self, lane: Lane[Delivery]) -> None:
        """A lane that waited or was stopped goes on."""
        self.table.resume(lane)
        self.life.changed()
        self._ensure_runner()

    def sleep(self, lane: Lane[Delivery], wait: float) -> None:
        """The lane's head runs again after so many seconds."""
        now = self.now()
        self.table.retry(lane, now + wait, now)
        self._arm()

    def acknowledge(self, delivery: Delivery) -> None:
        """What the message caused is durable."""
        if not self.acknowledged:
            self._loop.call_soon(self.settle)
        self.acknowledged.append(delivery)
        self._ensure_runner()

    def pass_over(
        self, lane: Lane[Delivery], delivery: Delivery, outcome: Outcome = Outcome.DUPLICATE
    ) -> None:
        """The lane's head repeats another message, or is stale: it does not run, and is done when all before it is."""
        delivery.outcome = outcome
        self.table.passed(lane)
        # Not by acknowledge(): the runner that this is called from goes on with the lane, and needs no other.
        if not self.acknowledged:
            self._loop.call_soon(self.settle)
        self.acknowledged.append(delivery)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something later, unless the engine has ended by then."""
        self.clock.after(seconds, what)

    def took_in(self, number: int) -> None:
        """Redriven messages were put into their lane."""
        self.counters.accepted += number
        self._ensure_runner()

    def changed(self) -> None:
        """The engine may have come to rest."""
        self.life.changed()

    def put_back(self, key: bytes, deliveries: Sequence[Delivery]) -> None:
        """Messages that were set aside come before everything in their lane that has not begun."""
        lane = self.table.insert(key, deliveries)
        if lane.state is LaneState.STOPPED:
            self.resume(lane)
        else:
            self.life.changed()
            self._ensure_runner()

    @property
    def behind(self) -> bool:
        """Whether a third of the room is taken: at a quarter long lanes let go, at half reading stops."""
        return self.capacity.behind

    def at(self, when: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something at this time of the loop; whoever asks must cancel it when the engine ends."""
        return self.clock.at(when, what)

    def decode(self, delivery: Delivery) -> None:
        """Decode its value, if that is still to be done."""
        self.pipeline.decode_value(delivery)

    def kept(self) -> dict[int, dict[int, RetryState]]:
        """What to write down about messages that are not done, by partition and offset: attempts, and waits."""
        kept = self.attempts.by_partition()
        if self.versions is not None:
            self.versions.note_waits(kept)
        return kept

    def _refetch(self, lane: Lane[Delivery], partition: int, offsets: Sequence[int]) -> None:
        key: bytes | None = lane.key  # type: ignore[assignment]  # the engine's lanes have no other keys
        self.refetches.request(
            key, partition, offsets, lambda back, gone: self.table.returned(lane, back, gone)
        )

    # Runners.

    def _ensure_runner(self) -> None:
        if self._standby or self.life.ended or not self.table.startable:
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
        table, steps, wall, observer = self.table, self.pipeline.steps, self.wall, self._observer
        decode, hand_over, encoded = self.pipeline.decode, self.pipeline.hand_over, self.pipeline.encode
        life, counters = self.life, self.counters
        records, held, twice = (
            self.stopped_lanes.records,
            self.stopped_lanes.held,
            self.duplicates.waiting,
        )  # almost always empty
        versioned = self.versions is not None
        last, turns = len(steps), 0
        lane: Lane[Delivery] | None = None
        self._standby = False
        while not life.ended:  # then it ends, also when its stage swallowed the cancellation
            if lane is None and (lane := table.take()) is None:
                parked: asyncio.Future[None] = self._loop.create_future()
                self._parked.append(parked)
                self.life.changed()
                await parked
                self._standby = False
                turns = 0
                continue
            if not self._standby and (table.ready or table.again):
                self._ensure_runner()
            turns += 1
            delivery: Delivery = lane.head  # type: ignore[assignment]
            if (
                versioned
                or delivery.failure_state is not None
                or (twice and (delivery.partition, delivery.offset) in twice)
                or ((records or held) and ((key := lane.key) is None or key in records or key in held))
            ) and not self._may_start(lane, delivery):
                lane = None
                if turns % TURNS == 0:  # a long lane that is parked must not hold up the loop
                    await asyncio.sleep(0)
                continue
            delivery.attempts += 1
            if observer is not None:
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
                    delivery.value = await steps[stage].call(delivery)
                    stage = delivery.stage = stage + 1
                    delivery.attempt = 1
                    if delivery.failure_state is not None and stage < last:
                        delivery.attempt = delivery.failure_state.attempt_at(steps[stage].name)
                value = delivery.value
                if hand_over is None or value is None:
                    if not self.acknowledged:
                        self._loop.call_soon(self.settle)
                    self.acknowledged.append(delivery)
                else:
                    hand_over(delivery, value if type(value) is bytes else encoded(value, steps[-1].name))
            except SentAloneError:
                self.promised += 1
                lane = None
            except (Exception, SystemExit) as error:
                self.failure_handler.failed(lane, delivery, error)
                lane = None
            except asyncio.CancelledError:
                if life.stopping:
                    raise
                self.failure_handler.failed(
                    lane, delivery, RuntimeError("the stage was cancelled from inside")
                )
                lane = None
            else:
                if observer is not None:
                    observer.ended(delivery, delivery.attempts, delivery.outcome)
                if delivery.failure_state is not None:
                    self.failure_handler.passed(delivery)
                counters.passed += 1
                if turns < TURNS:
                    lane = table.turn(lane)
                    continue
                table.passed(lane)  # nothing is taken that would not start at once
                lane = None
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

    def _may_start(self, lane: Lane[Delivery], delivery: Delivery) -> bool:
        """Whether a head that something is known about may run now; if not, its lane was dealt with."""
        if not self.stopped_lanes.may_start(lane, delivery):
            return False
        failure_state = delivery.failure_state
        redriven = failure_state is not None and failure_state.letter is not None
        twice = not redriven and (delivery.partition, delivery.offset) in self.duplicates.waiting
        if twice and self.stopped_lanes.repeats(delivery):
            self.pass_over(lane, delivery)
            return False
        if self.versions is not None and not self.versions.may_start(lane, delivery):
            return False
        return failure_state is None or self.failure_handler.may_start(lane, delivery, failure_state)

    # What happens next.

    def _arm(self) -> None:
        """One timer, for the earliest backoff."""
        due = self.table.next_due()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        # The loop's clock may stand a hair before the timer's due time; wake what this timer was for all the same.
        self.table.wake(max(self._loop.time(), self._timer_due))
        self._arm()
        self._ensure_runner()

    def _settle(self, deliveries: list[Delivery]) -> None:
        now = self.wall()
        for delivery in deliveries:
            delivery.finished = now
        done = self.table.settle(deliveries)
        if done:
            for delivery in self.counters.add_done(done):
                if not delivery.redriven:  # the message of a dead letter may wait in its lane
                    self.duplicates.done(delivery)
            if self.attempts:
                self.attempts.forget_done(done)
            if self.versions is not None:
                for delivery in done:
                    self.versions.done(delivery)
            try:
                self._on_done(done)
            except Exception as error:
                self.fail(
                    error if isinstance(error, KeylaneError) else KeylaneError(f"internal error: {error!r}")
                )
        self.life.changed()
