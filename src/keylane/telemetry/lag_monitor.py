"""Measures a group repeatedly: its lag, how fast it moves, and what delays it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.kafka.oldest_pending import OldestPendingReader
from keylane.lanes.lane_record import LaneStatus
from keylane.offsets.shard import WHOLE
from keylane.outcome import WITH_DEAD_LETTER
from keylane.state.admin import AdminClient, NeverRanError
from keylane.telemetry.aggregate import Totals
from keylane.telemetry.lag import LagMeter
from keylane.telemetry.lag_trend import LagMovement, LagTrend, WorkInProgress, pace_of, work_on
from keylane.telemetry.reader import TelemetryLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.kafka.oldest_pending import OldestPending
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.telemetry.lag import PartitionLag
    from keylane.telemetry.snapshot import Snapshot


STARTS_WITHIN_SECONDS = 60.0
"""An app started less than this ago, whose tasks have sent no telemetry since, counts as starting."""
EPOCH_GAP_SECONDS = 3.0
"""Time, plus two intervals, that may pass without telemetry between two epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """One partition in one measurement."""

    partition: int
    offsets: PartitionLag
    reached: int
    """Everything below this offset is done, as far as is known: tasks may be ahead of the group's offset."""
    movement: LagMovement
    """The movement of ``reached``."""
    oldest: OldestPending | None
    """The first message that is not done; None if there is none, or it could not be read."""
    pace: LagTrend
    blocked: LaneRecord | None
    """The blocked lane with the lowest offset."""
    retried: tuple[int, RetryState] | None
    """The lowest offset with failed attempts, and their record."""
    work: WorkInProgress | None = None
    """The owner's telemetry; None without telemetry, or while no task runs."""
    stalled: float = 0.0
    """Seconds for which this process has seen no movement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagView:
    """One measurement."""

    at: float
    partitions: tuple[PartitionView, ...]
    tasks: tuple[Snapshot, ...]
    """For an app with telemetry: the tasks that run."""
    silent: float | None
    """Seconds since the last record of an app that has stopped sending telemetry; None otherwise."""
    members: int | None = None
    """Consumers in a group that belongs to no app; None for an app, or if unknown."""
    starting: float | None = None
    """Seconds since the start of an app whose tasks have sent no telemetry yet; None otherwise."""
    blocked: int = 0
    parked: int = 0
    """Parked lanes of all partitions, which wait for an operator."""
    dead: int = 0
    """Dead letters of the current or last epoch, including parked messages."""
    malformed: Mapping[str, int] = field(default_factory=dict)
    """Records of the state topic that could not be read, by kind."""

    @property
    def lag(self) -> int:
        """The lag of all partitions."""
        return sum(one.offsets.lag for one in self.partitions)

    @property
    def hidden(self) -> int:
        """Offsets of open transactions in all partitions."""
        return sum(one.offsets.hidden for one in self.partitions)

    @property
    def movement(self) -> LagMovement:
        """The movement of all partitions together."""
        return _sum([one.movement for one in self.partitions])

    @property
    def pace(self) -> LagTrend:
        """The trend of the worst partition."""
        return max(
            (one.pace for one in self.partitions), key=lambda pace: pace.severity, default=LagTrend.IDLE
        )

    @property
    def skewed(self) -> tuple[int, float] | None:
        """The partition with most of the lag, and its share, if that is at least half and twice its fair part."""
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


class LagMonitor:
    """Measures the lag of a group on a topic; with ``app`` it also reads the telemetry of that app. One thread uses it.

    Rates are over the last ``over`` seconds, and at least over the time between two measurements. ``listen`` gets the
    telemetry that is read, from ``since`` seconds ago on. Raises BrokerError when no broker answers.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        topic: str,
        *,
        app: bool = True,
        over: float = 3.0,
        since: float = 15.0,
        listen: Callable[[list[Snapshot]], None] = lambda _snapshots: None,
    ) -> None:
        # What other programs' consumers see is not known, so their lag counts to the end of the log, as in other tools.
        self._meter = LagMeter(settings, group, topic, committed=app and settings.reads_committed(""))
        self._heads = OldestPendingReader(settings, topic)
        self._over = over
        self._before: deque[_Look] = deque()
        self._stood: dict[
            int, tuple[int, float]
        ] = {}  # ``reached``, and when it was first seen with that value
        self._is_app = app
        self._listen = listen
        self._operator: AdminClient | None = None
        self._records: TelemetryLog | None = None
        self._totals = Totals(since=time.time())
        if app:
            try:
                self._operator = AdminClient(settings, group)
            except NeverRanError:
                app = False
        if app:
            self._records = TelemetryLog(settings, group, seconds=since)

    def close(self) -> None:
        """Close all clients."""
        self._heads.close()
        if self._operator is not None:
            self._operator.close()
        if self._records is not None:
            self._records.close()

    @property
    def operator(self) -> AdminClient | None:
        """The reader of the app's state topic, for the thread that measures; None without such a topic."""
        return self._operator

    def measure(self) -> LagView | None:
        """Measure now; None the first time, because there is nothing to compare with."""
        if self._records is not None:
            # The first answer decides whether an app seems to run, so a busy broker gets more time for it.
            snapshots = self._records.catch_up(1.0 if self._before else 5.0)
            self._totals.take(snapshots)
            self._listen(snapshots)
        offsets, now = self._meter.partitions(), time.monotonic()
        reached = self._reached(offsets)
        for partition, at in reached.items():
            if self._stood.get(partition, (None, 0.0))[0] != at:
                self._stood[partition] = at, now
        before = self._before
        before.append(_Look(at=now, offsets=offsets, reached=reached))
        while len(before) > 2 and now - before[1].at >= self._over:
            before.popleft()
        return None if len(before) < 2 else self._view(before[0], before[-1])

    def _reached(self, offsets: Mapping[int, PartitionLag]) -> dict[int, int]:
        """Return the offsets below which everything is done: the group's, or those in telemetry, which are ahead of it.

        With ``commit="epoch"`` tasks are minutes ahead, and the group's own offset does not move meanwhile.
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
        if not running and last is not None and wall - last.at > EPOCH_GAP_SECONDS + 2 * last.interval:
            silent = wall - last.at
        starting = None if running else self._starting(wall)
        if starting is not None:
            silent = None
        members = None if self._is_app else self._meter.members()
        blocked: dict[int, LaneRecord] = {}
        attempts: Mapping[int, Mapping[int, RetryState]] = {}
        lanes: list[LaneRecord] = []
        if self._operator is not None:
            lanes = self._operator.lanes()
            for record in sorted(lanes, key=lambda record: -record.offset):
                if record.stop is LaneStatus.BLOCKED:
                    blocked[record.partition] = record
            attempts = self._operator.attempts()
        heads = self._heads.read({p: at for p, at in look.reached.items() if at < offsets[p].end})
        movements = {}
        for partition, one in offsets.items():
            at = look.reached[partition]
            earlier = was.offsets.get(partition, one)  # a partition that was added in the meantime
            movements[partition] = LagMovement(
                seconds=max(look.at - was.at, 1e-3),
                came=one.end - earlier.end,
                done=at - was.reached.get(partition, at),
                lag=max(0, one.end - at),
            )
        deserted = set() if starting is not None else self._deserted(running, wall)
        whole = _sum(list(movements.values()))
        views = []
        for partition, one in sorted(offsets.items()):
            at, movement, head = look.reached[partition], movements[partition], heads.get(partition)
            tried = attempts.get(partition) or {}
            retried = min(((o, kept) for o, kept in tried.items() if o >= at), default=None, key=_offset)
            at_head = at if head is None else head.offset
            work = work_on(partition, running, wall)
            stalled = look.at - self._stood[partition][1]
            views.append(
                PartitionView(
                    partition=partition,
                    offsets=one,
                    reached=at,
                    movement=movement,
                    oldest=head,
                    pace=pace_of(
                        movement,
                        whole=whole,
                        runs=silent is None and members != 0 and partition not in deserted,
                        starting=starting is not None,
                        held_up=partition in blocked and blocked[partition].offset <= at_head,
                        stalled=stalled,
                        work=work,
                    ),
                    blocked=blocked.get(partition),
                    retried=retried,
                    work=work,
                    stalled=stalled,
                )
            )
        return LagView(
            at=wall,
            partitions=tuple(views),
            tasks=tuple(running),
            silent=silent,
            members=members,
            starting=starting,
            blocked=sum(record.stop is LaneStatus.BLOCKED for record in lanes),
            parked=sum(record.stop is LaneStatus.PARKED for record in lanes),
            dead=self._dead(),
            malformed={} if self._operator is None else dict(self._operator.malformed),
        )

    def _deserted(self, running: list[Snapshot], wall: float) -> set[int]:
        """Partitions of shards that do not run, while others do."""
        if all(one.shard == str(WHOLE) for one in running):
            return set()
        started = {} if self._operator is None else self._operator.started_by_partition()
        heard = self._totals.heard()
        found = set[int]()
        for partition, at in started.items():
            last = heard.get(partition)
            if last is not None and last.at > at:
                if wall - last.at > EPOCH_GAP_SECONDS + 2 * last.interval:
                    found.add(partition)
            elif wall - at > STARTS_WITHIN_SECONDS:
                found.add(partition)
        return found

    def _starting(self, wall: float) -> float | None:
        """Seconds since a run took the app over, if its tasks have sent no telemetry yet; otherwise None."""
        started = None if self._operator is None or self._records is None else self._operator.started()
        if started is None or started < self._totals.last_at:
            return None
        ago = max(0.0, wall - started)
        return ago if ago < STARTS_WITHIN_SECONDS else None

    def _dead(self) -> int:
        """Dead letters of the newest epoch, by the last record of each of its tasks, also of those that have ended."""
        last = self._totals.latest
        if last is None:
            return 0
        if last.shard == str(WHOLE):
            found = [one.outcomes for one in self._totals.of_epoch(last.epoch) if one.run == last.run]
        else:  # shards have epochs of their own
            found = [one.outcomes for one in self._totals.running(last.at)]
        return sum(counts[outcome] for counts in found for outcome in WITH_DEAD_LETTER)


def _sum(movements: list[LagMovement]) -> LagMovement:
    return LagMovement(
        seconds=movements[0].seconds if movements else 1.0,
        came=sum(one.came for one in movements),
        done=sum(one.done for one in movements),
        lag=sum(one.lag for one in movements),
    )


def _offset(found: tuple[int, RetryState]) -> int:
    return found[0]
