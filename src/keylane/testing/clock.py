"""Virtual clock: an asyncio event loop that jumps to its next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    _Ready = list[tuple[selectors.SelectorKey, int]]
    _Select = Callable[[float | None], _Ready]

T = TypeVar("T")

_WAKE_SECONDS = 0.5
"""Real seconds to wait for a thread that the loop did not start."""
_ROUNDS_PER_POLL = 16
"""Rounds of a busy loop between two checks for results from threads."""


class StuckError(KeylaneError, RuntimeError):
    """The tasks that still wait can never continue, or the time limit has passed. Names them and where they wait."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` is virtual.

    When no callback is ready, the clock jumps to the next timer. ``await asyncio.sleep(3600)`` takes no real time, and
    timers always fire in the order of their times. Work in threads (``run_in_executor``, ``asyncio.to_thread``) takes
    real time, and the clock does not move meanwhile.

    Raises :class:`StuckError` instead of hanging when there is no ready callback, timer or thread, and when the clock
    passes ``limit``.

    ``time.time()`` and ``time.sleep()`` keep using real time, and the clock does not wait for sockets. The loop is for
    code whose I/O is faked.
    """

    def __init__(self, start: float = 0.0, limit: float = math.inf) -> None:
        self._now = float(start)
        self._limit = limit
        self._jobs: set[Future[Any]] = set()  # running in threads; written by the loop's thread only
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(_Selector(self._idle))
        self._jump(0.0)

    def time(self) -> float:
        """The virtual time in seconds, beginning with ``start``."""
        return self._now

    def run_in_executor(  # type: ignore[override] # typeshed's type variables cannot be named here
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run in a thread, as other loops do. The clock does not move until the thread is done."""
        if executor is None:
            executor = self._pool = self._pool or ThreadPoolExecutor(thread_name_prefix="virtual")
        job = executor.submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        # Added after wrap_future added its own callback: when this one runs, the result has been scheduled.
        self._jobs.add(job)
        job.add_done_callback(self._job_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109
        """Wait for the threads in real time. A time-out in virtual time would end at once."""
        if self._pool is not None:
            self._pool.shutdown()

    def _job_done(self, job: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before the thread ended
            self.call_soon_threadsafe(self._jobs.discard, job)

    def _idle(self, timeout: float | None, select: _Select) -> _Ready:
        """Called when no callback is ready: wait for a thread, jump to the next timer, or raise StuckError."""
        if self._jobs:
            return select(None)
        if timeout is None:
            woken = select(_WAKE_SECONDS)
            if not woken:
                self._give_up("nothing can continue, because there is no timer and no thread")
            return woken
        self._jump(timeout)
        if self._now > self._limit:
            limit, self._limit = self._limit, math.inf  # the tasks that are cancelled now may need more time
            self._give_up(f"the limit of {limit:g} seconds has passed")
        return []

    def _jump(self, seconds: float) -> None:
        self._now += seconds
        # asyncio runs timers that are due before now + resolution. Half a year from the start, adding a nanosecond
        # to a float changes nothing, so the timer at the present time would never be due.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))

    def _give_up(self, why: str) -> NoReturn:
        waiting = sorted(_place(task) for task in asyncio.all_tasks(self))
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        raise StuckError(
            f"at {self._now:g} virtual seconds {why}; still waiting: {'; '.join(waiting[:8])}{more}"
        )


class _Selector(selectors.DefaultSelector):
    """Selector that asks the loop before it waits."""

    def __init__(self, idle: Callable[[float | None, _Select], _Ready]) -> None:
        super().__init__()
        self._idle = idle
        self._rounds = 0

    def select(self, timeout: float | None = None) -> _Ready:
        self._rounds += 1
        if timeout is not None and timeout <= 0 and self._rounds % _ROUNDS_PER_POLL:
            return []  # ready callbacks come first; results from threads can wait for a few rounds
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._idle(timeout, super().select)


def run_virtual(main: Coroutine[Any, Any, T], *, start: float = 0.0, limit: float = math.inf) -> T:
    """``asyncio.run`` on a :class:`VirtualLoop` whose clock begins at ``start``.

    Raises :class:`StuckError` when nothing can continue, or when the clock passes ``limit``.

    >>> async def a_long_day() -> float:
    ...     await asyncio.sleep(86_400)
    ...     return asyncio.get_running_loop().time()
    >>> run_virtual(a_long_day())
    86400.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start, limit)) as runner:
        return runner.run(main)


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its innermost coroutine outside of asyncio."""
    coroutine: Any = task.get_coro()
    place = repr(coroutine)
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_globals.get("__name__", "").startswith("asyncio."):
            file = frame.f_code.co_filename.rpartition("/")[2]
            place = f"{coroutine.__qualname__} ({file}:{frame.f_lineno})"
        coroutine = coroutine.cr_await
    return place
