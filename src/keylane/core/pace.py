"""Whether a partition is kept up with, in words: from two looks at it, and what is known about what holds it up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_SLACK = 2.0
"""Seconds of what comes in that may be waiting without a word."""
_FEW = 100
"""Messages that are no backlog."""
_OLD = 30.0
"""Seconds after which a message that nothing moves past is stuck."""


class Pace(StrEnum):
    """How a partition is doing, the best first."""

    IDLE = "idle"
    KEEPING_UP = "keeping up"
    CATCHING_UP = "catching up"
    FALLING_BEHIND = "falling behind"
    STUCK = "stuck"

    @property
    def severity(self) -> int:
        """To find the worst."""
        return list(Pace).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """What happened to one partition between two looks."""

    seconds: float
    came: int
    """Offsets by which the log grew."""
    done: int
    """Offsets by which the group moved; below 0 when somebody moved it back."""
    lag: int

    @property
    def rate_in(self) -> float:
        """Messages per second that came."""
        return max(0, self.came) / self.seconds

    @property
    def rate_out(self) -> float:
        """Messages per second that the group moved past."""
        return max(0, self.done) / self.seconds

    @property
    def catch_up(self) -> float | None:
        """Seconds until the lag is gone if all goes on like this; None when it will not be."""
        if not self.lag:
            return 0.0
        gain = self.rate_out - self.rate_in
        return self.lag / gain if gain > 0 else None


def pace_of(movement: Movement, *, oldest: float | None, held_up: bool) -> Pace:
    """``oldest`` is the age in seconds of the first message that is not done, where that is known.

    ``held_up``: something is known that keeps the partition where it is: a lane that is blocked, no task that runs.
    """
    if not movement.lag:
        return Pace.KEEPING_UP if movement.came > 0 else Pace.IDLE
    if movement.done <= 0:
        if held_up or (oldest is not None and oldest > max(_OLD, movement.seconds)):
            return Pace.STUCK
        few = movement.lag <= max(_FEW, movement.rate_in * _SLACK)
        return Pace.KEEPING_UP if few else Pace.FALLING_BEHIND
    if movement.lag <= max(_FEW, movement.rate_in * _SLACK):
        return Pace.KEEPING_UP
    return Pace.FALLING_BEHIND if movement.came > movement.done else Pace.CATCHING_UP
