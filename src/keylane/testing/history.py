"""History of attempts: the start and end of each, written by the processes that ran them.

Events survive ``kill -9``: each is one ``write`` to a file of its own process, and the writer returns after it.

Events of several processes are ordered by the machine's monotonic clock, which all its processes share. So a history
is valid for **one machine** and one boot. The wall clock is recorded only for people who read it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from keylane.audit.violation import EventKind, HistoryEvent
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_SUFFIX = ".history"
_FORMAT = 1


class HistoryError(KeylaneError):
    """A history cannot be read. Names the file and the line."""


class Ended(StrEnum):
    """How an attempt ended, as far as its recorder knows. Other words are allowed, and are not final."""

    OK = "ok"
    DEAD = "dead"
    SKIPPED = "skipped"
    PARKED = "parked"
    IGNORED = "ignored"
    RETRY = "retry"
    FAILED = "failed"
    """The attempt raised an exception. The engine decides later whether to retry."""
    CANCELLED = "cancelled"


FINAL: frozenset[str] = frozenset({Ended.OK, Ended.DEAD, Ended.SKIPPED, Ended.PARKED, Ended.IGNORED})
"""Outcomes that finish a message, so that its lane may continue."""


class ObservedDelivery(Protocol):
    """The message of an attempt, such as a :class:`keylane.Message`."""

    @property
    def key(self) -> bytes | None:
        """The key; None for a keyless message."""

    @property
    def partition(self) -> int:
        """The partition of the source topic."""

    @property
    def offset(self) -> int:
        """The offset in that partition."""

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All events of a run, in order."""

    events: tuple[HistoryEvent, ...]
    torn: int = 0
    """The number of files whose last line was cut off when their writer was killed."""

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[HistoryEvent]:
        return iter(self.events)


class HistoryWriter:
    """Writes attempts into a folder, from any number of processes and threads.

    An instance can be pickled and sent to Spark's Python workers. It contains the folder and the name, and opens a new
    file when a process first uses it. The process id is added to ``owner``, because the open attempts of a process end
    when it is killed. A second run in the same process needs another name.

    Raises OSError if the file cannot be written, because an incomplete history proves nothing.
    """

    __slots__ = ("_fd", "_life", "_name", "_pid", "folder", "owner")

    def __init__(self, folder: str | Path, owner: str | None = None) -> None:
        self.folder = Path(folder)
        self._name = owner
        self.owner = ""  # set by _open, in the process that writes
        self._fd = -1  # belongs to the process _pid; a forked child opens another file
        self._pid = -1
        self._life = 0

    def __reduce__(self) -> tuple[type[HistoryWriter], tuple[Path, str | None]]:
        return HistoryWriter, (self.folder, self._name)

    def attempt(self, msg: ObservedDelivery) -> Attempt:
        """A context manager around one attempt, for the body of a ``def`` or ``async def`` stage.

        It writes the start before the body and the end after it: ``ok``, ``failed`` after an exception, ``cancelled``
        after a cancellation, or the ``.outcome`` that the body has set.
        """
        return Attempt(self, msg)

    def start(self, msg: ObservedDelivery) -> None:
        """Record the start of an attempt; call it before the work."""
        self._write(f"s {time.monotonic_ns()} {_position(msg)}\n")

    def end(self, msg: ObservedDelivery, outcome: str = Ended.OK) -> None:
        """Record the end of an attempt; call it after the work. Raises ValueError unless the outcome is one line."""
        self._end(_position(msg), outcome)

    def started(self, message: ObservedDelivery, attempt: int) -> None:
        """Record a start, as an app's ``observer``. The engine numbers attempts over all stages."""
        self._write(f"s {time.monotonic_ns()} {_position(message, attempt)}\n")

    def ended(self, message: ObservedDelivery, attempt: int, outcome: str) -> None:
        """Record an end, as an app's ``observer``; see :meth:`started`."""
        self._end(_position(message, attempt), outcome)

    def began_again(self) -> None:
        """Begin another owner, as an app's ``observer``, when a task restarts after an aborted transaction."""
        self.close()
        self._life += 1

    def close(self) -> None:
        """Close this process's file. The next event opens a new one. Events survive without it."""
        if self._fd >= 0 and self._pid == os.getpid():
            os.close(self._fd)
        self._fd = -1
        self._pid = -1

    def _end(self, position: str, outcome: str) -> None:
        now = time.monotonic_ns()
        if not outcome or outcome.splitlines() != [outcome]:
            raise ValueError(f"outcome must be one line of text, got {outcome!r}")
        self._write(f"e {now} {position} {outcome}\n")

    def _write(self, line: str) -> None:
        if self._pid != os.getpid():
            self._open()
        data = line.encode()
        if os.write(self._fd, data) != len(data):
            raise OSError(
                f"cannot write a complete line to the history in {self.folder}; check the free disk space"
            )

    def _open(self) -> None:
        pid = os.getpid()
        owner = str(pid) if self._name is None else f"{self._name}@{pid}"
        if self._life:
            owner += f"+{self._life}"
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", self._name or "p")
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            path = self.folder / f"{stem}-{pid}-{number}{_SUFFIX}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                break
            except FileExistsError:
                number += 1
        wall = time.time_ns() - time.monotonic_ns()
        os.write(fd, f"{json.dumps({'format': _FORMAT, 'owner': owner, 'wall': wall})}\n".encode())
        self.owner, self._fd, self._pid = owner, fd, pid


