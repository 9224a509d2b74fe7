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
class Pause:
    """From this virtual second the sink acknowledges nothing, for so many seconds: a slow broker."""

    at: float
    for_: float


Fault = Crash | Drain | Pause
