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
    """It works now, and can cause trouble later."""
    FAULT = "fault"
    """It does not work, or breaks a promise."""
    UNKNOWN = "unknown"
    """It could not be checked; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was checked, what was found, and what to do about it; ``remedy`` is empty when nothing has to be done."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """A check that passed."""
    return Finding(check=check, level=Level.OK, found=found)


def note(check: str, found: str, remedy: str = "") -> Finding:
    """A fact worth knowing."""
    return Finding(check=check, level=Level.NOTE, found=found, remedy=remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    """A risk, and how to remove it."""
    return Finding(check=check, level=Level.WARNING, found=found, remedy=remedy)


def fault(check: str, found: str, remedy: str) -> Finding:
    """A fault, and how to fix it."""
    return Finding(check=check, level=Level.FAULT, found=found, remedy=remedy)


def unknown(check: str, found: str, remedy: str = "") -> Finding:
    """A check that could not be made."""
    return Finding(check=check, level=Level.UNKNOWN, found=found, remedy=remedy)


def counted(number: int, noun: str) -> str:
    """``1 task``, ``2,000 tasks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