class Attempt:
    """One attempt, as a context manager; made by :meth:`HistoryWriter.attempt`."""

    __slots__ = ("_position", "_writer", "outcome")

    def __init__(self, writer: HistoryWriter, msg: ObservedDelivery) -> None:
        self._writer = writer
        self._position = _position(msg)
        self.outcome: str | None = None
        """The outcome to record; None for the one that follows from the end of the body."""

    def __enter__(self) -> Self:
        self._writer._write(f"s {time.monotonic_ns()} {self._position}\n")  # noqa: SLF001 - the writer's other half
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = self.outcome
        if outcome is None:
            if kind is None:
                outcome = Ended.OK
            else:
                gone = issubclass(kind, asyncio.CancelledError | GeneratorExit)
                outcome = Ended.CANCELLED if gone else Ended.FAILED
        self._writer._end(self._position, outcome)  # noqa: SLF001 - the writer's other half


def read_history(folder: str | Path) -> History:
    """All histories in a folder, merged in the order of the machine's monotonic clock.

    An incomplete last line of a killed writer is ignored and counted. Raises :class:`HistoryError` if the folder does
    not exist, or a file is not a history.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HistoryError(f"expected a folder with histories, but {folder} does not exist")
    events: list[HistoryEvent] = []
    torn = 0
    with collector_paused():
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            torn += _read_file(path, events)
        events.sort(key=attrgetter("seq"))
        return History(events=tuple(events), torn=torn)


def _position(msg: ObservedDelivery, attempt: int | None = None) -> str:
    key = msg.key
    number = msg.attempt if attempt is None else attempt
    return f"{msg.partition} {msg.offset} {number} {'-' if key is None else 'x' + key.hex()}"


def _read_file(path: Path, events: list[HistoryEvent]) -> bool:
    """Append the events of a file, in its order; True if its last line is incomplete."""
    *lines, rest = path.read_bytes().decode("utf-8", "replace").split("\n")
    if not lines:
        return bool(rest)
    try:
        head = json.loads(lines[0])
        owner, wall = str(head["owner"]), int(head["wall"])
        if head["format"] != _FORMAT:
            raise HistoryError(f"expected history format {_FORMAT} in {path}, got {head['format']}")
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(f"{path} is not a history: its first line is {lines[0][:80]!r}") from error
    keys: dict[str, bytes | None] = {"-": None}
    line = ""
    try:
        for line in lines[1:]:
            kind, ticks, partition, offset, attempt, text, *outcome = line.split(" ", 6)
            if text not in keys:
                keys[text] = _key(text)
            seq = int(ticks)
            events.append(
                HistoryEvent(
                    _KINDS[kind, len(outcome)],
                    keys[text],
                    int(partition),
                    int(offset),
                    int(attempt),
                    owner,
                    (seq + wall) / 1e9,
                    seq,
                    outcome[0] if outcome else None,
                )
            )
    except (ValueError, KeyError) as error:
        number = lines.index(line, 1) + 1
        raise HistoryError(f"line {number} of {path} is not an event: {line[:80]!r}") from error
    return bool(rest)


_KINDS = {("s", 0): EventKind.START, ("e", 1): EventKind.END}  # by letter and number of outcomes


def _key(text: str) -> bytes:
    if text[:1] != "x":
        raise ValueError("key must be '-', or 'x' and hex digits")
    return bytes.fromhex(text[1:])


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would visit millions of live events repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
