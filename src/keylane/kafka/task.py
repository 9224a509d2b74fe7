"""One task's epoch: restore, fetch, run lanes, produce, commit as it goes, drain, commit, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop
from confluent_kafka import Producer, TopicPartition

from keylane.core.progress import LIMIT, encode
from keylane.core.watermark import Progress, Watermark
from keylane.engine.collector import own_collector
from keylane.engine.engine import Engine
from keylane.engine.pipeline import open_pipeline
from keylane.errors import KafkaError, KeylaneError
from keylane.kafka.cluster import TIMEOUT, Cluster
from keylane.kafka.fetcher import Batch, Fetcher, Share
from keylane.kafka.output import KafkaOutput
from keylane.kafka.state import ELSEWHERE, MAX_PROGRESS, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from keylane.app import App
    from keylane.engine.delivery import Delivery
    from keylane.engine.pipeline import Step
    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Record

log = logging.getLogger("keylane.task")

_PUMP_BUSY = 0.005
_PUMP_IDLE = 0.05
_CONTROL = 0.1
_COLLECT_EVERY = 10.0
_COLLECT_BELOW = 5_000
_COLLECT_AT_LEAST = 60.0
_OUTCOMES_EVERY = 0.25
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
    starts: Mapping[int, int]
    """The task's partitions, and where each begins when the group has no progress for it."""
    until: Mapping[int, int] | None
    """Where each ends, for a run over what is there; None to go on until the epoch is over."""
    seconds: float
    sink_limit: int
    """The sink's ``max.message.bytes``."""
    outcomes: str = "all"


_producers: dict[KafkaSettings, Producer] = {}
"""Spark uses a Python worker again for the next epoch; a new idempotent producer takes half a second to be ready."""


def _producer(settings: KafkaSettings) -> Producer:
    if settings not in _producers:
        _producers[settings] = settings.producer()
    return _producers[settings]


