"""Timers as a stage sees them: calls of a handler of its lane at a later time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING, Any

from keylane.errors import Poison
from keylane.handlers.encoding import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TIMER_SECONDS_MAX = 100 * 365 * 86_400.0
"""The furthest that a timer can be ahead: a century."""
TIMER_BYTES_MAX = 65_536
"""Size limit of a timer's value as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A timer of a lane that has not fired."""

    name: str
    at: float
    """Unix time."""
    value: Any = None
    """What its handler gets as ``msg.value``."""


@dataclass(frozen=True, slots=True)
class TimerChange:
    """What an attempt wants: a timer at this time with this JSON, or none."""

    due: int = 0
    """Milliseconds since 1970."""
    content: bytes | None = None


class Timers:
    """The timers of the message's lane: a parameter ``timers: Timers`` of a stage or handler.

    A timer calls the handler ``@app.on_timer(name)`` in the lane, between its messages. There is one timer of each name
    in a lane. What a failed attempt has changed is discarded; the rest is committed together with the progress of the
    message, and a timer does not fire before that.
    """

    __slots__ = ("_changes", "_existing", "_known", "_open", "_wall")

    def __init__(
        self, known: frozenset[str], existing: Callable[[], Mapping[str, Timer]], wall: Callable[[], float]
    ) -> None:
        self._known = known
        self._existing = existing
        self._wall = wall
        self._changes: dict[str, TimerChange] = {}
        self._open = True

    def set(
        self, name: str, *, after: float | None = None, at: float | datetime | None = None, value: Any = None
    ) -> None:
        """Set the lane's timer of this name, or replace it: ``after`` seconds, or ``at`` a unix time or datetime.

        One in the past fires at once. ``value`` is JSON; the handler gets it as ``msg.value``. Raises
        :class:`keylane.Poison` for a time or value that cannot be, and for a name without a handler.
        """
        self._check(name)
        if (after is None) == (at is None):
            raise Poison(f"timer {name!r}: give either after= or at=, got after={after!r} and at={at!r}")
        now = self._wall()
        if isinstance(at, datetime):
            if at.tzinfo is None:
                raise Poison(f"timer {name!r}: at={at!r} has no time zone; write datetime(…, tzinfo=UTC)")
            at = at.timestamp()
        given: Any = after if at is None else at
        if type(given) not in (int, float) or not isfinite(given) or given < 0:
            raise Poison(f"timer {name!r}: expected seconds from 0 on, got {given!r}")
        due: float = now + given if at is None else given
        if due - now > TIMER_SECONDS_MAX:
            raise Poison(
                f"timer {name!r}: {due - now:,.0f} s ahead, and the limit is {TIMER_SECONDS_MAX:,.0f}"
            )
        try:
            content = as_json(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise Poison(f"timer {name!r}: its value cannot be stored: {error}") from error
        if len(content) > TIMER_BYTES_MAX:
            raise Poison(
                f"timer {name!r}: its value has {len(content):,} bytes, and the limit is {TIMER_BYTES_MAX:,}"
            )
        self._changes[name] = TimerChange(int(due * 1000), content)

    def cancel(self, name: str) -> None:
        """Remove the lane's timer of this name, if there is one."""
        self._check(name)
        self._changes[name] = TimerChange()

    def list(self) -> list[Timer]:
        """The lane's timers, by time."""
        found = dict(self._existing())
        for name, change in self._changes.items():
            found.pop(name, None)
            if change.content is not None:
                found[name] = timer_of(name, change.due, change.content)
        return sorted(found.values(), key=lambda timer: timer.at)

    def close(self) -> Mapping[str, TimerChange]:
        """End of the attempt: what it has changed, by name."""
        self._open = False
        return self._changes

    def discard(self) -> None:
        """The attempt failed, or was cut off: later changes by its code are errors."""
        self._open = False

    def _check(self, name: str) -> None:
        if not self._open:
            raise RuntimeError(f"timer {name!r} was changed after its attempt had ended")
        if name not in self._known:
            known = ", ".join(map(repr, sorted(self._known))) or "none"
            raise Poison(
                f"no handler for timer {name!r}: declare one with @app.on_timer({name!r}); there are: {known}"
            )


def timer_of(name: str, due: int, content: bytes) -> Timer:
    """The timer with this time and JSON."""
    return Timer(name=name, at=due / 1000, value=json.loads(content))


def is_timers(annotation: Any) -> bool:
    """Whether a parameter takes the timers."""
    return annotation is Timers or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Timers")
