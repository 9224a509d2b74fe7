"""The circuit breaker of a stage: while a stage fails everywhere, its lanes wait together.

::

              too many of the recent calls failed
    CLOSED ────────────────────────────────────────▶ OPEN ◀──────────────┐
      ▲                                               │ open_for is over │ too many of the probes failed
      │                                               ▼                  │
      │                                           HALF_OPEN ─────────────┤
      │ calls enough have succeeded,                  │ enough of them   │ too many of the recent calls failed
      │ or nobody waits any more                      ▼ succeeded        │
      └─────────────────────────────────────────── RECOVERING ───────────┘

RECOVERING is there because of what waits: an hour of lanes let loose at once would bring a service down that has only
just come back. Calls are let through a few at a time, and twice as many with every round trip that goes well.

Each opening begins a new *generation*. A call belongs to the generation it was admitted in; when it ends in a later
one, its result says how things were before the circuit opened, and changes nothing but the count of calls in flight.
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
    """What a circuit does with a call that wants to start."""

    CLOSED = "closed"
    """All is well: every call is admitted."""
    OPEN = "open"
    """The stage fails: no call is admitted."""
    HALF_OPEN = "half_open"
    """A few calls are admitted to find out whether it still fails."""
    RECOVERING = "recovering"
    """It works again: calls are admitted a few at a time, then more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """When the circuit of a stage opens and how it closes again.

    It opens when, of at least ``minimum`` calls that ended within the last ``window`` seconds, a share of
    ``failure_rate`` or more failed transiently, and when the last ``minimum`` of them all did. For ``open_for`` seconds
    no call starts; then ``probes`` calls do, and their results decide. A probe must end for that: give a stage with a
    breaker a time-out.

    Raises :class:`SettingsError` for values that make no sense.
    """

    failure_rate: float = 0.5
    window: float = 10.0
    minimum: int = 20
    open_for: float = 5.0
    probes: int = 3

    def __post_init__(self) -> None:
        if not _number(self.failure_rate) or not 0 < self.failure_rate <= 1:
            raise SettingsError(
                f"Breaker(failure_rate={self.failure_rate!r}): needs a share of the calls, more than 0 and at most 1"
            )
        for name, seconds in (("window", self.window), ("open_for", self.open_for)):
            if not _number(seconds) or not 0 < seconds < inf:
                raise SettingsError(f"Breaker({name}={seconds!r}): needs seconds, more than 0")
        for name, count in (("minimum", self.minimum), ("probes", self.probes)):
            if type(count) is not int or count < 1:
                raise SettingsError(f"Breaker({name}={count!r}): needs a whole number of calls, at least 1")


def _number(value: object) -> bool:
    return isinstance(value, int | float)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitStatistics:
    """A snapshot of a circuit."""

    state: CircuitState
    calls: int
    """Results that count now: those in the window as of the last one; when HALF_OPEN, of the probes;
    when OPEN, those that opened it."""
    failures: int
    """How many of ``calls`` failed."""
    in_flight: int
    """Calls admitted and not ended, those of earlier generations included."""
    limit: int | None
    """How many calls of this generation may be in flight; None: any number."""
    since: float | None
    """When the circuit came into this state; None: it never was in another."""


_BUCKETS = 10
_CLOSED_AT = 64
"""RECOVERING ends when the limit has grown to this many times ``probes``: six round trips, each twice the last."""

# Looking a member up on its Enum costs as much as the rest of admit().
_CLOSED, _OPEN = CircuitState.CLOSED, CircuitState.OPEN
_HALF_OPEN, _RECOVERING = CircuitState.HALF_OPEN, CircuitState.RECOVERING


