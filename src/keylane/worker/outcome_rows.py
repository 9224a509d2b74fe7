"""Rows of finished messages, on their way from the task's loop to Spark's sink."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from keylane.outcome import WITH_DEAD_LETTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.engine.delivery import Delivery

_BATCH_ROWS = 16_384
_WAITING_BATCHES_MAX = 16
"""Batches that may wait for Spark's sink; then the task stops fetching."""
_ALL_EVERY_SECONDS, _FAILED_EVERY_SECONDS = 0.25, 1.0
"""Time between two batches: of all messages, or only of those that failed at least once."""


class OutcomeRows:
    """Gathers rows on the loop and hands them to the thread that Spark reads from.

    ``wanted`` is the app's ``outcomes`` option: ``"all"``, ``"failed"``, or ``"none"``.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._rows: list[Delivery] = []
        self._batches: queue.SimpleQueue[list[Delivery] | BaseException | None] = queue.SimpleQueue()
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
        """Give Spark what was gathered."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._batches.put(rows)

    def discard(self) -> None:
        """Forget rows that were not handed over: their transaction was aborted."""
        self._rows = []

    def end(self, error: BaseException | None = None) -> None:
        """No more rows follow; the reader raises ``error`` if there is one."""
        self._batches.put(error)

    @property
    def crowded(self) -> bool:
        """Whether Spark's sink is far behind."""
        return self._batches.qsize() > _WAITING_BATCHES_MAX

    def batches(self) -> Iterator[list[Delivery]]:
        """Yield batches until the end. On Spark's thread."""
        while (batch := self._batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
