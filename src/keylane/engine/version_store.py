"""Version store: the version marks of all entities of a task, the newest in memory, the rest in a temporary file.

The durable copy is in the state topic; this one serves a task's lookups. It is loaded from there when the task starts,
and deleted with the process. Its memory is bounded, whatever the number of entities.
"""

from __future__ import annotations

import sqlite3
from functools import partial
from typing import TYPE_CHECKING

from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import slot_of
from keylane.policies.versions import VersionMark, set_back

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.offsets.slots import Slots

Name = tuple[int, bytes]
"""Partition and key."""
RECENT_ENTITIES = 50_000
"""Entities in each of the two generations in memory."""
_CACHE_KIB = 8192
_GET = "SELECT passed, applied, o, began, trail, lost, ahead FROM marks WHERE p = ? AND k = ?"
_SINCE = "SELECT k, passed, applied, o, began, trail, lost, ahead FROM marks WHERE p = ? AND o >= ?"
_MOVED = (
    "SELECT p, k, passed, applied, o, began, trail, lost, ahead FROM marks "
    "WHERE (p, k) > (?, ?) AND o < 0 ORDER BY p, k LIMIT ?"
)


class VersionStore:
    """Marks by entity. Used by one thread at a time. The memory has two generations, each dropped as a whole."""

    def __init__(self, recent: int = RECENT_ENTITIES) -> None:
        self.home: Callable[[bytes], int | None] = lambda _key: None
        """The partition to which a key's messages are written now, if the task owns it; otherwise None."""
        self._recent = recent
        self._young: dict[Name, VersionMark] = {}
        self._old: dict[Name, VersionMark] = {}
        self._file: sqlite3.Connection | None = None  # None while all marks fit into the young generation

    def get(self, name: Name) -> VersionMark | None:
        """The entity's mark; None if it is unknown."""
        found = self._young.get(name) or self._old.get(name)
        if found is not None or self._file is None:
            return found
        row = self._file.execute(_GET, name).fetchone()
        return None if row is None else VersionMark(*row)

    def put(self, name: Name, mark: VersionMark) -> None:
        """Set the entity's mark."""
        young = self._young
        young[name] = mark
        if len(young) >= self._recent:
            self._flush()
            self._old, self._young = young, {}

    def forget(self, name: Name) -> None:
        """Remove the entity's mark."""
        self._young.pop(name, None)
        self._old.pop(name, None)
        if self._file is not None:
            self._file.execute("DELETE FROM marks WHERE p = ? AND k = ?", name)

    def set_back(self, partition: int, watermark: int, is_done: Callable[[bytes, int], bool]) -> int:
        """Rewind entities whose messages run again; returns how many. All offsets below the watermark are done."""
        self._flush()
        self._young, self._old = {}, {}
        if self._file is None:
            return 0
        changed: list[tuple[Name, VersionMark | None]] = []
        for k, *row in self._file.execute(_SINCE, (partition, watermark)):
            mark = VersionMark(*row)
            before = set_back(mark, partial(is_done, k))
            if before != mark:
                changed.append(((partition, k), before))
        for name, before in changed:
            if before is None:
                self.forget(name)
            else:
                self.put(name, before)
        return len(changed)

    def moved(self, behind: Name, limit: int) -> list[tuple[Name, VersionMark]]:
        """The next entities, by partition and key, whose mark was not set by a message of their partition."""
        self._flush()
        if self._file is None:
            return []
        return [((p, k), VersionMark(*row)) for p, k, *row in self._file.execute(_MOVED, (*behind, limit))]

    def _flush(self) -> None:
        if not self._young:
            return
        if self._file is None:
            # An empty name: a private temporary file, deleted when it is closed.
            self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = OFF")
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._file.execute(
                "CREATE TABLE marks (p INTEGER, k BLOB, passed INTEGER, applied INTEGER, o INTEGER, began INTEGER, "
                "trail BLOB, lost BLOB, ahead BLOB, PRIMARY KEY (p, k)) WITHOUT ROWID"
            )
        rows = ((*name, *mark) for name, mark in sorted_items(self._young))
        self._file.execute("BEGIN")
        self._file.executemany("REPLACE INTO marks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._file.execute("COMMIT")


def sorted_items(young: dict[Name, VersionMark]) -> list[tuple[Name, VersionMark]]:
    """The marks in the order of the file, so that neighbours are written together."""
    return sorted(young.items(), key=lambda item: item[0])


def home(partitions: int, slots: Mapping[int, Slots], key: bytes) -> int | None:
    """The partition of a key among ``partitions``; None if the key is not in these slots."""
    found = partition_of(key, partitions)
    return found if found in slots and slot_of(key, 0) in slots[found] else None


class Moves:
    """Assigns each mark to its key's current partition. The mark written last counts for a key."""

    def __init__(self, partitions: int, slots: Mapping[int, Slots], recent: int = RECENT_ENTITIES) -> None:
        self.store = VersionStore(recent)
        self.store.home = self._home = partial(home, partitions, slots)
        self._mine = slots
        self._written = VersionStore()  # when each mark of the store was written

    def put(self, partition: int, key: bytes, mark: VersionMark | None, written: int) -> None:
        """Add a mark as read; None: it was deleted. ``written`` is its timestamp in milliseconds."""
        at_home = self._home(key)
        if partition in self._mine and partition != at_home:  # for its messages that are read there again
            self._keep((partition, key), mark)
        if at_home is None:
            return
        name = at_home, key
        before = self._written.get(name)
        if before is None or before.passed <= written:
            self._written.put(name, VersionMark(written, -1))
            self._keep(name, mark if partition == at_home or mark is None else mark.moved())

    def _keep(self, name: Name, mark: VersionMark | None) -> None:
        if mark is None:
            self.store.forget(name)
        else:
            self.store.put(name, mark)
