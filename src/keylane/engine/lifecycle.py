"""Lifecycle of one engine: whether it runs, fails or has ended, and who waits for it to rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from keylane.errors import AbortedError, FencedError

if TYPE_CHECKING:
    from collections.abc import Callable


class Lifecycle:
    """The state of one engine as a whole. Used only on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.failure: asyncio.Future[None] = loop.create_future()
        """Done with an exception when the engine cannot continue."""
        self.stopping = False  # written by fail() and end(): from now on runners are cancelled from outside
        self.ended = False  # written by fail() and end(): nothing more is started
        self._changed = asyncio.Event()  # set by changed(), cleared by wait_until()

    def changed(self) -> None:
        """The engine may have come to rest."""
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Stop with this error; the first one counts. Starts nothing more when another task may own the messages."""
        self.stopping = True
        self.ended = self.ended or isinstance(error, FencedError | AbortedError)
        if not self.failure.done():
            self.failure.set_exception(error)
        self._changed.set()

    def end(self) -> None:
        """Start nothing more."""
        self.stopping = self.ended = True

    async def wait_until(self, rested: Callable[[], bool]) -> None:
        """Wait until ``rested()`` is true. Raises the engine's failure."""
        while not rested():
            if self.failure.done():
                self.failure.result()
            self._changed.clear()
            await self._changed.wait()
