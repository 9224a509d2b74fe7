"""Lag trend: whether a partition keeps up, from two looks at it and from its task's telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from keylane.histogram import BOUNDS
from keylane.lanes.ordering import ORDERINGS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.telemetry.snapshot import Snapshot

_BACKLOG_SLACK_SECONDS = 2.0
"""Seconds of incoming messages that may wait without counting as a backlog."""
_BACKLOG_SLACK_MESSAGES = 100
"""Messages that may wait without counting as a backlog."""
STUCK_AFTER_SECONDS = 30.0
"""Time without progress after which a partition is stuck; less if the cause is known."""
_TIMES_SLOWER = 3.0
"""A message hangs if it takes this many times as long as the slowest one before it."""
_FIRST_MESSAGE_SECONDS = 600.0
"""The time after which a message hangs if none was finished before, so that no duration is known."""


class LagTrend(StrEnum):
    """How a partition is doing, from best to worst."""

    IDLE = "idle"
    KEEPING_UP = "keeping up"
    CATCHING_UP = "catching up"
    FALLING_BEHIND = "falling behind"
    STUCK = "stuck"
    NOT_RUNNING = "not running"

    @property
    def severity(self) -> int:
        """The rank of the trend: the higher, the worse."""
        return list(LagTrend).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagMovement:
    """What happened to one partition between two looks."""

    seconds: float
    came: int
    """Offsets by which the log grew."""
    done: int
    """Offsets by which the group moved; negative if it was moved back."""
    lag: int

    @property
    def rate_in(self) -> float:
        """Incoming messages per second."""
        return max(0, self.came) / self.seconds

    @property
    def rate_out(self) -> float:
        """Messages done per second."""
        return max(0, self.done) / self.seconds

    @property
    def catch_up(self) -> float | None:
        """Seconds until the lag is gone at the current rates; None if it does not shrink."""
        if not self.lag:
            return 0.0
        gain = self.rate_out - self.rate_in
        return self.lag / gain if gain > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkInProgress:
    """The work on a partition, as its task reports it."""

    in_flight: int
    """Lanes of the task that run or are ready to run."""
    stalled: float
    """Seconds without progress although it is the partition's turn."""
    idle: float
    """Seconds since the task finished a message of any partition."""
    slowest: float | None
    """Seconds that the slowest message of this epoch took, to one bucket; None if none was finished."""
    patience: float
    """Seconds that a message may take before it counts as hanging."""

    @property
    def hangs(self) -> bool:
        """Whether the time without progress is longer than the work explains."""
        return self.stalled > self.patience


def work_on(partition: int, tasks: Iterable[Snapshot], now: float) -> WorkInProgress | None:
    """The work of the task that is furthest behind in this partition; None if no running task owns it.

    The oldest message of a partition is the head of its lane, so it is always its turn, with two exceptions: with
    ``order="global"`` other partitions may come first, and a message that was not fetched yet waits for room. In both
    cases any message that the task finishes counts as progress.
    """
    owners = [task for task in tasks if partition in task.partitions]
    if not owners:
        return None
    task = min(owners, key=lambda one: one.partitions[partition].watermark)
    figures, lanes = task.partitions[partition], task.lanes
    idle = max(0.0, now - task.progressed)
    stalled = max(0.0, now - figures.moved)
    if _spans_partitions(task.order) or not figures.held:
        stalled = min(stalled, idle)
    slowest = _slowest(owners)
    in_flight = lanes.running + lanes.ready
    patience = STUCK_AFTER_SECONDS
    if slowest is not None:
        patience = max(patience, _TIMES_SLOWER * slowest)
        if task.done:  # every lane has its turn: a round of all of them takes so long
            patience = max(patience, _TIMES_SLOWER * in_flight * (task.at - task.began) / task.done)
    elif in_flight:
        patience = _FIRST_MESSAGE_SECONDS
    return WorkInProgress(in_flight=in_flight, stalled=stalled, idle=idle, slowest=slowest, patience=patience)


def _spans_partitions(order: str) -> bool:
    """Whether a lane of this ordering has messages of several partitions."""
    known = ORDERINGS.get(order)
    return known is not None and known.max_tasks == 1


def _slowest(tasks: Iterable[Snapshot]) -> float | None:
    """The upper bound of the last non-empty bucket."""
    found = [i for task in tasks for i, number in enumerate(task.processing.counts) if number]
    return BOUNDS[min(max(found), len(BOUNDS) - 1)] if found else None


def pace_of(
    movement: LagMovement,
    *,
    whole: LagMovement,
    runs: bool,
    starting: bool = False,
    held_up: bool,
    stalled: float,
    work: WorkInProgress | None,
) -> LagTrend:
    """How a partition is doing. ``whole`` is the movement of all partitions.

    ``runs``: False if no task is known to run. ``held_up``: a lane is known to hold the partition up.
    ``starting``: the app has just started and cannot have done anything yet.
    ``stalled``: seconds for which the caller has seen no movement; it decides if there is no ``work``.
    """
    if not movement.lag:
        return LagTrend.KEEPING_UP if movement.came > 0 else LagTrend.IDLE
    if not runs:
        return LagTrend.NOT_RUNNING
    if movement.done <= 0:
        hangs = stalled > STUCK_AFTER_SECONDS and not starting if work is None else work.hangs
        if held_up or hangs:
            return LagTrend.STUCK
    if movement.lag <= max(_BACKLOG_SLACK_MESSAGES, movement.rate_in * _BACKLOG_SLACK_SECONDS):
        return LagTrend.KEEPING_UP
    # A partition that did not move while another did shares its task: it is behind if all together are behind.
    judged = movement if movement.done > 0 else whole
    if judged.done <= 0:
        working = starting or (work is not None and work.in_flight > 0)
        return LagTrend.CATCHING_UP if working and judged.came <= 0 else LagTrend.FALLING_BEHIND
    return LagTrend.FALLING_BEHIND if judged.came > judged.done else LagTrend.CATCHING_UP
