"""Heavy hitters: the few keys with most of the messages, found in bounded memory.

The Misra-Gries summary, trimmed in bulk. It counts a bounded number of keys. When there are twice as many as allowed,
the count of the largest surplus key is subtracted from all, and keys without a count left are dropped. That is one sort
for many new keys instead of a search for the smallest per key. The subtracted total is known, so a key's true count is
between its count and that much more, and every key above its share of the counters is present.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    K = TypeVar("K", bound=Hashable)
else:
    K = TypeVar("K")

COUNTERS = 256
"""Keys counted for certain: all that have more than one in this many messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotKey:
    """A snapshot of one key that has a large share of a task's messages."""

    key: bytes
    partition: int
    share: float
    """Share of the messages that the task has fetched recently, 0 to 1. The true share may be higher, by less than one
    in :data:`COUNTERS`."""
    waiting: int
    """Messages that wait in its lane now, including evicted ones."""


class HeavyHitters(Generic[K]):
    """Counts any number of names with at most twice ``places`` counters.

    With ``total`` counted in all, a name that was counted *n* times has a count from ``n - shaved`` to ``n``, where
    ``shaved`` is at most ``total / (places + 1)``. A name without a counter was counted at most ``shaved`` times.
    """

    def __init__(self, places: int = COUNTERS) -> None:
        self.total = 0.0
        self.shaved = 0.0
        self._places = places
        self._counts: dict[K, float] = {}

    def add(self, names: Collection[K], weight: float = 1) -> None:
        """Count each of these names ``weight`` times."""
        counts = self._counts
        get = counts.get
        for name in names:
            counts[name] = get(name, 0.0) + weight
        self.total += weight * len(names)
        # Trim once per call: a batch is small compared with the counters.
        if len(counts) > 2 * self._places:
            self._cut()

    def fade(self) -> None:
        """Halve all counts, so that older messages weigh half as much as newer ones."""
        self.total /= 2
        self.shaved /= 2
        self._counts = {name: count / 2 for name, count in self._counts.items()}

    def top(self, least: float) -> list[tuple[K, float]]:
        """Names with at least this share of all, and their shares; the largest first."""
        enough = max(least * self.total, 1e-9)
        found = [(name, count / self.total) for name, count in self._counts.items() if count >= enough]
        return sorted(found, key=lambda one: -one[1])

    def __len__(self) -> int:
        """How many names have a counter."""
        return len(self._counts)

    def count(self, name: K) -> float:
        """The count of a name; 0 if it has no counter."""
        return self._counts.get(name, 0.0)

    def _cut(self) -> None:
        less = sorted(self._counts.values(), reverse=True)[self._places]
        self.shaved += less
        self._counts = {name: count - less for name, count in self._counts.items() if count > less}
