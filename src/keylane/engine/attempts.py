"""Retry attempts of one engine: of every message that has failed and is not done, to be persisted with its commits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.engine.delivery import FailureState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_record import RetryState
    from keylane.offsets.slots import Slots

Position = tuple[int, int]
"""Partition and offset."""


class RetryAttempts:
    """The attempts by partition and offset, whether their messages have been read yet or not. Used only on its loop.

    Attempts are kept until their message is done, so that a crash at any time continues the count. Redriven messages
    have none: their redrive counts.
    """

    def __init__(self) -> None:
        self._states: dict[Position, RetryState] = {}  # written by the methods below

    def __bool__(self) -> bool:
        return bool(self._states)

    def restore(self, states: Mapping[Position, RetryState]) -> None:
        """Add what an earlier task persisted."""
        self._states.update(states)

    def recall(self, deliveries: Iterable[Delivery]) -> None:
        """Give messages that were just read the attempts they had before."""
        states = self._states
        for delivery in deliveries:
            state = states.get((delivery.partition, delivery.offset))
            if state is not None:
                delivery.failure_state = FailureState.restored(state)
                delivery.attempts = state.attempts

    def record(self, delivery: Delivery, state: RetryState) -> None:
        """The message has failed and will be retried."""
        self._states[delivery.partition, delivery.offset] = state

    def postpone(self, delivery: Delivery, due: float) -> None:
        """The message's next attempt is due at this unix time."""
        state = self._states.get((delivery.partition, delivery.offset))
        if state is not None:
            self._states[delivery.partition, delivery.offset] = replace(state, due=due)

    def forget_done(self, deliveries: Sequence[Delivery]) -> None:
        """These messages are done."""
        for delivery in deliveries:
            if delivery.failure_state is not None and not delivery.redriven:
                self._states.pop((delivery.partition, delivery.offset), None)

    def forget(self, partition: int, offset: int) -> None:
        """The message is no longer in the log, or its lane is blocked: a release gives it all its attempts."""
        self._states.pop((partition, offset), None)

    def forget_range(self, partition: int, slots: Slots) -> None:
        """Another worker has these slots, and what was persisted about them."""
        for place, state in list(self._states.items()):
            if place[0] == partition and state.slot in slots:
                del self._states[place]

    def by_partition(self) -> dict[int, dict[int, RetryState]]:
        """What to persist, by partition and offset."""
        found: dict[int, dict[int, RetryState]] = {}
        for (partition, offset), state in self._states.items():
            found.setdefault(partition, {})[offset] = state
        return found
