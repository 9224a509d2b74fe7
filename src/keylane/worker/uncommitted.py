"""With ``exactly_once``: deliveries that are done, and in no committed transaction yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.worker.commit import Contributor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from keylane.engine.delivery import Delivery
    from keylane.worker.commit import CommitBatch


class UncommittedDeliveries(Contributor):
    """Hands deliveries to ``count`` when the transaction that has their progress is committed, each once.

    Its collection must not be before that of the progress.
    """

    def __init__(self, count: Callable[[list[Delivery]], None]) -> None:
        self._count = count
        self._done: list[Delivery] = []
        self._collected: list[Delivery] = []

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """These are done."""
        self._done += deliveries

    def collect(self, _batch: CommitBatch, /) -> None:
        """Whatever is done by now is in this transaction."""
        self._collected, self._done = self._done, []

    def committed(self) -> None:
        """The transaction is committed: they count."""
        collected, self._collected = self._collected, []
        self._count(collected)

    def aborted(self) -> None:
        """They will be in the next transaction."""
        self._done[:0] = self._collected
        self._collected = []
