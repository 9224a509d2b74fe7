"""What follows the ranges of a worker."""

from __future__ import annotations

from typing import Any

from keylane.offsets.slots import ALL, SLOTS, Slots
from keylane.worker.range_member import RateShare


class Engine:
    """Remembers the shares."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def change_share(self, share: float) -> None:
        self.shares.append(share)


def test_rate_share_is_the_part_of_all_slots() -> None:
    engine: Any = Engine()
    slots = {0: ALL}
    rates = RateShare(engine, slots, partitions=4)
    rates.take({0: ALL})
    slots[1] = Slots(0, SLOTS // 2 - 1)
    rates.take({1: slots[1]})
    del slots[0]
    rates.release({0: ALL})
    rates.plan(8)
    assert engine.shares == [1 / 4, 3 / 8, 1 / 8, 1 / 16]
