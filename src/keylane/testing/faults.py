"""What can go wrong in a run of the harness, as values: a schedule of faults is a list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """At this virtual second everything in memory is lost; the run goes on from the progress committed last.

    What was handed to the sink and not acknowledged may be there afterwards or not, as the seed will have it. Unlike
    in a real crash, stages that wait see a CancelledError and resources are closed.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """At this virtual second the epoch ends as epochs do: it drains, commits, and the next one goes on."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """A drain; from the next epoch on so many ``tasks`` share out every partition's keys."""

    at: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """From this virtual second the sink acknowledges nothing, for so many seconds: a slow broker."""

    at: float
    for_: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """From this virtual second letters cannot be written, for so many seconds."""

    at: float
    for_: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """From this virtual second the sink rejects single results, for so many seconds: each with this chance."""

    at: float
    for_: float
    chance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An operator releases the blocked lane of this key."""

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """An operator skips the message at which the lane of this key is blocked."""

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    """An operator redrives the lane of this key: all its letters, before anything newer.

    A redrive that a crash cuts off is standing: the next task goes on with it.
    """

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """An operator says how far the entity of this key is: the version after ``to`` is next; None: it begins anew."""

    at: float
    key: bytes
    to: int | None = None


Action = Release | Skip | Redrive | Reset
Fault = Crash | Drain | Recut | Pause | Refuse | Reject | Action
"""What happens in a run besides the messages."""
