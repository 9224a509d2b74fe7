"""Writes a task's ledger in the transaction that commits the progress it proves."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

from keylane.ledger import Ledger, encode
from keylane.outcome import Outcome
from keylane.worker.commit import Contributor, TopicRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.engine.delivery import Delivery
    from keylane.message import Message
    from keylane.spec import AppSpec, Observer
    from keylane.worker.commit import CommitBatch

_UNTRIED = (Outcome.SKIPPED, Outcome.PARKED, Outcome.DUPLICATE, Outcome.STALE)
"""Outcomes without an attempt that the ledger could record."""
_lives = itertools.count(1)


class LedgerWriter(Contributor):
    """The observer of an app that keeps a ledger; calls the app's own observer too. Used on the task's loop.

    Records wait here until a transaction collects its progress. Every message that is done by then has its record in
    that transaction, or in an earlier one. What a killed process did since then leaves no record, and runs again.
    """

    def __init__(self, app: AppSpec, rule: Ledger, owner: str) -> None:
        self._topic = app.ledger_topic
        self._source = app.source
        self._then: Observer | None = app.observer
        self._rule = rule
        self._owner = owner
        self._life = f"{os.getpid()}.{next(_lives)}"
        self._clock = time.time_ns() - time.monotonic_ns()  # fixed, so that time never goes back
        self._open: dict[tuple[int, int], int] = {}
        self._waiting: list[tuple[bytes | None, bytes]] = []
        self._given: list[tuple[bytes | None, bytes]] = []  # collected, but not committed yet

    def started(self, message: Message, attempt: int) -> None:
        """Record the start of an attempt."""
        if self._rule.records(message.key, message.offset):
            self._open[message.partition, message.offset] = self._now()
        if self._then is not None:
            self._then.started(message, attempt)

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        """Record its end."""
        started = self._open.pop((message.partition, message.offset), None)
        if started is not None:
            self._add(message, attempt, started, outcome)
        if self._then is not None:
            self._then.ended(message, attempt, outcome)

    def done(self, deliveries: Iterable[Delivery]) -> None:
        """Record those that are done without an attempt of their own."""
        for delivery in deliveries:
            if delivery.outcome in _UNTRIED and self._rule.records(delivery.key, delivery.offset):
                self._add(delivery, 0, self._now(), delivery.outcome.value)

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the waiting records: they prove the progress in the same batch."""
        waiting, self._waiting = self._waiting, []
        batch.records.extend(TopicRecord(self._topic, value, key) for key, value in waiting)
        self._given += waiting

    def committed(self) -> None:
        """The records are durable."""
        self._given = []

    def aborted(self) -> None:
        """Keep the records for the next transaction."""
        self._waiting[:0] = self._given
        self._given = []

    def _add(self, message: Message, attempt: int, started: int, outcome: str) -> None:
        value = encode(
            topic=self._source,
            source_id=getattr(message, "source_id", ""),
            partition=message.partition,
            offset=message.offset,
            attempt=attempt,
            owner=self._owner,
            life=self._life,
            started=started,
            ended=self._now(),
            outcome=str(outcome),
            redriven=getattr(message, "redriven", False),
            share=self._rule.share,
        )
        self._waiting.append((message.key, value))

    def _now(self) -> int:
        return (time.monotonic_ns() + self._clock) // 1000
