"""Letters on their way back into their lanes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.engine.delivery import FailureState
from keylane.message import Message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.message import Record


_OFFER_SECONDS = 0.02
"""Between two looks whether reading has come to the next letter's place."""


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

    Call :meth:`StoppedLanes.begin_redrive` for the lanes before reading the letters, and end it when all have run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left: set[Delivery] = set()
        self._through: asyncio.Future[None] | None = None

    async def wait_until_quiet(self, keys: Collection[bytes]) -> None:
        """Wait until nothing of these lanes is on its way to the dead letters: then all their letters are there."""
        stopped_lanes = self._engine.stopped_lanes
        while not all(stopped_lanes.is_quiet(key) for key in keys):  # noqa: ASYNC110 - seldom, and soon over
            await asyncio.sleep(0.02)
        for key in keys:
            stopped_lanes.restart_redrive(key)

    def ran_before(self, record: Record) -> None:
        """Note a letter that was redriven, maybe in an earlier task: a letter that repeats its event does not run."""
        self._engine.duplicates.came_through(Message(record))

    async def run(self, found: Iterable[RedriveItem]) -> list[Delivery]:
        """Run these letters and wait until all of them are done.

        Each lane's run in the order of their source, and those of a former source before them.
        """
        lanes: dict[bytes | None, list[Delivery]] = {}
        for one in sorted(
            found, key=lambda one: (one.in_source, one.record.partition(), one.record.offset())
        ):
            delivery = self._engine.make(one.record)
            failure_state = delivery.failure_state = FailureState()
            failure_state.letter, failure_state.redrives = one.letter, one.redrives + 1
            failure_state.in_source = one.in_source
            lanes.setdefault(self._engine.lane_key(delivery.key, delivery.partition), []).append(delivery)
        all_ = [delivery for lane in lanes.values() for delivery in lane]
        if not all_:
            return all_
        self._left = set(all_)
        self._through = asyncio.get_running_loop().create_future()
        stopped_lanes = self._engine.stopped_lanes
        for key, deliveries in lanes.items():
            stopped_lanes.redrive(key, deliveries)
        while not self._through.done():
            await asyncio.wait([self._through], timeout=_OFFER_SECONDS)
            for key in lanes:
                if key is not None and stopped_lanes.redriving[key].waits:
                    stopped_lanes.offer(key)
        return all_

    def done(self, delivery: Delivery) -> None:
        """A redriven message is done; also one that stays parked."""
        self._left.discard(delivery)
        if not self._left and self._through is not None and not self._through.done():
            self._through.set_result(None)
