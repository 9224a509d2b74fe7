"""One task of a run of the harness, from its restore to its drain or crash."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from math import inf, nextafter
from typing import TYPE_CHECKING

from keylane.engine.engine import Engine
from keylane.engine.lane_state import TIMER, MemoryValues
from keylane.engine.redrive import RedriveItem, RedriveRounds
from keylane.engine.version_store import Moves
from keylane.lanes.lane_record import KEYLESS, LANE, LaneStatus, decode_lane
from keylane.offsets.range_progress import RangeWatermark
from keylane.offsets.slots import SLOTS
from keylane.outcome import Outcome

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.redrive import Redriver
    from keylane.engine.stages import Step
    from keylane.lanes.lane_record import LaneRecord
    from keylane.message import Record
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.testing.checker import Position
    from keylane.testing.durable import DurablePart, DurableState
    from keylane.testing.log import MemoryLog, MemoryRecord
    from keylane.testing.sink import Dead, MemorySink

_TIMER_SECONDS = 0.05
"""Between two looks whether a timer that is due has fired."""
REDRIVE = b"redrive/"
"""Prefix of unfinished redrive commands in the state topic."""


@dataclass(slots=True, kw_only=True)
class World:
    """State that all tasks of a run share."""

    log: MemoryLog
    durable: DurableState
    sink: MemorySink
    rng: random.Random
    reading: tuple[float, float]
    arrivals: dict[Position, float] = field(default_factory=dict)
    duplicates: set[Position] = field(default_factory=set)
    stale: set[Position] = field(default_factory=set)
    redriven: set[Position] = field(default_factory=set)
    """Redriven dead letters, without which their lanes had continued."""
    until: float = nextafter(inf, 0)
    """Timers that are due later do not fire."""
    first: int = 0
    """The number of the source's first partition in the history: partitions of deleted topics come before it."""

    def place(self, partition: int, offset: int) -> Position:
        """The position in the history of a message of the present topic."""
        return self.first + partition, offset

    def recreated(self) -> None:
        """The source topic was created again."""
        self.first += self.log.partitions
        self.durable = self.durable.of_new_source()
        self.sink.recreated(self.first)
        self.arrivals.clear()


