"""The records of entities' versions in the state topic."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from keylane.engine.version_store import VersionStore, home
from keylane.offsets.range_progress import RangeWatermark
from keylane.state.topic import VERSION, VERSIONS, part_of, stale_parts
from keylane.worker.commit import Contributor
from keylane.worker.version_moves import gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.engine.version_store import Name
    from keylane.engine.versions import Versions
    from keylane.kafka.transactional_writer import StateRecord
    from keylane.offsets.watermark import Watermark
    from keylane.policies.versions import VersionMark
    from keylane.spec import AppSpec
    from keylane.state.topic import StateTopic
    from keylane.worker.commit import CommitBatch
    from keylane.worker.progress import ProgressTracker
    from keylane.worker.session import WorkerSession
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_MOVED_AT_ONCE_ENTITIES = 5000
"""Moved entities that one transaction writes into their new partition."""


class VersionRecords(Contributor):
    """Restored once, connected to the engine's versions, then part of every commit. Comes after the progress."""

    def __init__(
        self, app: AppSpec, worker_session: WorkerSession, state: StateTopic, plan: TaskPlan
    ) -> None:
        self._app = app
        self._worker_session = worker_session
        self._state = state
        self._slots = plan.slots
        self._partitions = plan.partitions
        self._moving: Name | None = (
            None  # entities after it still have to be written into their new partition
        )
        self._moved_to: Name | None = None  # its value after this commit
        self._collected: dict[Name, VersionMark] = {}
        self._versions: Versions
        self._progress: ProgressTracker

    def restore(self, watermarks: Mapping[int, Watermark | RangeWatermark]) -> None:
        """Restore the entities' versions; messages that run again set theirs back to the earlier version. Blocks.

        If partitions were added, keys may have moved: their entities are searched for in all partitions.
        """
        worker_session, state, partitions = self._worker_session, self._state, self._partitions
        complete = all(
            not slots.without(s for s, count in state.layouts.get(p, {}).items() if count == partitions)
            for p, slots in self._slots.items()
        )
        self._moving = None if complete else (-1, b"")
        if worker_session.versions is not None:
            return
        if not complete and partitions > 1:
            worker_session.versions = gather(worker_session, self._app, partitions, self._slots)
        else:
            if state.versions is None:
                state.restore_versions()
            worker_session.versions = state.versions or VersionStore()
        worker_session.versions.home = partial(home, partitions, self._slots)
        for partition, mark in watermarks.items():
            changed = worker_session.versions.set_back(partition, mark.value, partial(self._was_done, mark))
            if changed:
                log.info(
                    "entities are set back partition=%d count=%d: their messages run again",
                    partition,
                    changed,
                )

    def _was_done(self, mark: Watermark | RangeWatermark, key: bytes, offset: int) -> bool:
        """True if this key's message was done before. Other tasks care about the slots that they own."""
        if not isinstance(mark, RangeWatermark):
            return not mark.wanted(offset)
        slot = self._app.slot_of(key, offset)
        return slot not in mark.slots or mark.is_done(slot, offset)

    def connect(self, versions: Versions, progress: ProgressTracker) -> None:
        """Set where changed versions come from, and the progress that they belong to."""
        self._versions, self._progress = versions, progress

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the versions that belong to the progress in this batch; more of them would be ahead of it."""
        self._collected = self._versions.changed(self._progress.withheld)
        for (partition, key), mark in self._collected.items():
            batch.note(partition, VERSION + key, mark.encode())
        self._moved_to = self._collect_moved(batch)
        if batch.tidy:
            self._forget_old_layouts(batch)

    def committed(self) -> None:
        """The versions are durable, and so are the moved entities."""
        self._moving = self._moved_to
        self._versions.written(self._collected)
        self._collected = {}

    def aborted(self) -> None:
        """The versions still count as changed."""
        self._collected = {}

    def _collect_moved(self, batch: CommitBatch) -> Name | None:
        """Add some of the entities from other partitions. Returns the last one; None when there are no more."""
        store = self._worker_session.versions
        if self._moving is None or store is None:
            return None
        found = store.moved(self._moving, _MOVED_AT_ONCE_ENTITIES)
        for name, _ in found:
            mark = store.get(name)
            if mark is not None and mark.offset < 0 and store.home(name[1]) == name[0]:
                # Otherwise a message has set it since and that is written, or it belongs to another task.
                batch.note(name[0], VERSION + name[1], mark.encode())
        if len(found) == _MOVED_AT_ONCE_ENTITIES:
            return found[-1][0]
        for partition, slots in self._slots.items():
            batch.note(partition, part_of(VERSIONS, slots), b"%d" % self._partitions)
        return None

    def _forget_old_layouts(self, batch: CommitBatch) -> None:
        """Delete layouts whose slots are all in newer ones. The rest still count for others' slots."""
        if self._moving is not None:
            return
        for partition, slots in self._slots.items():
            old = stale_parts(self._state.parts.get(partition, set()), VERSIONS, slots)
            if not old:
                continue
            batch.note(partition, part_of(VERSIONS, slots), b"%d" % self._partitions)
            layouts = self._state.layouts.get(partition, {})
            newer = [s for s, count in layouts.items() if count == self._partitions and s not in old.values()]
            for name, before in old.items():
                if not before.without([slots, *newer]):
                    batch.note(partition, name, None)

    def redriven_versions(self) -> list[StateRecord]:
        """Versions of redriven messages, whose progress in the source is older: committed with their letters."""
        return [
            (partition, VERSION + key, mark.encode())
            for (partition, key), mark in self._versions.changed().items()
            if self._progress.is_committed(partition, mark.offset)
        ]
