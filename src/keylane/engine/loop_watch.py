"""Event loop watch: warns about an ``async def`` stage that blocks its task's loop, and where it does.

While a stage blocks, no other message of its task runs. The loop records the time every :data:`_BEAT_SECONDS`. A thread
checks that time, and if it is old, inspects the loop's thread. There is no cost per message.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

    from keylane.spec import StageSpec

log = logging.getLogger("keylane.task")

BLOCKED_SECONDS = 0.1
"""Time without a turn of the loop after which its thread is inspected."""
SAID_EVERY_SECONDS = 60.0
"""Time between two warnings about the same stage."""
_BEAT_SECONDS = 0.05
_LOOK_SECONDS = 0.02
"""Time between two inspections of a blocked loop."""
_SAME_CALL_SECONDS = 0.05
"""Time for which the same call must be seen: many short calls in a row do not block."""
_NOT_THE_APPS = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1]), "<frozen"}
)


@contextmanager
def watched(stages: Iterable[StageSpec]) -> Iterator[None]:
    """Watch the running loop for the duration of the block."""
    watch = LoopWatch(
        {code: stage.name for stage in stages if stage.is_async and (code := _code(stage.function))}
    )
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class LoopWatch:
    """The watch of one loop. Call :meth:`start` and :meth:`stop` on the loop; all else happens in a thread.

    ``stages`` are the stages' names by the code of their functions.
    """

    def __init__(self, stages: dict[CodeType, str]) -> None:
        self._stages = stages
        self._beat = 0.0  # written by the loop
        self._timer: asyncio.TimerHandle | None = None
        self._ended = threading.Event()
        self._call: FrameType | None = None  # the last seen call of a stage
        self._since = 0.0
        self._said: dict[str, float] = {}

    def start(self) -> None:
        """Start the thread."""
        if not self._stages:
            return
        self._mark(asyncio.get_running_loop())
        me = threading.get_ident()
        threading.Thread(target=self._check, args=(me,), name="keylane-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _mark(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = time.monotonic()
        self._timer = loop.call_later(_BEAT_SECONDS, self._mark, loop)

    def _check(self, thread: int) -> None:
        wait = _BEAT_SECONDS
        while not self._ended.wait(wait):
            now = time.monotonic()
            if now - self._beat < BLOCKED_SECONDS:
                self._call, wait = None, _BEAT_SECONDS
                continue
            wait = _LOOK_SECONDS
            self._sample(sys._current_frames().get(thread), now)  # noqa: SLF001 - documented, and the only way
        self._call = None

    def _sample(self, frame: FrameType | None, now: float) -> None:
        innermost: FrameType | None = None  # in the app's own code
        while frame is not None and frame.f_code not in self._stages:
            if innermost is None and not frame.f_code.co_filename.startswith(_NOT_THE_APPS):
                innermost = frame
            frame = frame.f_back
        if frame is None or frame is not self._call:
            self._call, self._since = frame, now
        elif now - self._since >= _SAME_CALL_SECONDS:
            self._say(self._stages[frame.f_code], innermost or frame, now)

    def _say(self, stage: str, frame: FrameType, now: float) -> None:
        if now - self._said.get(stage, -SAID_EVERY_SECONDS) < SAID_EVERY_SECONDS:
            return
        self._said[stage] = now
        log.warning(
            "stage %r blocks the event loop for more than %g s, at %s:%d in %s: no other message of its task runs "
            "meanwhile. Use 'await' there, or declare the stage with 'def', which runs it in a thread",
            stage,
            BLOCKED_SECONDS,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_code.co_name,
            extra={"stage": stage},
        )


def _code(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object with __call__
        function = getattr(function, "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None)
