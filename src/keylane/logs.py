"""Logs: one line per important event, with its key and offset; repeated lines are limited; no secrets.

A line may quote a message, or an error that quotes one. So its values, its length and its traceback are bounded, and
nothing in them moves a terminal's cursor or looks like another line.

Apps and Spark may set up logging themselves: the set-up here is used only if there is none.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from keylane.redaction import redact
from keylane.safe_text import cut, cut_bytes, printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.message import Message

Format = Literal["text", "json"]
FORMATS: tuple[str, ...] = get_args(Format)
FIELDS = ("key", "partition", "offset", "stage", "attempts", "error", "stop")
"""Fields that a line may have besides its text, as ``extra`` of the call."""
BURST_LINES_MAX = 10
"""Lines of one kind printed within :data:`BURST_WINDOW_SECONDS`; further ones are counted."""
BURST_WINDOW_SECONDS = 10.0
BYTES_SHOWN = 200
"""Bytes of a key, or of any other bytes, that a line shows."""
VALUE_CHARACTERS_MAX = 2500
"""Characters of any other value: an error's text has 2,000."""
LINE_CHARACTERS_MAX = 8000
"""Characters of a line, before unprintable ones are escaped."""
TRACEBACK_CHARACTERS_MAX = 32_000
"""Characters of a traceback."""
_KINDS_REMEMBERED = 1000
"""Kinds of lines that are tracked."""


def where(message: Message, **more: Any) -> dict[str, Any]:
    """The message that a line is about, for ``extra``."""
    key = message.key
    return {
        "key": None if key is None else cut_bytes(key, BYTES_SHOWN),
        "partition": message.partition,
        "offset": message.offset,
        **more,
    }


def set_up(level: int, form: str = "text", stream: TextIO | None = None) -> None:
    """Log to standard error, unless logging has been set up already."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level)


def _message(record: logging.LogRecord) -> str:
    """The line's text, of bounded length whatever its values are, without secrets."""
    given = record.args
    if isinstance(given, tuple):
        given = tuple(map(short, given))
    elif given:
        given = {name: short(value) for name, value in given.items()}
    text = str(record.msg)
    if given:
        try:
            text = text % given
        except Exception:  # the line is printed in any case
            text = f"{text} {given!r}"
    return redact(cut(text, LINE_CHARACTERS_MAX))


def short(value: object) -> object:
    """A value for a line, such as a key: a long one is shown as its beginning and its length."""
    if isinstance(value, bytes) and len(value) > BYTES_SHOWN:
        return _Cut(f"{value[:BYTES_SHOWN]!r}… ({len(value):,} bytes)")
    if isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
        return _Cut(cut(value, VALUE_CHARACTERS_MAX))
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    try:
        text = str(value)
    except Exception:  # a value's own __repr__
        return _Cut(f"<a {type(value).__name__} without a text>")
    return value if len(text) <= VALUE_CHARACTERS_MAX else _Cut(cut(text, VALUE_CHARACTERS_MAX))


class _Cut(str):
    """Looks the same with ``%s`` and ``%r``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, text. A text of several lines is one line; a traceback's lines are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format without secrets, and without terminal control characters."""
        record.message = printable(_message(record))
        record.asctime = self.formatTime(record)
        parts = [self.formatMessage(record)]
        if record.exc_info:
            parts.append(printable_lines(self._traceback(record)))
        if record.stack_info:
            parts.append(printable_lines(redact(cut(record.stack_info, TRACEBACK_CHARACTERS_MAX))))
        return "\n  ".join(parts)

    def _traceback(self, record: logging.LogRecord) -> str:
        return (
            redact(cut(self.formatException(record.exc_info), TRACEBACK_CHARACTERS_MAX))
            if record.exc_info
            else ""
        )


def as_json(level: str, logger: str, message: str, at: float | None = None) -> dict[str, Any]:
    """The fields that every line has."""
    return {
        "at": datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat(
            timespec="milliseconds"
        ),
        "level": level,
        "logger": logger,
        "message": redact(cut(message, LINE_CHARACTERS_MAX)),
    }


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """``at``, ``level``, ``logger``, ``message``, and what else is known: key, partition, offset …"""
        found = as_json(record.levelname, record.name, _message(record), record.created)
        for name in FIELDS:
            value = getattr(record, name, None)
            if isinstance(value, str):
                value = cut(value, VALUE_CHARACTERS_MAX)
                found[name] = value if name == "key" else redact(value)
            elif value is not None:
                found[name] = value
        if (more := getattr(record, "more", None)) is not None:
            found["more"] = more
        if record.exc_info:
            found["traceback"] = redact(cut(self.formatException(record.exc_info), TRACEBACK_CHARACTERS_MAX))
        return json.dumps(found, default=str)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Prints the first lines of a kind, and the number of the others when :data:`BURST_WINDOW_SECONDS` are over.

    A kind is a logger and the text of the call, before its values are filled in. This limits errors with tracebacks
    too.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}  # under the handler's own lock

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        name = record.name, record.levelno, str(record.msg)[:BYTES_SHOWN]
        now = self._clock()
        kind = self._kinds.get(name)
        if kind is None or now >= kind.ends:
            if kind is not None:
                self._sum_up(kind)
            if len(self._kinds) >= _KINDS_REMEMBERED:
                self.sum_up()
            kind = self._kinds[name] = _Kind(ends=now + BURST_WINDOW_SECONDS)
        kind.said += 1
        if kind.said <= BURST_LINES_MAX:
            super().emit(record)
            return
        kind.left_out += 1
        kind.last = record
        if kind.timer is None:
            kind.timer = threading.Timer(kind.ends - now, self._over, (name, kind))
            kind.timer.daemon = True
            kind.timer.start()

    def sum_up(self) -> None:
        """Print the numbers of lines left out so far."""
        with self.lock or threading.RLock():
            for kind in self._kinds.values():
                self._sum_up(kind)
            self._kinds.clear()

    def close(self) -> None:
        """Print the numbers of lines left out, and close."""
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
            (kind.left_out, BURST_WINDOW_SECONDS, str(last.msg)),
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
