"""Writer and parser of the headers that make a message a dead letter.

A dead letter has its message's partition, key, value and headers. Keylane's headers follow the message's own, with
``keylane-app`` first. Everything before the last ``keylane-app`` belongs to the message.

======================  ================================================================================
``keylane-app``         the app; ``keylane-app-version`` if it has one
``keylane-kind``        ``dead``, ``archived`` (its lane is blocked) or ``parked``
``keylane-topic``       of the message, with ``-partition``, ``-offset`` and ``-timestamp`` (ms; 0: it had none)
``keylane-topic-id``    Kafka's id of that topic, and ``keylane-cluster`` the cluster's; left out if unknown
``keylane-stage``       the stage that failed, with ``-error`` (class), ``-message`` and ``-traceback``; a message
                        that was parked behind the one that failed has none of these
``keylane-attempts``    the number of attempts
``keylane-failures``    the latest of them: ``[{"stage": …, "attempt": …, "at": unix seconds, "error": …}, …]``
``keylane-failed-at``   unix seconds
``keylane-park``        parked only: the offset at which its lane was parked, the same for all messages behind it
``keylane-redrives``    how often it was redriven before; left out if never
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

FIRST_HEADER = "keylane-app"
"""The first of Keylane's headers."""

# Together they stay below cluster.DEAD_LETTER_ROOM_BYTES.
_MESSAGE_BYTES, _TRACEBACK_BYTES, _FAILURES_BYTES, _NAME_BYTES, _FAILURE_TEXT_BYTES = (
    6_000,
    24_000,
    16_000,
    500,
    300,
)


def dead_letter_headers(
    app: str,
    app_version: str | None,
    kind: DeadLetterKind | Literal["dead", "archived", "parked"],
    source: TopicIdentity,
    partition: int,
    offset: int,
    timestamp: int | None,
    failure: FailureInfo | None,
    park: int | None = None,
    redrives: int = 0,
    *,
    at: float | None = None,
    unreadable: str | None = None,
) -> Headers:
    """The headers to append to the message's own: less than ``cluster.DEAD_LETTER_ROOM_BYTES`` bytes for any failure.

    ``source``: the message's topic. ``failure``: None for a message that is parked behind the one that failed;
    ``at`` is then the time of the parking. ``park``: see :attr:`DeadLetter.park`. ``unreadable``: why the message's
    own headers are missing. Raises ValueError if ``kind`` does not match ``park`` and ``failure``.
    """
    kind = DeadLetterKind(kind)
    if (kind is DeadLetterKind.PARKED) != (park is not None) or (
        failure is None and kind is not DeadLetterKind.PARKED
    ):
        raise ValueError(
            "expected a park offset for parked dead letters only, and a failure for all others, "
            f"got {kind=!s}, {park=}, {failure=}"
        )
    failed_at = at if failure is None else failure.failed_at
    given: dict[str, bytes | str | int | None] = {
        FIRST_HEADER: app,
        "keylane-app-version": app_version,
        "keylane-kind": kind.value,
        "keylane-topic": source.topic,
        "keylane-topic-id": source.id or None,
        "keylane-cluster": source.cluster or None,
        "keylane-partition": partition,
        "keylane-offset": offset,
        "keylane-timestamp": timestamp or 0,
        "keylane-attempts": 0 if failure is None else failure.attempts,
        "keylane-failed-at": None if failed_at is None else f"{failed_at:.3f}",
        "keylane-park": park,
        "keylane-redrives": redrives or None,
        "keylane-headers-unreadable": None if unreadable is None else _head(unreadable, _NAME_BYTES),
    }
    if failure is not None:
        given |= {
            "keylane-stage": _head(failure.stage, _NAME_BYTES),
            "keylane-error": _head(failure.error, _NAME_BYTES),
            "keylane-message": _head(failure.message, _MESSAGE_BYTES),
            "keylane-traceback": _tail(failure.traceback, _TRACEBACK_BYTES),
            "keylane-failures": _failures(failure.failures),
        }
    return [
        (name, value if isinstance(value, bytes) else str(value).encode("utf-8", "replace"))
        for name, value in given.items()
        if value is not None
    ]


