"""Range member: a part of the worker that keeps something for each range, and so follows it when it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

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
