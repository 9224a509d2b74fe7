"""One Spark task of an ordered DataFrame: rows in, outcomes out, with the engine on its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import uvloop

from keylane.dataframe.rows import FrameRows
from keylane.engine.engine import Engine
from keylane.engine.garbage import collect, own_collector
from keylane.engine.shutdown import end_stages, end_threads
from keylane.engine.stages import open_pipeline
from keylane.errors import FailureGuardError
from keylane.kafka.fetcher import BUFFERED_BYTES_MAX
from keylane.policies.failure_policy import PARK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from keylane.dataframe.rows import FramePlan, FrameRecord
    from keylane.engine.delivery import Delivery
    from keylane.engine.output import Then
    from keylane.engine.results import ResultRecord
    from keylane.policies.failure_info import FailureInfo
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.frame")

_ENGINE_BATCH_ROWS = 1_000
"""The most rows that are handed to the engine at once."""
_SPARK_BATCH_ROWS = 8_192
"""The least outcomes that are handed to Spark at once, except at the end."""


class FrameOutput:
    """Output that keeps results and dead letters for the outcome rows. Used on the loop only."""

    def __init__(self) -> None:
        self.letters: dict[tuple[int, int], FailureInfo | None] = {}
        """By partition and offset; removed when the row is made."""
        self.records: dict[tuple[int, int], Sequence[ResultRecord]] = {}
        """Results that are not one plain value, by partition and offset; removed when the row is made."""

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Acknowledge at once: Spark makes the row durable."""
        delivery.value = value
        delivery.engine.acknowledge(delivery)

    def all_results(self, delivery: Delivery, records: Sequence[ResultRecord]) -> None:
        """As :meth:`result`; what is more than one plain value is in a column of its own."""
        only = records[0] if len(records) == 1 else None
        if only is None or not only.plain:
            self.records[delivery.partition, delivery.offset] = records
        delivery.value = None if only is None else only.value
        delivery.engine.acknowledge(delivery)

    def letter(
        self,
        delivery: Delivery,
        letter: FailureInfo | None,
        kind: Literal["dead", "archived", "parked"],  # noqa: ARG002 - the outcome has it, too
        park: int | None,  # noqa: ARG002
        then: Then,
    ) -> None:
        """Keep the failure until the row is made."""
        if letter is not None:
            self.letters[delivery.partition, delivery.offset] = letter
        asyncio.get_running_loop().call_soon(then, None)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:  # noqa: ARG002
        """Drop the record: a DataFrame has no state to restore later."""
        asyncio.get_running_loop().call_soon(then, None)


