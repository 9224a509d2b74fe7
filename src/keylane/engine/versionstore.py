"""The versions of all entities of a task: the newest in memory, the rest in a temporary file.

The state topic is where they are safe; this is what a task can ask. It is filled from there when the task begins, and
gone with the process. However many entities there are, the memory that it takes is bounded.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from keylane.core.versions import Mark

if TYPE_CHECKING:
    from collections.abc import Callable

Name = tuple[int, bytes]
"""Partition and key."""
Entry = tuple[Mark, int]
"""A mark, and the offset of the message that set it."""

RECENT = 50_000
"""Entities that each of the two generations in memory holds."""
_CACHE_KIB = 8192


class VersionStore:
    """Used by one thread at a time. Two generations of what was put last, and no work to drop one by one."""

    def __init__(self, recent: int = RECENT) -> None:
        self._recent = recent
        self._young: dict[Name, Entry] = {}
        self._old: dict[Name, Entry] = {}
        self._file: sqlite3.Connection | None = None  # none, as long as the young ones suffice

    def get(self, name: Name) -> Mark | None:
        """How far this entity is; None when nothing is known of it."""
        found = self._young.get(name) or self._old.get(name)
        if found is not None:
            return found[0]
        if self._file is None:
            return None
        row = self._file.execute("SELECT passed, applied FROM marks WHERE p = ? AND k = ?", name).fetchone()
        return None if row is None else Mark(*row)

    def put(self, name: Name, mark: Mark, offset: int) -> None:
        """What is known of this entity from now on."""
        young = self._young
        young[name] = mark, offset
        if len(young) >= self._recent:
            self._flush()
            self._old, self._young = young, {}

    def keep_done(self, partition: int, watermark: int, is_done: Callable[[bytes, int], bool]) -> int:
        """Forget what messages have set that are not done, because they run again; how many.

        Everything below the watermark is done.
        """
        self._flush()
        self._young, self._old = {}, {}
        if self._file is None:
            return 0
        ask = "SELECT k, o FROM marks WHERE p = ? AND o >= ?"
        gone = [
            (partition, k) for k, o in self._file.execute(ask, (partition, watermark)) if not is_done(k, o)
        ]
        self._file.executemany("DELETE FROM marks WHERE p = ? AND k = ?", gone)
        return len(gone)

    def _flush(self) -> None:
        if not self._young:
            return
        if self._file is None:
            # Without a name: a file of its own that nobody else sees, gone when it is closed.
            self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = OFF")
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._file.execute(
                "CREATE TABLE marks (p INTEGER, k BLOB, passed INTEGER, applied INTEGER, o INTEGER, "
                "PRIMARY KEY (p, k)) WITHOUT ROWID"
            )
        rows = ((p, k, mark.passed, mark.applied, o) for (p, k), (mark, o) in sorted_items(self._young))
        self._file.execute("BEGIN")
        self._file.executemany("REPLACE INTO marks VALUES (?, ?, ?, ?, ?)", rows)
        self._file.execute("COMMIT")


def sorted_items(young: dict[Name, Entry]) -> list[tuple[Name, Entry]]:
    """In the order of the file, where neighbours are written together."""
    return sorted(young.items(), key=lambda item: item[0])
