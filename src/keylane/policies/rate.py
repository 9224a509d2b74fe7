"""Rate limits of a stage: how many calls may start in a time, evenly, for all keys and for each key."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Hashable

CATCH_UP_SECONDS = 0.1
"""Calls of this time may start at once, after they could not start on time. At least one always may."""
EARLY_SECONDS = 0.001
"""A timer may fire so much before its time."""
_FORGET_KEYS = 10_000
"""Keys remembered until those that may start again are forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` calls in ``per`` seconds, evenly spaced: ``Rate(100)``, ``Rate(1000, per=60)``.

    In any time the number of calls is at most that of the rate, and those of a tenth of a second, or one, more.

    Raises :class:`SettingsError` for invalid values.
    """

    count: float
    _: KW_ONLY
    per: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("per", self.per)):
            if type(value) not in (int, float) or not 0 < value < inf:
                raise SettingsError(f"Rate: {name} must be a number above 0, got {value!r}")

    @property
    def interval(self) -> float:
        """Seconds from one call to the next."""
        return self.per / self.count


class RateLimit:
    """The calls of one stage in one task; ``share`` is the part of the rate that the task has, from 0 to 1."""

    __slots__ = ("_interval", "_next", "_rate", "_tolerance")

    def __init__(self, rate: Rate, share: float = 1.0) -> None:
        self._rate = rate
        self._next = -inf  # when the next call would start if all were on time
        self.set_share(share, -inf)

    def set_share(self, share: float, now: float) -> None:
        """The task has another part of the rate from now on; with 0 no call may start."""
        self._interval = self._rate.interval / share if share > 0 else inf
        self._tolerance = max(0.0, CATCH_UP_SECONDS - self._interval)
        if self._interval < inf:  # what was to wait for long does not any more
            self._next = min(self._next, now + self._tolerance + self._interval)

    def admit(self, now: float) -> bool:
        """Whether a call may start now; if so, it counts."""
        if self._interval == inf:
            return False
        on_time = max(self._next, now)
        if on_time - now > self._tolerance + EARLY_SECONDS:
            return False
        self._next = on_time + self._interval
        return True

    def room(self, now: float) -> int:
        """How many calls may start now."""
        if self._interval == inf:
            return 0
        ahead = max(self._next, now) - now
        spare = self._tolerance + EARLY_SECONDS - ahead
        return 0 if spare < 0 else int(spare / self._interval) + 1

    def wait(self, now: float) -> float:
        """Seconds until a call may start; 0 if one may now."""
        if self._interval == inf:
            return inf
        return max(0.0, self._next - self._tolerance - now)


class KeyRates:
    """The calls of each key. A key of which nothing was heard for a while is forgotten."""

    __slots__ = ("_forget_at", "_interval", "_next")

    def __init__(self, rate: Rate) -> None:
        self._interval = rate.interval
        self._next: dict[Hashable, float] = {}  # when the key's next call may start
        self._forget_at = _FORGET_KEYS

    def __len__(self) -> int:
        """The number of keys remembered."""
        return len(self._next)

    def due(self, key: Hashable) -> float:
        """The time at which a call of this key may start."""
        return self._next.get(key, -inf)

    def admits(self, key: Hashable, now: float) -> bool:
        """Whether a call of this key may start now."""
        return self._next.get(key, -inf) <= now + EARLY_SECONDS

    def started(self, key: Hashable, now: float) -> None:
        """A call of this key starts now."""
        # On time: a call that was a little late does not delay all that follow.
        late = now - self.due(key)
        on_time = now - late if late < min(self._interval, CATCH_UP_SECONDS) else now
        self._next[key] = on_time + self._interval
        if len(self._next) > self._forget_at:
            self._next = {each: due for each, due in self._next.items() if due > now}
            self._forget_at = max(_FORGET_KEYS, 2 * len(self._next))
