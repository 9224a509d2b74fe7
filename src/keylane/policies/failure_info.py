"""Failure info: why a message failed for good, for dead letters and stopped lanes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keylane import strict_json as wire

FAILURES_KEPT = 20
"""Failed attempts listed in a dead letter; the oldest are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One failed attempt. ``at`` is in unix time."""

    stage: str
    attempt: int
    at: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureInfo:
    """Why a message failed for good. ``attempts`` counts those of all stages."""

    stage: str
    error: str
    """The exception's qualified class."""
    message: str
    traceback: str
    attempts: int
    failed_at: float
    failures: tuple[FailedAttempt, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values, for :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> FailureInfo:
        """The reverse of :meth:`as_json`. Raises MalformedRecordError."""
        stage, error, message, traceback, attempts, failed_at, failures = wire.fields(
            found, "stage", "error", "message", "traceback", "attempts", "failed_at", "failures"
        )
        return cls(
            stage=wire.text(stage),
            error=wire.text(error),
            message=wire.text(message),
            traceback=wire.text(traceback),
            attempts=wire.integer(attempts),
            failed_at=wire.number(failed_at),
            failures=tuple(map(_failed, wire.array(failures, 10 * FAILURES_KEPT))),
        )


def _failed(found: object) -> FailedAttempt:
    stage, attempt, at, error = wire.fields(found, "stage", "attempt", "at", "error")
    return FailedAttempt(
        stage=wire.text(stage), attempt=wire.integer(attempt), at=wire.number(at), error=wire.text(error)
    )
