"""Range member: a part of the worker that keeps something for each range, and so follows it when it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from keylane.offsets.slots import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.engine.engine import Engine
    from keylane.offsets.slots import Slots


class RangeMember(Protocol):
    """What comes and goes with a range. Both methods are called on the loop's thread and must not block.

    The ranges are slots by partition. A worker has at most one range of a partition at a time.
    """

    def take(self, ranges: Mapping[int, Slots], /) -> None:
        """The worker owns these ranges now; nothing of them has been fetched.

        Their progress is known, and the worker's view of the state topic has all that the earlier owners wrote.
        """

    def release(self, ranges: Mapping[int, Slots], /) -> None:
        """Forget these ranges, and write nothing about them: another worker may own them.

        Nothing of them runs, and the transaction that has just been committed contained the last of them.
        """


class RateShare:
    """The worker's part of the app's rates: its part of all slots. A :class:`RangeMember`.

    ``slots`` are those that the worker owns; they change before this member is called. A slot has one owner at any
    time, so the rates of all workers never add up to more than the app's.
    """

    def __init__(self, engine: Engine, slots: Mapping[int, Slots], partitions: int) -> None:
        self._engine = engine
        self._slots = slots
        self._partitions = partitions

    def plan(self, partitions: int) -> None:
        """The source has this many partitions now."""
        self._partitions = partitions
        self._apply()

    def take(self, _ranges: Mapping[int, Slots], /) -> None:
        """There are more slots."""
        self._apply()

    def release(self, _ranges: Mapping[int, Slots], /) -> None:
        """There are fewer slots."""
        self._apply()

    def _apply(self) -> None:
        owned = sum(map(len, self._slots.values()))
        self._engine.change_share(owned / (len(ALL) * self._partitions))
