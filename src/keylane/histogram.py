"""Histogram of durations, with the same fixed buckets in every process."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Self

from keylane import strict_json as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDS = tuple(0.0005 * 2 ** (n / 2) for n in range(48))
"""Upper bounds of the buckets in seconds, from 0.5 ms to 1.5 hours; one more bucket has no upper bound."""

_SUM_MAX_SECONDS = 1e18


class Histogram:
    """Counts per bucket of :data:`BOUNDS`. Any two histograms can be added; quantiles are exact to one bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self, counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        self.counts = [0] * (len(BOUNDS) + 1) if counts is None else list(counts)
        self.sum = total

    def add(self, seconds: float, weight: int = 1) -> None:
        """Count a value ``weight`` times. A negative value counts as 0, because clocks differ."""
        if seconds < 0:
            seconds = 0.0
        self.counts[bisect_left(BOUNDS, seconds)] += weight
        self.sum += seconds * weight

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def plus(self, other: Histogram) -> Histogram:
        """The sum of both."""
        return Histogram(
            [a + b for a, b in zip(self.counts, other.counts, strict=True)], self.sum + other.sum
        )

    def minus(self, earlier: Histogram) -> Histogram:
        """The values added since ``earlier``, an older state of this histogram."""
        return Histogram(
            [a - b for a, b in zip(self.counts, earlier.counts, strict=True)], self.sum - earlier.sum
        )

    def quantile(self, q: float) -> float | None:
        """The value below which a share ``q`` of the values is, as its bucket's upper bound. None without values."""
        left = q * self.count
        if not self.count:
            return None
        for bound, number in zip(BOUNDS, self.counts, strict=False):
            left -= number
            if left <= 0:
                return bound
        return BOUNDS[-1]

    def as_json(self) -> dict[str, Any]:
        """JSON values, with non-empty buckets only."""
        return {"sum": round(self.sum, 6), "buckets": [[i, n] for i, n in enumerate(self.counts) if n]}

    @classmethod
    def from_json(cls, found: object) -> Self:
        """The reverse of :meth:`as_json`. Raises MalformedRecordError."""
        total, buckets = wire.fields(found, "sum", "buckets")
        made = cls(total=wire.number(total))
        if not 0 <= made.sum <= _SUM_MAX_SECONDS:
            raise wire.MalformedRecordError(f"expected a sum of at least 0, got {made.sum}")
        for bucket in wire.array(buckets, len(made.counts)):
            index, number = wire.row(bucket, 2)
            made.counts[wire.integer(index, 0, len(made.counts) - 1)] = wire.integer(number)
        return made
