"""The engine: runs one task's messages, lane by lane, and decides what happens next to each.

:class:`Engine` puts the parts together and is what a task calls. Each part owns its fields:

=================================================  ==================================================================
:class:`~keylane.lanes.lane_table.LaneTable`       what may run next
:class:`~keylane.engine.runner_pool.RunnerPool`    the tasks that run it
:class:`~keylane.engine.message_runner`            what such a task does with each message
:class:`~keylane.engine.scheduler.LaneScheduler`   lanes that stop, wait, retry or resume
:mod:`~keylane.engine.acknowledgements`            what is durable, and so done
:class:`~keylane.engine.failure_handler`           messages that failed: retry or policy
:class:`~keylane.engine.stopped_lanes`             lanes that are blocked, parked or redriven
:class:`~keylane.engine.capacity.BufferCapacity`   how full the buffer is, and eviction
:class:`~keylane.engine.refetch.Refetches`         evicted messages that are being read again
:class:`~keylane.engine.lifecycle.Lifecycle`       whether the engine runs, has failed or has ended
=================================================  ==================================================================
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.engine.acknowledgements import Acknowledgements
from keylane.engine.attempts import RetryAttempts
from keylane.engine.capacity import BufferCapacity
from keylane.engine.clock import Clock
from keylane.engine.counters import MessageCounters
from keylane.engine.duplicates import Duplicates
from keylane.engine.failure_handler import FailureHandler
from keylane.engine.hooks import Hooks
from keylane.engine.hot_keys import HotKeyDetector
from keylane.engine.lane_batch_runner import LaneBatchRunner
from keylane.engine.lane_state import LaneStates, MemoryValues
from keylane.engine.lifecycle import Lifecycle
from keylane.engine.message_runner import MessageRunner
from keylane.engine.pauses import Pauses
from keylane.engine.pipeline import pipeline_of
from keylane.engine.refetch import Refetches
from keylane.engine.runner_pool import RunnerPool
from keylane.engine.scheduler import LaneScheduler
from keylane.engine.stopped_lanes import StoppedLanes
from keylane.engine.timers import TimerQueue
from keylane.engine.version_store import VersionStore
from keylane.engine.versions import VersionedTable, Versions
from keylane.errors import KeylaneError
from keylane.lanes.lane_table import Lane, LaneStatistics, LaneTable
from keylane.lanes.ordering import GLOBAL
from keylane.offsets.slots import ALL

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.lane_state import ValueStore
    from keylane.engine.output import Output
    from keylane.engine.stages import Step
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.lanes.lane_table import Holds
    from keylane.message import Record
    from keylane.offsets.slots import Slots
    from keylane.offsets.watermark import PartitionProgress
    from keylane.outcome import Outcome
    from keylane.spec import AppSpec

_RELEASE_LOOK_SECONDS = 0.01
"""Time between two looks whether what has begun of a range that is released has ended."""
_CUT_OFF_SECONDS = 2.0
"""Time for which a call that was cancelled, because its range is released, may still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot: how full the engine is and what it has done since it was made."""

    lanes: LaneStatistics
    held: int
    """Messages accepted and not done."""
    done: int
    outcomes: Counter[Outcome]
    """How those that are done ended."""
    early: int
    """Of those not done, the ones that wait for a version before theirs."""
    retries: int
    runners: int


class Engine:
    """Runs one task's messages. Used only on the loop that it was made on; not thread-safe.

    ``on_done`` is called with the deliveries that are done, in batches; those of a lane come in its order.

    ``fetch(ticket, partition, offsets)`` reads evicted messages again; the answer comes with :meth:`returned`. Without
    it nothing is evicted. ``let_go(partition, count, bytes)`` is called when messages are evicted; with numbers below
    zero when room is needed for messages that are read again.

    ``progress(partition)`` is what is done there, ``read_to(partition)`` the offset up to which it was accepted; None
    where that is unknown. ``room()`` is how many messages there is room for in memory, by default the app's
    ``max_buffered``; ``used()`` how many are there or on their way.

    ``store`` has the versions that are done, for an app with version ordering. ``duplicates`` are those of an earlier
    epoch of the same task. ``values`` has the committed lane state, for an app with states, and ``record_limit`` is the
    largest record that its topic takes. ``source_id`` is Kafka's id of the source topic, if known. ``share`` is the
    part of the app's rates that this task has.
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
        values: ValueStore | None = None,
        record_limit: int = 0,
        source_id: str = "",
        share: float = 1.0,
        wall: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        loop = asyncio.get_running_loop()
        room = room or (lambda: app.max_buffered)
        spans_partitions = app.order.max_tasks == 1
        self.wall = wall
        self.source_id = source_id
        self._order = app.order
        self._slot_of = app.slot_of
        # None where every key is a lane: the hot path.
        self._lane_key = None if app.order.by_key else app.order.lane_key
        self.clock = Clock(loop, wall)
        self.life = Lifecycle(loop)
        self.counters = MessageCounters()
        self.duplicates = duplicates or Duplicates(app.idempotency, app.order)
        self._attempts = RetryAttempts()
        self.pauses = Pauses(loop)
        self._pipeline = pipeline_of(app, steps, output, self.pauses)
        hooks = Hooks(app)

        self.refetches = Refetches(
            fetch=None if spans_partitions else fetch,  # else a lane may have messages of several partitions
            on_evicted=let_go,
            make=self.make,
            order=app.order,
            counters=self.counters,
            attempts=self._attempts,
            duplicates=self.duplicates,
            life=self.life,
        )
        table_class = LaneTable if app.versions is None else VersionedTable
        self.table: LaneTable[Delivery] = table_class(
            on_evicted=self.refetches.evicted,
            fetch=self._refetch if self.refetches.possible else None,
            room=room,
            used=used or (lambda: self.capacity.buffered + self.refetches.incoming),
            retry_share=app.retry_share,
        )
        self.capacity = BufferCapacity(
            self.table,
            self.counters,
            self.clock,
            room=room,
            evicts=self.refetches.possible and app.versions is None,  # versions evict what waits for them
        )
        self._pool = RunnerPool(self.table, self.life, loop)
        self._acks = Acknowledgements(
            table=self.table,
            pool=self._pool,
            life=self.life,
            clock=self.clock,
            counters=self.counters,
            attempts=self._attempts,
            duplicates=self.duplicates,
            on_done=on_done,
            loop=loop,
            sinks=app.sinks,
        )
        self.acknowledged = self._acks.acknowledged  # the same list: the hot path of delivery reports
        self._lanes = LaneScheduler(
            table=self.table, pool=self._pool, acks=self._acks, life=self.life, clock=self.clock
        )
        self.stopped_lanes = StoppedLanes(
            output,
            lanes=self._lanes,
            acks=self._acks,
            attempts=self._attempts,
            duplicates=self.duplicates,
            counters=self.counters,
            hooks=hooks,
            clock=self.clock,
            life=self.life,
            spans_partitions=spans_partitions,
            progress=progress,
            read_to=read_to,
        )
        failures = FailureHandler(
            app,
            self._pipeline,
            lanes=self._lanes,
            stopped_lanes=self.stopped_lanes,
            attempts=self._attempts,
            duplicates=self.duplicates,
            counters=self.counters,
            hooks=hooks,
            clock=self.clock,
            life=self.life,
            pauses=self.pauses,
            rng=rng,
        )
        self.versions: Versions | None = None
        if app.versions is not None and isinstance(self.table, VersionedTable):
            self.versions = self._acks.versions = Versions(
                app.versions,
                app,
                self.table,
                store or VersionStore(),
                pipeline=self._pipeline,
                lanes=self._lanes,
                failures=failures,
                stopped_lanes=self.stopped_lanes,
                refetches=self.refetches,
                clock=self.clock,
                life=self.life,
            )
            self.stopped_lanes.on_redriven = self.versions.resume
        self.states: LaneStates | None = None
        self.timers: TimerQueue | None = None
        if app.keeps_state:
            self.states = self._acks.states = LaneStates(
                app, values or MemoryValues(), wall=wall, record_limit=record_limit, loop=loop
            )
        if app.timers and self.states is not None:
            self.timers = self._acks.timers = failures.timers = self.states.timers = TimerQueue(
                app,
                self.states,
                engine=self,
                table=self.table,
                lanes=self._lanes,
                acks=self._acks,
                stopped_lanes=self.stopped_lanes,
                output=output,
                clock=self.clock,
                life=self.life,
                loop=loop,
            )
        runner = LaneBatchRunner if any(step.lane_batch is not None for step in steps) else MessageRunner
        self._runner = runner(
            app,
            pipeline=self._pipeline,
            table=self.table,
            pool=self._pool,
            lanes=self._lanes,
            acks=self._acks,
            failures=failures,
            stopped_lanes=self.stopped_lanes,
            duplicates=self.duplicates,
            versions=self.versions,
            states=self.states,
            timers=self.timers,
            counters=self.counters,
            clock=self.clock,
            life=self.life,
            pauses=self.pauses,
            loop=loop,
        )
        self._pool.attach(self._runner.run)
        self.skew = HotKeyDetector(self.table, tell=lambda hot: hooks.call("hot", hot))
        self.pauses.attach(resume=self._lanes.resume)
        for step in steps:
            if step.rate is not None:
                step.rate.attach(resume=self._lanes.resume, share=share)
        self._batchers = [step.batcher for step in steps if step.batcher is not None]
        for batcher in self._batchers:
            batcher.attach(self.table, alone=app.order is GLOBAL)

    # What a task does with it.

    def restore(
        self,
        kept: Mapping[tuple[int, int], RetryState],
        lanes: Iterable[LaneRecord] = (),
        held: Iterable[bytes] = (),
    ) -> None:
        """Restore what was persisted: attempts by partition and offset, stopped lanes, lanes to be redriven."""
        self._attempts.restore(kept)
        self.stopped_lanes.restore(lanes, held)
        if self.timers is not None:
            self.timers.begin()

    def note_done_before(self, records: Iterable[Record]) -> None:
        """Records that were done before a restart and are read again, so that what repeats them is recognised.

        For a partition with persisted progress: those from ``app.idempotency.since(watermark)`` to the watermark, then
        those above it that are done. A partition's records come in its order, over this and :meth:`accept` together.
        They do not run and are not kept. Does nothing when the app has no ``idempotency``.
        """
        self.duplicates.note_done_before(records)

    def accept(self, records: Sequence[Record]) -> None:
        """Queue records, in the order of their partitions, into their lanes."""
        now, make = self.clock.now(), self._pipeline.delivery
        deliveries = [make(record, self) for record in records]
        if self._attempts:
            self._attempts.recall(deliveries)
        lane_key = self._lane_key
        if lane_key is None:
            keys = [delivery.key for delivery in deliveries]
        else:
            try:
                keys = [lane_key(delivery) for delivery in deliveries]
            except Exception as error:
                self.fail(KeylaneError(f"order={self._order!r} cannot tell a message's lane: {error!r}"))
                return
        if self.duplicates.active:
            self.duplicates.arrived(records, deliveries, keys)
        self.table.arrive_all(keys, deliveries, now)
        self.counters.accepted += len(records)
        self.capacity.arrived(now)
        self._pool.ensure_runner()

    def returned(self, ticket: int, records: Sequence[Record], missing: int) -> None:
        """Evicted messages that were read again, in order, in one call or several; ``missing`` exist no more.

        The engine fails when one belongs to another lane: then these are not the messages that were evicted.
        """
        self.refetches.returned(ticket, records, missing)
        self.life.changed()
        self._pool.ensure_runner()

    def make(self, record: Record) -> Delivery:
        """A message of this engine."""
        return self._pipeline.delivery(record, self)

    def lane_key(self, key: bytes | None, partition: int) -> bytes | None:
        """The lane of a message with this key; None for one that has a lane to itself."""
        return self._order.lane_of(key, partition)

    def kept(self) -> dict[int, dict[int, RetryState]]:
        """What to persist about messages that are not done, by partition and offset: attempts, and waits."""
        kept = self._attempts.by_partition()
        if self.versions is not None:
            self.versions.note_waits(kept)
        return kept

    async def finish(self) -> None:
        """Wait until everything accepted is done, or is in a lane that has stopped. Raises the engine's failure."""
        await self.life.wait_until(lambda: self.resting)

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - it ends in a result, not an exception
        """Start nothing new and wait for what was started, retries included, until its results are durable.

        Returns False when ``timeout`` seconds were not enough: then what still ran was cancelled and is not done.
        """
        table = self.table
        table.close()
        for batcher in self._batchers:
            batcher.hurry()
        deadline = self.clock.now() + timeout

        def rested() -> bool:
            due = table.next_due()
            asleep = due is None or due > deadline  # to wait for a backoff that ends later would be useless
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

    async def release(self, partition: int, slots: Slots, timeout: float) -> bool:  # noqa: ASYNC109 - a result
        """Start nothing more of a range, and wait until what has begun of it is durable. Other ranges keep running.

        What has not begun is forgotten, also heads that wait for a retry or are stopped: their attempts and records
        are kept until :meth:`forget`. Nothing of the range may be accepted any more. What still runs after ``timeout``
        seconds is cancelled and is not done. Returns False if it does not end then either, or must not be cancelled
        alone: in a thread, or in a batch with messages of others. Raises the engine's failure.
        """
        holds, among = self._holds(partition, slots), None
        deadline, cut_off = self.clock.now() + timeout, False
        while not self.draining:
            removed, left = self.table.shed(holds, self.stopped_lanes.is_pinned, among)
            self.counters.accepted -= removed
            self._pool.ensure_runner()
            self.life.changed()
            if self.failure.done():
                self.failure.result()
            if self.refetches.are_open(holds):
                among = None
            elif not left:
                return True
            else:
                among = left
            if self.clock.now() >= deadline:
                if cut_off or not self._may_cut_off:
                    return False
                self._pool.cut_off(left)
                deadline, cut_off = self.clock.now() + _CUT_OFF_SECONDS, True
            await asyncio.sleep(_RELEASE_LOOK_SECONDS)
        return False

    @property
    def _may_cut_off(self) -> bool:
        """Whether every call is of one message, and ends when it is cancelled."""
        return not any(step.batcher or step.lane_batch or step.threads for step in self._pipeline.opened)

    def forget(self, ranges: Mapping[int, Slots]) -> None:
        """Another worker owns these ranges now, and has what was persisted about them."""
        for partition, slots in ranges.items():
            self._attempts.forget_range(partition, slots)
            self.stopped_lanes.forget_range(self._holds(partition, slots))
            self.duplicates.forget_partition(partition)

    def _holds(self, partition: int, slots: Slots) -> Holds:
        if slots == ALL:
            return lambda found, _key, _offset: found == partition
        slot_of = self._slot_of
        return lambda found, key, offset: found == partition and slot_of(key, offset) in slots

    async def abort(self) -> bool:
        """Cancel what runs, without waiting for results. Nothing that was running is done.

        Returns False if a stage swallows its cancellation and runs on: then only the end of the process ends it.
        """
        self.life.end()
        await self._pool.cancel()
        self._lanes.close()
        self.capacity.close()
        self.clock.close()
        if self.timers is not None:
            self.timers.close()
        if self.versions is not None:
            self.versions.close()
        for step in self._pipeline.opened:
            if step.gate is not None:
                step.gate.close()
            if step.rate is not None:
                step.rate.close()
        self.pauses.close()
        return not self._pool.stage_survived

    # Queries.

    def set_share(self, share: float) -> None:
        """The task has another part of the app's rates from now on."""
        for step in self._pipeline.opened:
            if step.rate is not None:
                step.rate.set_share(share)

    def holds(self) -> dict[str, int]:
        """What holds lanes back now besides breakers, in words, and how many lanes wait for it: rates and pauses."""
        found = {
            f"rate of stage {step.name}": step.rate.waiting
            for step in self._pipeline.opened
            if step.rate is not None and step.rate.waiting
        }
        return found | self.pauses.holds()

    @property
    def resting(self) -> bool:
        """Whether nothing is left to do, except in stopped lanes."""
        if self.promised or not self.clock.idle or (self.versions is not None and not self.versions.resting):
            return False
        idle = self.held == 0 and (self.timers is None or not self.timers.in_flight)
        return idle or (self.table.quiet and not self.table.unsettled)

    @property
    def draining(self) -> bool:
        """Whether nothing new is started: what arrives now must be left for the next epoch."""
        return self.table.closed

    @property
    def held(self) -> int:
        """Messages accepted and not done."""
        return self.counters.pending

    @property
    def behind(self) -> bool:
        """Whether the buffer fills in spite of eviction."""
        return self.capacity.behind

    @property
    def promised(self) -> int:
        """Records and results that were handed over and not answered, for which a lane waits."""
        return self._acks.unanswered

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How the messages that are done ended."""
        return self.counters.outcomes

    @property
    def refusals(self) -> Sequence[tuple[Delivery, Any]]:
        """Messages whose results the producer gave up on, and its errors."""
        return self._acks.refusals

    @property
    def failure(self) -> asyncio.Future[None]:
        """Done with an exception when the engine cannot continue."""
        return self.life.failure

    def statistics(self) -> EngineStatistics:
        """A snapshot of its buffers and counters."""
        return EngineStatistics(
            lanes=self.table.statistics(),
            held=self.held,
            done=self.counters.done,
            outcomes=self.outcomes,
            early=0 if self.versions is None else self.versions.waiting_count,
            retries=self.counters.retries,
            runners=len(self._pool),
        )

    # Called by the output.

    def settle(self) -> None:
        """Process the acknowledgements that have come in. Called after the producer was polled."""
        self._acks.settle()

    def acknowledge(self, delivery: Delivery) -> None:
        """What the message caused is durable."""
        self._acks.acknowledge(delivery)

    def answered(self, delivery: Delivery, problem: str | None) -> None:
        """The sink's answer to a result that was sent alone: None when it is durable, or why the sink rejects it."""
        self._runner.answered(delivery, problem)

    def refused(self, delivery: Delivery, error: Any) -> None:
        """The producer gave up on what this message caused: the message is not done, and the engine fails."""
        self._acks.refused(delivery, error)

    def fail(self, error: BaseException) -> None:
        """Stop with this error; the first one counts."""
        self.life.fail(error)

    def _refetch(self, lane: Lane[Delivery], partition: int, offsets: Sequence[int]) -> None:
        key: bytes | None = lane.key  # type: ignore[assignment]  # the engine's lanes have no other keys
        self.refetches.request(
            key, partition, offsets, lambda back, gone: self.table.returned(lane, back, gone)
        )
