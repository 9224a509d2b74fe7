"""What ran when: the start and the end of every attempt, written by the processes that ran them.

The writer is made for processes that get killed: an event is one ``write`` to a file that only this process
writes, and it is done before the caller goes on. What was written before ``kill -9`` is read back afterwards.

Events of several processes are put in order by the machine's monotonic clock, which all processes of one machine
share and which is never set back. A history is therefore good for **one machine** and one boot; the wall clock is
recorded for the reader's eye only.
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
    """A history that cannot be read; names the file and the line."""


class Ended(StrEnum):
    """How an attempt ended, as far as the one who recorded it could know. Other words are allowed, and not final."""

    OK = "ok"
    DEAD = "dead"
    SKIPPED = "skipped"
    PARKED = "parked"
    IGNORED = "ignored"
    RETRY = "retry"
    FAILED = "failed"
    """An exception left the attempt. Whether it is tried again is for the lane to decide, not for the attempt."""
    CANCELLED = "cancelled"


FINAL: frozenset[str] = frozenset({Ended.OK, Ended.DEAD, Ended.SKIPPED, Ended.PARKED, Ended.IGNORED})
"""After one of these the message is finished and its lane may go on."""


class ObservedDelivery(Protocol):
    """What an attempt is an attempt at; :class:`keylane.Message` is one."""

    @property
    def key(self) -> bytes | None:
        """The lane it belongs to; None for a keyless message."""

    @property
    def partition(self) -> int:
        """Of the source topic."""

    @property
    def offset(self) -> int:
        """In that partition."""

    @property
    def attempt(self) -> int:
        """Counts from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All events of a run, in the order in which they happened."""

    events: tuple[HistoryEvent, ...]
    torn: int = 0
    """Files whose last line was cut off by the death of their writer."""

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[HistoryEvent]:
        return iter(self.events)


class HistoryWriter:
    """Records attempts into a folder, from any number of processes at once.

    An instance can be pickled and carried to Spark's Python workers: it holds the folder and the name, and opens a
    file of its own the first time a process uses it. ``owner`` is completed with the pid, because an owner is a
    process: when it dies, its open attempts die with it. A second run *inside* one process needs another name.

    Safe to use from several threads.
    Raises OSError when the file cannot be written: a history with holes proves nothing.
    """

    __slots__ = ("_fd", "_life", "_name", "_pid", "folder", "owner")

    def __init__(self, folder: str | Path, owner: str | None = None) -> None:
        self.folder = Path(folder)
        self._name = owner
        self.owner = ""  # set by _open, in the process that writes
        self._fd = -1  # belongs to the process _pid; a forked child opens its own
        self._pid = -1
        self._life = 0

    def __reduce__(self) -> tuple[type[HistoryWriter], tuple[Path, str | None]]:
        return HistoryWriter, (self.folder, self._name)

    def attempt(self, msg: ObservedDelivery) -> Attempt:
        """A context manager around one attempt, for the body of a stage, plain or ``async``.

        The start is written before the body begins, the end after it ended: ``ok``, ``failed`` when an exception left
        it, ``cancelled`` when it was cancelled, or what the body put into ``.outcome``.
        """
        return Attempt(self, msg)

    def start(self, msg: ObservedDelivery) -> None:
        """Records that an attempt starts; call it before the work begins."""
        self._write(f"s {time.monotonic_ns()} {_position(msg)}\n")

    def end(self, msg: ObservedDelivery, outcome: str = Ended.OK) -> None:
        """Records that an attempt ended; call it after the work. Raises ValueError unless the outcome is one line."""
        self._end(_position(msg), outcome)

    def started(self, message: ObservedDelivery, attempt: int) -> None:
        """As an app's ``observer``: the engine tells of every attempt itself, numbered over all stages."""
        self._write(f"s {time.monotonic_ns()} {_position(message, attempt)}\n")

    def ended(self, message: ObservedDelivery, attempt: int, outcome: str) -> None:
        """As an app's ``observer``: see :meth:`started`."""
        self._end(_position(message, attempt), outcome)

    def began_again(self) -> None:
        """As an app's ``observer``: a task begins again in this process, after its transaction was aborted."""
        self.close()
        self._life += 1

    def close(self) -> None:
        """Closes this process's file. The next event opens a new one. Not needed for anything to survive."""
        if self._fd >= 0 and self._pid == os.getpid():
            os.close(self._fd)
        self._fd = -1
        self._pid = -1

    def _end(self, position: str, outcome: str) -> None:
        now = time.monotonic_ns()
        if not outcome or outcome.splitlines() != [outcome]:
            raise ValueError(f"an outcome is one line of text, not {outcome!r}")
        self._write(f"e {now} {position} {outcome}\n")

    def _write(self, line: str) -> None:
        if self._pid != os.getpid():
            self._open()
        data = line.encode()
        if os.write(self._fd, data) != len(data):
            raise OSError(f"the history in {self.folder} could not be written: is the disk full?")

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
        """What the end is to say; None leaves it to how the body ends."""

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
    """All histories in a folder, merged into one, in the order of the machine's monotonic clock.

    A last line that its writer's death cut off is left out and counted. Raises :class:`HistoryError` when the folder is
    missing or a file holds something else than a history.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HistoryError(f"there is no history in {folder}: the folder does not exist")
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
    """Appends the events of a file, in its order; true when its last line was torn."""
    *lines, rest = path.read_bytes().decode("utf-8", "replace").split("\n")
    if not lines:
        return bool(rest)
    try:
        head = json.loads(lines[0])
        owner, wall = str(head["owner"]), int(head["wall"])
        if head["format"] != _FORMAT:
            raise HistoryError(f"{path} has format {head['format']}: this version reads format {_FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(f"{path} is no history: its first line is {lines[0][:80]!r}") from error
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
        raise HistoryError(f"line {number} of {path} is no event: {line[:80]!r}") from error
    return bool(rest)


_KINDS = {("s", 0): EventKind.START, ("e", 1): EventKind.END}  # a letter, and how many outcomes go with it


def _key(text: str) -> bytes:
    if text[:1] != "x":
        raise ValueError("a key is '-' or 'x' and hex digits")
    return bytes.fromhex(text[1:])


@contextmanager
def collector_paused() -> Iterator[None]:
    """Millions of small live objects make the cyclic collector run over them again and again: twice as fast without."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
