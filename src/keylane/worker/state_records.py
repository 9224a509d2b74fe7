"""The records of lane state in the worker's commits, and the restore of what was committed.

A value and the progress of the message that set it are in one transaction, so they never disagree. For that, progress
is never left out of a commit of an app with states (:class:`~keylane.worker.progress.ProgressTracker`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from keylane.engine.lane_state import VALUE, StoredValue
from keylane.state.lane_values import encode_value, record_key
from keylane.state.topic import LAYOUT, part_of, stale_parts
from keylane.worker.commit import Contributor, TopicRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from keylane.engine.lane_state import LaneStates, Name
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.state.topic import StateTopic
    from keylane.worker.commit import CommitBatch
    from keylane.worker.lane_values import LaneValues

log = logging.getLogger("keylane.task")

_MOVED_AT_ONCE = 5_000
"""Moved values that one transaction writes into their new partition."""
_EXPIRED_AT_ONCE = 1_000
"""Expired values that one transaction removes."""
_SWEEP_SECONDS = 1.0


class StateRecords(Contributor):
    """Restored once, connected to the engine's states, then part of every commit. Comes after the progress."""

    def __init__(
        self, app: AppSpec, values: LaneValues, state: StateTopic, slots: Mapping[int, Slots], partitions: int
    ) -> None:
        self._topic = app.lane_state
        self._by_key = app.order.by_key
        self._expires = any(spec.ttl is not None for spec in app.states.values())
        self._values = values
        self._state = state
        self._slots = slots
        self._partitions = partitions
        self._moved: dict[Name, StoredValue] = {}  # not written into their new partition yet
        self._complete = True  # values of keys that have moved here are known to be written
        self._collected: dict[Name, StoredValue] = {}
        self._collected_moved: list[Name] = []
        self._expired: dict[Name, StoredValue] = {}
        self._swept_at = 0.0
        self._ends: dict[int, int] = {}  # reported while the transaction is committed
        self._states: LaneStates

    def restore(self, *, unchanged: bool) -> None:
        """Restore the values of all ranges. Blocks. Raises BrokerError, KeylaneError.

        ``unchanged``: the same ranges ended here as planned, and nobody else has owned them since.
        If partitions were added, keys may have moved: their values are searched for in all partitions.
        """
        if not unchanged:
            self._values.release_all()
            self._values.take_all(self._slots)
        if not self._by_key:
            return
        self._complete = all(
            not slots.without(
                s for s, count in self._state.state_layouts.get(p, {}).items() if count == self._partitions
            )
            for p, slots in self._slots.items()
        )
        if not self._complete:
            self._values.gather(self._slots, self._partitions, self._found_moved)
            if self._moved:
                log.info("lane state follows its keys to new partitions values=%d", len(self._moved))

    def _found_moved(self, name: Name, value: StoredValue) -> None:
        self._moved[name] = value
        self._values.put({name: value})

    def connect(self, states: LaneStates) -> None:
        """Set where changed values come from."""
        self._states = states

    def collect(self, batch: CommitBatch, /) -> None:
        """Add what messages that are done have changed, values that have moved, and the removal of expired ones."""
        self._collected = self._states.changed()
        self._expired = self._find_expired() if self._expires else {}
        self._collected_moved = []
        for name, value in self._moved.items():
            if len(self._collected_moved) == _MOVED_AT_ONCE:
                break
            self._collected_moved.append(name)
            if name not in self._collected and not self._states.is_pending(name):
                self._add(batch, name, value)
        for name, value in (*self._collected.items(), *self._expired.items()):
            self._add(batch, name, value)
        last = {
            record.partition: place
            for place, record in enumerate(batch.records)
            if record.topic == self._topic
        }
        for place in last.values():
            batch.records[place] = batch.records[place]._replace(report=self._delivered)
        if not self._complete and len(self._collected_moved) == len(self._moved):
            for partition, slots in self._slots.items():
                batch.note(partition, part_of(LAYOUT, slots), b"%d" % self._partitions)
        if batch.tidy and self._complete:
            self._forget_old_layouts(batch)

    def committed(self) -> None:
        """The values are durable."""
        if not self._complete and len(self._collected_moved) == len(self._moved):
            self._complete = True
        for name in self._collected_moved:
            del self._moved[name]
        self._states.written(self._collected)
        self._values.put(self._expired)
        self._values.committed_to(self._ends)
        self._reset()

    def aborted(self) -> None:
        """The values still count as changed."""
        self._reset()

    def _reset(self) -> None:
        self._collected, self._collected_moved, self._expired, self._ends = {}, [], {}, {}

    def _add(self, batch: CommitBatch, name: Name, value: StoredValue) -> None:
        partition, lane, tag = name
        key = record_key(tag, lane)
        batch.records.append(
            TopicRecord(self._topic, encode_value(value), key, partition, self._values.labels)
        )

    def _delivered(self, error: Any, message: Any) -> None:
        """The delivery report of a partition's last record, on the thread of the commit."""
        if error is None:
            self._ends[message.partition()] = message.offset() + 1

    def _find_expired(self) -> dict[Name, StoredValue]:
        """Values whose time is over, and that nobody is changing."""
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_SECONDS:
            return {}
        self._swept_at = now
        found = self._values.due(int(time.time() * 1000), VALUE, _EXPIRED_AT_ONCE)
        return {
            name: StoredValue(None, 0, value.offset)
            for name, value in found
            if name not in self._collected and not self._states.is_pending(name)
        }

    def _forget_old_layouts(self, batch: CommitBatch) -> None:
        """Delete layouts whose slots are all in newer ones. The rest still count for others' slots."""
        for partition, slots in self._slots.items():
            old = stale_parts(self._state.parts.get(partition, set()), LAYOUT, slots)
            if not old:
                continue
            batch.note(partition, part_of(LAYOUT, slots), b"%d" % self._partitions)
            layouts = self._state.state_layouts.get(partition, {})
            newer = [s for s, count in layouts.items() if count == self._partitions and s not in old.values()]
            for name, before in old.items():
                if not before.without([slots, *newer]):
                    batch.note(partition, name, None)
