"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and will hurt one day."""
    FAULT = "fault"
    """It does not work, or breaks a promise."""
    UNKNOWN = "unknown"
    """It could not be looked at; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what was found, and what to do about it: empty where there is nothing to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=Level.OK, found=found)


def note(check: str, found: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(check=check, level=Level.NOTE, found=found, remedy=remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It will hurt."""
    return Finding(check=check, level=Level.WARNING, found=found, remedy=remedy)


def fault(check: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check=check, level=Level.FAULT, found=found, remedy=remedy)


def unknown(check: str, found: str, remedy: str = "") -> Finding:
    """Nobody knows."""
    return Finding(check=check, level=Level.UNKNOWN, found=found, remedy=remedy)


def counted(number: int, noun: str) -> str:
    """``1 task``, ``2,000 tasks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
