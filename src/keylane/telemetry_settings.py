"""Telemetry settings of an app."""

from __future__ import annotations

from dataclasses import dataclass

from keylane.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Telemetry settings: every task writes a record each ``interval`` seconds.

    Raises :class:`SettingsError` for an interval outside 0.1 to 3600 seconds.
    """

    interval: float = 1.0

    def __post_init__(self) -> None:
        if type(self.interval) not in (int, float) or not 0.1 <= self.interval <= 3600:
            raise SettingsError(
                f"Telemetry(interval={self.interval!r}): expected a number of seconds from 0.1 to 3600"
            )
