"""Virtual time: an asyncio loop that jumps to its next timer instead of waiting for it."""

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

_GRACE = 0.5
"""Real seconds in which a thread that the loop knows nothing of may still wake it."""
_POLLED = 16
"""Rounds of a busy loop between two looks at what threads have sent it."""


class StuckError(KeylaneError, RuntimeError):
    """What still waits will never go on, or not in any useful time; names who waits, and where."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` is virtual.

    When nothing is ready it jumps to the next timer, so ``await asyncio.sleep(3600)`` takes no real time and two timers
    always fire in the order of their times. Work in threads (``run_in_executor``, ``asyncio.to_thread``) is really
    waited for, and while there is any the clock stands still. With nothing ready, no timers and no threads left the
    run raises :class:`StuckError` instead of hanging; and so it does when the clock passes ``limit``.

    ``time.time()`` and ``time.sleep()`` know nothing of it, and sockets get no time to answer: for code that does its
    I/O through fakes.
    """

    def __init__(self, start: float = 0.0, limit: float = math.inf) -> None:
        self._now = float(start)
        self._limit = limit
        self._jobs: set[Future[Any]] = set()  # what runs in threads; written on the loop's thread only
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(_Selector(self._idle))
        self._jump(0.0)

    def time(self) -> float:
        """Virtual seconds; they begin at ``start``."""
        return self._now

    def run_in_executor(  # type: ignore[override] # typeshed's type variables cannot be named here
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As every loop's; the clock stands still until the thread is done."""
        if executor is None:
            executor = self._pool = self._pool or ThreadPoolExecutor(thread_name_prefix="virtual")
        job = executor.submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        # Asked for after wrap_future did the same: when this one is told, the result is on its way already.
        self._jobs.add(job)
        job.add_done_callback(self._job_over)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109
        """Wait for its threads, really: the time-out of asyncio's own would be over at once."""
        if self._pool is not None:
            self._pool.shutdown()

    def _job_over(self, job: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before the thread came to its end
            self.call_soon_threadsafe(self._jobs.discard, job)

    def _idle(self, timeout: float | None, select: _Select) -> _Ready:
        """Nothing is ready now: wait for a thread, or jump, or find that nobody will ever go on."""
        if self._jobs:
            return select(None)
        if timeout is None:
            woken = select(_GRACE)
            if not woken:
                self._give_up("nothing is left that could go on: no timer, no thread")
            return woken
        self._jump(timeout)
        if self._now > self._limit:
            limit, self._limit = self._limit, math.inf  # what is cancelled now may take its time
            self._give_up(f"the limit of {limit:g} is passed")
        return []

    def _jump(self, seconds: float) -> None:
        self._now += seconds
        # asyncio runs what is due before now + resolution. Half a year from the start a nanosecond added to a float
        # changes nothing: it would ask for ever whether the timer that it stands at is due.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))

    def _give_up(self, why: str) -> NoReturn:
        waiting = sorted(_place(task) for task in asyncio.all_tasks(self))
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        raise StuckError(
            f"at {self._now:g} virtual seconds {why}. Still waiting: {'; '.join(waiting[:8])}{more}"
        )


class _Selector(selectors.DefaultSelector):
    """Asks the loop what to do before it waits."""

    def __init__(self, idle: Callable[[float | None, _Select], _Ready]) -> None:
        super().__init__()
        self._idle = idle
        self._asked = 0

    def select(self, timeout: float | None = None) -> _Ready:
        self._asked += 1
        if timeout is not None and timeout <= 0 and self._asked % _POLLED:
            return []  # what is ready in the loop comes first; a thread can wait for a few rounds
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._idle(timeout, super().select)


def run_virtual(main: Coroutine[Any, Any, T], *, start: float = 0.0, limit: float = math.inf) -> T:
    """``asyncio.run`` on a :class:`VirtualLoop`; ``start`` is what its clock shows first.

    Raises :class:`StuckError` when nothing can go on, or the clock passes ``limit``.

    >>> async def a_long_day() -> float:
    ...     await asyncio.sleep(86_400)
    ...     return asyncio.get_running_loop().time()
    >>> run_virtual(a_long_day())
    86400.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start, limit)) as runner:
        return runner.run(main)


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its innermost coroutine that is not asyncio's own."""
    coroutine: Any = task.get_coro()
    place = repr(coroutine)
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_globals.get("__name__", "").startswith("asyncio."):
            file = frame.f_code.co_filename.rpartition("/")[2]
            place = f"{coroutine.__qualname__} ({file}:{frame.f_lineno})"
        coroutine = coroutine.cr_await
    return place
