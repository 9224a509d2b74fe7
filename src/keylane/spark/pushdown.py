"""The topics, partitions, offsets and start time that a query's filters select.

Spark still evaluates every filter itself. The selection here need not be exact, as long as it leaves out nothing that
a filter accepts.
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

from keylane.kafka.offset_range import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql.datasource import Filter


@dataclass(slots=True)
class _Range:
    """An inclusive range; wider than requested rather than narrower."""

    low: float = -inf
    high: float = inf

    def narrow(self, low: float, high: float) -> None:
        self.low, self.high = max(self.low, low), min(self.high, high)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


@dataclass(slots=True)
class Narrowing:
    """A selection from filters that all hold. Pickled with its reader."""

    topics: set[str] | None = None
    partitions: _Range = field(default_factory=_Range)
    offsets: _Range = field(default_factory=_Range)
    times: _Range = field(default_factory=_Range)

    def add(self, given: Filter) -> None:
        """Add a filter; filters on neither a position nor a time change nothing."""
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
        """Earliest wanted timestamp, in ms. There is no latest one: timestamps need not rise in a log."""
        return None if self.times.low == -inf else max(0, int(self.times.low) - 1)

    def apply(self, spans: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Apply the selection, except times, to these ranges."""
        found = []
        for span in spans:
            if span.partition not in self.partitions:
                continue
            if self.topics is not None and span.topic not in self.topics:
                continue
            start = int(max(span.start, self.offsets.low))
            end = int(min(span.end, self.offsets.high + 1))
            if start < end:
                found.append(OffsetRange(span.topic, span.partition, start, end))
        return found


def _values(given: Filter) -> Sequence[Any]:
    """Return the values that a filter compares with; empty if it cannot be used here."""
    if isinstance(given, In):
        return [value for value in given.value if value is not None]
    if isinstance(
        given, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
    ):
        return [] if given.value is None else [given.value]
    return []
