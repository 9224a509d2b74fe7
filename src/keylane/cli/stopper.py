"""SIGTERM and Ctrl-C: what they ask for, and how long that may take."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T")

OVERDUE = 4
"""The exit code of a stop that was not drained to its end."""
_LOOK = 0.05
_LEAVE = 15.0


class AbandonedError(BaseException):
    """The work is left as it is and the process is to end. Not an Exception: nobody on the way may keep it."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Stopper:
    """Runs the work in a thread, so that the main thread is free for signals and the time, whatever the work waits for.

    The first signal asks for a stop: at once when nothing runs, else the work drains and has so many seconds for it. A
    second one, or the end of that time, abandons the work.

    ``_signals`` is written by the handler alone. ``_room``, ``_since`` and ``_always`` are the work's, under the lock;
    the main thread reads them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signals: list[int] = []
        self._lock = threading.Lock()
        self._room: float | None = None
        self._since = 0.0
        self._always = False
        self._guarding = False
        self._asked_at: float | None = None
        signal.signal(signal.SIGTERM, self._take)
        signal.signal(signal.SIGINT, self._take)

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self._signals)

    def nothing_runs(self) -> None:
        """Said by the work: a stop may end the process at once."""
        with self._lock:
            self._room, self._always = None, False

    def runs(self, seconds: float, *, always: bool = False) -> None:
        """Said by the work: from here on a stop has to end it properly, which takes so many seconds at most.

        ``always``: these seconds count from now, asked or not. Ends the work when a stop was asked for already and
        nothing ran until now.
        """
        with self._lock:
            if self._room is None and self._signals and not always:
                raise _nothing_ran()
            self._room, self._since, self._always = seconds, time.monotonic(), always

    def guard(self, work: Callable[[], T]) -> T:
        """Do the work; what it returns or raises. Raises :class:`AbandonedError` when it has to be left."""
        results: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="keylane-run", daemon=True)
        self._guarding = True
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK)
            self._mind()
        if errors:
            raise errors[0]
        return results[0]

    def _mind(self) -> None:
        with self._lock:
            room, since, always = self._room, self._since, self._always
            if self._signals and self._asked_at is None:
                self._asked_at = time.monotonic()
                ask = True
                if room is None:
                    raise _nothing_ran()
            else:
                ask = False
        if ask and room is not None:
            line = (
                f"stopping: what is running is finished and committed first, within {room:g} s. "
                "A second signal ends it now, without that"
            )
            threading.Thread(
                target=self._say, args=(line,), daemon=True
            ).start()  # a terminal may stand still
        if len(self._signals) > 1:
            raise AbandonedError(
                128 + self._signals[-1], "ended without the drain: what was running runs again next time"
            )
        asked_at = self._asked_at
        if room is None or (asked_at is None and not always):
            return
        if time.monotonic() > max(since, asked_at or since) + room:
            raise AbandonedError(
                OVERDUE,
                f"Spark has not ended within {room:g} s and is ended now. Nothing is lost: "
                "what was running runs again next time",
            )

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if not self._guarding:  # the main thread is still in the middle of something, and nothing was begun
            raise _nothing_ran()


def _nothing_ran() -> AbandonedError:
    return AbandonedError(0, "stopped: nothing was running")


def last_resort(code: int) -> None:
    """End the process with ``code`` should it still be there in 15 s, whatever keeps it."""

    def watch() -> None:
        time.sleep(_LEAVE)
        os._exit(code)

    threading.Thread(target=watch, name="keylane-last-resort", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End the process now, and the JVM that it has started."""
    from keylane.spark import jvm  # noqa: PLC0415 - not needed by --help

    sys.stdout.flush()
    sys.stderr.flush()
    jvm.end()
    os._exit(code)
