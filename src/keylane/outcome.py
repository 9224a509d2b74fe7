"""How the processing of one message ended."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """What became of a message. Every delivered message ends in exactly one of these per run.

    Statistics, telemetry and metrics count whatever is listed here.
    """

    OK = "ok"
    """All stages ran; the result, if there was one, is acknowledged."""
    DEAD = "dead"
    """It could not be processed; its dead letter is acknowledged."""
    SKIPPED = "skipped"
    """An operator skipped it; its dead letter is acknowledged."""
    PARKED = "parked"
    """Its lane is parked; its letter is acknowledged, and it will run when the lane is redriven."""
    DUPLICATE = "duplicate"
    """It repeats an earlier message of its lane, which has finished, and was not run."""
    STALE = "stale"
    """Its lane has gone beyond its version; it was not run."""
    IGNORED = "ignored"
    """No handler is for its type, and the app says to ignore such."""


WITH_DEAD_LETTER = frozenset({Outcome.DEAD, Outcome.SKIPPED, Outcome.PARKED})
"""Outcomes of messages that went to the dead letters."""
