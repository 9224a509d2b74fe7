"""A map and a sorter on disk, for keys and rows that may not fit into memory.

SQLite keeps each in an unnamed temporary file with a cache of 8 MB. The file disappears with the process.
"""

from __future__ import annotations

import sqlite3

from blake3 import blake3

_DIGEST_BYTES = 20
_CACHE_KB = 8192


class DiskTable:
    """Keys, each a tuple of values, some of them with a text. Used by one thread at a time."""

    def __init__(self) -> None:
        self._db = _temporary_database("CREATE TABLE seen (name BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")

    def add(self, *key: object) -> bool:
        """Add a key. False if it was there before."""
        added = self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, '')", (_digest(key),))
        return added.rowcount == 1

    def put(self, *key: object, text: str) -> None:
        """Add or replace a key with this text."""
        self._db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", (_digest(key), text))

    def get(self, *key: object) -> str | None:
        """The text of a key; None if the key is not there."""
        found = self._db.execute("SELECT text FROM seen WHERE name = ?", (_digest(key),)).fetchone()
        return None if found is None else str(found[0])


class DiskSorter:
    """Rows of three whole numbers, each row once, in ascending order. Used by one thread at a time."""

    def __init__(self) -> None:
        self._db = _temporary_database(
            "CREATE TABLE rows (a INTEGER, b INTEGER, c INTEGER, PRIMARY KEY (a, b, c)) WITHOUT ROWID"
        )
        self._after = (-1, -1, -1)

    def add(self, a: int, b: int, c: int) -> None:
        """Add a row of numbers from 0 on."""
        self._db.execute("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", (a, b, c))

    def take(self, limit: int) -> list[tuple[int, int, int]]:
        """The next rows, empty after the last one."""
        rows = self._db.execute(
            "SELECT a, b, c FROM rows WHERE (a, b, c) > (?, ?, ?) ORDER BY a, b, c LIMIT ?",
            (*self._after, limit),
        ).fetchall()
        if rows:
            self._after = rows[-1]
        return rows


def _temporary_database(table: str) -> sqlite3.Connection:
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    db.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA temp_store = FILE")
    db.execute(table)
    db.execute("BEGIN")
    return db


def _digest(key: tuple[object, ...]) -> bytes:
    return blake3(repr(key).encode("utf-8", "surrogatepass")).digest(_DIGEST_BYTES)
