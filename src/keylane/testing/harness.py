"""Runs an app without Spark and without Kafka, in virtual time, through the engine that runs it in production."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.core.progress import LIMIT, decode, encode
from keylane.core.watermark import Watermark
from keylane.engine.engine import Engine
from keylane.engine.pipeline import open_pipeline
from keylane.errors import KeylaneError
from keylane.message import EVENT_ID
from keylane.testing.checker import check
from keylane.testing.clock import run_virtual
from keylane.testing.history import Event, History, Kind
from keylane.testing.log import MemoryLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from keylane.app import App, Observer
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import DeadLetter
    from keylane.message import Headers, Message
    from keylane.testing.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """At this virtual second everything in memory is lost; the run goes on from the progress committed last.

    What was handed to the sink and not acknowledged may be there afterwards or not, as the seed will have it. Unlike
    in a real crash, stages that wait see a CancelledError and resources are closed.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """At this virtual second the epoch ends as epochs do: it drains, commits, and the next one goes on."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """From this virtual second the sink acknowledges nothing, for so many seconds: a slow broker."""

    at: float
    for_: float


Fault = Crash | Drain | Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A result in the sink."""

    key: bytes | None
    value: bytes
    headers: Headers
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A dead letter: the message as it came, its place in the source, and why."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int
    offset: int
    stage: str
    error: str
    message: str
    traceback: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run. Lists are in the order in which things became durable, over all epochs and runs so far."""

    results: list[Written]
    dead: list[Dead]
    history: History
    verdict: Verdict
    """The history as :func:`keylane.testing.check` judges it: one repeat of a message is allowed per fault survived."""
    elapsed: float
    """Virtual seconds since the harness was made."""
    epochs: int


class Harness:
    """An app, a log in memory and a virtual clock: tests of an app that take milliseconds and come out the same each time.

    >>> from keylane import App, Message
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

    ``latency`` is how many virtual seconds the sink takes to acknowledge: a number, or a pair to draw between. Acknowledgements
    come in order in each partition of the sink, and in any order otherwise. ``holes`` is the chance of a hole
    in the log before a message. ``limit`` are the virtual seconds after the last arrival that a run may take.
    ``seed`` decides about backoffs, latencies, holes, and what a crash leaves behind.

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
        self._seed = seed
        self._breaks: deque[Crash | Drain] = deque(f for f in faults if not isinstance(f, Pause))
        self._pauses = [f for f in faults if isinstance(f, Pause)]
        self._latency = latency if isinstance(latency, tuple) else (latency, latency)
        self._holes = holes
        self._limit = limit
        self._unsent: list[tuple[float, bytes | None, bytes | None, Headers]] = []
        self._arrivals: dict[tuple[int, int], float] = {}
        self._committed: dict[int, tuple[int, str]] = {}  # offset and metadata, as Kafka's group keeps them
        self._results: list[Written] = []
        self._dead: list[Dead] = []
        self._epochs = 0
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
        source, rng = self._app.source, random.Random(f"{self._seed}/holes/{self._epochs}")
        for at, key, value, headers in sorted(self._unsent, key=lambda sent: sent[0]):
            partition = self.log.choose(source, key)
            if rng.random() < self._holes:
                self.log.skip(source, partition, rng.randint(1, 3))
            record = self.log.append(
                source, key=key, value=value, headers=headers, timestamp=int(at * 1000), partition=partition
            )
            self._arrivals[partition, record.offset()] = at
        self._unsent.clear()
        last = max(self._arrivals.values(), default=0.0)
        run_virtual(self._epochs_until_done(), start=self._now, limit=max(last, self._now) + self._limit)
        history = History(events=tuple(self._recorder.events))
        sent = {(r.partition(), r.offset()): r.key() for r in self.log.records(source)}
        return RunResult(
            results=list(self._results),
            dead=list(self._dead),
            history=history,
            verdict=check(history, sent=sent, allow_repeats=self._epochs - 1),
            elapsed=self._now,
            epochs=self._epochs,
        )

    async def _epochs_until_done(self) -> None:
        more = True
        while more:
            self._epochs += 1
            self._recorder.owner = f"epoch-{self._epochs}"
            more = await self._epoch()
        self._now = asyncio.get_running_loop().time()

    async def _epoch(self) -> bool:
        """One life of a task; whether another one is needed."""
        loop, app = asyncio.get_running_loop(), self._app
        rng = random.Random(f"{self._seed}/{self._epochs}")
        sink = _Sink(app, self.log, rng, self._when_acknowledged, self._results, self._dead)
        marks = {p: self._restored(p) for p in range(self.log.partitions)}
        moved, progressed = asyncio.Event(), asyncio.Event()

        def done(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                marks[delivery.partition].done([delivery.offset])
            moved.set()
            progressed.set()

        async with open_pipeline(app) as steps:
            engine = Engine(app, steps, sink, on_done=done, wall=loop.time, rng=rng.random)

            async def work() -> None:
                await asyncio.gather(*(self._feed(engine, p, mark, moved) for p, mark in marks.items()))
                await engine.finish()

            async def commits() -> None:
                while True:
                    await progressed.wait()  # no timer while nothing moves: a loop at rest is how a stuck one is known
                    progressed.clear()
                    await asyncio.sleep(app.commit_interval)
                    self._commit(marks)

            tasks = [loop.create_task(work()), loop.create_task(commits())]
            wait = self._breaks[0].at - loop.time() if self._breaks else None
            over, _ = await asyncio.wait(
                [*tasks, engine.failure], timeout=wait, return_when=asyncio.FIRST_COMPLETED
            )
            crashed = not over and isinstance(self._breaks.popleft(), Crash)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if crashed:
                sink.crash()
                await engine.drain(0)
            else:
                for task in over:
                    task.result()
                await engine.drain(app.drain_timeout)
                self._commit(marks)
        # The clock stands still while a thread runs: after this nothing is left of the epoch.
        await asyncio.sleep(1e-6)
        return not over

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

    def _restored(self, partition: int) -> Watermark:
        restored = decode(*self._committed.get(partition, (0, None)))
        if restored.problem is not None:
            raise KeylaneError(f"committed progress of partition {partition}: {restored.problem}")
        return Watermark(restored.progress)

    def _commit(self, marks: dict[int, Watermark]) -> None:
        for partition, mark in marks.items():
            progress = mark.progress()
            self._committed[partition] = progress.watermark, encode(progress, LIMIT)

    def _when_acknowledged(self, rng: random.Random, now: float) -> float:
        due = now + rng.uniform(*self._latency)
        for pause in self._pauses:
            if pause.at <= due < pause.at + pause.for_:
                due = pause.at + pause.for_
        return due


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOver:
    """What the sink will make durable: the write, and the delivery that is told."""

    write: Callable[[], None]
    delivery: Delivery


class _Sink:
    """Where results and dead letters go: an :class:`~keylane.engine.engine.Output` over the log in memory."""

    def __init__(
        self,
        app: App,
        log: MemoryLog,
        rng: random.Random,
        when: Callable[[random.Random, float], float],
        results: list[Written],
        dead: list[Dead],
    ) -> None:
        self._app, self._log, self._rng, self._when = app, log, rng, when
        self._results, self._dead = results, dead
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[str, int], deque[_HandedOver]] = {}
        self._last: dict[tuple[str, int], float] = {}
        self._crashed = False

    def result(self, delivery: Delivery, value: bytes) -> None:
        topic = self._app.sink or ""
        partition = self._log.choose(topic, delivery.key)
        headers = list(delivery.headers)
        if all(name != EVENT_ID for name, _ in headers):
            headers.append((EVENT_ID, delivery.position.encode()))

        def write() -> None:
            record = self._log.append(
                topic, key=delivery.key, value=value, headers=headers, partition=partition
            )
            self._results.append(
                Written(
                    key=delivery.key,
                    value=value,
                    headers=headers,
                    partition=partition,
                    offset=record.offset(),
                )
            )

        self._hand_over(topic, partition, _HandedOver(write=write, delivery=delivery))

    def dead(self, delivery: Delivery, letter: DeadLetter) -> None:
        topic = self._app.dlq
        dead = Dead(
            key=delivery.key,
            value=delivery.original,
            headers=list(delivery.headers),
            partition=delivery.partition,
            offset=delivery.offset,
            stage=letter.stage,
            error=letter.error,
            message=letter.message,
            traceback=letter.traceback,
            attempts=letter.attempts,
        )
        handed_over = _HandedOver(write=lambda: self._dead.append(dead), delivery=delivery)
        self._hand_over(topic, self._log.choose(topic, delivery.key), handed_over)

    def _hand_over(self, topic: str, partition: int, handed_over: _HandedOver) -> None:
        place = topic, partition
        self._waiting.setdefault(place, deque()).append(handed_over)
        due = max(self._when(self._rng, self._loop.time()), self._last.get(place, 0.0))
        self._last[place] = due
        self._loop.call_at(due, self._acknowledge, place)

    def _acknowledge(self, place: tuple[str, int]) -> None:
        if self._crashed:
            return
        handed_over = self._waiting[place].popleft()
        handed_over.write()
        handed_over.delivery(None, None)
        handed_over.delivery.engine.settle()

    def crash(self) -> None:
        """In each partition some of what was not acknowledged, the first of it, is there all the same."""
        self._crashed = True
        for waiting in self._waiting.values():
            for handed_over in list(waiting)[: self._rng.randint(0, len(waiting))]:
                handed_over.write()


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


__all__ = ["Crash", "Dead", "Drain", "Fault", "Harness", "Pause", "RunResult", "Written"]
