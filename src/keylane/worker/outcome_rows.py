"""Rows of finished messages, on their way from a worker's loop to the Spark task that is attached."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from keylane.outcome import WITH_DEAD_LETTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.engine.delivery import Delivery

_BATCH_ROWS = 16_384
_WAITING_BATCHES_MAX = 16
"""Batches that may wait for Spark's sink; then the worker stops fetching."""
_ALL_EVERY_SECONDS, _FAILED_EVERY_SECONDS = 0.25, 1.0
"""Time between two batches: of all messages, or only of those that failed at least once."""

_Batches = queue.SimpleQueue["list[Delivery] | BaseException | None"]


class OutcomeRows:
    """Gathers rows on the loop and hands them to the Spark task that is attached. Each row goes to one task.

    Rows that are handed over while no task is attached wait for the next one. ``wanted`` is the app's ``outcomes``
    option: ``"all"``, ``"failed"``, or ``"none"``.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._rows: list[Delivery] = []  # the loop's
        self._lock = threading.Lock()
        self._waiting: list[list[Delivery]] = []
        self._reader: _Batches | None = None
        self.every = _ALL_EVERY_SECONDS if wanted == "all" else _FAILED_EVERY_SECONDS

    def add(self, deliveries: list[Delivery]) -> None:
        """These are done. On the loop."""
        if self._wanted == "all":
            self._rows += deliveries
        elif self._wanted == "failed":
            self._rows += [
                d
                for d in deliveries
                if d.error is not None or d.attempts > 1 or d.outcome in WITH_DEAD_LETTER
            ]
        if len(self._rows) >= _BATCH_ROWS:
            self.hand_over()

    def hand_over(self) -> None:
        """Hand over what was gathered. On the loop."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        with self._lock:
            if self._reader is None:
                self._waiting.append(rows)
            else:
                self._reader.put(rows)

    def discard(self) -> None:
        """Forget rows that were not handed over: their transaction was aborted. On the loop."""
        self._rows = []

    def open(self) -> Iterator[list[Delivery]]:
        """Attach a Spark task: yields batches until :meth:`end`. On Spark's thread."""
        reader: _Batches = queue.SimpleQueue()
        with self._lock:
            for rows in self._waiting:
                reader.put(rows)
            self._waiting = []
            self._reader = reader
        return _batches(reader)

    def end(self, error: BaseException | None = None) -> None:
        """Detach: the task gets what was gathered, and then ends; it raises ``error`` if there is one. On the loop."""
        self.hand_over()
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.put(error)

    @property
    def crowded(self) -> bool:
        """Whether Spark's sink is far behind."""
        reader = self._reader
        return len(self._waiting) + (0 if reader is None else reader.qsize()) > _WAITING_BATCHES_MAX


def _batches(reader: _Batches) -> Iterator[list[Delivery]]:
    while (batch := reader.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield batch
