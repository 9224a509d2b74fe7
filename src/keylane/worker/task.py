"""One Spark task: the rows of one part of the plan, for one epoch.

The task attaches to the lanes that run in its worker already, or starts them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from keylane.state.ownership import ItemTakenError
from keylane.worker.lane_worker import LOCAL, LaneWorker, LocalWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.engine.delivery import Delivery
    from keylane.engine.hot_keys import HotName
    from keylane.spec import AppSpec
    from keylane.worker.epoch_plan import EpochPlan
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_LOOK_SECONDS = 0.2
"""Time between two looks for a part of the plan that nobody has."""


class Task:
    """Runs one plan. :meth:`outcomes` is its whole life.

    ``shared``: the plans of all tasks of the epoch, when this one may take another's. ``local``: the workers of the
    task's process.
    """

    def __init__(
        self,
        app: AppSpec,
        plan: TaskPlan,
        *,
        attempt: int = 1,
        shared: EpochPlan | None = None,
        local: LocalWorkers = LOCAL,
    ) -> None:
        self._app = app
        self._plan = plan
        self._attempt = attempt
        self._shared = shared
        self._local = local
        self._worker: LaneWorker | None = None

    @property
    def owner(self) -> str:
        """The name of the worker."""
        return "" if self._worker is None else self._worker.owner

    @property
    def hot(self) -> frozenset[HotName]:
        """Keys that recently made up much of what was read."""
        return frozenset() if self._worker is None else self._worker.hot

    def outcomes(self) -> Iterator[list[Delivery]]:
        """Run the epoch and yield what is done, in batches. Raises what ended it if that was not the plan."""
        running = self._local.idle(self._app, self._plan)
        home = None
        for worker in running:
            known = self._home(worker)
            rows = worker.attach(self._plan_of(worker), self._attempt, moves=known is not None)
            if rows is None:
                continue
            try:
                yield from self._read(worker, rows)
            except ItemTakenError:  # its transaction was aborted, and meanwhile others had some of its ranges
                break
            if not worker.gave_way:
                return
            home = known
        for worker in self._local.idle(self._app, self._plan):
            home = self._home(worker)
            yield from self._read(worker, worker.retire())
        for plan in self._choices(home):
            worker = LaneWorker(self._app, plan, attempt=self._attempt, local=self._local)
            try:
                yield from self._read(worker, worker.start())
            except ItemTakenError:  # before anything ran
                continue
            return

    def _read(self, worker: LaneWorker, rows: Iterator[list[Delivery]]) -> Iterator[list[Delivery]]:
        self._worker = worker
        try:
            yield from rows
        finally:
            worker.detach()

    def _home(self, worker: LaneWorker) -> int | None:
        """The part of the plan that is this worker's."""
        return None if self._shared is None else self._shared.homes.get(worker.id)

    def _plan_of(self, worker: LaneWorker) -> TaskPlan:
        home = self._home(worker)
        return self._plan if self._shared is None or home is None else self._shared.part(home, self._plan)

    def _choices(self, home: int | None) -> Iterator[TaskPlan]:
        """Plans to start with: the worker's own part, or else one that nobody has."""
        plan, shared = self._plan, self._shared
        if shared is None:
            yield plan
            return
        if home is not None:
            yield shared.part(home, plan)
        elif not shared.homes or len(shared.assignment.tasks) == 1:  # nothing runs yet, or there is no choice
            yield plan
        began = time.monotonic()
        while (waited := time.monotonic() - began) < plan.seconds:
            number = shared.unowned(self._app, plan, waited=waited)
            if number is not None:
                yield shared.part(number, plan)
            time.sleep(_LOOK_SECONDS)
        log.warning(
            "task %d of epoch %d: other tasks have all parts of the plan", plan.spark_task, plan.epoch
        )
