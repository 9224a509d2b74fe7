"""Telemetry: what a task does, as one small record a second, that can be added up over tasks and over time.

A record is the JSON of a :class:`Snapshot`; docs/telemetry.md says what each name in it means. Counters and histograms
count from the beginning of the task's epoch, so a record that is lost takes nothing with it: the next one has it too.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from keylane import strict_json as wire
from keylane.histogram import Histogram
from keylane.offsets.shard import WHOLE, Shard
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VERSION = 2
COUNTERS = ("done", "retries", "dropped")
"""Of a snapshot, what only grows, beside its outcomes."""


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
    moved: float
    """Unix time when the watermark was last seen to move; when the task began, before that."""

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
    """For a stage whose breaker is open, whose rate is used up, or that is paused."""
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
    shard: str
    """Of the run, such as ``3/8``; ``1/1`` if it processes all partitions."""
    epoch: int
    task: int
    plan: int
    """The number of the replan command that led to the epoch's plan; 0 if there was none."""
    order: str
    """The app's: ``key``, ``partition``, ``global`` or ``none``."""
    owner: str
    life: str
    """Of this task in this epoch, different each time: counters begin with it."""
    began: float
    at: float
    interval: float
    final: bool
    """The task's last one in this epoch."""
    progressed: float
    """Unix time when a message was last seen to be done; when the task began, before that."""
    done: int
    outcomes: Counter[Outcome]
    """How those that are done ended."""
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
    holds: Mapping[str, int] = field(default_factory=dict)
    """What holds lanes back besides breakers, in words, and how many lanes wait for it: rates and pauses."""
    latency: Histogram = field(default_factory=Histogram)
    """Seconds from a message's timestamp until it was done."""
    processing: Histogram = field(default_factory=Histogram)
    """Seconds from its first attempt until it was done."""
    hot: tuple[HotFigures, ...] = ()
    wall: str = ""
    """Every lane with its slot, packed by :mod:`keylane.telemetry.lane_wall`; empty unless somebody looks."""

    def encode(self) -> bytes:
        """For :func:`decode`."""
        found: dict[str, Any] = {"v": VERSION}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "partitions":
                value = {str(p): _plain(figures) | {"lag": figures.lag} for p, figures in value.items()}
            elif one.name == "outcomes":
                value = {outcome.value: value[outcome] for outcome in Outcome}
            elif isinstance(value, Histogram):
                value = value.as_json()
            elif one.name == "lanes":
                value = _plain(value)
            elif one.name == "hot":
                value = [_plain(hot) for hot in value]
            elif one.name == "wall" and not value:
                continue
            found[one.name] = value
        return json.dumps(found, separators=(",", ":")).encode()


@wire.decoder
def decode(value: bytes | None) -> Snapshot:
    """A record's snapshot. Raises MalformedRecordError, also when it is of another version.

    What a later version of the same number has added is left out.
    """
    found = wire.loads(value, limit=_RECORD_BYTES_MAX)
    (version,) = wire.fields(found, "v")
    if version != VERSION:
        raise wire.MalformedRecordError(f"expected a record of version {VERSION}, got {version!r:.60}")
    outcomes, partitions, breakers, hot, lanes, latency, processing = wire.fields(
        found, "outcomes", "partitions", "breakers", "hot", "lanes", "latency", "processing"
    )
    outcomes = _object(outcomes, _ENTRIES_MAX)
    wall = wire.text(found.get("wall", ""), _RECORD_BYTES_MAX)
    plain = _typed(Snapshot, {"shard": str(WHOLE), **_object(found, _ENTRIES_MAX)}, without="wall")
    plain["shard"] = str(Shard.parse(plain["shard"]))
    if not 0 < plain["interval"] <= _INTERVAL_SECONDS_MAX:  # as long as five of them a task counts as running
        raise wire.MalformedRecordError(
            f"expected an interval of at most {_INTERVAL_SECONDS_MAX} s, got {plain['interval']}"
        )
    return Snapshot(
        **plain,
        outcomes=Counter({outcome: wire.integer(outcomes.get(outcome.value, 0)) for outcome in Outcome}),
        partitions={
            wire.integer(int(p)): PartitionFigures(**_typed(PartitionFigures, figures))
            for p, figures in _object(partitions, _PARTITIONS_MAX).items()
        },
        breakers={
            wire.text(s, _NAME_CHARACTERS_MAX): wire.text(state, _NAME_CHARACTERS_MAX)
            for s, state in _object(breakers, _ENTRIES_MAX).items()
        },
        holds={  # a record of an earlier version has none
            wire.text(what, _NAME_CHARACTERS_MAX): wire.integer(waiting)
            for what, waiting in _object(found.get("holds", {}), _ENTRIES_MAX).items()
        },
        lanes=LaneFigures(**_typed(LaneFigures, lanes)),
        latency=Histogram.from_json(latency),
        processing=Histogram.from_json(processing),
        wall=wall,
        hot=tuple(HotFigures(**_typed(HotFigures, one)) for one in wire.array(hot, _ENTRIES_MAX)),
    )


_RECORD_BYTES_MAX = 1 << 20
_INTERVAL_SECONDS_MAX = 86_400.0
_PARTITIONS_MAX, _ENTRIES_MAX, _NAME_CHARACTERS_MAX = 10_000, 1000, 1000
"""Seconds in a histogram."""
_READERS: dict[str, Callable[[object], object]] = {
    "int": wire.integer,
    "float": wire.seconds,
    "bool": wire.boolean,
    "str": lambda found: wire.text(found, _NAME_CHARACTERS_MAX),
}
"""By the type that a field says it has."""


def _typed(kind: type, found: object, without: str = "") -> dict[str, Any]:
    """The fields of plain types."""
    plain = {
        one.name: _READERS[str(one.type)]
        for one in fields(kind)
        if str(one.type) in _READERS and one.name != without
    }
    return {
        name: read(value)
        for (name, read), value in zip(plain.items(), wire.fields(found, *plain), strict=True)
    }


def _object(found: object, most: int) -> dict[str, Any]:
    if not isinstance(found, dict) or len(found) > most:
        raise wire.MalformedRecordError(
            f"expected an object of at most {most} items, got {type(found).__name__}"
        )
    return found


def _plain(one: PartitionFigures | LaneFigures | HotFigures) -> dict[str, Any]:
    """``asdict`` would copy everything first, and take three times as long for the record."""
    return {name: getattr(one, name) for name in one.__slots__}
