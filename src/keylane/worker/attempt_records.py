"""The records of retry attempts in the state topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lanes.lane_record import encode_retries
from keylane.state.topic import ATTEMPTS, part_of
from keylane.worker.commit import Contributor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.lanes.lane_record import RetryState
    from keylane.offsets.slots import Slots
    from keylane.worker.commit import CommitBatch

Attempts = dict[int, dict[int, "RetryState"]]
"""By partition and offset."""


class AttemptRecords(Contributor):
    """One record per partition, written when it has changed. ``written`` is what the state topic contains."""

    def __init__(
        self, slots: Mapping[int, Slots], written: Attempts, current: Callable[[], Attempts]
    ) -> None:
        self._slots = slots
        self._written = written
        self._current = current
        self._changed: Attempts = {}

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the records that have changed."""
        current = self._current()
        for partition in current.keys() | self._written.keys():
            now = current.get(partition, {})
            if now != self._written.get(partition, {}):
                name = part_of(ATTEMPTS, self._slots[partition])
                batch.note(partition, name, encode_retries(now, batch.room) if now else None)
                self._changed[partition] = now

    def committed(self) -> None:
        """The records are durable."""
        self._written |= self._changed
        self._changed = {}

    def aborted(self) -> None:
        """The next commit compares again."""
        self._changed = {}
