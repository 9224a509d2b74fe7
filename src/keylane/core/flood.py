"""Bad messages, or a bad day? When most messages of many lanes fail for good, the messages are not to blame.

A faulty release or a service that answers everything with «400» would empty a topic into the dead letters, one message
after another, each of them with good reason. The watch notices, so that the app can stop instead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodGuard:
    """When an app stops because most of its messages fail for good.

    Either ``consecutive`` messages in a row did, with not one success in between; or the last ``minimum`` failures lie
    so close together that they are a share of ``ratio`` or more of all messages since the first of them.
    Neither counts while more than half of those failures come from one lane: one bad key is no outage.

    Raises :class:`SettingsError` for values that make no sense.
    """

    ratio: float = 0.5
    minimum: int = 100
    consecutive: int = 50

    def __post_init__(self) -> None:
        if not _number(self.ratio) or not 0 < self.ratio <= 1:
            raise SettingsError(
                f"FloodGuard(ratio={self.ratio!r}): needs a share of the messages, more than 0 and at most 1"
            )
        for name, count in (("minimum", self.minimum), ("consecutive", self.consecutive)):
            # One failure alone always is one lane's.
            if type(count) is not int or count < 2:
                raise SettingsError(f"FloodGuard({name}={count!r}): needs a whole number of at least 2")


def _number(value: object) -> bool:
    return isinstance(value, int | float)


class FloodWatch:
    """Counts the failures of one task. It remembers the lanes of the last failures and nothing else."""

    def __init__(self, guard: FloodGuard) -> None:
        self._guard = guard
        self._row = _Stretch(guard.consecutive)
        self._share = _Stretch(guard.minimum)
        self.tripped: str | None = None
        """Why the app has to stop; once set it stays. Written here only."""

    def failed(self, lane: Hashable, passed: int) -> str | None:
        """A message of ``lane`` has failed for good, after ``passed`` messages, a count that only grows, succeeded.

        ``None`` as the lane is a message without a key: it has a lane of its own.
        Returns what was seen, as a sentence that names the setting, when the app has to stop; else None.
        """
        if self.tripped is not None:
            return self.tripped
        row, share, guard = self._row, self._share, self._guard
        row.add(lane, passed)
        share.add(lane, passed)
        if row.full and not row.one_lane and passed == row.passed_before:
            self.tripped = (
                f"the last {row.size} messages, of {row.lanes} lanes, failed for good and not one succeeded in between "
                f"(FloodGuard(consecutive={guard.consecutive}))"
            )
        elif share.full and not share.one_lane:
            messages = share.size + passed - share.passed_before
            if share.size / messages >= guard.ratio:
                self.tripped = (
                    f"{share.size} of the last {messages} messages, of {share.lanes} lanes, failed for good "
                    f"(FloodGuard(ratio={guard.ratio}, minimum={guard.minimum}))"
                )
        return self.tripped


class _Stretch:
    """The last ``size`` failures, and whether one lane has more than half of them."""

    __slots__ = ("_counts", "_failures", "_heavy", "_keyless", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._failures: deque[tuple[Hashable, int]] = deque()
        self._counts: dict[Hashable, int] = {}
        self._keyless = 0
        # The lane with more than half of ``size``: there is never more than one, so it can be kept instead of sought.
        self._heavy: Hashable = None

    def add(self, lane: Hashable, passed: int) -> None:
        if len(self._failures) == self.size:
            self._drop(self._failures.popleft()[0])
        self._failures.append((lane, passed))
        if lane is None:
            self._keyless += 1
            return
        count = self._counts[lane] = self._counts.get(lane, 0) + 1
        if 2 * count > self.size:
            self._heavy = lane

    def _drop(self, lane: Hashable) -> None:
        if lane is None:
            self._keyless -= 1
            return
        count = self._counts[lane] - 1
        if count:
            self._counts[lane] = count
        else:
            del self._counts[lane]
        if lane == self._heavy and 2 * count <= self.size:
            self._heavy = None

    @property
    def full(self) -> bool:
        return len(self._failures) == self.size

    @property
    def one_lane(self) -> bool:
        return self._heavy is not None

    @property
    def passed_before(self) -> int:
        """How many messages had succeeded when the first of these failures came."""
        return self._failures[0][1]

    @property
    def lanes(self) -> int:
        return len(self._counts) + self._keyless
