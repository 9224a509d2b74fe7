"""From a peer's "P <unix time> <done> [worker]" lines to a rate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.process import Series

WARM_UP_SHARE = 0.2
"""The share of the messages that is left out: start-up and warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Messages per second from 20% to 100% of the messages, and the times between which that was."""

    per_second: float
    done: int
    begin: float
    end: float


def read_progress(log: Path) -> Series:
    """How many messages all workers together had done, over time."""
    workers: dict[str, Series] = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            fields = line.split()
            if len(fields) >= 3 and fields[0] == "P":
                name = fields[3] if len(fields) > 3 else ""
                workers.setdefault(name, []).append((float(fields[1]), float(fields[2])))
    times = sorted({time for series in workers.values() for time, _ in series})
    return [(time, sum(value_at(s, time) for s in workers.values() if time >= s[0][0])) for time in times]


def rate(series: Series) -> Rate | None:
    """None when nothing was done, or everything between two lines."""
    if not series or not (done := series[-1][1]):
        return None
    first = max(done * WARM_UP_SHARE, series[0][1])
    begin, end = _when(series, first), _when(series, done)
    if end <= begin:
        return None
    return Rate(per_second=(done - first) / (end - begin), done=int(done), begin=begin, end=end)


def value_at(series: Series, time: float) -> float:
    """The value of a sampled series at a time, on the straight line between its samples."""
    if time <= series[0][0]:
        return series[0][1]
    for (a, x), (b, y) in pairwise(series):
        if time <= b:
            return x + (y - x) * (time - a) / (b - a) if b > a else y
    return series[-1][1]


def _when(series: Series, value: float) -> float:
    before = series[0]
    for point in series:
        if point[1] >= value:
            (a, x), (b, y) = before, point
            return a + (b - a) * (value - x) / (y - x) if y > x else b
        before = point
    return series[-1][0]
