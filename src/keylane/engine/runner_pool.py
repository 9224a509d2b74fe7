"""Runner pool of one engine: the tasks that run the heads of lanes.

Runners are reused. A runner takes ready lanes one after another; before it takes one while more are ready, it makes
sure that another runner is scheduled. Stages that never wait need no second runner; stages that wait get one runner for
each message that waits. There is no fixed number of runners, and no lane is bound to one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from typing import TYPE_CHECKING, Any

from keylane.lanes.lane_table import LaneState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from keylane.engine.delivery import Delivery
    from keylane.engine.lifecycle import Lifecycle
    from keylane.lanes.lane_table import Lane, LaneTable

CANCEL_SECONDS_MAX = 5.0
"""Time for which a stage that swallows its cancellation is cancelled again."""
_CANCEL_INTERVAL_SECONDS = 1.0


class RunnerPool:
    """The runners of one engine. Used only on its loop. :meth:`attach` says what a runner does."""

    __slots__ = ("_idle", "_life", "_loop", "_run", "_table", "_tasks", "cut", "scheduled", "stage_survived")

    def __init__(self, table: LaneTable[Delivery], life: Lifecycle, loop: asyncio.AbstractEventLoop) -> None:
        self.scheduled = (
            False  # written by ensure_runner() and by runners: one is scheduled and has not taken a lane
        )
        self.stage_survived = (
            False  # written by cancel(): a stage runs although it was cancelled again and again
        )
        self.cut: set[Lane[Delivery]] = (
            set()
        )  # written by cut_off(), emptied by the runners that it has cancelled
        self._tasks: set[asyncio.Task[None]] = set()  # written by ensure_runner() and _ended()
        self._idle: deque[asyncio.Future[None]] = deque()  # written by ensure_runner() and idle()
        self._run: Callable[[], Coroutine[Any, Any, None]]
        self._table = table
        self._life = life
        self._loop = loop

    def attach(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Set the coroutine function of a runner, before the first one is needed."""
        self._run = run

    def __len__(self) -> int:
        """The number of runners, idle ones included."""
        return len(self._tasks)

    def ensure_runner(self) -> None:
        """Make sure that a runner is scheduled if a lane is ready."""
        if self.scheduled or self._life.ended or not self._table.startable:
            return
        self.scheduled = True
        while self._idle:
            future = self._idle.pop()
            if not future.done():
                future.set_result(None)
                return
        task = self._loop.create_task(self._run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def idle(self) -> asyncio.Future[None]:
        """What an idle runner awaits: done when the runner is scheduled again."""
        future = self._loop.create_future()
        self._idle.append(future)
        return future

    def cut_off(self, lanes: Collection[Lane[Delivery]]) -> None:
        """Cancel what runs of these lanes. Their heads have not run then, and wait until they are removed."""
        for task in self._tasks:
            coroutine = task.get_coro()
            lane = (
                inspect.getcoroutinelocals(coroutine).get("lane") if inspect.iscoroutine(coroutine) else None
            )
            if lane is not None and lane in lanes and lane.state is LaneState.RUNNING:
                self.cut.add(lane)
                task.cancel()

    async def cancel(self) -> None:
        """Cancel all runners. A stage that swallows its cancellation is cancelled again and again."""
        deadline = self._loop.time() + CANCEL_SECONDS_MAX
        left = set(self._tasks)
        while left and not self.stage_survived:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_INTERVAL_SECONDS)
            self.stage_survived = bool(left) and self._loop.time() >= deadline

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._life.fail(error)
