"""The headers that make a message a dead letter: written and read.

A letter lies in the partition that its message lay in. Key, value and headers are the message's own; behind
its headers stand ours, ``keylane-app`` first. Everything before the last ``keylane-app`` is the message's.

======================  ================================================================================
``keylane-app``         the app; ``keylane-app-version`` when it has one
``keylane-kind``        ``dead``, ``archived`` (its lane is blocked) or ``parked``
``keylane-topic``       where the message lay, with ``-partition``, ``-offset`` and ``-timestamp`` (ms; 0: it had none)
``keylane-topic-id``    Kafka's id of that topic, and ``keylane-cluster`` the cluster's; left out when not known
``keylane-stage``       where it failed, with ``-error`` (class), ``-message`` and ``-traceback``; a message that was
                        parked because it stood behind the one that failed has none of these
``keylane-attempts``    how often it was tried
``keylane-failures``    the last of them: ``[{"stage": …, "attempt": …, "at": unix seconds, "error": …}, …]``
``keylane-failed-at``   unix seconds
``keylane-park``        parked only: the offset at which its lane was parked, the same for all that stood behind
``keylane-redrives``    how often it was redriven before; left out when never
``keylane-headers-unreadable``  why the message's own headers are missing
======================  ================================================================================
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from keylane import strict_json as wire
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.policies.failure_info import FAILURES_KEPT, FailedAttempt
from keylane.safe_text import valid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.message import Headers, Record
    from keylane.offsets.identity import TopicIdentity
    from keylane.policies.failure_info import FailureInfo

BORDER = "keylane-app"
"""The first of our headers."""

# Bytes. Together they stay below what a dead letter may be larger than its message (cluster.DEAD_LETTER_ROOM_BYTES).
_MESSAGE, _TRACEBACK, _FAILURES, _NAME, _FAILED = 6_000, 24_000, 16_000, 500, 300


def dead_letter_headers(
    app: str,
    app_version: str | None,
    kind: DeadLetterKind | Literal["dead", "archived", "parked"],
    source: TopicIdentity,
    partition: int,
    offset: int,
    timestamp: int | None,
    letter: FailureInfo | None,
    park: int | None = None,
    redrives: int = 0,
    *,
    at: float | None = None,
    unreadable: str | None = None,
) -> Headers:
    """The headers to put behind the message's own; less than ``cluster.DEAD_LETTER_ROOM_BYTES`` bytes, whatever failed.

    ``source`` is the topic that the message lay in.
    ``letter`` is None for a message that is parked behind the one that failed; ``at`` is then when that was.
    ``unreadable`` says why the message's own headers are missing. Raises ValueError for a park that is no park.
    """
    kind = DeadLetterKind(kind)
    if (kind is DeadLetterKind.PARKED) != (park is not None) or (
        letter is None and kind is not DeadLetterKind.PARKED
    ):
        raise ValueError(f"a letter of kind {kind} with park={park} and letter={letter}")
    failed_at = at if letter is None else letter.failed_at
    given: dict[str, bytes | str | int | None] = {
        BORDER: app,
        "keylane-app-version": app_version,
        "keylane-kind": kind.value,
        "keylane-topic": source.topic,
        "keylane-topic-id": source.id or None,
        "keylane-cluster": source.cluster or None,
        "keylane-partition": partition,
        "keylane-offset": offset,
        "keylane-timestamp": timestamp or 0,
        "keylane-attempts": 0 if letter is None else letter.attempts,
        "keylane-failed-at": None if failed_at is None else f"{failed_at:.3f}",
        "keylane-park": park,
        "keylane-redrives": redrives or None,
        "keylane-headers-unreadable": None if unreadable is None else _head(unreadable, _NAME),
    }
    if letter is not None:
        given |= {
            "keylane-stage": _head(letter.stage, _NAME),
            "keylane-error": _head(letter.error, _NAME),
            "keylane-message": _head(letter.message, _MESSAGE),
            "keylane-traceback": _tail(letter.traceback, _TRACEBACK),
            "keylane-failures": _failures(letter.failures),
        }
    return [
        (name, value if isinstance(value, bytes) else str(value).encode("utf-8", "replace"))
        for name, value in given.items()
        if value is not None
    ]


def parse(record: Record) -> DeadLetter | UnreadableDeadLetter:
    """The letter, or what is wrong with it. Never raises: anybody may have written into the topic."""
    partition, offset, key, value = record.partition(), record.offset(), record.key(), record.value()
    headers: list[tuple[str, bytes | None]] | None = None
    try:
        headers = list(record.headers() or ())
        border = _border(headers)
        has = _Context(headers[border:])
        kind = has.kind()
        return DeadLetter(
            partition=partition,
            offset=offset,
            key=key,
            value=value,
            headers=tuple(headers[:border]),
            headers_unreadable=has.text("headers-unreadable"),
            topic=has.name("topic"),
            topic_id=has.text("topic-id") or "",
            cluster=has.text("cluster") or "",
            source_partition=has.number("partition"),
            source_offset=has.number("offset"),
            timestamp=has.number("timestamp", 0) or None,
            kind=kind,
            stage=has.text("stage"),
            error=has.text("error"),
            message=has.text("message"),
            traceback=has.text("traceback"),
            attempts=has.number("attempts", 0),
            failures=has.failures(),
            failed_at=has.seconds("failed-at"),
            park=has.number("park") if kind is DeadLetterKind.PARKED else None,
            redrives=has.number("redrives", 0),
            app=has.name("app"),
            app_version=has.text("app-version"),
        )
    except UnicodeDecodeError as error:
        reason = f"the name of a header is not UTF-8 ({error})"
    except _NoLetterError as error:
        reason = str(error)
    return UnreadableDeadLetter(
        partition=partition,
        offset=offset,
        reason=reason,
        key=key,
        value=value,
        headers=None if headers is None else tuple(headers),
    )


class _NoLetterError(ValueError):
    """What is wrong with a record that ought to be a letter."""


def _border(headers: Headers) -> int:
    for place in range(len(headers) - 1, -1, -1):
        if headers[place][0] == BORDER:
            return place
    raise _NoLetterError(f"it has no header {BORDER!r}: Keylane did not write it")


class _Context:
    """Our headers of one record. Every method raises :class:`_NoLetterError` when its header makes no sense."""

    def __init__(self, headers: Headers) -> None:
        self._headers = {name: value for name, value in reversed(headers) if value is not None}

    def text(self, name: str) -> str | None:
        value = self._headers.get(f"keylane-{name}")
        return None if value is None else value.decode("utf-8", "backslashreplace")

    def name(self, name: str) -> str:
        found = self.text(name)
        if not found:
            raise _NoLetterError(f"its header 'keylane-{name}' is missing or empty")
        return found

    def number(self, name: str, missing: int | None = None) -> int:
        found = self.text(name)
        if found is None and missing is not None:
            return missing
        if found is None or not re.fullmatch(r"[0-9]{1,18}", found):
            raise self._wrong(name, "a number", found)
        return int(found)

    def seconds(self, name: str) -> float | None:
        found = self.text(name)
        if found is not None and not re.fullmatch(r"[0-9]{1,11}(\.[0-9]{1,9})?", found):
            raise self._wrong(name, "a time in seconds", found)
        return None if found is None else float(found)

    def kind(self) -> DeadLetterKind:
        found = self.text("kind")
        try:
            return (
                DeadLetterKind.DEAD if found is None else DeadLetterKind(found)
            )  # 0.1 wrote none: all were dead
        except ValueError:
            raise self._wrong("kind", f"one of {', '.join(DeadLetterKind)}", found) from None

    def failures(self) -> tuple[FailedAttempt, ...]:
        found = self.text("failures")
        if found is None:
            return ()
        try:
            return tuple(_failed(each) for each in wire.loads(found))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise self._wrong("failures", "a list of attempts as JSON", found) from None

    @staticmethod
    def _wrong(name: str, needed: str, found: str | None) -> _NoLetterError:
        if found is None:
            return _NoLetterError(f"its header 'keylane-{name}' is missing")
        shown = found if len(found) <= 60 else found[:60] + "…"
        return _NoLetterError(f"its header 'keylane-{name}' is {shown!r}, not {needed}")


def _failed(given: Any) -> FailedAttempt:
    stage, attempt, at, error = given["stage"], given["attempt"], float(given["at"]), given["error"]
    if not (isinstance(stage, str) and type(attempt) is int and math.isfinite(at) and isinstance(error, str)):
        raise TypeError(given)
    return FailedAttempt(stage=valid(stage), attempt=attempt, at=at, error=valid(error))


def _failures(failures: Sequence[FailedAttempt]) -> bytes:
    """As JSON, the oldest left out when there are too many or they are too long."""
    kept = [
        {
            "stage": _head(each.stage, _FAILED).decode(),
            "attempt": each.attempt,
            "at": round(each.at, 3),
            "error": _head(each.error, _FAILED).decode(),
        }
        for each in failures[-FAILURES_KEPT:]
    ]
    while len(text := json.dumps(kept, ensure_ascii=False).encode()) > _FAILURES:
        del kept[0]
    return text


def _head(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore").encode()


def _tail(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[-limit:].decode("utf-8", "ignore").encode()
