"""Circuit breaker of a stage: while a stage fails in every lane, the lanes wait together.

::

              too many of the recent calls failed
    CLOSED ────────────────────────────────────────▶ OPEN ◀──────────────┐
      ▲                                               │ open_for elapsed │ too many of the probes failed
      │                                               ▼                  │
      │                                           HALF_OPEN ─────────────┤
      │ enough calls succeeded,                       │ enough of them   │ too many of the recent calls failed
      │ or no lane waits any more                     ▼ succeeded        │
      └─────────────────────────────────────────── RECOVERING ───────────┘

RECOVERING limits the rush of waiting lanes: all of them at once could bring down a service that has only just
recovered. A few calls are admitted at first, and twice as many after every successful round trip.

Each opening starts a new *generation*. A call belongs to the generation that admitted it. When it ends in a later
generation, its result is outdated: it only reduces the number of calls in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


class CircuitState(Enum):
    """Whether a circuit admits a call."""

    CLOSED = "closed"
    """The stage works: every call is admitted."""
    OPEN = "open"
    """The stage fails: no call is admitted."""
    HALF_OPEN = "half_open"
    """A few calls are admitted as probes."""
    RECOVERING = "recovering"
    """The stage works again: the number of calls in flight is limited, and the limit grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """When the circuit of a stage opens and how it closes again.

    The circuit opens in two cases: at least ``minimum`` calls ended within the last ``window`` seconds and a share of
    ``failure_rate`` or more of them failed transiently; or the last ``minimum`` calls all failed. No call starts for
    ``open_for`` seconds; then ``probes`` calls start, and their results decide. A probe that never ends keeps the
    circuit half open: give a stage with a breaker a time-out.

    Raises :class:`SettingsError` for invalid values.
    """

    failure_rate: float = 0.5
    window: float = 10.0
    minimum: int = 20
    open_for: float = 5.0
    probes: int = 3

    def __post_init__(self) -> None:
        if not _number(self.failure_rate) or not 0 < self.failure_rate <= 1:
            raise SettingsError(
                f"Breaker(failure_rate={self.failure_rate!r}): expected a share of the calls, "
                "more than 0 and at most 1"
            )
        for name, seconds in (("window", self.window), ("open_for", self.open_for)):
            if not _number(seconds) or not 0 < seconds < inf:
                raise SettingsError(f"Breaker({name}={seconds!r}): expected seconds, more than 0")
        for name, count in (("minimum", self.minimum), ("probes", self.probes)):
            if type(count) is not int or count < 1:
                raise SettingsError(
                    f"Breaker({name}={count!r}): expected a whole number of calls, at least 1"
                )


def _number(value: object) -> bool:
    return isinstance(value, int | float)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitStatistics:
    """A snapshot of a circuit."""

    state: CircuitState
    calls: int
    """Results that count now: those in the window; when HALF_OPEN, those of the probes; when OPEN, those that
    opened it."""
    failures: int
    """How many of ``calls`` failed."""
    in_flight: int
    """Calls admitted and not ended, including those of earlier generations."""
    limit: int | None
    """How many calls of this generation may be in flight; None: no limit."""
    since: float | None
    """When the circuit entered this state; None if it has never changed."""


_WINDOW_BUCKETS = 10
_CLOSE_LIMIT_PER_PROBE = 64
"""RECOVERING ends when the limit has grown to this many times ``probes``: after six round trips of doubling."""

# Enum attribute lookup costs as much as the rest of admit().
_CLOSED, _OPEN = CircuitState.CLOSED, CircuitState.OPEN
_HALF_OPEN, _RECOVERING = CircuitState.HALF_OPEN, CircuitState.RECOVERING


