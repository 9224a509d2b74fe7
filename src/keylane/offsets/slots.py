"""Slots: every key maps to a slot of its partition's ring, and a task owns ranges of slots.

If several tasks share a partition, each of them reads all of it and runs only its own slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOTS = 65_536
_SPREAD = 40_503
"""Odd, and about SLOTS divided by the golden ratio, so that successive offsets are far apart."""


def slot_of(key: bytes | None, offset: int) -> int:
    """The slot of a key; a message without a key gets its slot by its offset."""
    if key is None:
        return offset * _SPREAD % SLOTS
    return int.from_bytes(blake3(key).digest(2), "little")


@dataclass(frozen=True, slots=True, order=True)
class Slots:
    """The slots from ``first`` to ``last``, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last < SLOTS:
            raise ValueError(f"expected slots between 0 and {SLOTS - 1}, got {self.first} to {self.last}")

    def __contains__(self, slot: int) -> bool:
        return self.first <= slot <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @classmethod
    def parse(cls, text: str) -> Slots:
        """The reverse of ``str``. Raises ValueError."""
        first, last = text.split("-")
        return cls(int(first), int(last))

    def overlaps(self, other: Slots) -> bool:
        """Whether they have a slot in common."""
        return self.first <= other.last and other.first <= self.last

    def common(self, other: Slots) -> Slots | None:
        """The slots in both; None if there are none."""
        return (
            Slots(max(self.first, other.first), min(self.last, other.last)) if self.overlaps(other) else None
        )

    def without(self, others: Iterable[Slots]) -> list[Slots]:
        """The rest of these slots without the others, ascending."""
        left, begin = [], self.first
        for other in sorted(others):
            if other.last < begin or other.first > self.last:
                continue
            if other.first > begin:
                left.append(Slots(begin, other.first - 1))
            begin = other.last + 1
        if begin <= self.last:
            left.append(Slots(begin, self.last))
        return left


ALL = Slots(0, SLOTS - 1)
