"""Hot keys: the few that much of what arrives belongs to, found in bounded memory.

The summary of Misra and Gries, cut in bulk. It keeps a count for each of some keys; when there are twice as many as it
may keep, the count of the largest that has no place is taken off all of them, and those with nothing left go. Of a
thousand new keys that costs one sort instead of a thousand searches for the smallest. What was taken off is known: a
key's true count is between what is kept and that much more, and a key with more than its share of the places is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    K = TypeVar("K", bound=Hashable)
else:
    K = TypeVar("K")

PLACES = 256
"""Keys that are kept for certain: all that make up more than one message in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotKey:
    """One key that much of what arrives belongs to, as a task sees it. A snapshot."""

    key: bytes
    partition: int
    share: float
    """Of the messages that the task has lately read, 0 to 1. It may be more, by less than one in :data:`PLACES`."""
    waiting: int
    """Messages that wait in its lane now, those of which only the offsets are kept included."""


class Summary(Generic[K]):
    """Counts names, of which there may be any number, in room for twice ``places``.

    With ``total`` counted in all, a name that was counted *n* times is kept with a count from ``n - shaved`` to ``n``,
    where ``shaved`` is at most ``total / (places + 1)``; a name that is not kept was counted at most ``shaved`` times.
    """

    def __init__(self, places: int = PLACES) -> None:
        self.total = 0.0
        self.shaved = 0.0
        self._places = places
        self._counts: dict[K, float] = {}

    def add(self, names: Collection[K], weight: float = 1) -> None:
        """Count each of these names so many times."""
        counts = self._counts
        get = counts.get
        for name in names:
            counts[name] = get(name, 0.0) + weight
        self.total += weight * len(names)
        # Looked at when all are in: a batch is small beside what is kept.
        if len(counts) > 2 * self._places:
            self._cut()

    def fade(self) -> None:
        """Halve everything: what was counted before counts half as much as what follows."""
        self.total /= 2
        self.shaved /= 2
        self._counts = {name: count / 2 for name, count in self._counts.items()}

    def top(self, least: float) -> list[tuple[K, float]]:
        """Names that make up at least this share of all, and their shares; the largest first."""
        enough = max(least * self.total, 1e-9)
        found = [(name, count / self.total) for name, count in self._counts.items() if count >= enough]
        return sorted(found, key=lambda one: -one[1])

    def __len__(self) -> int:
        """How many names are kept."""
        return len(self._counts)

    def count(self, name: K) -> float:
        """What is kept of a name; 0 when nothing is."""
        return self._counts.get(name, 0.0)

    def _cut(self) -> None:
        less = sorted(self._counts.values(), reverse=True)[self._places]
        self.shaved += less
        self._counts = {name: count - less for name, count in self._counts.items() if count > less}
