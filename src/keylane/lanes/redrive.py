"""Redrive of one lane: when each of its dead letters runs among the lane's other messages.

::

    WAITING ──give──▶ RUNNING ──give up──▶ OVER
       └──────────────give up───────────────▶

Every message runs in log order, whether it comes from the log or from the dead letters: a letter runs after the lane's
older messages in the log and before the newer ones. Nothing starts until the letters are known.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

E = TypeVar("E")


class RedriveState(Enum):
    """The state of a lane's redrive."""

    WAITING = "waiting"
    """Its letters are not known yet."""
    RUNNING = "running"
    """Its letters run, each in log order."""
    OVER = "over"
    """One failed and the lane stopped again: the remaining letters stay dead letters."""


class LaneRedrive(Generic[E]):
    """Decides when a letter enters its lane. Call it at each turn of a head that comes from the log."""

    def __init__(self, *, parked: bool) -> None:
        self.parked = parked
        """Whether the lane is parked. It is unparked once all its letters succeeded."""
        self.began_again = False
        """Whether the message at which the lane was parked has got all its attempts again."""
        self.state = RedriveState.WAITING
        self._letters: deque[E] = deque()  # not in the lane yet, oldest first

    @property
    def waits(self) -> bool:
        """Whether there are letters that are not in the lane yet."""
        return bool(self._letters)

    @property
    def may_pass(self) -> bool:
        """Whether a head from the log may run when no letter is due: it is older than the next letter."""
        return self.state is RedriveState.RUNNING and self.waits

    def give(self, letters: Iterable[E]) -> None:
        """Add these letters, oldest first. More may follow."""
        if self.state is RedriveState.WAITING:
            self.state = RedriveState.RUNNING
        self._letters.extend(letters)

    def due(self, comes_next: Callable[[E], bool]) -> list[E]:
        """Take the letters that enter the lane now, before its head.

        ``comes_next`` tells whether no older message of the lane is left in the log or in the lane.
        """
        taken = []
        while self._letters and (self.state is RedriveState.OVER or comes_next(self._letters[0])):
            taken.append(self._letters.popleft())
        return taken

    def give_up(self) -> None:
        """End the redrive because the lane stopped again: no remaining letter may run."""
        self.state = RedriveState.OVER
        self.parked = False
