"""A worker's lanes: restore, fetch, run lanes, produce, commit; they outlive the Spark task that started them.

At the end of an epoch the Spark task detaches, and the lanes keep running. The next task in this process attaches to
them. Lanes that no task attaches to for ``keep_alive`` seconds are drained, committed and released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from dataclasses import replace
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
from keylane.errors import AbortedError, BrokerError, FailureGuardError, FencedError, SourceChangedError
from keylane.kafka.fetcher import Fetcher
from keylane.kafka.rejection import RejectedError, Rejections
from keylane.offsets.slots import ALL
from keylane.state.ownership import Claimant, Ownership
from keylane.state.pauses import scopes_of
from keylane.worker.commands import CommandExecutor
from keylane.worker.commit_loop import LAST_COMMIT_TRIES, CommitLoop
from keylane.worker.epoch_records import EpochRecords, LastRecords
from keylane.worker.held_messages import HeldMessages
from keylane.worker.ledger_writer import LedgerWriter
from keylane.worker.outcome_rows import OutcomeRows
from keylane.worker.output import BUSY_LOOP_LANES, LAST_REPORTS_SECONDS, KafkaOutput
from keylane.worker.progress import ProgressTracker
from keylane.worker.range_mover import RangeMover
from keylane.worker.refetch import Refetched, RefetchReader
from keylane.worker.session import take_session
from keylane.worker.telemetry_sender import TelemetryWriter
from keylane.worker.uncommitted import UncommittedDeliveries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.stages import Step
    from keylane.kafka.settings import KafkaSettings
    from keylane.spec import AppSpec
    from keylane.state.commands import Command
    from keylane.state.topic import StateTopic
    from keylane.worker.range_member import RangeMember
    from keylane.worker.session import WorkerSession
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_PUMP_BUSY_SECONDS, _PUMP_CALM_SECONDS, _PUMP_IDLE_SECONDS = 0.005, 0.02, 0.05
"""Time between two looks at what was acknowledged: while a lane waits for it, while none does, with nothing held."""
_STATE_POLL_SECONDS = 0.1
_LATE_DRAIN_SECONDS = 1.0
"""Time for a drain that begins because a range was not released within ``drain_timeout``: its new owner waits."""
_ABORTED_MAX = LAST_COMMIT_TRIES
_FORGET_ABORTED_SECONDS = 60
_LETTERS_SECONDS = 5.0
"""How long a task that the failure guard stops waits for its dead letters."""


class LocalWorkers:
    """The lane workers of one process, by app and run. Spark runs one task at a time in a process."""

    def __init__(self) -> None:
        self._workers: defaultdict[tuple[KafkaSettings, str, str, str], list[LaneWorker]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, app: AppSpec, plan: TaskPlan, worker: LaneWorker) -> None:
        """It has started."""
        with self._lock:
            self._workers[self._key(app, plan)].append(worker)

    def remove(self, app: AppSpec, plan: TaskPlan, worker: LaneWorker) -> None:
        """It has ended, and a task knows its rows and its error."""
        with self._lock, contextlib.suppress(ValueError):
            self._workers[self._key(app, plan)].remove(worker)

    def idle(self, app: AppSpec, plan: TaskPlan) -> list[LaneWorker]:
        """Those of the plan's app and run that no task is attached to."""
        with self._lock:
            return [worker for worker in self._workers[self._key(app, plan)] if worker.idle]

    @staticmethod
    def _key(app: AppSpec, plan: TaskPlan) -> tuple[KafkaSettings, str, str, str]:
        return plan.settings, app.name, app.source, plan.run


LOCAL = LocalWorkers()
"""Those of this process."""


