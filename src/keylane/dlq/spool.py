"""The spool: dead letters in local files while their topic takes none.

One folder per app and cluster, one file per process at a time: ``<folder>/<app>/<cluster>/<host>-<pid>-<n>.spool``. A
process locks (flock) the file that it writes or ships, so each file has one owner at a time; files of dead processes
are free. A task ships only letters of its own cluster and leaves all others. The format of the files:
:mod:`keylane.dlq.spool_format`.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import socket
import threading
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from keylane.dlq.spool_format import SpooledDeadLetter, SpoolReader, frame
from keylane.errors import KeylaneError
from keylane.topic_names import dead_letter_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

__all__ = ["Spool", "SpoolError", "SpooledDeadLetter", "default_folder", "folder_of", "foreign"]

log = logging.getLogger("keylane.kafka")

WINDOW_RECORDS = 500
WINDOW_BYTES = 16_000_000
"""Bytes sent before waiting for the first acknowledgements."""


class SpoolError(KeylaneError):
    """A dead letter could not be stored; says why, and what to do."""


class DeadLetterRefusedError(KeylaneError):
    """The topic takes dead letters, but will never take this one."""


def default_folder() -> Path:
    """``$KEYLANE_SPOOL``, or ``keylane/spool`` in this user's folder for state. Raises SpoolError if there is none."""
    if given := os.environ.get("KEYLANE_SPOOL"):
        return Path(given).absolute()
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # noqa: PTH117 - an empty text is not a path
        return Path(state) / "keylane" / "spool"
    try:
        return Path.home() / ".local" / "state" / "keylane" / "spool"
    except RuntimeError as error:
        raise SpoolError(f"no folder for the spool: {error}. Set KEYLANE_SPOOL to one") from error


def folder_of(folder: Path, app: str, cluster: str) -> Path:
    """The folder for the dead letters of an app in a cluster. A cluster without an id is called ``unknown``."""
    return folder / app / (quote(cluster, safe="") if cluster.strip(".") else "unknown")


def foreign(own: Path) -> list[Path]:
    """Files with letters of the app that are not for this cluster: of other clusters, or of an unknown one.

    ``own`` is what :func:`folder_of` returns. In earlier versions one folder was for all clusters, and nothing in its
    files says where they belong.
    """
    files = (path for pattern in ("*.spool", "*/*.spool") for path in own.parent.glob(pattern))
    return sorted(path for path in files if path.parent != own)


class Spool:
    """The letters of one app in one cluster that wait on this machine. It touches no file before the first letter.

    Safe to use from several threads: :meth:`append` waits for the disk only, never for a :meth:`ship` under way.
    """

    def __init__(self, folder: Path, app: str, cluster: str) -> None:
        self._folder = folder_of(folder, app, cluster)
        self._topic = dead_letter_topic(app)  # the only valid topic of a letter
        self._lock = threading.Lock()  # protects _active
        self._shipping = threading.Lock()
        self._active: _Active | None = None  # the file that append() writes to
        self._counted: dict[str, tuple[int, int]] = {}  # for waiting(): size and letters of each file

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder

    def append(self, entry: SpooledDeadLetter) -> None:
        """Store a letter: it is on disk when this returns. Raises SpoolError, and stores nothing, when it cannot."""
        whole = frame(entry)
        with self._lock:
            try:
                if self._active is None:
                    self._active = _create(self._folder)
                self._active.append(whole)
            except OSError as error:
                active, self._active = self._active, None
                if active is not None and active.restore():
                    self._active = active
                where = self._folder if active is None else active.path
                raise SpoolError(
                    f"a dead letter for {entry.topic!r} could not be kept in {where}: {error.strerror or error}. "
                    "Make room there or give this user the right to write, or set KEYLANE_SPOOL to another folder"
                ) from error

    def waiting(self) -> int:
        """Return how many letters wait for this cluster, including those of other processes."""
        counted: dict[str, tuple[int, int]] = {}
        for path in self._files():
            try:
                size = path.stat().st_size
                known = self._counted.get(path.name)
                if known is None or known[0] != size:
                    with path.open("rb") as file:
                        reader = SpoolReader(file.fileno(), self._topic)
                        known = (reader.size, sum(1 for _ in reader))
            except OSError:  # just shipped, or another user's
                continue
            counted[path.name] = known
        self._counted = counted
        return sum(letters for _, letters in counted.values())

    def ship(self, send: Callable[[SpooledDeadLetter], Future[None]], *, timeout: float = 60.0) -> int:
        """Send all waiting letters, oldest file first, and return how many; blocks until all are acknowledged.

        ``send`` hands one over and returns a future that is done when it is acknowledged. Errors of either are raised
        here; SpoolError when no acknowledgement comes for ``timeout`` seconds. Letters that were not acknowledged
        stay, and are sent again with the rest of their file, so a topic may get a letter twice. A letter that the
        topic will never take (:class:`DeadLetterRefusedError`) stays, and does not delay others. Files that another
        process writes or ships are left to it.
        """
        with self._shipping:
            with self._lock:
                active, self._active = self._active, None  # the next letter begins a new file
            if active is not None:
                active.close()
            return sum(self._ship(path, send, timeout) for path in self._files())

    def close(self) -> None:
        """Close the file; its letters wait for the next :meth:`ship`, of any process."""
        with self._lock:
            active, self._active = self._active, None
        if active is not None:
            active.close()

    def _files(self) -> list[Path]:
        """The files, oldest first. A process writes one file after another, so the last write gives their order."""
        aged = []
        for path in self._folder.glob("*.spool"):
            with suppress(FileNotFoundError):
                aged.append((path.stat().st_mtime_ns, len(path.name), path.name, path))
        return [path for *_, path in sorted(aged)]

    def _ship(self, path: Path, send: Callable[[SpooledDeadLetter], Future[None]], timeout: float) -> int:
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return 0
        except OSError as error:
            log.warning("dead letters wait in %s and cannot be read: %s", path, error)
            return 0
        try:
            if not _own(fd, path):
                return 0
            reader = SpoolReader(fd, self._topic)
            sent, refused = _send(reader, send, timeout)
            if reader.torn:
                log.warning(
                    "%s ends in %d bytes of an unfinished dead letter: its process died while writing it",
                    path,
                    reader.torn,
                )
            if reader.damaged:
                aside = path.with_suffix(".damaged")
                path.rename(aside)
                log.error(
                    "%s was damaged in %d places; its other %d dead letters are in their topic. The file is kept as %s",
                    path,
                    reader.damaged,
                    sent,
                    aside,
                )
            elif refused:
                _replace(path, [letter for letter, _ in refused])
                log.error("%d dead letters stay in %s: %s", len(refused), path, refused[0][1])
            else:
                path.unlink()
            return sent
        finally:
            os.close(fd)


