"""Message counters of one engine: accepted, passed, done, retried."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery

_OK = Outcome.OK


class MessageCounters:
    """Counts one engine's messages. Used only on its loop. Parts that write a field directly are on the hot path."""

    __slots__ = ("_not_ok", "accepted", "done", "passed", "retries")

    def __init__(self) -> None:
        self.accepted = (
            0  # written by the engine, refetches and redrives: less those that left the log before they ran
        )
        self.passed = 0  # written by the message runner: messages that all stages succeeded for
        self.done = 0  # written by add_done()
        self.retries = 0  # written by the failure handler
        self._not_ok: Counter[Outcome] = Counter()  # written by add_done(): of those done, by outcome

    @property
    def pending(self) -> int:
        """Messages accepted and not done; of evicted ones only the offset is in memory."""
        return self.accepted - self.done

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How the messages that are done ended."""
        return Counter({_OK: self.done - self._not_ok.total(), **self._not_ok})

    def add_done(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Count these as done; returns those whose outcome is not OK."""
        self.done += len(deliveries)
        not_ok = [delivery for delivery in deliveries if delivery.outcome is not _OK]
        if not_ok:
            self._not_ok.update([delivery.outcome for delivery in not_ok])
        return not_ok
