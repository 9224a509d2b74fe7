"""Clocks of one engine: the loop's time, the wall clock, and calls at a later time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Clock:
    """The time of one engine. Used only on its loop. ``wall`` is unix time; it may be set back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall: Callable[[], float]) -> None:
        self.now = loop.time  # seconds on the loop's clock
        self.wall = wall
        self._loop = loop
        self._closed = False
        self._delayed: set[asyncio.TimerHandle] = set()  # written by after(): calls that are due later

    @property
    def idle(self) -> bool:
        """Whether no call of :meth:`after` is outstanding."""
        return not self._delayed

    def at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call at this time of the loop. The caller cancels the timer when the engine ends."""
        return self._loop.call_at(when, call)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call after this time, unless the engine has ended by then. The engine does not rest before."""

        def due() -> None:
            self._delayed.discard(timer)
            call()

        if self._closed:
            return
        timer = self._loop.call_later(seconds, due)
        self._delayed.add(timer)

    def close(self) -> None:
        """Cancel the calls of :meth:`after`, and take no more."""
        self._closed = True
        for timer in self._delayed:
            timer.cancel()
