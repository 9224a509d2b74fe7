"""Runs an app without Spark and without Kafka, in virtual time, through the engine that runs it in production."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.core.progress import LIMIT, decode, encode
from keylane.core.watermark import Watermark
from keylane.engine.engine import Engine
from keylane.engine.pipeline import open_pipeline
from keylane.errors import KeylaneError
from keylane.testing.checker import check
from keylane.testing.clock import run_virtual
from keylane.testing.faults import Drain, Fault, Pause
from keylane.testing.history import Event, History, Kind
from keylane.testing.log import MemoryLog
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.app import App, Observer
    from keylane.engine.delivery import Delivery
    from keylane.message import Headers, Message
    from keylane.testing.faults import Crash
    from keylane.testing.sink import Dead, Written
    from keylane.testing.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run. Lists are in the order in which things became durable, over all epochs and runs so far."""

    results: list[Written]
    dead: list[Dead]
    history: History
    verdict: Verdict
    """The history as :func:`keylane.testing.check` judges it: one repeat of a message is allowed per fault survived."""
    elapsed: float
    """Virtual seconds since the first second of the first run."""
    epochs: int
    """Lives of the task: one, and one more for each crash and each drain."""


class Harness:
    """An app, a log in memory and a virtual clock: a test takes milliseconds and comes out the same each time.

    >>> import asyncio
    >>> from keylane import App, Message
    >>> from keylane.testing import Crash, Harness
    >>> app = App("shout", source="in", sink="out", decode="text")
    >>> @app.stage
    ... async def shout(msg: Message) -> str:
    ...     await asyncio.sleep(3600)
    ...     return msg.value.upper()
    >>> run = Harness(app, seed=7, faults=[Crash(at=5000)])
    >>> run.send(key=b"anna", value=b"hello")
    >>> run.send(key=b"anna", value=b"again", at=10.0)
    >>> result = run.run()
    >>> [written.value for written in result.results], result.verdict.ok, round(result.elapsed)
    ([b'HELLO', b'AGAIN'], True, 8600)

    ``faults`` happen at their virtual second, if the run lasts that long. ``latency`` is how many virtual seconds the
    sink takes to acknowledge, a number or a pair to draw between: in order in each of its partitions, in any order
    otherwise. ``holes`` is the chance of a hole in the log before a message. ``limit`` are the virtual seconds that a
    run may take after the last arrival. ``seed`` decides backoffs, latencies, holes, and what a crash leaves behind.

    Raises :class:`keylane.SettingsError` when the app cannot run.
    """

    def __init__(
        self,
        app: App,
        *,
        partitions: int = 3,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        latency: float | tuple[float, float] = 0.001,
        holes: float = 0.0,
        limit: float = 86_400.0,
    ) -> None:
        app.check()
        faults = sorted(faults, key=lambda fault: fault.at)
        self.log = MemoryLog(partitions=partitions)
        self._recorder = _Recorder(app.observer)
        self._app = copy.copy(app)
        self._app.observer = self._recorder
        self._rng = random.Random(f"engine/{seed}")
        self._sink = MemorySink(
            app,
            self.log,
            rng=random.Random(f"sink/{seed}"),
            latency=latency if isinstance(latency, tuple) else (latency, latency),
            pauses=[fault for fault in faults if isinstance(fault, Pause)],
        )
        self._breaks = deque(fault for fault in faults if not isinstance(fault, Pause))
        self._holes = holes
        self._limit = limit
        self._unsent: list[tuple[float, bytes | None, bytes | None, Headers]] = []
        self._arrivals: dict[tuple[int, int], float] = {}
        self._committed: dict[int, tuple[int, str]] = {}  # offset and metadata, as Kafka's group keeps them
        self._epochs = 0
        self._broken = 0
        self._now = 0.0

    def send(
        self,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        at: float = 0.0,
    ) -> None:
        """A message that arrives at this virtual second. Messages of the same second arrive as they were sent."""
        self._unsent.append((at, key, value, list(headers)))

    def run(self) -> RunResult:
        """Run until everything sent is done. More can be sent afterwards, and run: time goes on where it stood.

        Raises :class:`keylane.testing.StuckError` when that will never be, and whatever makes an engine stop.
        """
        source = self._app.source
        for at, key, value, headers in sorted(self._unsent, key=lambda sent: sent[0]):
            partition = self.log.choose(source, key)
            if self._rng.random() < self._holes:
                self.log.skip(source, partition, self._rng.randint(1, 3))
            record = self.log.append(
                source, key=key, value=value, headers=headers, timestamp=int(at * 1000), partition=partition
            )
            self._arrivals[partition, record.offset()] = at
        self._unsent.clear()
        last = max(self._arrivals.values(), default=0.0)
        run_virtual(self._run(), start=self._now, limit=max(last, self._now) + self._limit)
        history = History(events=tuple(self._recorder.events))
        sent = {(r.partition(), r.offset()): r.key() for r in self.log.records(source)}
        return RunResult(
            results=list(self._sink.results),
            dead=list(self._sink.dead_letters),
            history=history,
            verdict=check(history, sent=sent, allow_repeats=self._broken),
            elapsed=self._now,
            epochs=self._epochs,
        )

    async def _run(self) -> None:
        more = True
        while more:
            self._epochs += 1
            self._recorder.owner = f"epoch-{self._epochs}"
            more = await self._epoch()
        self._now = asyncio.get_running_loop().time()

    async def _epoch(self) -> bool:
        """One life of a task; whether another one is needed."""
        loop, app = asyncio.get_running_loop(), self._app
        marks = {partition: self._restore(partition) for partition in range(self.log.partitions)}
        moved, progressed = asyncio.Event(), asyncio.Event()

        def done(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                marks[delivery.partition].done([delivery.offset])
            moved.set()
            progressed.set()

        async def work() -> None:
            await asyncio.gather(*(self._feed(engine, p, mark, moved) for p, mark in marks.items()))
            await engine.finish()

        async def commits() -> None:
            while True:
                # No timer while nothing moves: a loop at rest is how a stuck one is recognised.
                await progressed.wait()
                progressed.clear()
                await asyncio.sleep(app.commit_interval)
                self._commit(marks)

        async with open_pipeline(app) as steps:
            engine = Engine(app, steps, self._sink, on_done=done, wall=loop.time, rng=self._rng.random)
            tasks = [loop.create_task(work()), loop.create_task(commits())]
            drain_timeout = 0.0
            try:
                wait = self._breaks[0].at - loop.time() if self._breaks else None
                waiting: list[asyncio.Future[None]] = [*tasks, engine.failure]
                over, _ = await asyncio.wait(waiting, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for ended in over:
                    ended.result()
                if over or isinstance(self._next_break(), Drain):
                    drain_timeout = app.drain_timeout
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await engine.drain(drain_timeout)  # 0 seconds: everything that runs is cancelled
            if drain_timeout:
                self._commit(marks)
            else:
                self._sink.crash()
        # The clock stands still while a thread runs: after this nothing is left of the epoch.
        await asyncio.sleep(1e-6)
        return not over

    def _next_break(self) -> Crash | Drain:
        self._broken += 1
        return self._breaks.popleft()

    async def _feed(self, engine: Engine, partition: int, mark: Watermark, moved: asyncio.Event) -> None:
        """Hand over one partition as its messages arrive, as far as its share of the capacity allows."""
        loop, share = asyncio.get_running_loop(), max(1, self._app.capacity // self.log.partitions)
        records = deque(self.log.records(self._app.source, partition, start=mark.value))
        while records:
            wait = self._arrivals[partition, records[0].offset()] - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            if mark.pending >= share:
                moved.clear()
                await moved.wait()
                continue
            record = records.popleft()
            if not mark.restoring or mark.wanted(record.offset()):
                mark.deliver([record.offset()])
                engine.accept([record])
            mark.reach(record.offset() + 1)

    def _restore(self, partition: int) -> Watermark:
        restored = decode(*self._committed.get(partition, (0, None)))
        if restored.problem is not None:
            raise KeylaneError(f"committed progress of partition {partition}: {restored.problem}")
        return Watermark(restored.progress)

    def _commit(self, marks: dict[int, Watermark]) -> None:
        for partition, mark in marks.items():
            progress = mark.progress()
            self._committed[partition] = progress.watermark, encode(progress, LIMIT)


class _Recorder:
    """An observer that writes a history and passes on what it is told."""

    def __init__(self, then: Observer | None) -> None:
        self.events: list[Event] = []
        self.owner = ""
        self._then = then

    def started(self, message: Message, attempt: int) -> None:
        self._add(Kind.START, message, attempt, None)
        if self._then is not None:
            self._then.started(message, attempt)

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        self._add(Kind.END, message, attempt, str(outcome))
        if self._then is not None:
            self._then.ended(message, attempt, outcome)

    def _add(self, kind: Kind, message: Message, attempt: int, outcome: str | None) -> None:
        at = asyncio.get_running_loop().time()
        # Events of one virtual instant still have an order: each comes a nanosecond after the one before.
        seq = max(int(at * 1e9), self.events[-1].seq + 1 if self.events else 0)
        self.events.append(
            Event(kind, message.key, message.partition, message.offset, attempt, self.owner, at, seq, outcome)
        )
