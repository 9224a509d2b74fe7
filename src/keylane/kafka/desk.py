"""Carries out what operators order, in the task that owns the lane: release, skip, redrive."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from keylane.core.outcome import Outcome
from keylane.core.ranges import Ranges
from keylane.core.ring import ALL
from keylane.engine.redrive import Found, Redriver
from keylane.errors import KeylaneError
from keylane.kafka.letter import Kind, Letter, LetterRecord
from keylane.kafka.letters import Repeats, read_letters
from keylane.kafka.orders import audit_name
from keylane.kafka.state import REDRIVEN, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from keylane.app import App
    from keylane.core.ring import Slots
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.kafka.letter import Unreadable
    from keylane.kafka.orders import Order
    from keylane.kafka.output import KafkaOutput
    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.task")

_AT_ONCE = 1000
"""Letters that are redriven at once, at most: they are held in memory."""
_AGAIN = 5.0


class Desk:
    """One task's. Used on its loop's thread.

    ``redriven`` are the letters that were redriven, by partition, as the state topic says. ``cuts`` are the task's
    slots of partitions that are shared out.
    """

    def __init__(
        self,
        engine: Engine,
        output: KafkaOutput,
        settings: KafkaSettings,
        app: App,
        owner: str,
        redriven: dict[int, Ranges],
        cuts: Mapping[int, Slots],
        wall: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._output = output
        self._settings = settings
        self._app = app
        self._owner = owner
        self._cuts = cuts
        self._wall = wall
        self._redriver = Redriver(engine)
        self._redriven = dict(redriven)  # its own: the state's follows the topic, which lags behind
        self._changed: set[int] = set()  # partitions whose redriven letters are not written down
        self._orders: dict[tuple[int, bytes], Order] = {}  # to redrive, by partition and name
        self._awake = asyncio.Event()
        self.before_letters: Callable[[], None] = lambda: None
        """Called before it is noted which letters were redriven, in the same transaction."""

    def take(self, order: Order) -> None:
        """Carry out an order, or begin to."""
        stops = self._engine.stops
        if order.do == "redrive":
            self._orders[order.partition, order.name] = order
            begun = json.dumps({"owner": self._owner, "at": self._wall()}).encode()
            self._output.note(order.partition, audit_name(order.id, begun=True), begun, _unheard)
            lane = self._lane(order)
            if lane is not None:
                stops.hold(lane)
            self._awake.set()
            return
        problem = stops.release(order.lane) if order.do == "release" else stops.skip(order.lane)
        log.warning("%s by %s of lane %r: %s", order.do, order.who, order.lane, problem or "done")
        self._answer(order, problem or "done", ok=problem is None)

    def _lane(self, order: Order) -> bytes | None:
        return self._engine.lane_key(order.key, order.partition)

    @property
    def idle(self) -> bool:
        """Whether nothing is to be redriven."""
        return not self._orders

    def done(self, delivery: Delivery) -> None:
        """A redriven message is done."""
        assert delivery.trouble is not None  # noqa: S101 - redriven messages have a letter
        assert delivery.trouble.letter is not None  # noqa: S101
        if delivery.outcome is not Outcome.PARKED:
            self._mark(delivery.partition, delivery.trouble.letter)
        self._redriver.done(delivery)

    def write_down(self) -> None:
        """Note which letters were redriven, where that has changed."""
        if self._app.commit == "epoch":  # it is proposed with the epoch's progress
            return
        changed, self._changed = self._changed, set()
        if changed:
            self.before_letters()
        for partition in sorted(changed):

            def written(problem: str | None, partition: int = partition) -> None:
                if problem is not None:
                    self._changed.add(partition)

            name = part_of(REDRIVEN, self._cuts.get(partition, ALL))
            self._output.note(partition, name, self._redriven[partition].encode(), written)

    def redriven(self, partition: int) -> str:
        """Which letters were redriven, as text."""
        found = self._redriven.get(partition)
        return "" if found is None else found.encode().decode()

    async def run(self) -> None:
        """For ever: redrive what is ordered. Cut off anywhere, the order stands and the next task goes on with it."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            by_partition: dict[int, list[Order]] = {}
            for order in self._orders.values():
                by_partition.setdefault(order.partition, []).append(order)
            for partition, orders in by_partition.items():
                try:
                    await self._redrive(partition, orders)
                except KeylaneError as error:
                    log.warning("redrive of partition %d: %s; tried again in %g s", partition, error, _AGAIN)
                    await asyncio.sleep(_AGAIN)
                    self._awake.set()

    async def _redrive(self, partition: int, orders: list[Order]) -> None:
        stops = self._engine.stops
        keys = [lane for order in orders if (lane := self._lane(order)) is not None]
        await self._redriver.settled(keys)
        parked = stops.held_parked & set(keys)
        by_key = {order.key: order for order in orders}
        counts: dict[bytes | None, Counter[Outcome]] = {order.key: Counter() for order in orders}
        repeats = Repeats()
        letters = await asyncio.to_thread(read_letters, self._settings, self._app.dlq, partitions=[partition])
        wanted = self._wanted(letters, partition, by_key, repeats)
        while chunk := await asyncio.to_thread(lambda: list(islice(wanted, _AT_ONCE))):
            found = []
            for letter in chunk:
                if letter.key in parked and letter.key not in stops.held_parked:
                    counts[letter.key][Outcome.PARKED] += (
                        1  # one before it failed again: it stays where it lies
                    )
                else:
                    record = LetterRecord(letter)
                    found.append(Found(letter=letter.offset, record=record, redrives=letter.redrives))
            for delivery in await self._redriver.run(found):
                counts[delivery.key][delivery.outcome] += 1
        self.write_down()
        for order in orders:
            count = counts[order.key]
            if self._orders.get((order.partition, order.name)) is order:
                del self._orders[order.partition, order.name]
                lane = self._lane(order)
                if lane is not None and lane not in map(self._lane, self._orders.values()):
                    stops.let_go(lane)
            left = count[Outcome.DEAD] + count[Outcome.PARKED]
            through = count[Outcome.OK] + count[Outcome.DUPLICATE] + count[Outcome.IGNORED]
            result = (
                f"{through} through, {count[Outcome.DEAD]} dead again, {count[Outcome.PARKED]} still parked"
            ) + (f", {count[Outcome.STALE]} stale" if count[Outcome.STALE] else "")
            log.warning("redrive by %s of lane %r: %s", order.who, order.key, result)
            self._answer(order, result, ok=not left)

    def _wanted(
        self,
        letters: Iterator[Letter | Unreadable],
        partition: int,
        by_key: dict[bytes | None, Order],
        repeats: Repeats,
    ) -> Iterator[Letter]:
        """The letters to redrive; one that stands there again, redriven or not, is not another one."""
        redriven = self._redriven.setdefault(partition, Ranges())
        chosen = {
            key: None if order.letters is None else frozenset(order.letters) for key, order in by_key.items()
        }
        for letter in letters:
            if not isinstance(letter, Letter) or letter.kind is Kind.ARCHIVED or letter.key not in chosen:
                continue
            seen = repeats.seen(letter)
            of_lane = chosen[letter.key]
            if letter.offset in redriven or (of_lane is not None and letter.offset not in of_lane):
                continue
            if seen:
                self._mark(partition, letter.offset)
            else:
                yield letter

    def _mark(self, partition: int, letter: int) -> None:
        self._redriven.setdefault(partition, Ranges()).add(letter)
        self._changed.add(partition)

    def _answer(self, order: Order, result: str, *, ok: bool) -> None:
        answer = {"result": result, "ok": ok, "owner": self._owner, "at": self._wall()}
        self._output.note(
            order.partition, audit_name(order.id, done=True), json.dumps(answer).encode(), _unheard
        )
        if (
            order.partition,
            order.name,
        ) not in self._orders:  # else a newer order of this lane stands there by now
            self._output.note(order.partition, order.name, None, _unheard)


def _unheard(problem: str | None) -> None:
    if problem is not None:
        log.warning("an answer to an operator could not be written: %s", problem)
