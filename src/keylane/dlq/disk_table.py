"""A table of what was seen that may be larger than memory: for who reads a whole topic and looks for repetitions.

SQLite keeps it in a temporary file without a name, of which it holds 8 MB in memory; the file goes with the process.
"""

from __future__ import annotations

import sqlite3

from blake3 import blake3

_DIGEST_BYTES = 20
_CACHE_KB = 8192


class DiskTable:
    """Names, some with a text. Used by one thread at a time."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA temp_store = FILE")
        self._db.execute("CREATE TABLE seen (name BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, *name: object) -> bool:
        """Put it there; whether it was not there before."""
        added = self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, '')", (_digest(name),))
        return added.rowcount == 1

    def put(self, *name: object, text: str) -> None:
        """Put it there with this text, whatever was there."""
        self._db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", (_digest(name), text))

    def get(self, *name: object) -> str | None:
        """The text of what is there."""
        found = self._db.execute("SELECT text FROM seen WHERE name = ?", (_digest(name),)).fetchone()
        return None if found is None else str(found[0])


def _digest(name: tuple[object, ...]) -> bytes:
    return blake3(repr(name).encode("utf-8", "surrogatepass")).digest(_DIGEST_BYTES)
