"""One task's epoch: restore, fetch, run lanes, produce, commit as it goes, drain, commit, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import uvloop

from keylane.dlq.writer import DeadLetterWriter
from keylane.engine import hot_keys as skew
from keylane.engine.engine import Engine
from keylane.engine.garbage import collect, own_collector
from keylane.engine.loop_watch import watched
from keylane.engine.shutdown import end_stages, end_threads
from keylane.engine.stages import open_pipeline
from keylane.errors import (
    AbortedError,
    BrokerError,
    FailureGuardError,
    FencedError,
    KeylaneError,
    SourceChangedError,
)
from keylane.kafka.fetcher import FetchedBatch, Fetcher, PartitionFlow
from keylane.kafka.rejection import RejectedError, Rejections
from keylane.offsets.assignment import BUCKET, BUCKETS
from keylane.offsets.range_progress import RangeWatermark
from keylane.offsets.slots import ALL
from keylane.state.ownership import SAYS_SO_EVERY, Ownership
from keylane.worker.commands import CommandExecutor
from keylane.worker.commit import commit
from keylane.worker.last_records import LastRecords
from keylane.worker.ledger_writer import LedgerWriter
from keylane.worker.output import CROWDED, RECALL_SECONDS, KafkaOutput
from keylane.worker.progress import ProgressTracker
from keylane.worker.refetch import Refetched, RefetchReader
from keylane.worker.session import take_session
from keylane.worker.telemetry_sender import TelemetryWriter
from keylane.worker.uncommitted import UncommittedDeliveries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.stages import Step
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_writer import TransactionalWriter
    from keylane.message import Record
    from keylane.offsets.identity import AppIdentity
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.state.commands import Command
    from keylane.state.topic import StateTopic
    from keylane.worker.commit import Contributor
    from keylane.worker.session import WorkerSession

log = logging.getLogger("keylane.task")

_PUMP_BUSY, _PUMP_CALM, _PUMP_IDLE = 0.005, 0.02, 0.05
"""Seconds between two looks at what was acknowledged: while a lane waits for it, while none does, with nothing held."""
_CONTROL = 0.1
_SOON = 0.005
"""Seconds until a record that a lane waits for is written."""
_ABORTED_MAX = 5
_SAMPLE = 16
"""One of so many messages is looked at for the partition's load."""
_LAST = 5.0
"""Seconds that the leader of a partition's owners waits for the others at the end, and a flood for its letters."""
_OUTCOMES_EVERY, _FAILED_EVERY = 0.25, 1.0
"""Seconds between two batches of them: of all messages, or only of those that failed at first."""
_OUTCOMES_ROWS = 16_384
_OUTCOMES_WAITING = 16
"""Batches of outcomes that may wait for Spark's sink; then the task stops fetching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What one task does in one epoch. Made by the planner, travels to the task."""

    run: str
    epoch: int
    task: int
    settings: KafkaSettings
    identity: AppIdentity
    """The source and the dead-letter topic, as they were when it was planned."""
    starts: Mapping[int, int]
    """The task's partitions, and where each begins when the group has no progress for it."""
    cuts: Mapping[int, Slots] = field(default_factory=dict)
    """Of partitions that are shared out: this task's slots."""
    until: Mapping[int, int] | None
    """Where each ends, for a run over what is there; None to go on until the epoch is over."""
    seconds: float
    planned: float = 0.0
    """When, by the clock on the wall: tasks that begin later than others are to end with them."""
    sink_limit: int
    """The sink's ``max.message.bytes``."""
    sink_stamps: bool = False
    """Whether it gives records a time of its own."""
    outcomes: str = "all"
    partitions: int
    """Of the source, that the app reads. New ones count from the epoch on in which they are read."""
    former: tuple[int, ...] = ()
    """Numbers of partitions that the source had before."""
    order: int = 0
    """The last order to plan anew that it knows."""
    since: Mapping[int, int] = field(default_factory=dict)
    """Where the state topic says that the app is this run's, by partition."""

    @property
    def slots(self) -> dict[int, Slots]:
        """What it owns of each partition."""
        return {p: self.cuts.get(p, ALL) for p in self.starts}


