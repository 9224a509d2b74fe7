"""Test harness: an app on the production engine in virtual time, without Spark and Kafka."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from keylane.audit.violation import EventKind, HistoryEvent
from keylane.engine.duplicates import Duplicates
from keylane.engine.lane_state import VALUE
from keylane.engine.stages import decoder, open_pipeline
from keylane.engine.versions import reader_of
from keylane.errors import SettingsError
from keylane.event import encode_key, encode_value
from keylane.lanes.lane_record import LaneStatus
from keylane.message import Message
from keylane.offsets.slots import SLOTS, Slots
from keylane.spec import AppSpec, ResourceSpec
from keylane.testing.checker import check
from keylane.testing.clock import run_virtual
from keylane.testing.durable import DurableState
from keylane.testing.faults import (
    Crash,
    Drain,
    Fault,
    Hold,
    Pause,
    Recreate,
    Recut,
    Redrive,
    Refuse,
    Reject,
    Release,
    Reset,
    Skip,
)
from keylane.testing.history import History
from keylane.testing.life import REDRIVE, TaskLife, World, lanes
from keylane.testing.log import MemoryLog, partition_of
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.app import App
    from keylane.engine.pauses import PauseScope
    from keylane.lanes.lane_record import LaneRecord
    from keylane.message import Headers
    from keylane.spec import Observer
    from keylane.testing.checker import Position
    from keylane.testing.faults import Break
    from keylane.testing.log import MemoryRecord
    from keylane.testing.sink import Dead, Written
    from keylane.testing.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. Its lists are in the order of durability, over all epochs and runs so far.

    A source topic that was created again has partition numbers of its own here and in the history: they follow those of
    the topic before. With 3 partitions, the first topic's are 0 to 2, and the second one's 3 to 5.
    """

    results: list[Written]
    dead: list[Dead]
    duplicates: list[Position]
    """Partition and offset of duplicates, which did not run; each once, sorted."""
    stale: list[Position]
    """The same of stale messages, which did not run because a newer version had run."""
    waiting: list[Position]
    """The same of unfinished messages in blocked lanes, and of dead letters of parked lanes; they are not lost."""
    gone: list[Position]
    """The same of messages that were deleted with their topic, and neither committed as done nor dead letters."""
    states: dict[bytes, dict[str, Any]]
    """Lane state that is committed: by lane (the key, with ``order="key"``) and name, the JSON values."""
    history: History
    verdict: Verdict
    """The result of :func:`keylane.testing.check`, which allows one repeat of a message for each crash or drain."""
    elapsed: float
    """Virtual seconds since the beginning of the first run."""
    epochs: int
    """One, and one more for each crash, each drain, and each new source topic."""