class _Active:
    """A file that this process writes and has locked."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self._fd = fd
        self._size = 0  # bytes of complete letters on disk

    def append(self, frame: bytes) -> None:
        """Append a letter. Raises OSError; then :meth:`restore` returns whether the file is still usable."""
        rest = memoryview(frame)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        os.fsync(self._fd)
        self._size += len(frame)

    def restore(self) -> bool:
        """Remove what a failed append left. False if even that fails: the file is closed and ends in a torn letter."""
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        except OSError:
            os.close(self._fd)
            return False
        return True

    def close(self) -> None:
        if not self._size:  # created for a letter that could not be stored
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _create(folder: Path) -> _Active:
    """Create a file of this process: locked, and durable in its folder."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)  # letters are other people's data
        _fsync(each.parent)
    for number in itertools.count(1):
        path = folder / f"{socket.gethostname()}-{os.getpid()}-{number}.spool"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        try:
            if _own(fd, path):  # otherwise another process was faster to ship it, and removes it as empty
                _fsync(folder)
                return _Active(fd, path)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)
    raise AssertionError  # itertools.count() does not end


def _own(fd: int, path: Path) -> bool:
    """Lock the file, unless another process has. True if it is locked and still there."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.stat().st_ino == os.fstat(fd).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_Sent = list[tuple[SpooledDeadLetter, "Future[None]"]]
_Refused = list[tuple[SpooledDeadLetter, "DeadLetterRefusedError"]]


def _send(
    letters: Iterable[SpooledDeadLetter], send: Callable[[SpooledDeadLetter], Future[None]], timeout: float
) -> tuple[int, _Refused]:
    """Send in windows. Returns how many were acknowledged, and the letters that the topic will never take."""
    sent, size = 0, 0
    refused: _Refused = []
    window: _Sent = []
    for letter in letters:
        window.append((letter, send(letter)))
        sent += 1
        size += len(letter.value or b"")
        if len(window) >= WINDOW_RECORDS or size >= WINDOW_BYTES:
            refused += _wait(window, timeout)
            window, size = [], 0
    refused += _wait(window, timeout)
    return sent - len(refused), refused


def _wait(window: _Sent, timeout: float) -> _Refused:
    refused: _Refused = []
    for letter, future in window:
        if not wait([future], timeout).done:
            raise SpoolError(f"dead letters stay in the spool: no acknowledgement came within {timeout:g} s")
        try:
            future.result()
        except DeadLetterRefusedError as error:
            refused.append((letter, error))
    return refused


def _replace(path: Path, letters: Iterable[SpooledDeadLetter]) -> None:
    """Keep only these letters in the file, atomically."""
    fresh = path.with_suffix(".fresh")
    with fresh.open("wb") as file:
        for letter in letters:
            file.write(frame(letter))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _fsync(path.parent)
