"""Retry policy: how often a failed message runs again, and the wait before each retry."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Exponential backoff with full jitter, bounded in attempts and optionally in time.

    ``attempts`` includes the first one: ``Retry(attempts=1)`` never retries.
    The wait before retry *n* is drawn evenly from 0 to ``wait_initial * 2 ** (n - 1)``, capped at ``wait_max``.
    An error that asks for a wait (``Retry-After``, ``Transient(retry_after=…)``) gets that wait instead, capped at
    ``wait_asked_max``. No retry starts later than ``total`` seconds after the first failure; None: no time limit.

    Raises :class:`SettingsError` for invalid values.
    """

    attempts: int = 5
    wait_initial: float = 0.1
    wait_max: float = 2.0
    total: float | None = None
    wait_asked_max: float = 60.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise SettingsError(
                f"Retry(attempts={self.attempts!r}): expected a whole number of at least 1, the first attempt included"
            )
        waits = (self.wait_initial, self.wait_max)
        if not all(isinstance(wait, int | float) for wait in waits) or not 0 < waits[0] <= waits[1] < inf:
            raise SettingsError(
                f"Retry(wait_initial={self.wait_initial!r}, wait_max={self.wait_max!r}): "
                "expected seconds with 0 < wait_initial <= wait_max"
            )
        if self.total is not None and not _positive(self.total):
            raise SettingsError(
                f"Retry(total={self.total!r}): expected seconds, more than 0, or None for no time limit"
            )
        if not _positive(self.wait_asked_max):
            raise SettingsError(
                f"Retry(wait_asked_max={self.wait_asked_max!r}): expected seconds, more than 0"
            )

    def ceiling(self, failures: int) -> float:
        """The longest wait, in seconds, after ``failures`` failed attempts (1 or more)."""
        # The exponent is capped: 2 ** 1000 would overflow long after wait_max has taken over.
        return float(min(self.wait_max, self.wait_initial * 2 ** min(failures - 1, 60)))

    @property
    def longest(self) -> float:
        """The longest possible wait in seconds."""
        return float(max(self.wait_max, self.wait_asked_max))

    def wait(
        self,
        failures: int,
        rng: Callable[[], float],
        *,
        elapsed: float = 0.0,
        asked: float | None = None,
    ) -> float | None:
        """Seconds to wait after ``failures`` failed attempts; None if no retry is left.

        ``rng`` returns evenly distributed numbers in [0, 1). ``elapsed`` is the time since the first failure.
        ``asked``, 0 or more, is the wait that the error asks for. It is used without jitter, capped at
        ``wait_asked_max``.
        """
        if failures >= self.attempts:
            return None
        wait = self.ceiling(failures) * rng() if asked is None else float(min(asked, self.wait_asked_max))
        if self.total is not None and elapsed + wait > self.total:
            return None
        return wait


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < inf