class Harness:
    """Runs an app with a log in memory and a virtual clock: a test takes milliseconds and is repeatable.

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

    ``faults`` happen at their virtual second, if the run lasts that long.

    ``latency`` is the virtual seconds until the sink acknowledges a result: a number, or a pair to draw between.
    Acknowledgements of one partition come in order. ``letters`` is the same for dead letters (``latency`` if not
    given), ``commits`` for the state topic, and ``reading`` for reads: the first messages of an epoch, and dead letters
    for a redrive.

    ``holes`` is the chance of a gap in the offsets before a message. ``limit`` is the virtual seconds that a run may
    take after the last arrival. ``seed`` decides backoffs, latencies, gaps, and which writes survive a crash.

    ``resources`` are objects by name, which stages get instead of the app's resources. Those are not opened.

    Raises :class:`keylane.SettingsError` when the app cannot run.
    """

    def __init__(
        self,
        app: App | AppSpec,
        *,
        partitions: int = 3,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        latency: float | tuple[float, float] = 0.001,
        letters: float | tuple[float, float] | None = None,
        commits: float | tuple[float, float] | None = None,
        reading: float | tuple[float, float] = 0.0,
        holes: float = 0.0,
        limit: float = 86_400.0,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        spec = app if isinstance(app, AppSpec) else app.spec
        spec.check()
        faults = sorted(faults, key=lambda fault: fault.at)
        _check_faults(spec, faults)
        self.log = MemoryLog(partitions=partitions)
        self._recorder = _Recorder(spec.observer)
        self._app = spec.with_resources(_replaced(spec, resources or {}))
        self._rng = random.Random(f"engine/{seed}")
        self._sink = MemorySink(
            self._app,
            self.log,
            rng=random.Random(f"sink/{seed}"),
            latency=_pair(latency),
            letters=None if letters is None else _pair(letters),
            commits=None if commits is None else _pair(commits),
            pauses=[fault for fault in faults if isinstance(fault, Pause)],
            refusals=[fault for fault in faults if isinstance(fault, Refuse)],
            rejections=[fault for fault in faults if isinstance(fault, Reject)],
        )
        self._hold_faults = [fault for fault in faults if isinstance(fault, Hold)]
        self._breaks: deque[Break] = deque(
            fault for fault in faults if isinstance(fault, Crash | Drain | Recut | Recreate)
        )
        self._actions = deque(
            fault for fault in faults if isinstance(fault, Release | Skip | Redrive | Reset)
        )
        self._holes = holes
        self._limit = limit
        self._unsent: list[tuple[float, bytes | None, bytes | None, Headers]] = []
        self._world = World(
            log=self.log, durable=DurableState(spec), sink=self._sink, rng=self._rng, reading=_pair(reading)
        )
        self._arrivals = self._world.arrivals
        self._former: list[dict[Position, MemoryRecord]] = []  # by deleted topic, its messages
        self._gone: set[Position] = set()
        self._tasks = 1
        self._redrives = 0
        self._lanes: dict[Position, bytes | None] | None = None  # for an ordering that reads messages
        self._epochs = 0
        self._broken = 0
        self._now = 0.0

    def send(
        self,
        value: Any = None,
        *,
        key: Any = None,
        headers: Iterable[tuple[str, str | bytes | None]] | Mapping[str, str | bytes | None] = (),
        at: float = 0.0,
    ) -> None:
        """Send a message that arrives at this virtual second. Messages of the same second arrive in the order of calls.

        Key, value and headers are those of :meth:`keylane.Publisher.send`: bytes, text, anything JSON.
        """
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        made: Headers = [(name, text.encode() if isinstance(text, str) else text) for name, text in pairs]
        self._unsent.append((at, None if key is None else encode_key(key), encode_value(value), made))

    def rewind(self, partition: int, offset: int) -> None:
        """Move the group's offset back, as an operator does between two runs. Messages from there on run again."""
        self._world.durable.rewind(partition, offset)

    def add_partitions(self, partitions: int) -> None:
        """Raise the number of the source's partitions. Keys move from the next run on."""
        self.log.grow(partitions)

    def run(self, until: float | None = None) -> RunResult:
        """Run until all sent messages are done. After that, more can be sent and run; the clock continues.

        Timers fire too, and what they set again; not those that are due after the virtual second ``until``.

        Raises :class:`keylane.testing.StuckError` if that is impossible, and any error that stops the engine.
        """
        self._world.until = nextafter(inf, 0) if until is None else until
        last = max([*self._arrivals.values(), *(at for at, *_ in self._unsent)], default=0.0)
        self._append()
        run_virtual(self._run(), start=self._now, limit=max(last, self._now) + self._limit)
        history = History(events=tuple(self._recorder.events))
        messages = self.messages()
        sent = {place: record.key() for place, record in messages.items()}
        if self._app.order.reads_messages:
            self._lanes = {
                place: self._app.order.lane_key(Message(record)) for place, record in messages.items()
            }
        waiting = self._waiting()
        twice = self._sent_twice()
        letters = {
            (dead.partition, dead.offset) for dead in self._sink.dead_letters if dead.kind != "archived"
        }
        parked = {(dead.partition, dead.offset) for dead in self._sink.dead_letters if dead.kind == "parked"}
        return RunResult(
            results=list(self._sink.results),
            dead=list(self._sink.dead_letters),
            duplicates=sorted(self._world.duplicates),
            stale=sorted(self._world.stale),
            waiting=sorted(waiting),
            gone=sorted(self._gone - letters),
            states=self._states(),
            history=history,
            verdict=check(
                history,
                order=self._app.order,
                lanes=self._lanes,
                sent=sent,
                finished=self._sink.undone.union(
                    self._world.duplicates & letters,  # the others are duplicates according to the log
                    # Their redrive may have ended with their topic, when it had passed over them.
                    (place for place in twice.keys() & parked if place[0] < self._world.first),
                    ((d.partition, d.offset) for d in self._sink.dead_letters if d.kind == "dead"),
                ),
                waiting=waiting | self._gone,
                duplicates={place: first for place, first in twice.items() if place not in parked},
                versions=self._sent_versions(),
                stale=self._world.stale,
                redriven=self._world.redriven,
                allow_repeats=self._broken,
            ),
            elapsed=self._now,
            epochs=self._epochs,
        )

    def messages(self) -> dict[Position, MemoryRecord]:
        """All messages of the source by their position in the history, also those of deleted topics."""
        return {
            place: record for topic in (*self._former, self._present()) for place, record in topic.items()
        }

    def _present(self) -> dict[Position, MemoryRecord]:
        """The messages of the present topic."""
        records = self.log.records(self._app.source)
        return {self._world.place(record.partition(), record.offset()): record for record in records}

    def _append(self) -> None:
        """Append what was sent to the source; not what arrives when the source has been created again."""
        source = self._app.source
        ends = next((found.at for found in self._breaks if isinstance(found, Recreate)), None)
        unsent = sorted(self._unsent, key=lambda sent: sent[0])
        self._unsent.clear()
        for each in unsent:
            at, key, value, headers = each
            if ends is not None and max(at, self._now) >= ends:
                self._unsent.append(each)
                continue
            partition = self.log.choose(source, key)
            if self._rng.random() < self._holes:
                self.log.skip(source, partition, self._rng.randint(1, 3))
            record = self.log.append(
                source, key=key, value=value, headers=headers, timestamp=int(at * 1000), partition=partition
            )
            self._arrivals[partition, record.offset()] = at

    def _recreate(self) -> None:
        """Delete the source and create it again."""
        durable = self._world.durable
        parts = {partition: durable.begin(partition) for partition in range(self.log.partitions)}
        present = self._present()
        self._gone.update(
            place
            for place, record in present.items()
            if not parts[record.partition()].was_done(record.key(), record.offset())
        )
        self._former.append(present)
        self._world.recreated()
        self.log.recreate(self._app.source)
        now = asyncio.get_running_loop().time()
        # Commands about messages and versions of the old topic. A redrive is about the dead letters.
        self._actions = deque(
            action for action in self._actions if isinstance(action, Redrive) or action.at >= now
        )
        self._append()

    def _waiting(self) -> set[Position]:
        """Unfinished messages of blocked lanes, and those among the dead letters of parked lanes."""
        redriven = self._world.durable.redriven
        found = {
            (dead.partition, dead.offset)
            for letter, dead in enumerate(self._sink.dead_letters)
            if dead.kind == "parked" and letter not in redriven
        }
        blocked = [record for record in lanes(self._sink) if record.stop is LaneStatus.BLOCKED]
        if not blocked:
            return found
        parts = {partition: self._world.durable.begin(partition) for partition in range(self.log.partitions)}
        for place, sent in self._present().items():
            partition, offset, key = sent.partition(), sent.offset(), sent.key()
            if parts[partition].was_done(key, offset):
                continue
            for record in blocked:
                at = record.partition, record.offset
                same = (partition, offset) == at or (
                    self._behind(record, partition, offset, key) and (partition != at[0] or offset > at[1])
                )
                if same:
                    found.add(place)
                    break
        return found

    def _behind(self, record: LaneRecord, partition: int, offset: int, key: bytes | None) -> bool:
        """True if this message is in the record's lane."""
        known = self._lanes
        place = self._world.place(partition, offset)
        lane = self._app.order.lane_of(key, partition) if known is None else known[place]
        return lane is not None and lane == record.key

    def _states(self) -> dict[bytes, dict[str, Any]]:
        found: dict[bytes, dict[str, Any]] = {}
        for (_, lane, tag), value in self._world.durable.values.items():
            alive = not value.due or value.due > self._now * 1000
            if tag.startswith(VALUE) and value.content is not None and alive:
                found.setdefault(lane, {})[tag.removeprefix(VALUE)] = json.loads(value.content)
        return found

    def _sent_twice(self) -> dict[Position, Position]:
        """Duplicates according to the log. Those that are parked may run in a redrive all the same."""
        twice: dict[Position, Position] = {}
        for topic in (*self._former, self._present()):
            found = Duplicates(self._app.idempotency, self._app.order)
            records = list(topic.values())
            found.arrived(records, [Message(record) for record in records])
            for place, record in topic.items():
                repeats = found.waiting.get((record.partition(), record.offset()))
                if repeats is not None:
                    twice[place] = place[0], repeats
        return twice

    def _sent_versions(self) -> dict[Position, int] | None:
        """Versions according to the log, without messages that have no valid version."""
        if self._app.versions is None:
            return None
        read, decode = reader_of(self._app.versions), decoder(self._app)
        found = {}
        for place, record in self.messages().items():
            message = Message(record)
            with suppress(Exception):
                if decode is not None and message.value is not None:
                    message.value = decode(message.value)
                if (version := read(message)) is not None:
                    found[place] = version
        return found

    async def _run(self) -> None:
        more = True
        while more:
            self._epochs += 1
            self._world.durable.move_values(self.log.partitions)
            more = await self._epoch()
        self._now = asyncio.get_running_loop().time()

    async def _epoch(self) -> bool:
        """Run one epoch of all tasks; True if another one is needed."""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            tasks = [await self._begin(stack, number) for number in range(self._tasks)]
            jobs = [loop.create_task(self._work(tasks))]
            if self._hold_faults:
                self._order_holds(tasks)
                jobs.append(loop.create_task(self._hold(tasks)))
            for task in tasks:
                jobs += [loop.create_task(task.commits()), loop.create_task(task.clerk.run())]
            drain_timeout, recreate = 0.0, False
            try:
                wait = self._breaks[0].at - loop.time() if self._breaks else None
                waiting: list[asyncio.Future[None]] = [*jobs, *(task.engine.failure for task in tasks)]
                over, _ = await asyncio.wait(waiting, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for ended in over:
                    ended.result()
                found = None if over else self._next_break()
                recreate = isinstance(found, Recreate)
                if not isinstance(found, Crash | Recreate):
                    drain_timeout = self._app.drain_timeout
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
                # 0 seconds cancel everything that runs
                await asyncio.gather(*(task.engine.drain(drain_timeout) for task in tasks))
            if drain_timeout:
                await asyncio.gather(*(task.output.letters_answered() for task in tasks))
            for task in reversed(tasks):  # the one that commits the group's offset comes last
                if drain_timeout:
                    await task.commit()
                    task.output.close()
                else:
                    task.output.crash()
        # The clock does not move while a thread runs, so after this sleep all threads of the epoch have ended.
        await asyncio.sleep(1e-6)
        if recreate:
            self._recreate()
        return not over

    async def _begin(self, stack: AsyncExitStack, number: int) -> TaskLife:
        owner = f"epoch-{self._epochs}" if self._tasks == 1 else f"epoch-{self._epochs}/{number}"
        app = replace(self._app, observer=_Owner(self._recorder, owner, self._world.first))
        steps = await stack.enter_async_context(open_pipeline(app))
        slots = Slots(SLOTS * number // self._tasks, SLOTS * (number + 1) // self._tasks - 1)
        plan = dict.fromkeys(range(self.log.partitions), slots)
        return TaskLife(app, steps, self._world, plan, first=not number)

    async def _work(self, tasks: list[TaskLife]) -> None:
        feeds = [task.feed(partition) for task in tasks for partition in task.parts]
        await asyncio.gather(self._act(tasks), *feeds)
        for task in tasks:
            await task.rest()
        if self._unsent:
            await asyncio.Event().wait()  # for the new topic, in which they arrive

    async def _hold(self, tasks: list[TaskLife]) -> None:
        """Pause and resume what the schedule says, until cancelled."""
        loop = asyncio.get_running_loop()
        for at in sorted({at for hold in self._hold_faults for at in (hold.at, hold.at + hold.for_)}):
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
                self._order_holds(tasks)
        await asyncio.Event().wait()

    def _order_holds(self, tasks: list[TaskLife]) -> None:
        now = asyncio.get_running_loop().time() + 1e-9
        scopes = {_scope(hold): hold for hold in self._hold_faults if hold.at <= now < hold.at + hold.for_}
        for task in tasks:
            task.engine.pauses.order(scopes)

    async def _act(self, tasks: list[TaskLife]) -> None:
        """Carry out the operators' commands. The next epoch repeats a command that a crash has cut off."""
        loop = asyncio.get_running_loop()
        while self._actions:
            action = self._actions[0]
            await asyncio.sleep(max(0.0, action.at - loop.time()))
            if isinstance(action, Redrive):
                self._request_redrive(action.key, tasks)
                self._actions.popleft()
                continue
            partition = partition_of(action.key, self.log.partitions)
            task = next(task for task in tasks if task.owns(partition, action.key))
            engine = task.engine
            if isinstance(action, Release | Skip):
                found = engine.stopped_lanes.records.get(action.key)
                if found is not None:  # the message that is blocked at this time
                    act = (
                        engine.stopped_lanes.release
                        if isinstance(action, Release)
                        else engine.stopped_lanes.skip
                    )
                    act(action.key, found.partition, found.offset)
            elif engine.versions is not None:
                name = partition, action.key
                self._world.durable.write_versions({name: engine.versions.reset(*name, action.to)})
            while engine.promised:  # noqa: ASYNC110 - the command counts when its effect is committed
                await asyncio.sleep(0.01)
            self._actions.popleft()

    def _request_redrive(self, key: bytes, tasks: list[TaskLife]) -> None:
        """Record a redrive of this key in each partition that has dead letters of it."""
        first = self._world.first
        partitions = {dead.partition - first for dead in self._sink.dead_letters if dead.key == key}
        partitions = {partition for partition in partitions if partition >= 0}  # not those of deleted topics
        for partition in sorted(partitions | {partition_of(key, self.log.partitions)}):
            self._redrives += 1
            number = b"%d" % self._redrives
            self._sink.notes[partition, REDRIVE + key] = number
            task = next(task for task in tasks if task.owns(partition, key))
            task.clerk.take(partition, key, number)

    def _next_break(self) -> Break:
        found = self._breaks.popleft()
        if not isinstance(found, Recreate):  # after which nothing runs again
            self._broken += 1
        if isinstance(found, Recut):
            self._tasks = found.tasks
        return found


def _check_faults(app: AppSpec, faults: Iterable[Fault]) -> None:
    """Raises :class:`SettingsError` for faults that cannot happen to an app with this order."""
    for fault in faults:
        if isinstance(fault, Recut) and fault.tasks > 1 and not app.order.splittable:
            raise SettingsError(
                f"Harness: {fault} needs an order that can share partitions, got order={app.order!r}"
            )
        if isinstance(fault, Redrive) and app.order.reads_messages:
            raise SettingsError(
                f"Harness: {fault} needs an order by key or partition, got order={app.order!r}"
            )


def _scope(hold: Hold) -> PauseScope:
    if hold.partition is not None:
        return "partition", hold.partition
    if hold.stage is not None:
        return "stage", hold.stage
    return ("app", None) if hold.key is None else ("key", hold.key)


def _pair(seconds: float | tuple[float, float]) -> tuple[float, float]:
    return seconds if isinstance(seconds, tuple) else (seconds, seconds)


def _replaced(app: AppSpec, given: Mapping[str, Any]) -> list[ResourceSpec]:
    for name in given:
        if name not in app.resources:
            known = ", ".join(map(repr, app.resources)) or "none"
            raise SettingsError(f"Harness: app {app.name!r} has no resource {name!r}; it has {known}")
    return [
        ResourceSpec(name=name, function=lambda value=given[name]: value, needs=())
        if name in given
        else resource
        for name, resource in app.resources.items()
    ]


class _Recorder:
    """Records a history and calls the app's observer."""

    def __init__(self, then: Observer | None) -> None:
        self.events: list[HistoryEvent] = []
        self.then = then

    def add(
        self, kind: EventKind, message: Message, attempt: int, outcome: str | None, owner: str, first: int
    ) -> None:
        """Add an event at the present time. ``first`` is the number of the source's first partition."""
        at = asyncio.get_running_loop().time()
        # Events of the same virtual time keep their order: each is at least a nanosecond after the one before.
        seq = max(int(at * 1e9), self.events[-1].seq + 1 if self.events else 0)
        self.events.append(
            HistoryEvent(
                kind, message.key, first + message.partition, message.offset, attempt, owner, at, seq, outcome
            )
        )


class _Owner:
    """Observer of one task."""

    def __init__(self, recorder: _Recorder, owner: str, first: int) -> None:
        self._recorder = recorder
        self._owner = owner
        self._first = first

    def started(self, message: Message, attempt: int) -> None:
        self._recorder.add(EventKind.START, message, attempt, None, self._owner, self._first)
        if self._recorder.then is not None:
            self._recorder.then.started(message, attempt)

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        self._recorder.add(EventKind.END, message, attempt, str(outcome), self._owner, self._first)
        if self._recorder.then is not None:
            self._recorder.then.ended(message, attempt, outcome)
