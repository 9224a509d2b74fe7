"""What a query's filters say about where to look: which topics, partitions and offsets, and from what time on.

Spark evaluates every filter itself all the same. What is made of them here need not be exact, as long as nothing is
left out that a filter lets through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from keylane.kafka.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql.datasource import Filter


@dataclass(slots=True)
class _Range:
    """Inclusive on both sides; wider than what was asked for rather than narrower."""

    low: float = -inf
    high: float = inf

    def narrow(self, low: float, high: float) -> None:
        self.low, self.high = max(self.low, low), min(self.high, high)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


@dataclass(slots=True)
class Narrowing:
    """Made of filters that all hold. Pickled along with its reader."""

    topics: set[str] | None = None
    partitions: _Range = field(default_factory=_Range)
    offsets: _Range = field(default_factory=_Range)
    times: _Range = field(default_factory=_Range)

    def add(self, given: Filter) -> None:
        """One more of them; those that say nothing about a place or a time change nothing."""
        column: tuple[str, ...] = getattr(given, "attribute", ())
        values = _values(given)
        if len(column) != 1 or not values:
            return
        name = column[0].lower()
        if name == "topic":
            if isinstance(given, EqualTo | EqualNullSafe | In) and all(isinstance(v, str) for v in values):
                self.topics = set(values) if self.topics is None else self.topics & set(values)
            return
        if name == "timestamp":
            numbers = [v.timestamp() * 1000 for v in values if isinstance(v, datetime)]
        else:
            numbers = [v for v in values if type(v) is int]
        ranges = {"partition": self.partitions, "offset": self.offsets, "timestamp": self.times}
        if name not in ranges or len(numbers) != len(values):
            return
        low = -inf if isinstance(given, LessThan | LessThanOrEqual) else min(numbers)
        high = inf if isinstance(given, GreaterThan | GreaterThanOrEqual) else max(numbers)
        ranges[name].narrow(low, high)

    @property
    def since(self) -> int | None:
        """Milliseconds before which nothing is wanted. There is no such end: times need not rise in a log."""
        return None if self.times.low == -inf else max(0, int(self.times.low) - 1)

    def apply(self, spans: Iterable[Span]) -> list[Span]:
        """What is left of them, but for the times."""
        found = []
        for span in spans:
            if span.partition not in self.partitions:
                continue
            if self.topics is not None and span.topic not in self.topics:
                continue
            start = int(max(span.start, self.offsets.low))
            end = int(min(span.end, self.offsets.high + 1))
            if start < end:
                found.append(Span(span.topic, span.partition, start, end))
        return found


def _values(given: Filter) -> Sequence[Any]:
    """What a filter compares with; empty when that says nothing here."""
    if isinstance(given, In):
        return [value for value in given.value if value is not None]
    if isinstance(
        given, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
    ):
        return [] if given.value is None else [given.value]
    return []