class Circuit:
    """One stage's circuit: ``admit``, then exactly one of ``succeeded``, ``failed`` and ``dropped`` for each call.

    ``now`` must never decrease. Read ``generation`` right after ``admit`` and pass it back when the call ends.
    ``on_change`` is called with the old and the new state after each transition.

    The window has ten buckets, so it covers between 90 and 100 % of ``window``.
    """

    def __init__(
        self,
        breaker: Breaker,
        on_change: Callable[[CircuitState, CircuitState], None] | None = None,
    ) -> None:
        # The owner reads both on its hot path; only this class writes them.
        self.state = _CLOSED
        self.generation = 0
        self._breaker = breaker
        self._on_change = on_change
        self._since: float | None = None
        self._until = -inf  # OPEN: when the circuit becomes half open
        self._in_flight = 0  # of this generation
        self._late = 0  # in flight since earlier generations
        self._probes = 0  # HALF_OPEN: admitted and not dropped
        self._limit = 0  # RECOVERING: most calls of this generation in flight
        # The window: counts per bucket, and their sums. HALF_OPEN uses only the sums, for the probes.
        self._width = breaker.window / _WINDOW_BUCKETS
        self._at = 0  # number of the current bucket, counted from time 0
        self._bucket_ends = -inf
        self._calls_in = [0] * _WINDOW_BUCKETS
        self._failures_in = [0] * _WINDOW_BUCKETS
        self._calls = 0
        self._failures = 0
        self._streak = 0  # failures since the last success

    def admit(self, now: float) -> bool:
        """Whether a call may start now. If so, it counts as in flight until its end is reported."""
        if self.state is not _CLOSED:
            if self.state is _OPEN and now >= self._until:
                self._half_open(now)
            if self.room(now) == 0:
                return False
            if self.state is _HALF_OPEN:
                self._probes += 1
        self._in_flight += 1
        return True

    def room(self, now: float) -> int | None:
        """How many calls would be admitted now; None: no limit."""
        state = self.state
        if state is _CLOSED:
            return None
        if state is _RECOVERING:
            return self._limit - self._in_flight
        if state is _HALF_OPEN:
            return self._breaker.probes - self._probes
        return self._breaker.probes if now >= self._until else 0

    @property
    def next_at(self) -> float | None:
        """When OPEN, the time from which :meth:`admit` admits probes.

        None in other states: there only the end of a call in flight makes room.
        """
        return self._until if self.state is _OPEN else None

    def succeeded(self, now: float, generation: int) -> None:
        """Report a successful call."""
        if generation != self.generation:
            self._late -= 1
            return
        self._in_flight -= 1
        if self.state is _HALF_OPEN:
            self._calls += 1
            self._judge_probes(now)
            return
        if now >= self._bucket_ends:
            self._turn(now)
        self._calls += 1
        self._calls_in[self._at % _WINDOW_BUCKETS] += 1
        self._streak = 0
        if self.state is _RECOVERING:
            self._limit += 1
            if self._limit >= _CLOSE_LIMIT_PER_PROBE * self._breaker.probes:
                self._change(_CLOSED, now)

    def failed(self, now: float, generation: int) -> None:
        """Report a transient failure. Only this opens the circuit; a success never does, whatever the rate."""
        if generation != self.generation:
            self._late -= 1
            return
        self._in_flight -= 1
        if self.state is _HALF_OPEN:
            self._calls += 1
            self._failures += 1
            self._judge_probes(now)
            return
        if now >= self._bucket_ends:
            self._turn(now)
        self._calls += 1
        self._calls_in[self._at % _WINDOW_BUCKETS] += 1
        self._failures += 1
        self._failures_in[self._at % _WINDOW_BUCKETS] += 1
        self._streak += 1
        breaker = self._breaker
        minimum = breaker.minimum if self.state is _CLOSED else breaker.probes
        # A busy stage has a window full of successes: an outage is visible in the streak long before the rate.
        outage = min(self._streak, self._failures) >= minimum
        if outage or (self._calls >= minimum and self._failures / self._calls >= breaker.failure_rate):
            self._open(now)

    def dropped(self, now: float, generation: int) -> None:  # noqa: ARG002 - the three ends of a call look alike
        """Report a call whose end says nothing about the stage: poison, or cancelled.

        A dropped probe is replaced by another.
        """
        if generation != self.generation:
            self._late -= 1
            return
        self._in_flight -= 1
        if self.state is _HALF_OPEN:
            self._probes -= 1

    def nobody_waits(self, now: float) -> None:
        """End RECOVERING: no lane waits for the stage, so no rush can follow."""
        if self.state is _RECOVERING:
            self._change(_CLOSED, now)

    def snapshot(self) -> CircuitStatistics:
        """The circuit's state and counts."""
        limits = {_OPEN: 0, _HALF_OPEN: self._breaker.probes, _RECOVERING: self._limit}
        return CircuitStatistics(
            state=self.state,
            calls=self._calls,
            failures=self._failures,
            in_flight=self._in_flight + self._late,
            limit=limits.get(self.state),
            since=self._since,
        )

    def _open(self, now: float) -> None:
        self._until = now + self._breaker.open_for
        self.generation += 1
        self._late += self._in_flight
        self._in_flight = 0
        self._change(_OPEN, now)

    def _half_open(self, now: float) -> None:
        self._probes = 0
        self._forget()
        self._change(_HALF_OPEN, now)

    def _judge_probes(self, now: float) -> None:
        if self._calls < self._breaker.probes:
            return
        if self._failures / self._calls >= self._breaker.failure_rate:
            self._open(now)
        else:
            self._limit = self._breaker.probes
            self._forget()
            self._change(_RECOVERING, now)

    def _change(self, state: CircuitState, now: float) -> None:
        old, self.state = self.state, state
        self._since = now
        self._streak = 0
        if self._on_change is not None:
            self._on_change(old, state)

    def _turn(self, now: float) -> None:
        """Start the bucket of ``now`` and drop the buckets that have left the window."""
        at = int(now // self._width)
        if at - self._at >= _WINDOW_BUCKETS:
            self._forget()
        else:
            for gone in range(self._at + 1, at + 1):
                place = gone % _WINDOW_BUCKETS
                self._calls -= self._calls_in[place]
                self._failures -= self._failures_in[place]
                self._calls_in[place] = self._failures_in[place] = 0
        self._at = at
        self._bucket_ends = (at + 1) * self._width

    def _forget(self) -> None:
        self._calls = self._failures = 0
        self._calls_in = [0] * _WINDOW_BUCKETS
        self._failures_in = [0] * _WINDOW_BUCKETS
