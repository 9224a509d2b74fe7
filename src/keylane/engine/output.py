"""Output of an engine: where results, dead letters and state records go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.results import ResultRecord
    from keylane.policies.failure_info import FailureInfo

Then = Callable[[str | None], None]
"""Called with None when something is durable, or with the reason why it never will be.

Always on the loop's thread, and never from inside the call that it was passed to.
"""


class SentAloneError(Exception):
    """Raised by an output that sends a result alone: its lane waits for :meth:`Engine.answered`."""


class Output(Protocol):
    """Where results, dead letters and state records go. All calls hand over and return at once, in order."""

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Write a result with the key, headers and timestamp of its message to the app's first sink.

        Later ``delivery(None, …)`` is called when it is durable, or ``delivery(error, …)`` when it never will be.

        Raises :class:`keylane.Poison` when the sink can never take this value, and :class:`SentAloneError` when nothing
        of the lane may follow before the sink has answered.
        """

    def all_results(self, delivery: Delivery, records: Sequence[ResultRecord]) -> None:
        """Write the results of a message, at least one, together and in order.

        As :meth:`result`; reported when all of them are durable. If the sink can never take one of them, and that can
        be told before, none is written.
        """

    def letter(
        self,
        delivery: Delivery,
        letter: FailureInfo | None,
        kind: Literal["dead", "archived", "parked"],
        park: int | None,
        then: Then,
    ) -> None:
        """The message as it came, and why, to the dead letters; ``park`` is the offset at which its lane was parked."""

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """A record for the state topic; None deletes it."""
