"""Logs: one line for every event that matters, with its key and offset; repeated ones now and then; no secrets.

Apps and Spark may have logging of their own: what is set up here is used only where there is none.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from keylane.core.redact import redact
from keylane.core.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.message import Message

Format = Literal["text", "json"]
FORMATS: tuple[str, ...] = get_args(Format)
FIELDS = ("key", "partition", "offset", "stage", "attempts", "error", "stop")
"""What a line may have beside its text, as ``extra`` of the call."""
BURST = 10
"""Lines of one kind that are said within :data:`WINDOW` seconds; the others are counted."""
WINDOW = 10.0
_KINDS = 1000
"""Kinds of lines that are remembered."""


def where(message: Message, **more: Any) -> dict[str, Any]:
    """For ``extra``: which message a line is about."""
    key = message.key
    return {
        "key": None if key is None else show_bytes(key),
        "partition": message.partition,
        "offset": message.offset,
        **more,
    }


def set_up(level: int, form: str = "text", stream: TextIO | None = None) -> None:
    """Log to the standard error, unless somebody has set up logging already."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level)


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, text. A text of several lines is one line; a traceback keeps its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Without line breaks."""
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Without secrets."""
        return redact(super().format(record))


def as_json(level: str, logger: str, message: str, at: float | None = None) -> dict[str, Any]:
    """What every line has."""
    return {
        "at": datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat(
            timespec="milliseconds"
        ),
        "level": level,
        "logger": logger,
        "message": redact(message),
    }


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """``at``, ``level``, ``logger``, ``message``, and what else is known: key, partition, offset …"""
        found = as_json(record.levelname, record.name, record.getMessage(), record.created)
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                found[name] = redact(value) if isinstance(value, str) and name != "key" else value
        if (more := getattr(record, "more", None)) is not None:
            found["more"] = more
        if record.exc_info:
            found["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(found, default=str)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Says the first lines of a kind, and how many more there were when :data:`WINDOW` seconds are over.

    A kind is a logger and the text of the call, before its values are put in. Errors with tracebacks are lines too.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}  # under the handler's own lock

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        name = record.name, record.levelno, str(record.msg)
        now = self._clock()
        kind = self._kinds.get(name)
        if kind is None or now >= kind.ends:
            if kind is not None:
                self._sum_up(kind)
            if len(self._kinds) >= _KINDS:
                self.sum_up()
            kind = self._kinds[name] = _Kind(ends=now + WINDOW)
        kind.said += 1
        if kind.said <= BURST:
            super().emit(record)
            return
        kind.left_out += 1
        kind.last = record
        if kind.timer is None:
            kind.timer = threading.Timer(kind.ends - now, self._over, (name, kind))
            kind.timer.daemon = True
            kind.timer.start()

    def sum_up(self) -> None:
        """Say now what was left out so far."""
        with self.lock or threading.RLock():
            for kind in self._kinds.values():
                self._sum_up(kind)
            self._kinds.clear()

    def close(self) -> None:
        """Nothing is left out without a word."""
        self.sum_up()
        super().close()

    def _over(self, name: tuple[str, int, str], kind: _Kind) -> None:
        with self.lock or threading.RLock():
            if self._kinds.get(name) is kind:
                self._sum_up(kind)
                del self._kinds[name]

    def _sum_up(self, kind: _Kind) -> None:
        if kind.timer is not None:
            kind.timer.cancel()
        if not kind.left_out or kind.last is None:
            return
        last = kind.last
        record = logging.LogRecord(
            last.name,
            last.levelno,
            last.pathname,
            last.lineno,
            "… %d more like this in the last %g s: %s",
            (kind.left_out, WINDOW, str(last.msg)),
            None,
        )
        record.more = kind.left_out
        kind.left_out = 0
        super().emit(record)


class _Kind:
    """Lines of one kind in one window."""

    __slots__ = ("ends", "last", "left_out", "said", "timer")

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self.said = 0
        self.left_out = 0
        self.last: logging.LogRecord | None = None
        self.timer: threading.Timer | None = None