class LaneWorker:
    """The lanes of one part of the plan, in a thread of their own.

    Made with the plan of its first task, to which it is attached. :meth:`attach` is for the tasks that follow.
    """

    def __init__(
        self, app: AppSpec, plan: TaskPlan, *, attempt: int = 1, local: LocalWorkers = LOCAL
    ) -> None:
        self._app = app
        self._local = local
        self._plan = plan  # of the task that is attached, or was last
        self._attempt = attempt
        self.owner = f"{socket.gethostname()}:{os.getpid()}/{plan.task}"
        self._exact = app.delivery == "exactly_once"
        self.hot: frozenset[skew.HotName] = frozenset()
        """Keys that recently made up much of what was read."""
        self.id = ""
        """The transactional id under which it owns its slots; empty until it does."""
        self._rejections = Rejections()
        self._abandoned = threading.Event()  # Spark no longer reads the rows
        self._rows = OutcomeRows(plan.outcomes)
        self._lock = threading.Lock()  # guards the six below, which the loop and Spark's thread write
        self._attached = True  # a Spark task reads the rows
        self._detached_at = 0.0
        self._deadline = _deadline(plan)  # of the epoch
        self._retiring = False  # a task waits for the end
        self._closing = False  # it drains, and no task can attach
        self._ended = False
        self._error: BaseException | None = None  # what ended it while no task was attached
        self._served = plan  # the loop's: the last plan that it has seen
        self._moves_ranges = bool(plan.keep_alive) and app.moves_ranges
        self.gave_way = False
        """Whether it has ended so that ranges can move: its task may take a part of the plan again."""
        self._thread = threading.Thread(target=self._main, name="keylane-loop", daemon=True)
        self._reset()

    def _reset(self) -> None:
        """Start from the last commit, with nothing of an earlier try."""
        self._rows.discard()
        self._uncommitted = UncommittedDeliveries(self._count)
        self._rejected = False  # whether the broker rejected a result
        self._progress = ProgressTracker(self._app)
        self._held: HeldMessages
        self._commits: CommitLoop | None = None
        self._commands: CommandExecutor | None = None
        self._ownership: Ownership | None = None
        self._mover: RangeMover | None = None
        self._finished = False  # everything below the plan's `until` is done, or waits in stopped lanes
        self._moved_away = False  # it ends because all of its ranges are, or must be, others'
        self._succeeded = False  # another run has taken over
        self._leaves_alone = False  # the other owners of its shared partitions stay
        self._deserted = False  # no task has attached for too long
        self._telemetry: TelemetryWriter | None = None
        if self._app.telemetry is not None:
            interval = self._app.telemetry.interval
            self._telemetry = TelemetryWriter(self._app, self._plan, self.owner, interval=interval)
        self._ledger: LedgerWriter | None = None
        self._observed = self._app  # with the ledger as its observer, if it keeps one
        if self._app.ledger is not None:
            self._ledger = LedgerWriter(self._app, self._app.ledger, self.owner)
            self._observed = replace(self._app, observer=self._ledger)

    # For the Spark task, on its thread.

    def start(self) -> Iterator[list[Delivery]]:
        """Start, with a task attached. Yields what is done, in batches, until the epoch ends, and raises what ended it.

        When the plan has no ``keep_alive``, the lanes are drained and released before the iterator ends.
        """
        rows = self._rows.open()
        self._local.add(self._app, self._plan, self)
        self._thread.start()
        return rows

    @property
    def idle(self) -> bool:
        """Whether no task is attached."""
        return not self._attached

    def attach(self, plan: TaskPlan, attempt: int, *, moves: bool = False) -> Iterator[list[Delivery]] | None:
        """Attach the task of the next epoch; None if the lanes do not fit its plan, or are ending.

        ``moves``: ranges may differ, and move while the others run.
        """
        with self._lock:
            unfit = self._retiring or self._closing or self._ended or self._attached
            if unfit or not plan.continues(self._plan):
                return None
            if not plan.has_parts_of(self._plan) and not (moves and self._moves_ranges):
                return None
            if self._mover is not None and self._mover.has_left(plan):
                return None
            rows = self._rows.open()
            self._plan, self._attempt, self._deadline = plan, attempt, _deadline(plan)
            self._attached = True
        return rows

    def retire(self) -> Iterator[list[Delivery]]:
        """Drain, commit, release and end. Yields what was done since the last task, and raises what ended it."""
        with self._lock:
            rows = self._rows.open()
            self._retiring = self._attached = True
            if self._ended:
                self._rows.end(self._error)
                self._local.remove(self._app, self._plan, self)
        return rows

    def detach(self) -> None:
        """The task does not read any more. Unless its epoch ended as planned, the lanes end too."""
        with self._lock:
            lives_on = not (self._attached or self._retiring or self._closing or self._ended)
        if not lives_on:
            self._abandoned.set()
            self._thread.join(timeout=self._app.drain_timeout)

    # The loop's thread.

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self._run_until_over()
        except SourceChangedError as changed:
            log.warning("ending the epoch early owner=%s reason=%s", self.owner, changed)
        except BaseException as failure:
            error = failure
        with self._lock:
            self._ended = True
            if self._attached:
                self._rows.end(error)
                self._local.remove(self._app, self._plan, self)
            elif error is not None and not isinstance(error, FencedError):
                log.error("%s: its lanes failed between two epochs: %s", self.owner, error)
                self._error = error  # the next task raises it

    def _run_until_over(self) -> None:
        aborted, began = 0, time.monotonic()
        with own_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            while True:
                try:
                    runner.run(self._run())
                    break
                except AbortedError as error:
                    learned = isinstance(error, RejectedError) and self._rejections.start_over()
                    if not learned:
                        forget = time.monotonic() - began > _FORGET_ABORTED_SECONDS
                        aborted = 1 if forget else aborted + 1
                        began = time.monotonic()
                    # With commit="epoch" Spark commits all rows of an attempt: a second try would repeat them.
                    if aborted == _ABORTED_MAX or self._abandoned.is_set() or self._app.commit == "epoch":
                        raise
                    log.warning(
                        "transaction aborted, its messages run again in order owner=%s reason=%s",
                        self.owner,
                        error,
                    )
                    getattr(self._app.observer, "began_again", lambda: None)()
                    self._reset()
                    with self._lock:
                        self._closing = False

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
                # A process that was suspended may not know yet that Spark gave up on it.
                if await self._give_up(worker_session, again=rejected or isinstance(error, AbortedError)):
                    raise FencedError(f"{self.owner}: another task owns its partitions now") from error
                if rejected:
                    raise RejectedError(str(error)) from error
                raise
            if self._deserted:
                await asyncio.to_thread(worker_session.close)
            else:
                worker_session.keep_for_next_task()

    async def _give_up(self, worker_session: WorkerSession, *, again: bool) -> bool:
        """Close the session. If the task is to start ``again``: whether another one has replaced it meanwhile."""
        if self._commits is not None:
            await self._commits.end()
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
            claimant=_claimant(plan),
        )
        patient = not self._moves_ranges
        starts = await asyncio.to_thread(
            self._progress.restore, worker_session, ownership, state, plan, patient=patient
        )
        self._ownership, self.id = ownership, worker_session.writer.id
        commits = self._commits = CommitLoop(
            app, worker_session, state, ownership, self.owner, pause=lambda: self._progress.pause_seconds
        )
        dead_letters = DeadLetterWriter(worker_session, app, self._rejections)
        output = KafkaOutput(
            worker_session,
            dead_letters,
            app,
            limit=plan.sink_limit,
            stamps=plan.sink_stamps,
            rejections=self._rejections,
        )
        fetcher = Fetcher(
            worker_session.consumer,
            app.source,
            starts,
            capacity=app.max_buffered,
            deliver=lambda batch: _call_on(loop, self._held.accept, engine, batch),
            fail=lambda error: _call_on(loop, engine.fail, error),
            assigned=worker_session.assigned,
            until=plan.until,
            downstream_full=lambda: self._rows.crowded,
            loop_busy=lambda: len(engine.table.ready) > BUSY_LOOP_LANES,
            stuck=lambda: engine.table.stuck_entries,
            log_end_interval=inf if app.telemetry is None else app.telemetry.interval,
        )
        worker_session.assigned = {}
        self._held = HeldMessages(
            fetcher.flows, self._progress.watermarks, self._progress.restored, slot_of=app.slot_of
        )
        refetcher = RefetchReader(
            plan.settings,
            app.name,
            app.source,
            deliver=lambda part: _call_on(loop, self._refetched, engine, part),
            fail=lambda error: _call_on(loop, engine.fail, error),
        )
        engine = Engine(
            self._observed,
            steps,
            output,
            on_done=self._done,
            fetch=refetcher.request,
            let_go=self._held.evicted,
            progress=lambda partition: self._progress.watermarks[partition].progress(),
            read_to=lambda partition: (
                mark.position if (mark := self._progress.watermarks.get(partition)) else None
            ),
            room=lambda: fetcher.room,
            used=lambda: fetcher.buffered,
            store=worker_session.versions,
            duplicates=worker_session.duplicates,
            values=worker_session.values,
            record_limit=worker_session.rules(app.lane_state).limit,
            source_id=worker_session.identity.source.id,
            share=plan.share_of(self._progress.slots.values()),
        )
        worker_session.duplicates = engine.duplicates
        worker_session.writer.fail = engine.fail
        commands = self._commands = CommandExecutor(
            engine,
            output,
            plan.settings,
            app,
            self.owner,
            state.redriven,
            self._progress.slots,
            time.time,
            source=worker_session.identity.source,
            commit=commits.commit,
            plan=plan,
        )
        commits.contributors = [*self._progress.connect(engine, commands, output), commands]
        commits.contributors += [self._uncommitted, self._rejections]
        if self._ledger is not None:
            commits.contributors.append(self._ledger)
        engine.pauses.order(scopes_of(state.pauses.values()))
        members: list[RangeMember] = [self._progress, commands]
        for member in members:
            member.take(ownership.owned)
        fetcher.start()
        # Spark plans one more epoch after a stop was requested: it ends at once, and is not worth two lines per task.
        level = logging.DEBUG if state.stopped else logging.INFO
        log.log(level, "%s: epoch %d began, restored in %.3f s", self.owner, plan.epoch, loop.time() - began)
        self._served = plan
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
            loop.create_task(commits.run()),
            loop.create_task(collect(lambda: engine.held)),
            loop.create_task(self._watch_skew(engine)),
            loop.create_task(commands.run()),
            loop.create_task(dead_letters.ship()),
        ]
        if worker_session.values is not None:
            background.append(loop.create_task(worker_session.values.flush_often()))
        if self._telemetry is not None:
            self._telemetry.open(worker_session.sender, engine, steps, self._progress, fetcher, state)
            background.append(loop.create_task(self._telemetry.run()))
        for job in background:
            job.add_done_callback(lambda job: _fail_with(job, engine))
        if self._moves_ranges:
            self._mover = RangeMover(
                owner=self.owner,
                plan=plan,
                state=state,
                ownership=ownership,
                progress=self._progress,
                engine=engine,
                held=self._held,
                fetcher=fetcher,
                commits=commits,
                commands=commands,
                members=members,
                open_view=lambda partition: worker_session.view(partition, self._plan),
                is_new=worker_session.is_new,
                fail=engine.fail,
                drain_timeout=app.drain_timeout,
            )
        drained = began
        try:
            await self._until_over(engine, commands, fetcher, state)
            if self._mover is not None:
                await self._mover.close()
            fetcher.stop_fetching()
            draining = loop.time()
            late = self._mover is not None and self._mover.late
            if not await engine.drain(_LATE_DRAIN_SECONDS if late else app.drain_timeout):
                log.warning(
                    "%s: %d messages were not finished within %g s of drain; they run again",
                    self.owner,
                    engine.held,
                    app.drain_timeout,
                )
            drained = loop.time()
        finally:
            if self._mover is not None:
                await self._mover.close()
            await end_stages(engine, self.owner)
            if engine.failure.done() and isinstance(engine.failure.exception(), FailureGuardError):
                await dead_letters.rest(
                    _LETTERS_SECONDS
                )  # who reads the guard's error looks at the letters next
            output.close()
            for job in background:
                job.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            fetcher.stop_fetching()
            fenced = ownership.lost and not ownership.asked_to_leave
            await dead_letters.end(0.0 if fenced else LAST_REPORTS_SECONDS)
            await worker_session.purge_producers(LAST_REPORTS_SECONDS)
            self._rejected = self._rejections.add_suspects(engine.refusals, time.monotonic())
            engine.settle()
            try:
                await self._commit_last(engine, commits, ownership)
            finally:
                worker_session.assigned = await asyncio.to_thread(fetcher.close)
                await asyncio.to_thread(refetcher.close)
                await end_threads(steps, self.owner, app.drain_timeout)
                self._rows.hand_over()
                if self._telemetry is not None:
                    self._telemetry.last()
        ownership.check_run()
        if self._mover is not None and self._mover.moved:
            worker_session.forget_state()
        else:
            self._progress.save_to_session(self._plan.epoch)
        log.log(
            level,
            "%s: epoch %d ended after %.1f s: drained in %.3f s, closed in %.3f s",
            self.owner,
            self._plan.epoch,
            loop.time() - began,
            drained - draining,
            loop.time() - drained,
        )

    async def _commit_last(self, engine: Engine, commits: CommitLoop, ownership: Ownership) -> None:
        """Commit the last progress, with what the planner or the next task has to know; not if the task is fenced."""
        error = engine.failure.exception() if engine.failure.done() else None
        if isinstance(error, FencedError | AbortedError):
            return
        failed = error is not None
        last = LastRecords(
            self._plan,
            self._progress.slots,
            self._held.load,
            engine,
            None if failed else ownership,
            finished=self._finished,
        )
        shared = [p for p, slots in self._progress.slots.items() if slots != ALL]
        if self._leaves_alone:
            shared = []
        await commits.commit_last(last, shared=shared, failed=failed)

    # While it runs, on the loop.

    def _refetched(self, engine: Engine, part: Refetched) -> None:
        """Messages that were evicted, and are in memory again."""
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
            self._held.lost(part.partition, part.missing)
        engine.returned(part.ticket, part.records, len(part.missing))

    def _done(self, deliveries: list[Delivery]) -> None:
        if self._ledger is not None:
            self._ledger.done(deliveries)
        if self._telemetry is not None:
            self._telemetry.done(deliveries)
        own = deliveries
        if self._commands is not None and not self._commands.idle:
            own = self._without_redriven(deliveries)
        self._held.done(own, make_room=not self._exact)  # else when the transaction is committed
        if self._exact:
            self._uncommitted.add(deliveries)
        else:
            self._rows.add(deliveries)

    def _count(self, deliveries: list[Delivery]) -> None:
        """These are in a committed transaction: only now is there room for others."""
        self._held.make_room([delivery for delivery in deliveries if not delivery.redriven])
        self._rows.add(deliveries)

    def _without_redriven(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Redriven messages were done in the source before: their progress is among the dead letters."""
        own = []
        for delivery in deliveries:
            if delivery.redriven and self._commands is not None:
                self._commands.done(delivery)
            else:
                own.append(delivery)
        return own

    async def _pump(self, engine: Engine, output: KafkaOutput) -> None:
        """Serve acknowledgements: they move progress, so a few milliseconds do no harm if no lane waits for them.

        Every look wakes the loop up, which costs the most at a thousand messages per second.
        """
        handed_over = time.monotonic()
        while True:
            output.poll()
            output.look(engine)
            engine.settle()
            if time.monotonic() - handed_over > self._rows.every:
                handed_over = time.monotonic()
                self._rows.hand_over()
            wait = _PUMP_CALM_SECONDS if engine.held else _PUMP_IDLE_SECONDS
            if engine.draining or engine.table.stopped or engine.promised:
                wait = _PUMP_BUSY_SECONDS
            await asyncio.sleep(wait)

    async def _watch_skew(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(skew.LOOK_SECONDS)
            engine.skew.look(time.monotonic())
            self.hot = engine.skew.names

    async def _until_over(
        self, engine: Engine, commands: CommandExecutor, fetcher: Fetcher, state: StateTopic
    ) -> None:
        """Return when the lanes are to be drained: the run was stopped, the backlog is done, or others take over."""
        assert self._ownership is not None  # noqa: S101 - the lanes begin with it
        assert self._commits is not None  # noqa: S101
        changes, share = -1, -1.0
        while not state.poll() and not self._abandoned.is_set():
            if (owned := self._plan.share_of(self._progress.slots.values())) != share:  # ranges come and go
                share = owned
                engine.set_share(share)
            if state.pause_changes != changes:
                changes = state.pause_changes
                engine.pauses.order(scopes_of(state.pauses.values()))
            if self._mover is not None:
                if self._has_moved_away(self._mover, state):
                    break
            elif self._ownership.asked_to_leave:
                log.info("%s: another worker of this run takes over; finishing what has begun", self.owner)
                self._commits.leaving = self._leaves_alone = True
                break
            if (others := self._ownership.overruled) or (self._mover is None and self._ownership.lost):
                engine.fail(FencedError(f"{self.owner}: another task owns its partitions now {others}"))
            if state.successor is not None and self._mover is None:
                log.warning("%s: another run has taken over; finishing what has begun", self.owner)
                self._commits.leaving = True
                break
            commands.carry_out([command for command in state.take_commands() if self._is_ours(command)])
            if fetcher.ended and engine.resting and commands.idle and self._caught_up(engine):
                self._finished = True
                break
            if await self._is_over(engine, state):
                break
            wait = min(_STATE_POLL_SECONDS, max(0.0, self._deadline - time.monotonic()))
            await asyncio.wait([engine.failure], timeout=wait if self._attached else _STATE_POLL_SECONDS)
            if engine.failure.done():
                engine.failure.result()
        with self._lock:
            self._closing = True
            self.gave_way = self._moved_away and self._attached

    def _has_moved_away(self, mover: RangeMover, state: StateTopic) -> bool:
        """Move what is to be moved. True when the worker has nothing left, or must drain so that something can move."""
        assert self._commits is not None  # noqa: S101
        if state.successor is not None and not self._succeeded:
            log.warning("%s: another run has taken over; finishing what has begun", self.owner)
            self._succeeded = True
            mover.release_all()
        mover.look()
        if mover.stuck:
            log.warning("%s: ranges cannot move while others run; finishing what has begun", self.owner)
        elif not mover.ranges.over:
            return False
        self._moved_away = True
        self._commits.leaving = self._leaves_alone = True
        return True

    async def _is_over(self, engine: Engine, state: StateTopic) -> bool:
        """Whether to drain now. At the end of an epoch the task is detached instead, and the lanes keep running."""
        assert self._commits is not None  # noqa: S101
        with self._lock:
            plan, attached, deadline = self._plan, self._attached, self._deadline
        if self._retiring:  # a task that needs other lanes waits for the end of these
            self._leaves_alone = self._commits.leaving = True
            return True
        if plan is not self._served:
            self._begin_epoch(plan)
        if not attached:
            if time.monotonic() - self._detached_at < plan.keep_alive:
                return False
            log.warning("%s: no Spark task for %g s: draining and releasing", self.owner, plan.keep_alive)
            with self._lock:  # unless one has attached meanwhile
                self._deserted = self._closing = self._leaves_alone = not self._attached
            self._commits.leaving = self._deserted
            return self._deserted
        replanned = state.wanted.get("number", 0) > plan.replan
        if time.monotonic() < deadline and not replanned:
            return False
        if replanned:
            log.info("%s: there are other tasks or partitions now; the epoch ends", self.owner)
        if not plan.keep_alive:
            return True
        await self._end_epoch(plan, engine)
        return False

    def _begin_epoch(self, plan: TaskPlan) -> None:
        """A task has attached."""
        assert self._ownership is not None  # noqa: S101
        self._served = plan
        if self._mover is not None:
            self._mover.plan(plan)
        self._ownership.attached(_claimant(plan), plan.slots)
        if self._telemetry is not None:
            self._telemetry.begin_epoch(plan)
        log.info("%s: epoch %d began, its lanes were running", self.owner, plan.epoch)

    async def _end_epoch(self, plan: TaskPlan, engine: Engine) -> None:
        """Commit what is done, hand its rows over, and let the task go."""
        assert self._commits is not None  # noqa: S101
        engine.settle()
        if await self._commits.commit_epoch(EpochRecords(plan, self._progress.slots, self._held.load)):
            self._held.reset_load()
        with self._lock:
            self._attached = False
            self._detached_at = time.monotonic()
            self._rows.end()
        log.info("%s: epoch %d ended, its lanes keep running", self.owner, plan.epoch)

    def _is_ours(self, command: Command) -> bool:
        """Whether this worker runs the lane that the command is about."""
        assert self._commands is not None  # noqa: S101
        runs = self._mover is None or self._mover.is_running(command.partition)
        return runs and self._commands.is_ours(command)

    def _caught_up(self, engine: Engine) -> bool:
        """Everything below ``until`` was read, and is done or waits in a stopped lane."""
        return self._held.pending == engine.held and self._held.reached(self._plan.until or {})


def _fail_with(job: asyncio.Task[None], engine: Engine) -> None:
    """A background job that ends by itself ends the task: its work must not stop silently."""
    if not job.cancelled() and (error := job.exception()) is not None:
        engine.fail(error)


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call it on the loop's thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _deadline(plan: TaskPlan) -> float:
    """When the epoch ends, by the monotonic clock."""
    late = max(0.0, time.time() - plan.planned) if plan.planned else 0.0
    return time.monotonic() + plan.seconds - min(late, plan.seconds / 2)


def _claimant(plan: TaskPlan) -> Claimant:
    return Claimant(plan.epoch, plan.spark_task) if plan.keep_alive else Claimant()
