"""Why a message failed for good: what a dead letter, a stopped lane and its record say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FAILURES_KEPT = 20
"""Failures that a letter lists; the oldest are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One failed attempt. ``at`` is unix time."""

    stage: str
    attempt: int
    at: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Why a message failed for good. ``attempts`` counts those of all stages."""

    stage: str
    error: str
    """The exception's qualified class."""
    message: str
    traceback: str
    attempts: int
    failed_at: float
    failures: tuple[Failed, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values, for :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> DeadLetter:
        """Raises ValueError, TypeError or KeyError for what is no letter."""
        failures = tuple(Failed(**failed) for failed in found["failures"])
        return cls(**{**found, "failures": failures})
