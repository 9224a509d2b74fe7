"""Telemetry: what a task does, as one small record a second, that can be added up over tasks and over time.

A record is the JSON of a :class:`Snapshot`; docs/telemetry.md says what each name in it means. Counters and histograms
count from the beginning of the task's epoch, so a record that is lost takes nothing with it: the next one has it too.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 1
BOUNDS = tuple(0.0005 * 2 ** (n / 2) for n in range(48))
"""Seconds, the upper ends of a histogram's buckets, from 0.5 ms to an hour and a half; the last one has none."""
COUNTERS = ("done", "dead", "parked", "duplicates", "stale", "ignored", "retries", "dropped")
"""Of a snapshot, what only grows."""


def topic_of(app: str) -> str:
    """Where an app's telemetry is."""
    return f"{app}.telemetry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """That a task tells every ``interval`` seconds what it does. Raises :class:`SettingsError` for fewer than 0.1."""

    interval: float = 1.0

    def __post_init__(self) -> None:
        if type(self.interval) not in (int, float) or not 0.1 <= self.interval <= 3600:
            raise SettingsError(
                f"Telemetry(interval={self.interval!r}): needs a number of seconds from 0.1 to 3600"
            )


class Histogram:
    """How many fell into each bucket of :data:`BOUNDS`. Any two can be added; what is not exact is within a bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self, counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        self.counts = [0] * (len(BOUNDS) + 1) if counts is None else list(counts)
        self.sum = total

    def add(self, seconds: float, weight: int = 1) -> None:
        """Count a value so many times. Below 0 counts as 0: clocks differ."""
        if seconds < 0:
            seconds = 0.0
        self.counts[bisect_left(BOUNDS, seconds)] += weight
        self.sum += seconds * weight

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts)

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        return Histogram(
            [a + b for a, b in zip(self.counts, other.counts, strict=True)], self.sum + other.sum
        )

    def minus(self, earlier: Histogram) -> Histogram:
        """What came after ``earlier``, which this one contains."""
        return Histogram(
            [a - b for a, b in zip(self.counts, earlier.counts, strict=True)], self.sum - earlier.sum
        )

    def quantile(self, q: float) -> float | None:
        """Below which a share ``q`` of the values is: the upper end of its bucket. None when there are no values."""
        left = q * self.count
        if not self.count:
            return None
        for bound, number in zip(BOUNDS, self.counts, strict=False):
            left -= number
            if left <= 0:
                return bound
        return BOUNDS[-1]

    def as_json(self) -> dict[str, Any]:
        """Only the buckets with something in them."""
        return {"sum": round(self.sum, 6), "buckets": [[i, n] for i, n in enumerate(self.counts) if n]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError when it makes no sense."""
        made = cls(total=float(found["sum"]))
        for index, number in found["buckets"]:
            if not 0 <= index < len(made.counts):
                raise ValueError(f"there is no bucket {index}")
            made.counts[index] = int(number)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFigures:
    """One partition, as the task that owns it, or a range of it, sees it."""

    watermark: int
    position: int
    end: int
    """Of the log, as the last fetch saw it; never below ``position``."""
    held: int
    away: int
    """Of those that wait, how many are kept as offsets only."""
    paused: bool

    @property
    def lag(self) -> int:
        """Offsets from the watermark to the end."""
        return max(0, self.end - self.watermark)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """Lanes now, by what they do."""

    all: int = 0
    ready: int = 0
    running: int = 0
    retrying: int = 0
    waiting: int = 0
    """For a stage whose breaker is open."""
    blocked: int = 0
    parked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotFigures:
    """A key that much of what is read belongs to."""

    key: str
    """Text, or ``hex:…``."""
    partition: int
    share: float
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One task at one moment."""

    app: str
    source: str
    run: str
    epoch: int
    task: int
    plan: int
    """The number of the order by which the epoch was planned; 0 before there was one."""
    owner: str
    life: str
    """Of this task in this epoch, different each time: counters begin with it."""
    began: float
    at: float
    interval: float
    final: bool
    """The task's last one in this epoch."""
    done: int
    dead: int
    parked: int
    duplicates: int
    stale: int
    ignored: int
    retries: int
    dropped: int
    """Records of telemetry that were lost."""
    lanes: LaneFigures
    held: int
    early: int
    capacity: int
    partitions: Mapping[int, PartitionFigures]
    breakers: Mapping[str, str] = field(default_factory=dict)
    """By stage: ``closed``, ``open``, ``half_open`` or ``recovering``."""
    latency: Histogram = field(default_factory=Histogram)
    """Seconds from a message's timestamp until it was done."""
    processing: Histogram = field(default_factory=Histogram)
    """Seconds from its first attempt until it was done."""
    hot: tuple[HotFigures, ...] = ()

    @property
    def ok(self) -> int:
        """Of those done, the ones that ran to their end."""
        return self.done - self.dead - self.parked - self.duplicates - self.stale - self.ignored

    def encode(self) -> bytes:
        """For :func:`decode`."""
        found: dict[str, Any] = {"v": VERSION}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "partitions":
                value = {str(p): _plain(figures) | {"lag": figures.lag} for p, figures in value.items()}
            elif isinstance(value, Histogram):
                value = value.as_json()
            elif one.name == "lanes":
                value = _plain(value)
            elif one.name == "hot":
                value = [_plain(hot) for hot in value]
            found[one.name] = value
        return json.dumps(found, separators=(",", ":")).encode()


def decode(value: bytes | None) -> Snapshot:
    """A record's snapshot. Raises ValueError when it makes no sense, or is of another version.

    What a later version of the same number has added is left out.
    """
    try:
        found = json.loads(value or b"")
        if found["v"] != VERSION:
            raise ValueError(f"a record of version {found['v']}, not {VERSION}")
        known = {one.name: found[one.name] for one in fields(Snapshot)}
        partitions = {
            int(p): PartitionFigures(**_named(PartitionFigures, figures))
            for p, figures in known["partitions"].items()
        }
        return Snapshot(
            **known
            | {
                "partitions": partitions,
                "lanes": LaneFigures(**_named(LaneFigures, known["lanes"])),
                "latency": Histogram.from_json(known["latency"]),
                "processing": Histogram.from_json(known["processing"]),
                "hot": tuple(HotFigures(**_named(HotFigures, hot)) for hot in known["hot"]),
            }
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"no record of telemetry: {error!r}") from error


def _plain(one: PartitionFigures | LaneFigures | HotFigures) -> dict[str, Any]:
    """``asdict`` would copy everything first, and take three times as long for the record."""
    return {name: getattr(one, name) for name in one.__slots__}


def _named(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: found[one.name] for one in fields(kind)}