class FrameTask:
    """Runs the rows of one Spark task; :meth:`run` is its whole life.

    The calling thread reads rows and makes outcome rows while the loop's thread runs the lanes. At most
    ``app.max_buffered`` rows are between the two.
    """

    def __init__(self, app: AppSpec, plan: FramePlan, *, task: int, epoch: int) -> None:
        self._plan = plan
        self._blocks = app.on_failure.blocks
        if app.custom_sink is not None:  # results are rows
            app = replace(app, custom_sink=None, sink="results", sinks=("results",))
        self._app = app
        if self._blocks:  # a stopped lane gives up its rows at once, as a parked one does
            self._app = replace(app, on_failure=PARK)
        self.owner = f"{socket.gethostname()}:{os.getpid()}/{task}"
        self._epoch = epoch
        self._rows = FrameRows(plan, task)
        self._output = FrameOutput()
        self._out: queue.SimpleQueue[list[Delivery] | BaseException | None] = queue.SimpleQueue()
        self._done: list[Delivery] = []  # written by the calling thread: outcomes for Spark
        self._in_flight = 0  # written by the calling thread: rows fed and not done
        # Written by the loop's thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._feed: Callable[[Sequence[FrameRecord]], None] = lambda _records: None
        self._over: asyncio.Event | None = None
        self._abandoned: asyncio.Event | None = None

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The outcomes of all rows. Raises the error that ended the lanes."""
        batches = (batch for batch in batches if batch.num_rows)
        if self._plan.stream:
            batches = iter(self._rows.sort(list(batches)))
        first = next(batches, None)
        if first is None:  # without rows, no resource is opened
            return
        thread = threading.Thread(target=self._main, name="keylane-loop", daemon=True)
        thread.start()
        try:
            self._take(self._out.get())  # the loop runs, or its start failed
            for part, room in self._parts(first, batches):
                records = self._rows.records(part)
                while self._in_flight and self._in_flight + len(records) > room:
                    self._take(self._out.get())
                    yield from self._ready(_SPARK_BATCH_ROWS)
                self._in_flight += len(records)
                self._on_loop(self._feed, records)
            self._on_loop(_set, self._over)
            while self._take(self._out.get()):
                yield from self._ready(_SPARK_BATCH_ROWS)
            yield from self._ready(1)
        finally:
            self._on_loop(_set, self._abandoned)
            thread.join(timeout=self._app.drain_timeout + 5)

    def _parts(
        self, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Small slices of the batches, each with the number of such rows that may be in flight."""
        capacity = self._app.max_buffered
        batch: pa.RecordBatch | None = first
        while batch is not None:
            size = max(1, batch.nbytes // batch.num_rows)
            room = max(2, min(capacity, BUFFERED_BYTES_MAX // size))
            step = max(1, min(_ENGINE_BATCH_ROWS, room // 2))
            for at in range(0, batch.num_rows, step):
                yield batch.slice(at, step), room
            batch = next(rest, None)

    def _take(self, got: list[Delivery] | BaseException | None) -> bool:
        """Take what the loop sent; False when it has ended. Raises the error that ended it."""
        if isinstance(got, FailureGuardError):
            raise FailureGuardError(got.reason, "Fix the cause and run the frame again") from got
        if isinstance(got, BaseException):
            raise got
        if got:
            self._in_flight -= len(got)
            self._done += got
        return got is not None

    def _ready(self, least: int) -> Iterator[pa.RecordBatch]:
        """A batch of the outcomes so far, when there are at least ``least``."""
        if len(self._done) < least:
            return
        done, self._done = self._done, []
        app = self._app
        yield self._rows.to_arrow(
            done,
            self._output.letters,
            self._output.records,
            owner=self.owner,
            epoch=self._epoch,
            results=app.sink is not None or app.commit == "epoch",
            blocks=self._blocks,
        )

    def _on_loop(self, what: Callable[..., None], *given: object) -> None:
        """Call it on the loop, unless the loop has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(what, *given)

    # On the loop's thread.

    def _main(self) -> None:
        try:
            with own_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self._out.put(error)
        else:
            self._out.put(None)

    async def _run(self) -> None:
        async with open_pipeline(self._app) as steps:
            engine = Engine(self._app, steps, self._output, on_done=self._out.put, share=1 / self._plan.tasks)
            self._over, self._abandoned = asyncio.Event(), asyncio.Event()
            self._feed = engine.accept
            self._loop = asyncio.get_running_loop()
            self._out.put([])
            work = asyncio.ensure_future(self._work(engine, self._over))
            abandoned = asyncio.ensure_future(self._abandoned.wait())
            collecting = asyncio.ensure_future(collect(lambda: engine.held))
            try:
                waiting: list[asyncio.Future[Any]] = [work, abandoned, engine.failure]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if engine.failure.done():
                    engine.failure.result()
                if work.done():
                    work.result()
            finally:
                for job in (work, abandoned, collecting):
                    job.cancel()
                await asyncio.gather(work, abandoned, collecting, return_exceptions=True)
                await end_stages(engine, self.owner)
                await end_threads(steps, self.owner, self._app.drain_timeout)

    @staticmethod
    async def _work(engine: Engine, over: asyncio.Event) -> None:
        await over.wait()
        await engine.finish()


def _set(event: asyncio.Event | None) -> None:
    if event is not None:
        event.set()