class Circuit:
    """One stage's circuit: ``admit``, then exactly one of ``succeeded``, ``failed`` and ``dropped`` for each call.

    Every method takes ``now``, which never goes back. ``generation`` is read right after ``admit`` and handed back when
    the call ends. ``on_change`` is called with the old and the new state after each transition, when the circuit
    already is in the new one.

    The window is kept in ten buckets, so it ends between nine and ten tenths of ``window`` ago.
    """

    def __init__(
        self,
        breaker: Breaker,
        on_change: Callable[[CircuitState, CircuitState], None] | None = None,
    ) -> None:
        # Both are read by the owner on its hot path and written here only.
        self.state = _CLOSED
        self.generation = 0
        self._breaker = breaker
        self._on_change = on_change
        self._since: float | None = None
        self._until = -inf  # OPEN: when it turns half-open
        self._in_flight = 0  # of this generation
        self._late = 0  # in flight since earlier generations
        self._probes = 0  # HALF_OPEN: admitted and not dropped
        self._limit = 0  # RECOVERING: most calls of this generation in flight
        # The window: per bucket, and in sum. When HALF_OPEN only the sums, for the probes.
        self._width = breaker.window / _BUCKETS
        self._at = 0  # number of the current bucket, counted from time 0
        self._bucket_ends = -inf
        self._calls_in = [0] * _BUCKETS
        self._failures_in = [0] * _BUCKETS
        self._calls = 0
        self._failures = 0
        self._streak = 0  # failures since the last success

    def admit(self, now: float) -> bool:
        """Whether a call may start now; if so it is in flight until its end is reported."""
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
        """How many calls would be admitted now, one after another; None: any number."""
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
        """When OPEN, the time from which :meth:`admit` lets probes through.

        None otherwise: then only the end of a call in flight makes room.
        """
        return self._until if self.state is _OPEN else None

    def succeeded(self, now: float, generation: int) -> None:
        """A call has ended well."""
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
        self._calls_in[self._at % _BUCKETS] += 1
        self._streak = 0
        if self.state is _RECOVERING:
            self._limit += 1
            if self._limit >= _CLOSED_AT * self._breaker.probes:
                self._change(_CLOSED, now)

    def failed(self, now: float, generation: int) -> None:
        """A call has failed transiently. Only this opens the circuit: a success is no reason to, whatever the rate."""
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
        self._calls_in[self._at % _BUCKETS] += 1
        self._failures += 1
        self._failures_in[self._at % _BUCKETS] += 1
        self._streak += 1
        breaker = self._breaker
        minimum = breaker.minimum if self.state is _CLOSED else breaker.probes
        # A busy stage has a window full of successes: an outage shows in the streak long before it shows in the rate.
        outage = min(self._streak, self._failures) >= minimum
        if outage or (self._calls >= minimum and self._failures / self._calls >= breaker.failure_rate):
            self._open(now)

    def dropped(self, now: float, generation: int) -> None:  # noqa: ARG002 - the three ends of a call look alike
        """A call has ended in a way that says nothing of the stage: poison, or cancelled.

        A probe that is dropped is replaced by another.
        """
        if generation != self.generation:
            self._late -= 1
            return
        self._in_flight -= 1
        if self.state is _HALF_OPEN:
            self._probes -= 1

    def nobody_waits(self, now: float) -> None:
        """No lane waits for the stage: there is no stampede to fear, so RECOVERING ends."""
        if self.state is _RECOVERING:
            self._change(_CLOSED, now)

    def snapshot(self) -> CircuitStatistics:
        """What the circuit does and what it knows."""
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
        """Begin the bucket of ``now`` and forget those that have left the window."""
        at = int(now // self._width)
        if at - self._at >= _BUCKETS:
            self._forget()
        else:
            for gone in range(self._at + 1, at + 1):
                place = gone % _BUCKETS
                self._calls -= self._calls_in[place]
                self._failures -= self._failures_in[place]
                self._calls_in[place] = self._failures_in[place] = 0
        self._at = at
        self._bucket_ends = (at + 1) * self._width

    def _forget(self) -> None:
        self._calls = self._failures = 0
        self._calls_in = [0] * _BUCKETS
        self._failures_in = [0] * _BUCKETS
