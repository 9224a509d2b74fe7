"""The ring: every key has a slot, and a task owns slots of partitions.

A partition whose slots are shared out between several tasks is read by each of them, and each runs its own slots only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOTS = 65_536
_SPREAD = 40_503
"""Odd, and about SLOTS divided by the golden ratio: offsets that follow each other land far apart."""


def slot_of(key: bytes | None, offset: int) -> int:
    """A key's slot; a message without a key has one of its own, by its offset."""
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
            raise ValueError(f"no slots: {self.first} to {self.last} (there are 0 to {SLOTS - 1})")

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
        """The slots that are in both."""
        return (
            Slots(max(self.first, other.first), min(self.last, other.last)) if self.overlaps(other) else None
        )

    def without(self, others: Iterable[Slots]) -> list[Slots]:
        """What is left of these slots, ascending."""
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