class Task:
    """Runs one plan. :meth:`outcomes` is the whole life of it."""

    def __init__(self, app: AppSpec, plan: TaskPlan, *, attempt: int = 1) -> None:
        self._app = app
        self._plan = plan
        self._attempt = attempt
        self.owner = f"{socket.gethostname()}:{os.getpid()}/{plan.task}"
        self._exact = app.delivery == "exactly_once"
        self.hot: frozenset[skew.HotName] = frozenset()
        """Keys that lately made up much of what it read."""
        self._out: queue.SimpleQueue[list[Delivery] | BaseException | None] = queue.SimpleQueue()
        self._deadline = 0.0
        self._rejections = Rejections()
        self._abandoned = threading.Event()  # Spark no longer wants the outcomes
        self._begin()

    def _begin(self) -> None:
        self._rows: list[Delivery] = []
        self._uncommitted = UncommittedDeliveries(self._count)
        self._contributors: list[Contributor] = []
        self._rejected = False  # a result, by the broker
        self._writing: asyncio.Future[None] | None = None
        self._mending: asyncio.Future[None] | None = None
        self._progress = ProgressTracker(self._app)
        self._commands: CommandExecutor | None = None
        self._ownership: Ownership | None = None
        self._leaving: Ownership | None = None  # set when another run has taken over
        self._finished = False  # everything below the plan's `until` is done, or waits in stopped lanes
        self._flows: dict[int, PartitionFlow] = {}
        self._load: dict[int, list[int]] = {p: [0] * BUCKETS for p in self._plan.starts}
        self._telemetry: TelemetryWriter | None = None
        if self._app.telemetry is not None:
            interval = self._app.telemetry.interval
            self._telemetry = TelemetryWriter(self._app, self._plan, self.owner, interval=interval)
        self._ledger: LedgerWriter | None = None
        self._observed = self._app  # with the ledger as its observer, if it keeps one
        if self._app.ledger is not None:
            self._ledger = LedgerWriter(self._app, self._app.ledger, self.owner)
            self._observed = replace(self._app, observer=self._ledger)

    def outcomes(self) -> Iterator[list[Delivery]]:
        """Run the epoch and yield what is done, in batches. Raises what ended it when that was not the plan."""
        thread = threading.Thread(target=self._main, name="keylane-loop", daemon=True)
        thread.start()
        try:
            while (got := self._out.get()) is not None:
                if isinstance(got, BaseException):
                    raise got
                yield got
        finally:
            self._abandoned.set()
            thread.join(timeout=self._app.drain_timeout)

    def _main(self) -> None:
        late = max(0.0, time.time() - self._plan.planned) if self._plan.planned else 0.0
        self._deadline = time.monotonic() + self._plan.seconds - min(late, self._plan.seconds / 2)
        aborted, began = 0, time.monotonic()
        try:
            with own_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                while True:
                    try:
                        runner.run(self._run())
                        break
                    except AbortedError as error:
                        learned = isinstance(error, RejectedError) and self._rejections.start_over()
                        if not learned:
                            aborted = 1 if time.monotonic() - began > 60 else aborted + 1
                            began = time.monotonic()
                        # With commit="epoch" Spark commits all rows of an attempt: a second try would repeat them.
                        if aborted == _ABORTED_MAX or self._abandoned.is_set() or self._app.commit == "epoch":
                            raise
                        log.warning("%s: %s; its messages run again, in order", self.owner, error)
                        getattr(self._app.observer, "began_again", lambda: None)()
                        self._begin()
        except SourceChangedError as error:
            log.warning("%s: ending the epoch early: %s", self.owner, error)
            self._out.put(None)
        except BaseException as error:
            self._out.put(error)
        else:
            self._out.put(None)

    async def _run(self) -> None:
        async with open_pipeline(self._app) as steps:
            plan = self._plan
            worker_session = await asyncio.to_thread(
                take_session,
                plan.settings,
                self._app,
                plan.partitions,
                plan.identity,
                alone=self._exact and self._rejections.alone,
            )
            try:
                with watched(self._app.stages):
                    await self._epoch(worker_session, steps)
            except BaseException as error:
                rejected = self._rejected and type(error) is BrokerError
                # A process that was stopped for a while may not know yet that Spark gave up on it.
                if await self._leave(worker_session, again=rejected or isinstance(error, AbortedError)):
                    raise FencedError(f"{self.owner}: another task has claimed its partitions") from error
                if rejected:
                    raise RejectedError(str(error)) from error
                raise
            worker_session.keep()

    async def _leave(self, worker_session: WorkerSession, *, again: bool) -> bool:
        """Give the seat up; if the task is to begin ``again``, whether another one has taken its place meanwhile."""
        if self._mending is not None:  # a client that is closed while it is used takes its process with it
            self._mending.cancel()
            await asyncio.wait([self._mending])
        lost = (
            again
            and self._ownership is not None
            and await asyncio.to_thread(self._ownership.lost_by_now, worker_session.cluster)
        )
        await asyncio.to_thread(worker_session.close)
        return lost

    async def _epoch(self, worker_session: WorkerSession, steps: Sequence[Step]) -> None:
        app, plan = self._app, self._plan
        loop = asyncio.get_running_loop()
        began = loop.time()
        worker_session.writer.attach()
        state = await asyncio.to_thread(worker_session.state, plan.starts, plan.run, plan.since)
        ownership = Ownership(
            plan.settings,
            app.name,
            state,
            worker_session.writer,
            plan.run,
            self.owner,
            patience=app.drain_timeout + 5,
        )
        starts = await asyncio.to_thread(self._progress.restore, worker_session, ownership, state, plan)
        self._ownership = ownership
        dead_letters = DeadLetterWriter(worker_session, app, self._rejections)
        output = KafkaOutput(
            worker_session,
            dead_letters,
            app,
            limit=plan.sink_limit,
            stamps=plan.sink_stamps,
            rejections=self._rejections,
        )
        refetcher = RefetchReader(
            plan.settings,
            app.name,
            app.source,
            deliver=lambda part: _on(loop, self._reread, engine, part),
            fail=lambda error: _on(loop, engine.fail, error),
        )
        engine = Engine(
            self._observed,
            steps,
            output,
            on_done=self._done,
            fetch=refetcher.request,
            let_go=self._let_go,
            progress=lambda partition: self._progress.watermarks[partition].progress(),
            read_to=lambda partition: (
                mark.position if (mark := self._progress.watermarks.get(partition)) else None
            ),
            room=lambda: fetcher.room,
            used=lambda: fetcher.buffered,
            store=worker_session.versions,
        )
        engine.seen = worker_session.seen or engine.seen
        worker_session.seen = engine.seen
        worker_session.writer.fail = engine.fail
        commands = self._commands = CommandExecutor(
            engine,
            output,
            plan.settings,
            app,
            self.owner,
            state.redriven,
            plan.cuts,
            time.time,
            source=worker_session.identity.source,
            commit=lambda: self._write(worker_session.writer),
            plan=plan,
        )
        self._progress.restore_lanes(engine, output)

        fetcher = Fetcher(
            worker_session.consumer,
            app.source,
            starts,
            capacity=app.max_buffered,
            deliver=lambda batch: _on(loop, self._accept, engine, batch),
            fail=lambda error: _on(loop, engine.fail, error),
            assigned=worker_session.reading,
            until=plan.until,
            downstream_full=lambda: self._out.qsize() > _OUTCOMES_WAITING,
            loop_busy=lambda: len(engine.table.ready) > CROWDED,
            stuck=lambda: engine.table.stuck_entries,
            log_end_interval=inf if app.telemetry is None else app.telemetry.interval,
        )
        worker_session.reading = {}
        self._flows = fetcher.flows
        self._contributors = [*self._progress.open(engine, commands), commands]
        self._contributors += [self._uncommitted, self._rejections]
        if self._ledger is not None:
            self._contributors.append(self._ledger)
        fetcher.start()
        # Spark plans one more epoch after a stop was ordered: it ends at once, and is not worth two lines of each task.
        level = logging.DEBUG if state.stopped else logging.INFO
        log.log(level, "%s: epoch %d began, restored in %.3f s", self.owner, plan.epoch, loop.time() - began)
        if self._attempt > 1:  # an attempt that cannot succeed does not come this far
            log.warning(
                "%s: task %d of epoch %d runs again after a failure (attempt %d), from the last commit on",
                self.owner,
                plan.task,
                plan.epoch,
                self._attempt,
            )
        background = [
            loop.create_task(self._pump(engine, output)),
            loop.create_task(self._write_now_and_then(worker_session, state, ownership)),
            loop.create_task(collect(lambda: engine.held)),
            loop.create_task(self._watch_skew(engine)),
            loop.create_task(commands.run()),
            loop.create_task(dead_letters.ship()),
        ]
        if self._telemetry is not None:
            self._telemetry.open(worker_session.sender, engine, steps, self._progress, fetcher)
            background.append(loop.create_task(self._telemetry.run()))
        for job in background:
            job.add_done_callback(lambda job: _told(job, engine))
        drained = began
        try:
            await self._until_over(engine, commands, fetcher, state, ownership)
            fetcher.stop_fetching()
            draining = loop.time()
            if not await engine.drain(app.drain_timeout):
                log.warning(
                    "%s: %d messages were not finished within %g s of drain; they run again",
                    self.owner,
                    engine.held,
                    app.drain_timeout,
                )
            drained = loop.time()
        finally:
            await end_stages(engine, self.owner)
            if engine.failure.done() and isinstance(engine.failure.exception(), FailureGuardError):
                await dead_letters.rest(_LAST)  # who is told of a flood looks at its letters first
            output.close()
            for job in background:
                job.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            fetcher.stop_fetching()
            await dead_letters.end(0.0 if ownership.lost else RECALL_SECONDS)
            await worker_session.recall(RECALL_SECONDS)
            self._rejected = self._rejections.add_suspects(engine.refusals, time.monotonic())
            engine.settle()
            try:
                await self._write_last(engine, worker_session, state, ownership)
            finally:
                worker_session.reading = await asyncio.to_thread(fetcher.close)
                await asyncio.to_thread(refetcher.close)
                await end_threads(steps, self.owner, app.drain_timeout)
                self._hand_out()
                if self._telemetry is not None:
                    self._telemetry.last()
        ownership.check_run()
        self._progress.leave(plan.epoch)
        log.log(
            level,
            "%s: epoch %d ended after %.1f s: drained in %.3f s, closed in %.3f s",
            self.owner,
            plan.epoch,
            loop.time() - began,
            drained - draining,
            loop.time() - drained,
        )

    async def _write_last(
        self, engine: Engine, worker_session: WorkerSession, state: StateTopic, ownership: Ownership
    ) -> None:
        """The last progress, and what the planner or the next task has to know; unless nothing of it counts."""
        failed = engine.failure.exception() if engine.failure.done() else None
        if isinstance(failed, FencedError | AbortedError):
            return

        final = LastRecords(
            self._plan,
            self._load,
            engine,
            None if failed is not None else ownership,
            finished=self._finished,
        )
        if failed is None:
            await self._let_others_go_first(state, ownership)
        with contextlib.suppress(KeylaneError) if failed is not None else contextlib.nullcontext():
            for again in reversed(range(_ABORTED_MAX)):
                try:
                    await self._write(worker_session.writer, final)
                    break
                except AbortedError as error:
                    if self._exact or not again:
                        raise
                    if worker_session.writer.useless:
                        await self._mend(worker_session, state, ownership, error)
                    else:
                        log.warning("%s: %s; retrying the last commit", self.owner, error)
                        await asyncio.sleep(_CONTROL)

    async def _let_others_go_first(self, state: StateTopic, ownership: Ownership) -> None:
        """Who leads the owners of a partition writes the group's offset last. All drain at the same time anyway."""
        deadline = time.monotonic() + _LAST
        while time.monotonic() < deadline and any(
            ownership.leads(partition) and ownership.others(partition) for partition in self._plan.cuts
        ):
            await asyncio.sleep(0.02)
            state.poll()

    async def _mend(
        self, worker_session: WorkerSession, state: StateTopic, ownership: Ownership, why: AbortedError
    ) -> None:
        """Go on with a new client, if the partitions are still this task's. Raises FencedError, or BrokerError.

        A caller that is cancelled leaves it running, and the next one waits for it.
        """
        if self._mending is None or self._mending.done():
            self._mending = asyncio.ensure_future(self._mend_once(worker_session, state, ownership, why))
            self._mending.add_done_callback(_heard)
        await asyncio.shield(self._mending)

    async def _mend_once(
        self, worker_session: WorkerSession, state: StateTopic, ownership: Ownership, why: AbortedError
    ) -> None:
        log.warning("%s: %s; with a new client once more", self.owner, why)
        await asyncio.to_thread(worker_session.writer.mend)
        ends = await asyncio.to_thread(worker_session.cluster.ends, self._app.state, self._plan.starts)
        deadline = time.monotonic() + 30
        while not state.has_read(ends):
            state.poll()
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"topic {self._app.state!r} gives no answer; who owns the partitions is not known"
                )
            await asyncio.sleep(0.02)
        if ownership.lost:
            raise FencedError(f"{self.owner}: another task has claimed its partitions")
        worker_session.writer.trust()

    async def _write(self, writer: TransactionalWriter, final: LastRecords | None = None) -> None:
        """Commit what is done. A caller that is cancelled leaves it running; the last one waits for it."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        contributors = self._contributors if final is None else [*self._contributors, final]
        self._writing = asyncio.ensure_future(commit(writer, contributors, last=final is not None))
        self._writing.add_done_callback(_heard)
        await asyncio.shield(self._writing)

    # While it runs, on the loop.

    def _reread(self, engine: Engine, part: Refetched) -> None:
        """Messages that a stuck lane had let go of."""
        if engine.draining:
            return
        if part.missing:
            log.error(
                "%s/%d: %d messages behind a stuck lane are no longer in the log, the first at offset %d",
                self._app.source,
                part.partition,
                len(part.missing),
                part.missing[0],
            )
            self._progress.watermarks[part.partition].done(part.missing)
            self._flows[part.partition].done += len(part.missing)
        engine.returned(part.ticket, part.records, len(part.missing))

    def _let_go(self, partition: int, count: int, size: int) -> None:
        flow = self._flows[partition]
        flow.done += count
        flow.evicted += count
        flow.bytes_done += size

    def _accept(self, engine: Engine, batch: FetchedBatch) -> None:
        if batch.records:  # once for all partitions: by each of them it would cost three times as much
            engine.skew.arrived(list(chain.from_iterable(batch.records.values())))
        for partition, read in batch.records.items():
            group = read
            watermark = self._progress.watermarks[partition]
            reached = group[-1].offset() + 1
            if isinstance(watermark, RangeWatermark):
                group = watermark.own(read)
                self._flows[partition].done += len(read) - len(group)
                self._flows[partition].bytes_done += sum(map(len, read)) - sum(map(len, group))  # type: ignore[arg-type]
                if not group:
                    if not engine.draining:
                        watermark.reach(reached)
                    continue
            if watermark.restoring or group[0].offset() < self._progress.restored[partition]:
                wanted = self._unfinished(engine, partition, group)
            else:
                wanted = group
            if wanted and not engine.draining:
                load = self._load[partition]
                for record in wanted[::_SAMPLE]:
                    load[self._app.slot_of(record.key(), record.offset()) // BUCKET] += _SAMPLE
                watermark.deliver([record.offset() for record in wanted])
                engine.accept(wanted)
            if not engine.draining:
                watermark.reach(reached)
        for partition, end in batch.ends.items():
            if not engine.draining:
                self._progress.watermarks[partition].reach(end)

    def _unfinished(self, engine: Engine, partition: int, group: list[Record]) -> list[Record]:
        """Those that are not done; of the others only the event ids are of interest."""
        watermark, found = self._progress.watermarks[partition], self._progress.restored[partition]
        wanted: list[Record] = []
        done: list[Record] = []
        for record in group:
            offset = record.offset()
            (wanted if offset >= found and watermark.wanted(offset) else done).append(record)
        engine.note_done_before(done)
        self._flows[partition].done += len(done)
        self._flows[partition].bytes_done += sum(map(len, done))  # type: ignore[arg-type]  # the client's have a size
        return wanted

    def _done(self, deliveries: list[Delivery]) -> None:
        if self._ledger is not None:
            self._ledger.done(deliveries)
        if self._telemetry is not None:
            self._telemetry.done(deliveries)
        offsets: dict[int, list[int]] = defaultdict(list)
        own = deliveries
        if self._commands is not None and not self._commands.idle:
            own = self._without_redriven(deliveries)
        for delivery in own:
            offsets[delivery.partition].append(delivery.offset)
        for partition, group in offsets.items():
            self._progress.watermarks[partition].done(group)
        if not self._exact:
            self._make_room(own)
        if self._exact:
            self._uncommitted.add(deliveries)
        else:
            self._tell(deliveries)

    def _count(self, deliveries: list[Delivery]) -> None:
        """These are in a committed transaction: only now there is room for others."""
        self._make_room([delivery for delivery in deliveries if not delivery.redriven])
        self._tell(deliveries)

    def _make_room(self, deliveries: list[Delivery]) -> None:
        flows = self._flows
        for delivery in deliveries:
            flow = flows[delivery.partition]
            flow.done += 1
            flow.bytes_done += len(delivery.record)  # type: ignore[arg-type]  # the client's have a size

    def _tell(self, deliveries: list[Delivery]) -> None:
        """To Spark's sink, as much as the app wants to see there."""
        if self._plan.outcomes == "all":
            self._rows += deliveries
        elif self._plan.outcomes == "failed":
            self._rows += [d for d in deliveries if d.error is not None or d.attempts > 1]
        if len(self._rows) >= _OUTCOMES_ROWS:
            self._hand_out()

    def _without_redriven(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Redriven messages were done in the source before: their progress is among the dead letters."""
        own = []
        for delivery in deliveries:
            if delivery.redriven and self._commands is not None:
                self._commands.done(delivery)
            else:
                own.append(delivery)
        return own

    def _hand_out(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._out.put(rows)

    async def _pump(self, engine: Engine, output: KafkaOutput) -> None:
        """Serve acknowledgements: they move progress, so a few milliseconds do no harm where no lane waits for them.

        Every look wakes the loop up, which at a thousand messages a second is what costs most.
        """
        handed_out = time.monotonic()
        every = _OUTCOMES_EVERY if self._plan.outcomes == "all" else _FAILED_EVERY
        while True:
            output.poll()
            output.look(engine)
            engine.settle()
            if time.monotonic() - handed_out > every:
                handed_out = time.monotonic()
                self._hand_out()
            wait = _PUMP_CALM if engine.held else _PUMP_IDLE
            if engine.draining or engine.table.stopped or engine.promised:
                wait = _PUMP_BUSY
            await asyncio.sleep(wait)

    async def _watch_skew(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(skew.EVERY)
            engine.skew.look(time.monotonic())
            self.hot = engine.skew.names

    async def _until_over(
        self,
        engine: Engine,
        commands: CommandExecutor,
        fetcher: Fetcher,
        state: StateTopic,
        ownership: Ownership,
    ) -> None:
        """Return when the epoch is over, the run was told to stop, or everything there was is done."""
        while not state.poll() and time.monotonic() < self._deadline and not self._abandoned.is_set():
            if ownership.lost:
                engine.fail(FencedError(f"{self.owner}: another task has claimed its partitions"))
            if state.successor is not None:
                log.warning("%s: another run has taken over; finishing what has begun", self.owner)
                self._leaving = ownership
                return
            if state.wanted.get("number", 0) > self._plan.order:
                log.info("%s: there are other tasks or partitions now; the epoch ends", self.owner)
                return
            commands.take([order for order in state.take_commands() if self._is_ours(order)])
            if fetcher.ended and engine.resting and commands.idle and self._caught_up(engine):
                self._finished = True
                return
            wait = min(_CONTROL, max(0.0, self._deadline - time.monotonic()))
            await asyncio.wait([engine.failure], timeout=wait)
            if engine.failure.done():
                engine.failure.result()

    def _is_ours(self, order: Command) -> bool:
        """Of a partition that is shared out, an order is for the owner of its lane."""
        slots = self._plan.cuts.get(order.partition, ALL)
        if order.key is None and order.offset is None:
            return 0 in slots  # letters of messages without a key, which any one may run
        return self._app.slot_of(order.key, order.offset or 0) in slots

    def _caught_up(self, engine: Engine) -> bool:
        """Everything below ``until`` was seen, and is done or stands in a stopped lane."""
        until = self._plan.until or {}
        if sum(mark.pending for mark in self._progress.watermarks.values()) != engine.held:
            return False
        return all(mark.position >= until[p] for p, mark in self._progress.watermarks.items())

    async def _write_now_and_then(
        self, worker_session: WorkerSession, state: StateTopic, ownership: Ownership
    ) -> None:
        """Progress at the app's interval; records, which lanes wait for, soon."""
        writer = worker_session.writer
        interval = self._app.commit_interval
        due, said = time.monotonic() + interval, 0.0
        while True:
            now = time.monotonic()
            try:
                if self._leaving is not None and now - said > SAYS_SO_EVERY:
                    said = now
                    self._leaving.leaving()
                if now >= due:
                    await self._write(writer)
                    due = max(due + interval, time.monotonic()) + self._progress.rest
                elif writer.busy and not self._exact:
                    await writer.commit()
            except AbortedError as error:
                if self._exact:
                    raise
                if writer.useless:
                    await self._mend(worker_session, state, ownership, error)
                else:
                    log.warning("%s: %s; tried again in %g s", self.owner, error, interval)
                due = time.monotonic() + interval
            wait = max(0.0, min(due - time.monotonic(), _CONTROL))
            if writer.busy or self._exact:
                await asyncio.sleep(min(wait, _SOON))
            else:
                await writer.stirred(wait)


def _heard(done: asyncio.Future[None]) -> None:
    """Its caller was told, or was cancelled: nobody need complain that its exception was never looked at."""
    if not done.cancelled():
        done.exception()


def _told(job: asyncio.Task[None], engine: Engine) -> None:
    """A background job that ends by itself ends the task: nothing of it may be missing without a word."""
    if not job.cancelled() and (error := job.exception()) is not None:
        engine.fail(error)


def _on(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *given: object) -> None:
    """Do it on the loop's thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *given)
