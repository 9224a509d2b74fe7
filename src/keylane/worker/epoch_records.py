"""What commits at the end of an epoch, and the last one of a worker, say besides the progress."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from keylane.errors import FailureGuardError
from keylane.state.topic import GUARD, LOAD, REST, part_of
from keylane.worker.commit import Contributor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.engine.engine import Engine
    from keylane.offsets.slots import Slots
    from keylane.state.ownership import Ownership
    from keylane.worker.commit import CommitBatch
    from keylane.worker.task_plan import TaskPlan


class EpochRecords(Contributor):
    """For the planner: ``load`` is what was read in the epoch, by partition and bucket of slots.

    ``slots`` are those that the worker owns.
    """

    def __init__(self, plan: TaskPlan, slots: Mapping[int, Slots], load: Mapping[int, list[int]]) -> None:
        self._plan = plan
        self._slots = slots
        self._load = load

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the load."""
        plan = self._plan
        for partition, slots in self._slots.items():
            load = json.dumps([plan.run, plan.epoch, self._load[partition]]).encode()
            batch.note(partition, part_of(LOAD, slots), load)

    def committed(self) -> None:
        """Nothing follows."""

    def aborted(self) -> None:
        """Nothing to do: the same records are collected again."""


class LastRecords(EpochRecords):
    """The same, and why the worker has ended, for the planner or a task that tries again.

    ``ownership`` is released with the commit; None keeps it. ``finished``: everything below the plan's ``until`` was
    read, and is done or waits in a stopped lane. An epoch that ends earlier leaves messages to the next one.
    """

    def __init__(
        self,
        plan: TaskPlan,
        slots: Mapping[int, Slots],
        load: Mapping[int, list[int]],
        engine: Engine,
        ownership: Ownership | None,
        *,
        finished: bool,
    ) -> None:
        super().__init__(plan, slots, load)
        self._engine = engine
        self._ownership = ownership
        self._finished = finished

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the load, why the task has ended, and the release of its partitions."""
        super().collect(batch)
        plan, engine = self._plan, self._engine
        if engine.failure.done():
            error = engine.failure.exception()
            if isinstance(error, FailureGuardError):
                for partition in plan.starts:
                    why = {"run": plan.run, "why": str(error)}
                    batch.note(partition, GUARD, json.dumps(why).encode())
        elif self._finished and plan.until is not None and (engine.held or plan.cuts):
            for partition, slots in self._slots.items():
                value = {"run": plan.run, "until": plan.until[partition]}
                batch.note(partition, part_of(REST, slots), json.dumps(value).encode())
        if self._ownership is not None:
            batch.notes.extend(self._ownership.release())