class Task:
    """Runs one plan. :meth:`outcomes` is the whole life of it."""

    def __init__(self, app: App, plan: TaskPlan) -> None:
        self._app = app
        self._plan = plan
        self.owner = f"{socket.gethostname()}:{os.getpid()}/{plan.task}"
        self._out: queue.SimpleQueue[list[Delivery] | BaseException | None] = queue.SimpleQueue()
        self._rows: list[Delivery] = []
        self._watermarks: dict[int, Watermark] = {}
        self._committed: dict[int, Progress] = {}
        self._shares: dict[int, Share] = {}
        self._abandoned = threading.Event()  # Spark no longer wants the outcomes

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
        try:
            with own_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self._out.put(error)
        else:
            self._out.put(None)

    async def _run(self) -> None:
        app, plan = self._app, self._plan
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + plan.seconds
        async with open_pipeline(app) as steps:
            producer = _producer(plan.settings)
            state = State(plan.settings, app.name, app.state, plan.starts, plan.run)
            starts = await asyncio.to_thread(self._restore, state)
            consumer = plan.settings.consumer(app.name)
            output = KafkaOutput(producer, app, limit=plan.sink_limit)
            engine = Engine(app, steps, output, on_done=self._done)

            def deliver(batch: Batch) -> None:
                loop.call_soon_threadsafe(self._accept, engine, batch)

            def fail(error: BaseException) -> None:
                loop.call_soon_threadsafe(engine.fail, error)

            fetcher = Fetcher(
                consumer,
                app.source,
                starts,
                capacity=app.capacity,
                deliver=deliver,
                fail=fail,
                until=plan.until,
                crowded=lambda: self._out.qsize() > _OUTCOMES_WAITING,
            )
            self._shares = fetcher.shares
            fetcher.start()
            log.info("%s: epoch %d began, restored in %.3f s", self.owner, plan.epoch, loop.time() - began)
            background = [
                loop.create_task(self._pump(engine, output)),
                loop.create_task(self._commit_now_and_then(fetcher, output)),
                loop.create_task(self._collect_garbage(engine)),
            ]
            try:
                await self._until_over(engine, fetcher, state, deadline)
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
                await engine.abort()
                for job in background:
                    job.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                fetcher.stop_fetching()
                with contextlib.suppress(KeylaneError) if engine.failure.done() else contextlib.nullcontext():
                    await self._commit(fetcher, output)
                await asyncio.to_thread(fetcher.close)
                await self._wait_for_threads(steps)
                state.close()
                self._hand_out()
        log.info(
            "%s: epoch %d ended after %.1f s: drained in %.3f s, closed in %.3f s",
            self.owner,
            plan.epoch,
            loop.time() - began,
            drained - draining,
            loop.time() - drained,
        )

    async def _wait_for_threads(self, steps: Sequence[Step]) -> None:
        """No thread may outlive its task: it would still work on a message that another task runs again.

        A thread cannot be ended, but the process it lives in can. Spark runs the task again elsewhere.
        """
        deadline = time.monotonic() + self._app.drain_timeout
        while busy := [step.name for step in steps if step.threads]:
            if time.monotonic() > deadline:
                log.error("%s: stages %s are still running; this process ends with them", self.owner, busy)
                os._exit(70)
            await asyncio.sleep(0.02)

    # Start.

    def _restore(self, state: State) -> dict[int, int]:
        """Where each partition's reading begins: the group's progress, or the plan's."""
        app, plan = self._app, self._plan
        state.restore()
        found = Cluster(plan.settings).committed(app.name, app.source, plan.starts)
        starts = {}
        for partition, fallback in plan.starts.items():
            offset, metadata = found.get(partition, (fallback, None))
            restored = state.progress(partition, offset, metadata)
            if restored.problem:
                log.warning(
                    "%s/%d: %s; messages after %d run again", app.source, partition, restored.problem, offset
                )
            self._watermarks[partition] = Watermark(restored.progress)
            if partition in found:
                self._committed[partition] = restored.progress
            starts[partition] = restored.progress.watermark
        return starts

    # While it runs, on the loop.

    def _accept(self, engine: Engine, batch: Batch) -> None:
        records = batch.records
        by_partition: dict[int, list[Record]] = {}
        for record in records:
            partition = record.partition()
            group = by_partition.get(partition)
            if group is None:
                by_partition[partition] = [record]
            else:
                group.append(record)
        for partition, group in by_partition.items():
            watermark = self._watermarks[partition]
            reached = group[-1].offset() + 1
            if watermark.restoring:
                wanted = [record for record in group if watermark.wanted(record.offset())]
                self._shares[partition].done += len(group) - len(wanted)
            else:
                wanted = group
            if wanted and not engine.draining:
                watermark.deliver([record.offset() for record in wanted])
                engine.accept(wanted)
            if not engine.draining:
                watermark.reach(reached)
        for partition, end in batch.ends.items():
            if not engine.draining:
                self._watermarks[partition].reach(end)

    def _done(self, deliveries: list[Delivery]) -> None:
        offsets: dict[int, list[int]] = {}
        for delivery in deliveries:
            group = offsets.get(delivery.partition)
            if group is None:
                offsets[delivery.partition] = [delivery.offset]
            else:
                group.append(delivery.offset)
        for partition, group in offsets.items():
            self._watermarks[partition].done(group)
            self._shares[partition].done += len(group)
        if self._plan.outcomes == "all":
            self._rows += deliveries
        elif self._plan.outcomes == "failed":
            self._rows += [d for d in deliveries if d.error is not None or d.attempts > 1]
        if len(self._rows) >= _OUTCOMES_ROWS:
            self._hand_out()

    def _hand_out(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._out.put(rows)

    async def _pump(self, engine: Engine, output: KafkaOutput) -> None:
        """Serve acknowledgements; they move progress, nobody waits for them, so a few milliseconds do no harm."""
        handed_out = time.monotonic()
        while True:
            output.poll()
            engine.settle()
            if time.monotonic() - handed_out > _OUTCOMES_EVERY:
                handed_out = time.monotonic()
                self._hand_out()
            await asyncio.sleep(_PUMP_BUSY if engine.held else _PUMP_IDLE)

    @staticmethod
    async def _collect_garbage(engine: Engine) -> None:
        """Collect cycles that stages left behind, when little is held or it has been long.

        The engine itself leaves none; Python's own runs are off: see :func:`own_collector`.
        """
        last = time.monotonic()
        while True:
            await asyncio.sleep(_COLLECT_EVERY)
            if engine.held < _COLLECT_BELOW or time.monotonic() - last > _COLLECT_AT_LEAST:
                gc.collect()
                last = time.monotonic()

    async def _until_over(self, engine: Engine, fetcher: Fetcher, state: State, deadline: float) -> None:
        """Return when the epoch is over, the run was told to stop, or everything there was is done."""
        loop = asyncio.get_running_loop()
        while not state.poll() and loop.time() < deadline and not self._abandoned.is_set():
            if fetcher.ended and engine.held == 0 and self._caught_up():
                return
            await asyncio.wait([engine.failure], timeout=min(_CONTROL, max(0.0, deadline - loop.time())))
            if engine.failure.done():
                engine.failure.result()

    def _caught_up(self) -> bool:
        """Everything below ``until`` was seen and is done."""
        until = self._plan.until or {}
        return all(mark.pending == 0 and mark.position >= until[p] for p, mark in self._watermarks.items())

    # Progress.

    async def _commit_now_and_then(self, fetcher: Fetcher, output: KafkaOutput) -> None:
        while True:
            await asyncio.sleep(self._app.commit_interval)
            try:
                await self._commit(fetcher, output)
            except KafkaError as error:
                log.warning("%s: %s; tried again in %g s", self.owner, error, self._app.commit_interval)

    async def _commit(self, fetcher: Fetcher, output: KafkaOutput) -> None:
        """Write down how far the task is, where that has changed.

        What does not fit beside an offset goes to the state topic first; only then the offset says so.
        """
        changed = {}
        offsets = []
        for partition, mark in self._watermarks.items():
            progress = mark.progress()
            if progress == self._committed.get(partition):
                continue
            changed[partition] = progress
            metadata = encode(progress)
            if len(metadata) > LIMIT:
                text = metadata if len(metadata) <= MAX_PROGRESS else encode(progress, MAX_PROGRESS)
                await output.state(partition, f"{progress.watermark} {text}".encode())
                metadata = ELSEWHERE
            offsets.append(TopicPartition(self._app.source, partition, progress.watermark, metadata=metadata))
        if offsets:
            await asyncio.wait_for(asyncio.wrap_future(fetcher.commit(offsets)), TIMEOUT)
            self._committed.update(changed)