def parse(record: Record) -> DeadLetter | UnreadableDeadLetter:
    """The dead letter, or what is wrong with the record. Never raises: anybody may have written into the topic."""
    partition, offset, key, value = record.partition(), record.offset(), record.key(), record.value()
    headers: list[tuple[str, bytes | None]] | None = None
    try:
        headers = list(record.headers() or ())
        own = _count_own_headers(headers)
        has = _KeylaneHeaders(headers[own:])
        kind = has.kind()
        return DeadLetter(
            partition=partition,
            offset=offset,
            key=key,
            value=value,
            headers=tuple(headers[:own]),
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
    except _MalformedHeadersError as error:
        reason = str(error)
    return UnreadableDeadLetter(
        partition=partition,
        offset=offset,
        reason=reason,
        key=key,
        value=value,
        headers=None if headers is None else tuple(headers),
    )


class _MalformedHeadersError(ValueError):
    """What is wrong with the headers of a record in the dead-letter topic."""


def _count_own_headers(headers: Headers) -> int:
    """The number of headers that belong to the message itself."""
    for index in range(len(headers) - 1, -1, -1):
        if headers[index][0] == FIRST_HEADER:
            return index
    raise _MalformedHeadersError(f"it has no header {FIRST_HEADER!r}: Keylane did not write it")


class _KeylaneHeaders:
    """Keylane's headers of one record. Methods raise :class:`_MalformedHeadersError` for a malformed header."""

    def __init__(self, headers: Headers) -> None:
        self._headers = {name: value for name, value in reversed(headers) if value is not None}

    def text(self, name: str) -> str | None:
        value = self._headers.get(f"keylane-{name}")
        return None if value is None else value.decode("utf-8", "backslashreplace")

    def name(self, name: str) -> str:
        found = self.text(name)
        if not found:
            raise _MalformedHeadersError(f"its header 'keylane-{name}' is missing or empty")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        found = self.text(name)
        if found is None and default is not None:
            return default
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
            # Version 0.1 did not write this header, and all its dead letters were of this kind.
            return DeadLetterKind.DEAD if found is None else DeadLetterKind(found)
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
    def _wrong(name: str, expected: str, found: str | None) -> _MalformedHeadersError:
        if found is None:
            return _MalformedHeadersError(f"its header 'keylane-{name}' is missing")
        shown = found if len(found) <= 60 else found[:60] + "…"
        return _MalformedHeadersError(f"its header 'keylane-{name}' is {shown!r}, not {expected}")


def _failed(given: Any) -> FailedAttempt:
    stage, attempt, at, error = given["stage"], given["attempt"], float(given["at"]), given["error"]
    if not (isinstance(stage, str) and type(attempt) is int and math.isfinite(at) and isinstance(error, str)):
        raise TypeError(given)
    return FailedAttempt(stage=valid(stage), attempt=attempt, at=at, error=valid(error))


def _failures(failures: Sequence[FailedAttempt]) -> bytes:
    """As JSON. The oldest are left out if there are too many or they are too long."""
    kept = [
        {
            "stage": _head(each.stage, _FAILURE_TEXT_BYTES).decode(),
            "attempt": each.attempt,
            "at": round(each.at, 3),
            "error": _head(each.error, _FAILURE_TEXT_BYTES).decode(),
        }
        for each in failures[-FAILURES_KEPT:]
    ]
    while len(text := json.dumps(kept, ensure_ascii=False).encode()) > _FAILURES_BYTES:
        del kept[0]
    return text


def _head(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore").encode()


def _tail(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[-limit:].decode("utf-8", "ignore").encode()