class TaskLife:
    """A task that owns parts of partitions. The ``first`` task of an epoch commits the group's offset."""

    def __init__(
        self, app: AppSpec, steps: Sequence[Step], world: World, plan: dict[int, Slots], *, first: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self._app = app
        self._world = world
        self._first = first
        self.output = world.sink.of_task()
        self.parts = {p: world.durable.begin(p, slots) for p, slots in plan.items()}
        self._away = dict.fromkeys(self.parts, 0)  # evicted: the engine keeps only their offsets
        self._moved, self._progressed = asyncio.Event(), asyncio.Event()
        moves = Moves(world.log.partitions, plan, recent=3)  # few enough that its file is used
        for written, ((partition, key), found) in enumerate(world.durable.versions.items()):
            moves.put(partition, key, found, written)
        for partition, part in self.parts.items():
            moves.store.set_back(partition, part.mark.value, part.was_done)
        self.engine = Engine(
            app,
            steps,
            self.output,
            on_done=self._done,
            fetch=self._fetch,
            let_go=self._evicted,
            progress=lambda partition: self.parts[partition].mark.progress(),
            read_to=self._read_to,
            store=moves.store,
            values=MemoryValues(world.durable.values, self.owns),
            wall=loop.time,
            rng=world.rng.random,
            share=sum(map(len, plan.values())) / (SLOTS * world.log.partitions),
            source_id=f"recreated-{world.first}" if world.first else "",
        )
        self.clerk = CommandClerk(self, app, world)
        redrives = self._redrives()
        redriving = [self.engine.lane_key(key, partition) for partition, key in redrives]
        self.engine.restore(
            world.durable.kept(self.parts.values()),
            self._lanes(),
            [lane for lane in redriving if lane is not None],
        )
        for (partition, key), number in redrives.items():
            self.clerk.take(partition, key, number)

    def owns(self, partition: int, key: bytes | None, offset: int = 0) -> bool:
        """True if this task runs the message's lane."""
        part = self.parts.get(partition)
        return part is not None and part.owns(key, offset)

    async def feed(self, partition: int) -> None:
        """Pass the messages of a partition to the engine as they arrive, within its share of ``max_buffered``."""
        loop, world, part = asyncio.get_running_loop(), self._world, self.parts[partition]
        share = max(1, self._app.max_buffered // world.log.partitions)
        mark, arrivals = part.mark, world.arrivals
        begin, rule = mark.value, self._app.idempotency
        start = begin if rule is None else rule.since(begin)
        records = world.log.records(self._app.source, partition, start=start)
        if world.reading[1]:
            await asyncio.sleep(world.rng.uniform(*world.reading))
        place, end = 0, len(records)
        while place < end:
            now = loop.time()
            wait = arrivals[partition, records[place].offset()] - now
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            room = share - mark.pending + self._away[partition]
            if room <= 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            upto = place + 1
            while upto < min(end, place + room) and arrivals[partition, records[upto].offset()] <= now:
                upto += 1
            self._take(part, records[place:upto], begin)
            place = upto

    def _take(self, part: DurablePart, records: list[MemoryRecord], begin: int) -> None:
        mark = part.mark
        fresh: list[Record] = []
        for record in mark.own(records) if isinstance(mark, RangeWatermark) else records:
            offset = record.offset()
            if offset < begin or (mark.restoring and not mark.wanted(offset)):
                self._accept(part, fresh)
                fresh = []
                self.engine.note_done_before([record])
            else:
                fresh.append(record)
        self._accept(part, fresh)
        mark.reach(records[-1].offset() + 1)

    def _accept(self, part: DurablePart, records: list[Record]) -> None:
        if records:
            part.mark.deliver([record.offset() for record in records])
            self.engine.accept(records)

    async def rest(self) -> None:
        """Wait until all messages and all redrives are done."""
        while True:
            await self.clerk.rest()
            await self.engine.finish()
            if self.clerk.idle and not await self._wait_for_timer():
                return

    async def _wait_for_timer(self) -> bool:
        """Wait until the next timer is due; False if there is none, or none that can fire before the run ends."""
        timers = self.engine.timers
        if timers is None:
            return False
        await self.commit()
        due = min(
            (
                value.due / 1000
                for (partition, lane, tag), value in self._world.durable.values.items()
                if tag.startswith(TIMER) and self.owns(partition, lane) and not timers.is_held_back(lane)
            ),
            default=inf,
        )
        if due > self._world.until:
            return timers.in_flight > 0
        await asyncio.sleep(max(_TIMER_SECONDS, due - asyncio.get_running_loop().time()))
        return True

    async def commits(self) -> None:
        """Commit changes until cancelled."""
        while True:
            # Without progress there is no timer, or the loop could not detect that nothing can continue.
            await self._progressed.wait()
            self._progressed.clear()
            await asyncio.sleep(self._app.commit_interval)
            await self.commit()

    async def commit(self) -> None:
        """Commit the finished messages, and wait until the commit is durable."""
        await self.output.commit(self._snapshot)
        self.engine.stopped_lanes.committed(self._is_committed)

    def write_down(self) -> None:
        """Record the redriven dead letters, and versions whose offsets are committed.

        Not for an app with states: there a commit has recorded them, with what the letters have changed.
        """
        engine, durable = self.engine, self._world.durable
        if engine.states is not None:
            return
        changed = {} if engine.versions is None else engine.versions.changed()
        versions = {name: mark for name, mark in changed.items() if self._is_committed(name[0], mark.offset)}
        redriven = frozenset(self.clerk.redriven)

        def write() -> None:
            durable.write_versions(versions)
            durable.redriven.update(redriven)

        self.output.put(write)

    def _snapshot(self) -> Callable[[], None]:
        engine, durable = self.engine, self._world.durable
        engine.settle()
        kept = engine.kept()
        writes = [
            durable.progress(part, kept.get(partition, {}), leads=self._first)
            for partition, part in self.parts.items()
        ]
        versions = {} if engine.versions is None else engine.versions.changed()
        states = {} if engine.states is None else engine.states.changed()
        redriven = frozenset(self.clerk.redriven)

        def write() -> None:
            for each in writes:
                each()
            if engine.states is not None:
                engine.states.written(states)
            durable.write_versions(versions)
            if engine.versions is not None:
                engine.versions.written(versions)
            durable.redriven.update(redriven)

        return write

    def _read_to(self, partition: int) -> int | None:
        part = self.parts.get(partition)
        return None if part is None else part.mark.position

    def _is_committed(self, partition: int, offset: int) -> bool:
        written = self.parts[partition].written
        return written is not None and written.is_done(offset)

    def _done(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            failure_state = delivery.failure_state
            if delivery.outcome is Outcome.DUPLICATE:
                self._world.duplicates.add(self._world.place(delivery.partition, delivery.offset))
            elif delivery.outcome is Outcome.STALE:
                self._world.stale.add(self._world.place(delivery.partition, delivery.offset))
            if failure_state is None or failure_state.letter is None:
                self.parts[delivery.partition].mark.done([delivery.offset])
            else:
                self.clerk.done(delivery)
        self._moved.set()
        self._progressed.set()

    def _evicted(self, partition: int, count: int, _size: int) -> None:
        self._away[partition] += count
        self._moved.set()

    def _fetch(self, ticket: int, partition: int, offsets: Sequence[int]) -> None:
        """Fetch evicted messages again."""
        wanted = set(offsets)
        records = [
            record
            for record in self._world.log.records(self._app.source, partition, start=min(wanted))
            if record.offset() in wanted
        ]
        asyncio.get_running_loop().call_later(0.01, self.engine.returned, ticket, records, 0)

    def _lanes(self) -> list[LaneRecord]:
        """Recorded lanes of earlier tasks, without those whose message is done."""
        return [
            record
            for record in lanes(self._world.sink)
            if self.owns(record.partition, record.key, record.offset)
            and (
                record.stop is LaneStatus.PARKED
                or not self.parts[record.partition].was_done(record.key, record.offset)
            )
        ]

    def _redrives(self) -> dict[tuple[int, bytes], bytes]:
        return {
            (partition, key): number
            for (partition, name), number in self._world.sink.notes.items()
            if name.startswith(REDRIVE) and self.owns(partition, key := name.removeprefix(REDRIVE))
        }


class CommandClerk:
    """Carries out the redrives of one task, as :class:`keylane.worker.commands.CommandExecutor` does in production."""

    def __init__(self, life: TaskLife, app: AppSpec, world: World) -> None:
        self.redriven: set[int] = set()
        """Dead letters that were redriven here."""
        self._life = life
        self._app = app
        self._world = world
        self._rounds = RedriveRounds(life.engine, self._begin)
        self.run = self._rounds.run
        self._commands: dict[tuple[int, bytes], bytes] = {}
        self._running: set[tuple[int, bytes]] = set()
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def take(self, partition: int, key: bytes, number: bytes) -> None:
        """Begin a redrive. The command stays recorded until it was carried out, so the next task continues it."""
        self._commands[partition, key] = number
        lane = self._life.engine.lane_key(key, partition)
        if lane is not None:
            self._life.engine.stopped_lanes.begin_redrive(lane)
        self._at_rest.clear()
        self._rounds.look()

    @property
    def idle(self) -> bool:
        """True without an unfinished redrive."""
        return not self._commands

    async def rest(self) -> None:
        """Wait until all redrives are done."""
        await self._at_rest.wait()

    def done(self, delivery: Delivery) -> None:
        """Note that a redriven message is done."""
        if delivery.outcome is not Outcome.PARKED:
            self.redriven.add(delivery.failure_state.letter)  # type: ignore[union-attr,arg-type]  # it has a letter
        self._rounds.done(delivery)

    def _begin(self, redriver: Redriver) -> Coroutine[None, None, None] | None:
        """The next round: commands of one partition whose lanes are not redriven now."""
        busy = {self._place(*name) for name in self._running}
        names = [name for name in self._commands if self._place(*name) not in busy]
        if not names:
            return None
        partition = names[0][0]
        commands = {name[1]: self._commands[name] for name in names if name[0] == partition}
        self._running |= {(partition, key) for key in commands}
        return self._redrive(redriver, partition, commands)

    def _place(self, partition: int, key: bytes) -> bytes | int:
        """The lane, which letters of several partitions may share; else the partition."""
        lane = self._life.engine.lane_key(key, partition)
        return partition if lane is None else lane

    async def _redrive(self, redriver: Redriver, partition: int, commands: dict[bytes, bytes]) -> None:
        engine, world = self._life.engine, self._world
        stops = engine.stopped_lanes
        lane_of = partial(engine.lane_key, partition=partition)
        keys = [lane for key in commands if (lane := lane_of(key)) is not None]
        await redriver.wait_until_quiet(keys)
        if self._app.delivery == "exactly_once":
            await self._life.commit()  # dead letters are visible when their transaction is committed
        letters = list(world.sink.dead_letters)
        if world.reading[1]:
            await asyncio.sleep(world.rng.uniform(*world.reading))
        found = [
            letter
            for letter in self._wanted(redriver, letters, partition, commands)
            if not stops.is_over(lane_of(letter.record.key()))
        ]
        with_letters = {lane_of(letter.record.key()) for letter in found}
        ends: list[asyncio.Future[None]] = []

        def end(lanes: Collection[bytes | None]) -> None:
            if engine.states is None:
                self._end(partition, commands, lanes)
            else:
                ends.append(asyncio.ensure_future(self._end_committed(partition, commands, list(lanes))))

        end({lane_of(key) for key in commands} - with_letters)
        try:
            await redriver.run(found, end)
            await asyncio.gather(*ends)
        finally:
            for each in ends:
                each.cancel()

    async def _end_committed(
        self, partition: int, commands: dict[bytes, bytes], lanes: Collection[bytes | None]
    ) -> None:
        """End these lanes' redrives when what their letters have changed is committed."""
        await self._life.commit()
        self._end(partition, commands, lanes)

    def _end(self, partition: int, commands: dict[bytes, bytes], lanes: Collection[bytes | None]) -> None:
        """All letters of these lanes are done: end their redrives, and their commands unless they were given again."""
        self._life.write_down()  # before the commands are deleted
        engine = self._life.engine
        ended = {key: lane for key in commands if (lane := engine.lane_key(key, partition)) in lanes}
        for key in ended:
            self._running.discard((partition, key))
            if self._commands.get((partition, key)) == commands[key]:
                del self._commands[partition, key]
        wanted = {self._place(*name) for name in self._commands}
        for lane in dict.fromkeys(ended.values()):
            if lane is not None and lane not in wanted:
                engine.stopped_lanes.end_redrive(lane)
        for key in ended:
            self._life.output.delete(partition, REDRIVE + key, commands[key])
        if not self._commands:
            self._at_rest.set()
        self._rounds.look()

    def _wanted(
        self, redriver: Redriver, letters: list[Dead], partition: int, keys: dict[bytes, bytes]
    ) -> list[RedriveItem]:
        """The dead letters to redrive. A repeated dead letter counts once, and of a message only the newest one."""
        found = []
        repeats: set[tuple[int, int, str]] = set()
        relevant = [
            (place, dead)
            for place, dead in enumerate(letters)
            if dead.key in keys and self._is_in(partition, dead) and dead.kind != "archived"
        ]
        newest: dict[int, int] = {}
        for _, dead in relevant:
            newest[dead.offset] = max(dead.redrives, newest.get(dead.offset, 0))
        for place, dead in relevant:
            identity = dead.offset, dead.redrives, dead.kind
            seen = identity in repeats
            repeats.add(identity)
            record = self._world.log.records(self._app.source, partition, start=dead.offset)[0]
            if place in self.redriven or place in self._world.durable.redriven:
                if not seen:  # a dead letter with the same event id may still be there
                    redriver.ran_before(record)
                continue
            if seen or dead.redrives < newest[dead.offset]:
                self.redriven.add(place)
                continue
            if dead.kind == "dead":
                self._world.redriven.add(self._world.place(partition, dead.offset))
            found.append(RedriveItem(letter=place, record=record, redrives=dead.redrives))
        return found

    def _is_in(self, partition: int, dead: Dead) -> bool:
        """True if the dead letter is of this partition of the present topic."""
        return dead.partition == self._world.first + partition


def lanes(sink: MemorySink) -> list[LaneRecord]:
    """Stopped lanes according to the state topic."""
    return [
        decode_lane(name, partition, value)
        for (partition, name), value in sink.notes.items()
        if name.startswith((LANE, KEYLESS))
    ]
