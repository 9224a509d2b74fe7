"""How often and how late a failed message runs again."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Exponential backoff with full jitter, bounded in attempts.

    ``attempts`` counts the first one: ``Retry(attempts=1)`` never retries.
    The wait before retry *n* is drawn evenly from 0 to ``wait_initial * 2 ** (n - 1)``, capped at ``wait_max``.

    Raises :class:`SettingsError` for values that make no sense.
    """

    attempts: int = 5
    wait_initial: float = 0.1
    wait_max: float = 2.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise SettingsError(
                f"Retry(attempts={self.attempts!r}): needs a whole number of at least 1, the first attempt counts"
            )
        waits = (self.wait_initial, self.wait_max)
        if not all(isinstance(wait, int | float) for wait in waits) or not 0 < waits[0] <= waits[1] < inf:
            raise SettingsError(
                f"Retry(wait_initial={self.wait_initial!r}, wait_max={self.wait_max!r}): "
                "needs seconds with 0 < wait_initial <= wait_max"
            )

    def ceiling(self, failures: int) -> float:
        """The longest wait, in seconds, after ``failures`` failed attempts (1 or more)."""
        # The exponent is capped: 2 ** 1000 would overflow long after wait_max has taken over.
        return float(min(self.wait_max, self.wait_initial * 2 ** min(failures - 1, 60)))

    def wait(self, failures: int, rng: Callable[[], float]) -> float | None:
        """Seconds to wait after ``failures`` failed attempts, or None when they are used up.

        ``rng`` returns evenly distributed numbers in [0, 1).
        """
        if failures >= self.attempts:
            return None
        return self.ceiling(failures) * rng()
