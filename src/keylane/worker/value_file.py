"""Value file: the local copy of one partition's lane state, in SQLite.

It is a cache of the topic, and remembers for which slots and up to which offset it is complete. A file that is odd in
any way is discarded, and built again from the topic. One process at a time uses a file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from keylane.engine.lane_state import StoredValue
from keylane.errors import KeylaneError
from keylane.offsets.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import IO

log = logging.getLogger("keylane.task")

_FORMAT = 1
_FILES_MAX = 64
"""Files of one partition on one machine: more processes do not share a partition."""
_READER_CACHE_KIB, _WRITER_CACHE_KIB = 2_048, 8_192
_CHECKPOINT_PAGES = 4_000
_GET = "SELECT v, due, o FROM pairs WHERE k = ? AND tag = ?"
_LANE = "SELECT tag, v, due, o FROM pairs WHERE k = ?"
_DUE = "SELECT k, tag, slot, v, due, o FROM pairs WHERE due > ? AND due <= ? AND tag >= ? AND tag < ? ORDER BY due"
_NEXT = "SELECT due FROM pairs WHERE due > ? AND tag >= ? AND tag < ? ORDER BY due LIMIT 1"

Row = tuple[bytes, str, int, StoredValue]
"""Lane, tag, slot and value."""


class ValueFile:
    """One file. The loop looks up, other threads write. ``identity`` names the topics that the values belong to.

    Raises KeylaneError when the disk does not take it.
    """

    def __init__(self, path: Path, lock: IO[bytes], identity: str, kept_seconds: float) -> None:
        self.path = path
        self.covered: list[Slots] = []
        """The slots for which it is complete up to ``offset``."""
        self.offset = 0
        self._identity = identity
        self._lock_file = lock
        self._writing = threading.Lock()
        try:
            self._open()
            if not self._is_known(kept_seconds):
                self._discard()
                self._open()
        except sqlite3.Error as error:
            log.info("discarding a damaged local copy of lane state file=%s reason=%s", path, error)
            self._discard()
            try:
                self._open()
            except sqlite3.Error as again:
                raise self._failed(again) from again

    @classmethod
    def take(cls, folder: Path, name: str, identity: str, slots: Slots, kept_seconds: float) -> ValueFile:
        """A free file of this name, best one that is complete for these slots. Raises KeylaneError."""
        first: ValueFile | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for number in range(_FILES_MAX):
                path = folder / f"{name}.{number}.sqlite"
                if first is not None and not path.exists():
                    return first
                lock = path.with_suffix(".lock").open("ab")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    lock.close()
                    continue
                found = cls(path, lock, identity, kept_seconds)
                if not slots.without(found.covered):
                    if first is not None:
                        first.close()
                    return found
                if first is None:
                    first = found
                else:
                    found.close()
        except OSError as error:
            raise KeylaneError(
                f"the local copy of lane state cannot be kept in {folder}: {error}. Make the folder writable, or set "
                "KEYLANE_CACHE to another one"
            ) from error
        if first is None:
            raise KeylaneError(f"all {_FILES_MAX} local copies of lane state {name} in {folder} are in use")
        return first

    def get(self, lane: bytes, tag: str) -> StoredValue | None:
        """The value, or None."""
        try:
            row = self._reader.execute(_GET, (lane, tag)).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return None if row is None else StoredValue(*row)

    def lane(self, lane: bytes) -> dict[str, StoredValue]:
        """All values of a lane, by tag."""
        try:
            rows = self._reader.execute(_LANE, (lane,)).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return {tag: StoredValue(*rest) for tag, *rest in rows}

    def due(self, until: int, prefix: str, *, after: int = 0) -> Iterator[Row]:
        """Values of this kind with a time above ``after`` and up to ``until``, in the order of their times."""
        try:
            for lane, tag, slot, *rest in self._reader.execute(
                _DUE, (max(0, after), until, prefix, prefix + "\U0010ffff")
            ):
                yield lane, tag, slot, StoredValue(*rest)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def next_due(self, prefix: str, *, after: int = 0) -> int | None:
        """The earliest time above ``after`` of a value of this kind."""
        try:
            row = self._reader.execute(_NEXT, (max(0, after), prefix, prefix + "\U0010ffff")).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return None if row is None else int(row[0])

    def write(self, rows: Iterable[Row], offset: int) -> None:
        """Write these values, and remember that the file is complete up to this offset."""
        put, gone = [], []
        for lane, tag, slot, value in rows:
            if value.content is None:
                gone.append((lane, tag))
            else:
                put.append((lane, tag, slot, value.offset, value.due, value.content))
        put.sort(key=lambda row: row[:2])  # neighbours are written together
        with self._writing:
            self.offset = max(self.offset, offset)
            try:
                self._writer.execute("BEGIN")
                self._writer.executemany("DELETE FROM pairs WHERE k = ? AND tag = ?", gone)
                self._writer.executemany("REPLACE INTO pairs VALUES (?, ?, ?, ?, ?, ?)", put)
                self._note()
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed(error) from error

    def cover(self, slots: Sequence[Slots]) -> None:
        """From now on it is complete for these slots only; for none, it is so from the beginning of the topic."""
        with self._writing:
            self.covered = list(slots)
            if not slots:
                self.offset = 0
            try:
                self._note()
            except sqlite3.Error as error:
                raise self._failed(error) from error

    def forget(self, slots: Slots) -> None:
        """Remove the values of these slots: the file is not complete for them any more."""
        with self._writing:
            self.covered = [rest for one in self.covered for rest in one.without([slots])]
            try:
                self._writer.execute("BEGIN")
                self._note()
                self._writer.execute(
                    "DELETE FROM pairs WHERE slot BETWEEN ? AND ?", (slots.first, slots.last)
                )
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed(error) from error

    def count(self) -> int:
        """How many values it has."""
        return int(self._reader.execute("SELECT count(*) FROM pairs").fetchone()[0])

    def close(self) -> None:
        """Close it; another process may use it."""
        self._reader.close()
        self._writer.close()
        self._lock_file.close()

    def _open(self) -> None:
        # isolation_level=None: transactions begin and end where this module says so.
        self._writer = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._reader = self._writer
        for pragma in (
            "journal_mode = WAL",
            "synchronous = OFF",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        ):
            self._writer.execute(f"PRAGMA {pragma}")
        self._writer.execute(f"PRAGMA cache_size = -{_WRITER_CACHE_KIB}")
        self._writer.execute(
            "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID"
        )
        self._writer.execute(
            "CREATE TABLE IF NOT EXISTS pairs (k BLOB, tag TEXT, slot INTEGER, o INTEGER, due INTEGER, v BLOB, "
            "PRIMARY KEY (k, tag)) WITHOUT ROWID"
        )
        self._writer.execute("CREATE INDEX IF NOT EXISTS due ON pairs (due) WHERE due > 0")
        self._reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._reader.execute(f"PRAGMA cache_size = -{_READER_CACHE_KIB}")

    def _is_known(self, kept_seconds: float) -> bool:
        """Whether its values count; a new file has none."""
        found = dict(self._writer.execute("SELECT name, value FROM meta").fetchall())
        if not found:
            return True
        try:
            meta = json.loads(found["state"])
            if meta["format"] != _FORMAT or meta["identity"] != self._identity:
                return False
            if (
                not 0 <= time.time() - meta["at"] < kept_seconds
            ):  # removals may be missing from the topic by now
                return False
            self.covered = [Slots.parse(text) for text in meta["covered"]]
            self.offset = int(meta["offset"])
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def _note(self) -> None:
        meta = {
            "format": _FORMAT,
            "identity": self._identity,
            "offset": self.offset,
            "covered": [str(slots) for slots in self.covered],
            "at": time.time(),
        }
        self._writer.execute("REPLACE INTO meta VALUES ('state', ?)", (json.dumps(meta),))

    def _discard(self) -> None:
        for connection in {getattr(self, "_reader", None), getattr(self, "_writer", None)} - {None}:
            with suppress(sqlite3.Error):
                connection.close()  # type: ignore[union-attr]  # None is left out
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.covered, self.offset = [], 0

    def _failed(self, error: sqlite3.Error) -> KeylaneError:
        """The file is useless: the next one is built again from the topic."""
        with suppress(OSError):
            self._discard()
        return KeylaneError(
            f"the local copy of lane state in {self.path} failed and was removed: {error}. The task starts again and "
            "builds it from the topic; look whether the disk is full"
        )
