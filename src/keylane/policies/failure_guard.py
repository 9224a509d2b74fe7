"""Guard against mass failure: stops the app when most messages of many lanes fail for good.

A faulty release, or a service that answers every request with 400, would move a whole topic to the dead-letter topic,
one message at a time. The guard detects this, so that the app stops instead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGuard:
    """When an app stops because most of its messages fail for good.

    It stops in two cases: ``consecutive`` messages failed in a row, without a success in between; or the last
    ``minimum`` failures are a share of ``ratio`` or more of all messages since the first of them.
    Neither counts while more than half of those failures come from one lane: one bad key is not an outage.

    Raises :class:`SettingsError` for invalid values.
    """

    ratio: float = 0.5
    minimum: int = 100
    consecutive: int = 50

    def __post_init__(self) -> None:
        if not _number(self.ratio) or not 0 < self.ratio <= 1:
            raise SettingsError(
                f"FailureGuard(ratio={self.ratio!r}): expected a share of the messages, more than 0 and at most 1"
            )
        for name, count in (("minimum", self.minimum), ("consecutive", self.consecutive)):
            # A single failure always belongs to one lane.
            if type(count) is not int or count < 2:
                raise SettingsError(f"FailureGuard({name}={count!r}): expected a whole number of at least 2")


def _number(value: object) -> bool:
    return isinstance(value, int | float)


class FailureRate:
    """The failures of one task. Remembers only the lanes of the last failures."""

    def __init__(self, guard: FailureGuard) -> None:
        self._guard = guard
        self._row = _RecentFailures(guard.consecutive)
        self._share = _RecentFailures(guard.minimum)
        self.tripped: str | None = None
        """Why the app must stop. Never reset; only this class writes it."""

    def failed(self, lane: Hashable, passed: int) -> str | None:
        """Record a failure for good in ``lane``; ``passed`` is the total number of successes so far.

        ``lane`` is None for a message without a key, which is a lane of its own.
        Returns the reason, with the setting's name, if the app must stop; else None.
        """
        if self.tripped is not None:
            return self.tripped
        row, share, guard = self._row, self._share, self._guard
        row.add(lane, passed)
        share.add(lane, passed)
        if row.full and not row.one_lane and passed == row.passed_before:
            self.tripped = (
                f"the last {row.size} messages, from {row.lanes} lanes, failed for good without a success "
                f"(FailureGuard(consecutive={guard.consecutive}))"
            )
        elif share.full and not share.one_lane:
            messages = share.size + passed - share.passed_before
            if share.size / messages >= guard.ratio:
                self.tripped = (
                    f"{share.size} of the last {messages} messages, from {share.lanes} lanes, failed for good "
                    f"(FailureGuard(ratio={guard.ratio}, minimum={guard.minimum}))"
                )
        return self.tripped


class _RecentFailures:
    """The last ``size`` failures, and whether one lane has more than half of them."""

    __slots__ = ("_counts", "_failures", "_heavy", "_keyless", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._failures: deque[tuple[Hashable, int]] = deque()
        self._counts: dict[Hashable, int] = {}
        self._keyless = 0
        # The lane with more than half of ``size``. There is at most one, so it is tracked instead of searched for.
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
        """How many messages had succeeded when the first of these failures happened."""
        return self._failures[0][1]

    @property
    def lanes(self) -> int:
        return len(self._counts) + self._keyless
