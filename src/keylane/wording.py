"""Wording that several packages share: counts with their nouns, times, ages, and errors in one line."""

from __future__ import annotations

from datetime import UTC, datetime


def brief(error: str, message: str | None) -> str:
    """Format an error as its class without the module, and its message."""
    short = error.rpartition(".")[2]
    return f"{short}: {message}" if message else short


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 letter``, ``2,000 letters``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def local(seconds: float | None, *, exact: bool = False) -> str:
    """Format Unix seconds as local time; ``-`` for None."""
    if seconds is None:
        return "-"
    try:
        at = datetime.fromtimestamp(seconds, UTC).astimezone()
        return at.replace(tzinfo=None).isoformat(" ", "milliseconds" if exact else "seconds")
    except (ValueError, OverflowError, OSError):  # a message may carry any time
        return f"{seconds:g} s"


def age(seconds: float) -> str:
    """Format a duration in its two largest units: ``3 d 4 h``. Never below 0: clocks differ."""
    whole = max(0, int(seconds))
    parts = [(whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number or unit == parts[0][1])
