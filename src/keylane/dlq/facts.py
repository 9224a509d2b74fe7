"""Dead letters as JSON facts, for the command line and the console."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from keylane.dlq.record import DeadLetter, UnreadableDeadLetter
from keylane.key_text import show_key
from keylane.safe_text import show_bytes
from keylane.topic_names import dead_letter_topic

if TYPE_CHECKING:
    from keylane.dlq.summary import CauseGroup, CauseLine, DeadLetterSummary

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")


def list_facts(name: str, survey: DeadLetterSummary, limit: int, *, letters: bool) -> dict[str, Any]:
    """Return the result of ``dlq list`` as JSON facts."""
    groups = survey.groups()
    shown: dict[str, Any]
    if letters:
        lines = [line_facts(line) for line in survey.lines()]
        shown = {"list": lines, "left_out": survey.letters - len(lines)}
    else:
        shown = {
            "causes": [group_facts(group) for group in groups[:limit]],
            "left_out": max(0, len(groups) - limit),
        }
    return {
        "app": name,
        "topic": dead_letter_topic(name),
        "letters": survey.letters,
        "lanes": survey.lanes,
        **shown,
        "redriven": survey.redriven,
        "repeats": survey.repeats,
        "unreadable": survey.unreadable,
        "unreadable_examples": [{"position": u.position, "reason": u.reason} for u in survey.examples],
    }


def group_facts(group: CauseGroup) -> dict[str, Any]:
    """Return the dead letters of one cause as JSON facts."""
    example = group.example
    return {
        "stage": group.cause.stage,
        "error": group.cause.error,
        "message": group.cause.message,
        "count": group.count,
        "behind": group.behind,
        "lanes": group.lanes,
        "kinds": group.kinds,
        "first": group.first,
        "last": group.last,
        "example": example and example.position,
        "example_source": example and example.source,
        "example_message": example and example.message,
    }


def line_facts(line: CauseLine) -> dict[str, Any]:
    """Return one line of a list as JSON facts."""
    return {
        "position": line.position,
        "source": line.source,
        "kind": line.kind.value,
        "key": None if line.key is None else show_key(line.key),
        "stage": line.cause.stage,
        "error": line.cause.error,
        "message": line.message,
        "attempts": line.attempts,
        "failed_at": line.at,
        "park": line.park,
        "behind": line.behind,
        "redrives": line.redrives,
        "redriven": line.redriven,
    }


def letter_facts(
    found: DeadLetter | UnreadableDeadLetter, others: list[DeadLetter], *, redriven: bool
) -> dict[str, Any]:
    """Return one dead letter as JSON facts; ``others`` are further dead letters of the same message."""
    text = None if found.value is None else readable(found.value)
    headers = found.headers or ()
    facts: dict[str, Any] = {
        "position": found.position,
        "readable": isinstance(found, DeadLetter),
        "key": None if found.key is None else show_key(found.key),
        "value": text,
        "value_hex": found.value.hex() if found.value is not None and text is None else None,
        "headers": [{"name": n, "value": None if c is None else show_bytes(c)} for n, c in headers],
    }
    if isinstance(found, UnreadableDeadLetter):
        return {**facts, "reason": found.reason}
    return {
        **facts,
        "headers_unreadable": found.headers_unreadable,
        "app": found.app,
        "app_version": found.app_version,
        "kind": found.kind.value,
        "topic": found.topic,
        "source": found.source,
        "timestamp": found.timestamp,
        "stage": found.stage,
        "error": found.error,
        "message": found.message,
        "traceback": found.traceback,
        "attempts": found.attempts,
        "failures": [
            {"stage": f.stage, "attempt": f.attempt, "at": f.at, "error": f.error} for f in found.failures
        ],
        "failed_at": found.failed_at,
        "park": found.park,
        "redrives": found.redrives,
        "redriven": redriven,
        "also_at": [other.position for other in others],
    }


def readable(value: bytes) -> str | None:
    """Return the value as text if it is text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text
