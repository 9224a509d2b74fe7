"""Runs an app without Spark and without Kafka, in virtual time, through the engine that runs it in production."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.core.outcome import Outcome
from keylane.core.progress import LIMIT, decode, encode
from keylane.core.record import KEYLESS, LANE, Stop, decode_lane
from keylane.core.watermark import Watermark
from keylane.engine.duplicates import Duplicates
from keylane.engine.engine import Engine
from keylane.engine.pipeline import decoder, open_pipeline
from keylane.engine.redrive import Found, Redriver
from keylane.engine.versions import reader_of
from keylane.engine.versionstore import VersionStore
from keylane.errors import KeylaneError
from keylane.message import Message
from keylane.testing.checker import check
from keylane.testing.clock import run_virtual
from keylane.testing.faults import Crash, Drain, Fault, Pause, Redrive, Refuse, Release, Skip
from keylane.testing.history import Event, History, Kind
from keylane.testing.log import MemoryLog, partition_of
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from keylane.app import App, Observer
    from keylane.core.record import Kept, LaneRecord
    from keylane.engine.delivery import Delivery
    from keylane.engine.versionstore import Entry, Name
    from keylane.message import Headers
    from keylane.testing.checker import Position
    from keylane.testing.sink import Dead, Written
    from keylane.testing.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run. Lists are in the order in which things became durable, over all epochs and runs so far."""

    results: list[Written]
    dead: list[Dead]
    duplicates: list[Position]
    """Partition and offset of the messages that did not run because they repeat another one; each once, sorted."""
    stale: list[Position]
    """The same of messages that did not run because their lane had gone beyond their version."""
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
            refusals=[fault for fault in faults if isinstance(fault, Refuse)],
        )
        self._breaks = deque(fault for fault in faults if isinstance(fault, Crash | Drain))
        self._actions = deque(fault for fault in faults if isinstance(fault, Release | Skip | Redrive))
        self._redriven: set[int] = set()
        self._duplicates: set[Position] = set()
        self._stale: set[Position] = set()
        self._versions: dict[Name, Entry] = {}  # as they were committed
        self._holes = holes
        self._limit = limit
        self._unsent: list[tuple[float, bytes | None, bytes | None, Headers]] = []
        self._arrivals: dict[tuple[int, int], float] = {}
        self._committed: dict[int, tuple[int, str]] = {}  # offset and metadata, as Kafka's group keeps them
        self._kept: dict[tuple[int, int], Kept] = {}
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
            duplicates=sorted(self._duplicates),
            stale=sorted(self._stale),
            history=history,
            verdict=check(
                history,
                order=self._app.order,
                sent=sent,
                finished=self._duplicates.union(
                    (d.partition, d.offset) for d in self._sink.dead_letters if d.kind == "dead"
                ),
                duplicates=self._sent_twice(),
                versions=self._sent_versions(),
                stale=self._stale,
                allow_repeats=self._broken,
            ),
            elapsed=self._now,
            epochs=self._epochs,
        )

    def _sent_twice(self) -> dict[Position, Position]:
        """What the log says about messages that repeat others. One that went to the letters may run from there."""
        found = Duplicates(self._app.idempotency if self._app.order != "none" else None)
        records = list(self.log.records(self._app.source))
        found.arrived(records, [Message(record) for record in records])
        parked = {(dead.partition, dead.offset) for dead in self._sink.dead_letters if dead.kind == "parked"}
        return {place: (place[0], offset) for place, offset in found.waiting.items() if place not in parked}

    def _sent_versions(self) -> dict[Position, int] | None:
        """What the log says about versions; a message without a proper one is left out."""
        if self._app.versions is None:
            return None
        read, decode = reader_of(self._app.versions), decoder(self._app)
        found = {}
        for record in self.log.records(self._app.source):
            message = Message(record)
            with suppress(Exception):
                if decode is not None and message.value is not None:
                    message.value = decode(message.value)
                if (version := read(message)) is not None:
                    found[message.partition, message.offset] = version
        return found

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
        store = VersionStore(recent=3)  # so few that most are asked for in its file
        for name, entry in self._versions.items():
            store.put(name, *entry)

        def done(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                trouble = delivery.trouble
                if delivery.outcome is Outcome.DUPLICATE:
                    self._duplicates.add((delivery.partition, delivery.offset))
                elif delivery.outcome is Outcome.STALE:
                    self._stale.add((delivery.partition, delivery.offset))
                if trouble is None or trouble.letter is None:
                    marks[delivery.partition].done([delivery.offset])
                    continue
                if delivery.outcome is not Outcome.PARKED:
                    self._redriven.add(trouble.letter)
                    if engine.versions is not None:  # they are written down together
                        name = delivery.partition, delivery.key or b""
                        self._versions |= {n: e for n, e in engine.versions.changed().items() if n == name}
                redriver.done(delivery)
            moved.set()
            progressed.set()

        away = dict.fromkeys(marks, 0)  # messages of which the engine keeps only the places

        def let_go(partition: int, count: int) -> None:
            away[partition] += count
            moved.set()

        async def work() -> None:
            feeds = [self._feed(engine, p, mark, moved, away) for p, mark in marks.items()]
            await asyncio.gather(self._act(engine, redriver), *feeds)
            await engine.finish()

        async def commits() -> None:
            while True:
                # No timer while nothing moves: a loop at rest is how a stuck one is recognised.
                await progressed.wait()
                progressed.clear()
                await asyncio.sleep(app.commit_interval)
                self._commit(marks, engine)

        async with open_pipeline(app) as steps:
            engine = Engine(
                app,
                steps,
                self._sink,
                on_done=done,
                fetch=lambda *asked: self._fetch(engine, *asked),
                let_go=let_go,
                progress=lambda partition: marks[partition].progress(),
                store=store,
                wall=loop.time,
                rng=self._rng.random,
            )
            redriver = Redriver(engine)
            redriving = self._actions and isinstance(self._actions[0], Redrive)
            begun = redriving and self._actions[0].at <= loop.time()
            held = self._lane(engine, self._actions[0].key) if begun else None
            engine.restore(self._kept, self._lanes(marks), [held] if held is not None else ())
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
                self._commit(marks, engine)
            else:
                self._sink.crash()
        # The clock stands still while a thread runs: after this nothing is left of the epoch.
        await asyncio.sleep(1e-6)
        return not over

    async def _act(self, engine: Engine, redriver: Redriver) -> None:
        """What operators do. An action that a crash cuts off is taken up again by the next epoch."""
        loop = asyncio.get_running_loop()
        while self._actions:
            action = self._actions[0]
            await asyncio.sleep(max(0.0, action.at - loop.time()))
            if isinstance(action, Release):
                engine.stops.release(action.key)
            elif isinstance(action, Skip):
                engine.stops.skip(action.key)
            else:
                lane = self._lane(engine, action.key)
                if lane is not None:
                    engine.stops.hold(lane)
                    await redriver.settled([lane])
                await redriver.run(self._letters(action.key))
                if lane is not None:
                    engine.stops.let_go(lane)
            while engine.promised:  # noqa: ASYNC110 - an order stands until what it did is written down
                await asyncio.sleep(0.001)
            self._actions.popleft()

    def _lane(self, engine: Engine, key: bytes) -> bytes | None:
        return engine.lane_key(key, partition_of(key, self.log.partitions))

    def _letters(self, key: bytes) -> list[Found]:
        """This lane's letters that have not been redriven, each message once."""
        found: dict[tuple[int, int], Found] = {}
        for letter, dead in enumerate(self._sink.dead_letters):
            place = dead.partition, dead.offset
            if dead.key == key and letter not in self._redriven and dead.kind != "archived":
                record = self.log.records(self._app.source, dead.partition, start=dead.offset)[0]
                if place in found:
                    self._redriven.add(letter)
                else:
                    found[place] = Found(letter=letter, record=record, redrives=0)
        return list(found.values())

    def _next_break(self) -> Crash | Drain:
        self._broken += 1
        return self._breaks.popleft()

    async def _feed(
        self,
        engine: Engine,
        partition: int,
        mark: Watermark,
        moved: asyncio.Event,
        away: Mapping[int, int],
    ) -> None:
        """Hand over one partition as its messages arrive, as far as its share of the capacity allows."""
        loop, share = asyncio.get_running_loop(), max(1, self._app.capacity // self.log.partitions)
        begin, rule = mark.value, self._app.idempotency
        start = begin if rule is None else rule.since(begin)
        records = deque(self.log.records(self._app.source, partition, start=start))
        while records:
            wait = self._arrivals[partition, records[0].offset()] - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            if mark.pending - away[partition] >= share:
                moved.clear()
                await moved.wait()
                continue
            record = records.popleft()
            offset = record.offset()
            if offset < begin or (mark.restoring and not mark.wanted(offset)):
                engine.seen_before([record])
            else:
                mark.deliver([offset])
                engine.accept([record])
            mark.reach(offset + 1)

    def _restore(self, partition: int) -> Watermark:
        restored = decode(*self._committed.get(partition, (0, None)))
        if restored.problem is not None:
            raise KeylaneError(f"committed progress of partition {partition}: {restored.problem}")
        return Watermark(restored.progress)

    def _commit(self, marks: dict[int, Watermark], engine: Engine) -> None:
        self._kept = {
            (partition, offset): kept
            for partition, found in engine.kept().items()
            for offset, kept in found.items()
        }
        for partition, mark in marks.items():
            progress = mark.progress()
            self._committed[partition] = progress.watermark, encode(progress, LIMIT)
        if engine.versions is not None:
            entries = engine.versions.changed()
            self._versions |= entries
            engine.versions.written(entries)

    def _lanes(self, marks: dict[int, Watermark]) -> list[LaneRecord]:
        """Lanes that an earlier epoch wrote down, unless their message is done by now."""
        found = [
            decode_lane(name, partition, value)
            for (partition, name), value in self._sink.notes.items()
            if name.startswith((LANE, KEYLESS))
        ]
        return [
            record
            for record in found
            if record.stop is Stop.PARKED or marks[record.partition].wanted(record.offset)
        ]

    def _fetch(self, engine: Engine, ticket: int, partition: int, offsets: Sequence[int]) -> None:
        """Read messages again that a stuck lane let go of."""
        wanted = set(offsets)
        records = [
            record
            for record in self.log.records(self._app.source, partition, start=min(wanted))
            if record.offset() in wanted
        ]
        asyncio.get_running_loop().call_later(0.01, engine.returned, ticket, records, 0)


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
