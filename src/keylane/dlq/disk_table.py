"""A set and map on disk, for keys that may not fit into memory.

SQLite keeps it in an unnamed temporary file with a cache of 8 MB. The file disappears with the process.
"""

from __future__ import annotations

import sqlite3

from blake3 import blake3

_DIGEST_BYTES = 20
_CACHE_KB = 8192


class DiskTable:
    """Keys, each a tuple of values, some of them with a text. Used by one thread at a time."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA temp_store = FILE")
        self._db.execute("CREATE TABLE seen (name BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")
        self._db.execute("BEGIN")

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


def _digest(key: tuple[object, ...]) -> bytes:
    return blake3(repr(key).encode("utf-8", "surrogatepass")).digest(_DIGEST_BYTES)
