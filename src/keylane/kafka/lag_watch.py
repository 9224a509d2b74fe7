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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """One partition of one look."""

    partition: int
    offsets: PartitionLag
    movement: Movement
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
            lag=self.lag,
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
        self._before: deque[tuple[float, Mapping[int, PartitionLag]]] = deque()
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
        offsets, now = self._meter.partitions(), time.monotonic()
        before = self._before
        before.append((now, offsets))
        while len(before) > 2 and now - before[1][0] >= self._over:
            before.popleft()
        if len(before) < 2:
            return None
        return self._view(offsets, *before[0], now)

    def _view(
        self,
        offsets: Mapping[int, PartitionLag],
        then: float,
        earlier: Mapping[int, PartitionLag],
        now: float,
    ) -> LagView:
        wall = time.time()
        if self._records is not None:
            self._totals.take(self._records.catch_up(1.0))
        running = self._totals.running(wall)
        silent = None
        if not running and self._totals.last_at:
            silent = max(0.0, wall - self._totals.last_at)
        blocked: dict[int, LaneRecord] = {}
        attempts: Mapping[int, Mapping[int, Kept]] = {}
        if self._operator is not None:
            for record in sorted(self._operator.lanes(), key=lambda record: -record.offset):
                if record.stop is Stop.BLOCKED:
                    blocked[record.partition] = record
            attempts = self._operator.attempts()
        heads = self._heads.read({p: one.at for p, one in offsets.items() if one.lag})
        views = []
        for partition, one in sorted(offsets.items()):
            was = earlier.get(partition, one)  # it was added meanwhile
            movement = Movement(
                seconds=max(now - then, 1e-3), came=one.end - was.end, done=one.at - was.at, lag=one.lag
            )
            head = heads.get(partition)
            tried = attempts.get(partition) or {}
            retried = min(
                ((at, kept) for at, kept in tried.items() if at >= one.at), default=None, key=_offset
            )
            age = None if head is None or head.at is None else wall - head.at
            at_head = one.at if head is None else head.offset
            views.append(
                PartitionView(
                    partition=partition,
                    offsets=one,
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
