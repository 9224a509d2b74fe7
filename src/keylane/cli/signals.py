"""Handling of SIGTERM and Ctrl-C, with time limits."""

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

OVERDUE_EXIT_CODE = 4
"""The exit code of a stop without a complete drain."""
_POLL_INTERVAL_SECONDS = 0.05
_EXIT_SECONDS_MAX = 15.0


class AbandonedError(BaseException):
    """Abandon the work and exit. A BaseException so that no ``except Exception`` swallows it."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class StopSignals:
    """Guard that runs the work in a thread, so that the main thread can always handle signals and time limits.

    The first signal requests a stop: at once if nothing runs; otherwise the work drains within a time limit. A second
    signal, or the end of that time, abandons the work.

    ``_signals`` is written by the handler only. ``_room``, ``_since`` and ``_always`` are written by the work under
    the lock; the main thread reads them.
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
        """Whether a stop was requested."""
        return bool(self._signals)

    def nothing_runs(self) -> None:
        """Called by the work: a stop may end the process at once."""
        with self._lock:
            self._room, self._always = None, False

    def runs(self, seconds: float, *, always: bool = False) -> None:
        """Called by the work: from now on a stop must end it properly, within this many seconds.

        ``always``: the seconds count from now, even without a stop. Ends the work if a stop was requested already and
        nothing ran until now.
        """
        with self._lock:
            if self._room is None and self._signals and not always:
                raise _nothing_ran()
            self._room, self._since, self._always = seconds, time.monotonic(), always

    def guard(self, work: Callable[[], T]) -> T:
        """Run the work; return or raise what it does. Raises :class:`AbandonedError` if it must be abandoned."""
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
            thread.join(_POLL_INTERVAL_SECONDS)
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
                f"stopping: messages in flight are finished and committed first, within {room:g} s. "
                "A second signal ends the run at once, without a drain"
            )
            threading.Thread(
                target=self._say, args=(line,), daemon=True
            ).start()  # writing to a terminal may block
        if len(self._signals) > 1:
            raise AbandonedError(
                128 + self._signals[-1], "ended without a drain: messages in flight run again next time"
            )
        asked_at = self._asked_at
        if room is None or (asked_at is None and not always):
            return
        if time.monotonic() > max(since, asked_at or since) + room:
            raise AbandonedError(
                OVERDUE_EXIT_CODE,
                f"Spark did not end within {room:g} s; ending it now. Nothing is lost: "
                "messages in flight run again next time",
            )

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if not self._guarding:  # the main thread is still busy, and nothing was started
            raise _nothing_ran()


def _nothing_ran() -> AbandonedError:
    return AbandonedError(0, "stopped: nothing was running")


def last_resort(code: int) -> None:
    """End the process with ``code`` if it still exists in 15 s, whatever blocks it."""

    def watch() -> None:
        time.sleep(_EXIT_SECONDS_MAX)
        os._exit(code)

    threading.Thread(target=watch, name="keylane-last-resort", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End the process now, with the JVM that it started."""
    from keylane.spark import jvm  # noqa: PLC0415 - not needed by --help

    sys.stdout.flush()
    sys.stderr.flush()
    jvm.end()
    os._exit(code)
