"""Letters on their way back into their lanes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.engine.delivery import FailureState
from keylane.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable

    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.message import Record

    DoneLanes = dict[bytes | None, list[Delivery]]
    """Lanes, and their letters that were redriven; with None those that have no lane."""


_OFFER_SECONDS = 0.02
"""Between two looks whether reading has come to the next letter's place."""
_STALLED_SECONDS = 1.0
"""Without a letter that is done, after which the next round of redrives begins."""
_DONE_SECONDS = 0.5
"""Between two looks which lanes are done, while others are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveItem:
    """A letter to be redriven: its place among the dead letters, and the message that it was."""

    letter: int
    record: Record
    redrives: int
    """How often it was redriven before."""
    in_source: bool = True
    """True if the message came from the current source topic. If not, its offset means nothing here."""


class Redriver:
    """Runs letters of one engine again. Used on its loop only.

    Call :meth:`StoppedLanes.begin_redrive` for the lanes before reading the letters. End it for each lane when all its
    letters have run: others may wait until reading has come to their place, and nothing is read when the messages of
    waiting lanes fill the task.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left: set[Delivery] = set()
        self._through: asyncio.Future[None] | None = None
        self._moved: float | None = None  # when something last moved; None while the letters are looked for

    @property
    def stalled(self) -> bool:
        """Whether nothing has moved for a while: its letters wait for their place in the log, or are retried."""
        return self._moved is not None and asyncio.get_running_loop().time() - self._moved >= _STALLED_SECONDS

    async def wait_until_quiet(self, keys: Collection[bytes]) -> None:
        """Wait until nothing of these lanes is on its way to the dead letters: then all their letters are there."""
        self._moved = asyncio.get_running_loop().time()
        stopped_lanes = self._engine.stopped_lanes
        while not all(stopped_lanes.is_quiet(key) for key in keys):  # noqa: ASYNC110 - seldom, and soon over
            await asyncio.sleep(0.02)
        for key in keys:
            stopped_lanes.restart_redrive(key)
        self._moved = None

    def ran_before(self, record: Record) -> None:
        """Note a letter that was redriven, maybe in an earlier task: a letter that repeats its event does not run."""
        self._engine.duplicates.came_through(Message(record))

    async def run(self, found: Iterable[RedriveItem], on_done: Callable[[DoneLanes], None]) -> None:
        """Run these letters and wait until all of them are done.

        Each lane's run in the order of their source, and those of a former source before them.

        ``on_done`` is called with the lanes whose letters are all done: with each of them once, and with several when
        they are done within :data:`_DONE_SECONDS`.
        """
        lanes: DoneLanes = {}
        for one in sorted(
            found, key=lambda one: (one.in_source, one.record.partition(), one.record.offset())
        ):
            delivery = self._engine.make(one.record)
            failure_state = delivery.failure_state = FailureState()
            failure_state.letter, failure_state.redrives = one.letter, one.redrives + 1
            failure_state.in_source = one.in_source
            lanes.setdefault(self._engine.lane_key(delivery.key, delivery.partition), []).append(delivery)
        if not lanes:
            return
        loop, stopped_lanes = asyncio.get_running_loop(), self._engine.stopped_lanes
        self._left = {delivery for deliveries in lanes.values() for delivery in deliveries}
        self._through = loop.create_future()
        for key, deliveries in lanes.items():
            stopped_lanes.redrive(key, deliveries)
        looked = self._moved = loop.time()
        while lanes:
            await asyncio.wait([self._through], timeout=_OFFER_SECONDS)
            if self._through.done() or loop.time() - looked >= _DONE_SECONDS:
                looked = loop.time()
                done = {key: each for key, each in lanes.items() if self._left.isdisjoint(each)}
                lanes = {key: each for key, each in lanes.items() if key not in done}
                if done:
                    on_done(done)
            for key in lanes:
                if key is not None and stopped_lanes.redriving[key].waits:
                    stopped_lanes.offer(key)
        self._moved = None

    def done(self, delivery: Delivery) -> None:
        """A redriven message is done; also one that stays parked."""
        if delivery not in self._left:
            return
        self._left.remove(delivery)
        self._moved = asyncio.get_running_loop().time()
        if not self._left and self._through is not None and not self._through.done():
            self._through.set_result(None)


class RedriveRounds:
    """Carries out redrives in rounds, each for the commands that have come by then. Used on the engine's loop only.

    The letters are read once for each round. So the next round begins when the one before it is over; or when that one
    has stalled, because all lanes of the next round wait already, and may fill the task so that nothing is read.

    ``begin(redriver)`` takes the commands of the next round and returns what carries them out; None when there is none.
    """

    def __init__(
        self, engine: Engine, begin: Callable[[Redriver], Coroutine[None, None, None] | None]
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._rounds: dict[asyncio.Task[None], Redriver] = {}
        self._awake = asyncio.Event()

    def look(self) -> None:
        """There are commands, or lanes that may be redriven again."""
        self._awake.set()

    def done(self, delivery: Delivery) -> None:
        """A redriven message is done; also one that stays parked."""
        for redriver in self._rounds.values():
            redriver.done(delivery)

    async def run(self) -> None:
        """Carry out rounds until cancelled."""
        try:
            while True:
                self._awake.clear()
                if all(redriver.stalled for redriver in self._rounds.values()):
                    self._begin_next()
                # Without a round there is no timer, or the loop could not detect that nothing can continue.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STALLED_SECONDS / 2 if self._rounds else None):
                        await self._awake.wait()
                for ended in [task for task in self._rounds if task.done()]:
                    del self._rounds[ended]
                    ended.result()
        finally:
            for task in self._rounds:
                task.cancel()
            await asyncio.gather(*self._rounds, return_exceptions=True)

    def _begin_next(self) -> None:
        redriver = Redriver(self._engine)
        work = self._begin(redriver)
        if work is not None:
            task = asyncio.get_running_loop().create_task(work)
            self._rounds[task] = redriver
            task.add_done_callback(lambda _task: self._awake.set())
