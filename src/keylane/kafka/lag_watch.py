"""Looks at a group again and again: its lag, how fast it moves, and what holds it up."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.core.pace import Movement, Pace, pace_of
from keylane.core.record import Stop
from keylane.core.totals import Totals
from keylane.kafka.heads import Heads
from keylane.kafka.lag import LagMeter
from keylane.kafka.operator import NeverRanError, Operator
from keylane.kafka.telemetry_log import TelemetryLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.core.record import Kept, LaneRecord
    from keylane.core.telemetry import Snapshot
    from keylane.kafka.heads import Head
    from keylane.kafka.lag import PartitionLag
    from keylane.kafka.settings import KafkaSettings


GAP = 3.0
"""Seconds, and two intervals, for which nobody need speak between two epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """One partition of one look."""

    partition: int
    offsets: PartitionLag
    reached: int
    """Below which everything is done, as far as is known: tasks may be ahead of the group's offset."""
    movement: Movement
    """By what was reached."""
    oldest: Head | None
    """The first message that is not done; None when there is none, or it could not be read."""
    pace: Pace
    blocked: LaneRecord | None
    """The blocked lane with the lowest offset."""
    retried: tuple[int, Kept] | None
    """The lowest offset with attempts that failed, and what is known of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagView:
    """One look."""

    at: float
    partitions: tuple[PartitionView, ...]
    tasks: tuple[Snapshot, ...]
    """Of an app with telemetry: the tasks that run."""
    silent: float | None
    """Seconds since the last record of an app that tells no more, though it did; None otherwise."""

    @property
    def lag(self) -> int:
        """Of all partitions."""
        return sum(one.offsets.lag for one in self.partitions)

    @property
    def movement(self) -> Movement:
        """Of all partitions."""
        return Movement(
            seconds=self.partitions[0].movement.seconds if self.partitions else 1.0,
            came=sum(one.movement.came for one in self.partitions),
            done=sum(one.movement.done for one in self.partitions),
            lag=sum(one.movement.lag for one in self.partitions),
        )

    @property
    def pace(self) -> Pace:
        """Of the partition that is worst."""
        return max((one.pace for one in self.partitions), key=lambda pace: pace.severity, default=Pace.IDLE)

    @property
    def skewed(self) -> tuple[int, float] | None:
        """The partition with most of the lag and its share, when that is at least half and twice its fair part."""
        if self.lag < 100 or len(self.partitions) < 2:
            return None
        most = max(self.partitions, key=lambda one: one.offsets.lag)
        share = most.offsets.lag / self.lag
        return (most.partition, share) if share >= max(0.5, 2 / len(self.partitions)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    at: float
    offsets: Mapping[int, PartitionLag]
    reached: Mapping[int, int]


class LagWatch:
    """Of a group and a topic; with ``app`` also of what an app of the group's name tells. One thread uses it.

    Rates are over the last ``over`` seconds, at least over the time between two looks. Raises KafkaError when there is
    no answer.
    """

    def __init__(
        self, settings: KafkaSettings, group: str, topic: str, *, app: bool = True, over: float = 3.0
    ) -> None:
        self._meter = LagMeter(settings, group, topic)
        self._heads = Heads(settings, topic)
        self._over = over
        self._before: deque[_Look] = deque()
        self._operator: Operator | None = None
        self._records: TelemetryLog | None = None
        self._totals = Totals(since=time.time())
        if app:
            try:
                self._operator = Operator(settings, group)
            except NeverRanError:
                app = False
        if app:
            self._records = TelemetryLog(settings, group)

    def close(self) -> None:
        """Let go of all clients."""
        self._heads.close()
        if self._operator is not None:
            self._operator.close()
        if self._records is not None:
            self._records.close()

    def look(self) -> LagView | None:
        """What has happened since; None for the first time, when there is nothing to compare with."""
        if self._records is not None:
            self._totals.take(self._records.catch_up(1.0))
        offsets, now = self._meter.partitions(), time.monotonic()
        reached = self._reached(offsets)
        before = self._before
        before.append(_Look(at=now, offsets=offsets, reached=reached))
        while len(before) > 2 and now - before[1].at >= self._over:
            before.popleft()
        return None if len(before) < 2 else self._view(before[0], before[-1])

    def _reached(self, offsets: Mapping[int, PartitionLag]) -> dict[int, int]:
        """Below which everything is done: the group's offset, or what tasks tell, who commit it later.

        With ``commit="epoch"`` that is minutes later, and the group seems to stand still meanwhile.
        """
        marks: dict[int, list[int]] = {}
        for task in self._totals.running(time.time()):
            for partition, figures in task.partitions.items():
                marks.setdefault(partition, []).append(figures.watermark)
        return {p: min(one.end, max(one.at, min(marks.get(p, [0])))) for p, one in offsets.items()}

    def _view(self, was: _Look, look: _Look) -> LagView:
        wall, offsets = time.time(), look.offsets
        running = self._totals.running(wall)
        silent, last = None, self._totals.latest
        if not running and last is not None and wall - last.at > GAP + 2 * last.interval:
            silent = wall - last.at
        blocked: dict[int, LaneRecord] = {}
        attempts: Mapping[int, Mapping[int, Kept]] = {}
        if self._operator is not None:
            for record in sorted(self._operator.lanes(), key=lambda record: -record.offset):
                if record.stop is Stop.BLOCKED:
                    blocked[record.partition] = record
            attempts = self._operator.attempts()
        heads = self._heads.read({p: at for p, at in look.reached.items() if at < offsets[p].end})
        views = []
        for partition, one in sorted(offsets.items()):
            at = look.reached[partition]
            earlier = was.offsets.get(partition, one)  # it was added meanwhile
            movement = Movement(
                seconds=max(look.at - was.at, 1e-3),
                came=one.end - earlier.end,
                done=at - was.reached.get(partition, at),
                lag=one.end - at,
            )
            head = heads.get(partition)
            tried = attempts.get(partition) or {}
            retried = min(((o, kept) for o, kept in tried.items() if o >= at), default=None, key=_offset)
            age = None if head is None or head.at is None else wall - head.at
            at_head = at if head is None else head.offset
            views.append(
                PartitionView(
                    partition=partition,
                    offsets=one,
                    reached=at,
                    movement=movement,
                    oldest=head,
                    pace=pace_of(
                        movement,
                        oldest=age,
                        held_up=silent is not None
                        or (partition in blocked and blocked[partition].offset <= at_head),
                    ),
                    blocked=blocked.get(partition),
                    retried=retried,
                )
            )
        return LagView(at=wall, partitions=tuple(views), tasks=tuple(running), silent=silent)


def _offset(found: tuple[int, Kept]) -> int:
    return found[0]
