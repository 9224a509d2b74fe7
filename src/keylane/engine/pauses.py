"""Pauses of one engine: what does not run now, by command or because a service asked for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import inf
from typing import TYPE_CHECKING

from keylane.engine.admission import NotAdmittedError

if TYPE_CHECKING:
    import asyncio

    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import Lane

PauseScope = tuple[str, Hashable]
"""What is paused: ``("app", None)``, ``("partition", 3)``, ``("stage", name)``, ``("key", bytes)``."""
APP: PauseScope = ("app", None)
_NAME_CHARACTERS_MAX = 200


class Pauses:
    """Used only on the loop. A paused lane waits without using an attempt, and a drain does not wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.active: dict[PauseScope, float] = {}
        """What is paused, and until which time of the loop. Always this dict: the hot path asks whether it is empty."""
        self._ordered: set[PauseScope] = set()  # by commands
        self._waiting: dict[PauseScope, list[Lane[Delivery]]] = {}
        self._timers: dict[PauseScope, asyncio.TimerHandle] = {}
        self._loop = loop
        self._resume: Callable[[Lane[Delivery]], None] = lambda _lane: None

    def attach(self, *, resume: Callable[[Lane[Delivery]], None]) -> None:
        """Connect the engine: ``resume`` resumes a lane."""
        self._resume = resume

    def order(self, scopes: Mapping[PauseScope, object]) -> None:
        """Pause what operators have paused, exactly; what was in an earlier call and is not in this one resumes."""
        lifted = self._ordered - scopes.keys()
        self._ordered = set(scopes)
        for scope in scopes:
            self.active[scope] = inf
            if (timer := self._timers.pop(scope, None)) is not None:
                timer.cancel()
        for scope in lifted:
            self._lift(scope)

    def hold_stage(self, stage: str, seconds: float) -> None:
        """Call this stage for no message for this time: a service that it calls asked for it."""
        scope, until = ("stage", stage), self._loop.time() + seconds
        if until <= self.active.get(scope, -inf):
            return
        self.active[scope] = until
        if (timer := self._timers.pop(scope, None)) is not None:
            timer.cancel()
        self._timers[scope] = self._loop.call_at(until, self._lift, scope)

    def check(self, delivery: Delivery, stage: str) -> None:
        """Raise :class:`NotAdmittedError` if the message or the stage it is at is paused."""
        active = self.active
        for scope in (
            APP,
            ("partition", delivery.partition),
            ("key", delivery.key),
            ("stage", stage),
        ):
            if scope in active:
                raise NotAdmittedError(_ScopeGate(self, scope), f"{scope[0]} is paused")

    def wait(self, scope: PauseScope, lane: Lane[Delivery]) -> None:
        """Queue a lane until the pause is over."""
        if scope in self.active:
            self._waiting.setdefault(scope, []).append(lane)
        else:
            self._resume(lane)

    def holds(self) -> dict[str, int]:
        """What is paused, in words, and how many lanes wait for that."""
        return {_shown(scope): len(self._waiting.get(scope, ())) for scope in self.active}

    def close(self) -> None:
        """Cancel the timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _lift(self, scope: PauseScope) -> None:
        self._timers.pop(scope, None)
        self.active.pop(scope, None)
        for lane in self._waiting.pop(scope, ()):
            self._resume(lane)


def _shown(scope: PauseScope) -> str:
    kind, what = scope
    if what is None:
        return f"{kind} paused" if kind == "app" else f"{kind} without a value paused"
    shown = what.decode("utf-8", "backslashreplace") if isinstance(what, bytes) else str(what)
    return f"{kind} {shown[:_NAME_CHARACTERS_MAX]} paused"


class _ScopeGate:
    """Where the lanes of one pause wait."""

    __slots__ = ("_pauses", "_scope")

    def __init__(self, pauses: Pauses, scope: PauseScope) -> None:
        self._pauses = pauses
        self._scope = scope

    def wait(self, lane: Lane[Delivery]) -> None:
        self._pauses.wait(self._scope, lane)
