"""A worker's share of the lane state: hot values in memory, all of them in local files, restored from the topic.

:meth:`LaneValues.take` restores a range of a partition and :meth:`LaneValues.release` gives it up, one at a time, off
the loop. What is committed is in memory at once and in the file a moment later.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from keylane.cache import cache_folder
from keylane.engine.lane_state import StoredValue
from keylane.errors import KeylaneError
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import ALL, slot_of
from keylane.state.labels import SOURCE
from keylane.state.lane_values import LaneValueReader
from keylane.worker.value_file import ValueFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from keylane.engine.lane_state import Name
    from keylane.kafka.cluster import Cluster
    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.identity import AppIdentity
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.worker.value_file import Row

log = logging.getLogger("keylane.task")

HOT_BYTES = 64 << 20
"""Memory for hot values, in two generations."""
_ENTRY_BYTES = 350
"""A value's share of memory besides its content and key."""
_RESTORE_ROWS = 100_000
FLUSH_SECONDS = 1.0
_REMOVALS_KEPT_SECONDS = 86_400.0
"""Kafka's default of ``delete.retention.ms``: the time for which a removal is in a compacted topic."""
_KEPT_SHARE = 0.5
"""A file that was not used for this part of it is built again."""
_LOGGED_SECONDS = 1.0
_ABSENT = StoredValue(None, 0, -1)


class LaneValues:
    """The values of one worker's ranges, a :class:`~keylane.engine.lane_state.ValueStore`.

    The loop looks up and puts; :meth:`take`, :meth:`release` and :meth:`close` block and run elsewhere.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: AppSpec,
        cluster: Cluster,
        identity: AppIdentity,
        *,
        hot_bytes: int = HOT_BYTES,
    ) -> None:
        self._settings = settings
        self._app = app
        self._cluster = cluster
        self.labels = ((SOURCE, identity.source.encode()),)
        """The headers of its records."""
        topic = cluster.identity(app.lane_state).source
        self._identity = f"{identity.source}|{topic}"
        self._folder = cache_folder() / "lane-state" / app.name
        self._files: dict[int, ValueFile] = {}
        self._reader: LaneValueReader | None = None
        self._generation_bytes = hot_bytes // 2
        self._young: dict[Name, StoredValue] = {}
        self._old: dict[Name, StoredValue] = {}
        self._young_bytes = 0
        self._pending: dict[int, dict[Name, StoredValue]] = {}  # committed, not in the file yet
        self._flushing: dict[int, dict[Name, StoredValue]] = {}
        self._ends: dict[int, int] = {}  # by partition: all below is in memory or in the file
        self._owned: dict[int, list[Slots]] = {}
        self._lock = threading.Lock()  # guards the two dicts of changes, which several threads exchange
        self._flushes = threading.Lock()  # one flush at a time

    # The loop's.

    def get(self, name: Name) -> StoredValue | None:
        """The value, or None."""
        value = self._young.get(name)
        if value is None:
            value = self._find(name)
            self._remember(name, _ABSENT if value is None else value)
        return None if value is None or value.content is None else value

    def _find(self, name: Name) -> StoredValue | None:
        partition, lane, tag = name
        for later in (self._pending.get(partition), self._flushing.get(partition)):
            if later is not None and (found := later.get(name)) is not None:
                return found
        if (found := self._old.get(name)) is not None:
            return found
        file = self._files.get(partition)
        return None if file is None else file.get(lane, tag)

    def _remember(self, name: Name, value: StoredValue) -> None:
        self._young[name] = value
        self._young_bytes += _ENTRY_BYTES + len(name[1]) + len(value.content or b"")
        if self._young_bytes > self._generation_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0

    def lane(self, partition: int, lane: bytes) -> Mapping[str, StoredValue]:
        """All values of a lane, by tag."""
        file = self._files.get(partition)
        found = {} if file is None else file.lane(lane)
        for later in (self._flushing.get(partition, {}), self._pending.get(partition, {})):
            for name, value in later.items():
                if name[1] == lane:
                    found[name[2]] = value
        return {tag: value for tag, value in found.items() if value.content is not None}

    def put(self, changes: Mapping[Name, StoredValue]) -> None:
        """These changes were committed."""
        with self._lock:
            for name, value in changes.items():
                self._remember(name, value)
                self._pending.setdefault(name[0], {})[name] = value

    def committed_to(self, ends: Mapping[int, int]) -> None:
        """What was put is everything that the topic has below these offsets, of the worker's slots."""
        self._ends.update(ends)

    def due(self, until: int, prefix: str, limit: int, *, after: int = 0) -> list[tuple[Name, StoredValue]]:
        """Committed values of this kind with a time above ``after`` and up to ``until``, the earliest first."""
        found: list[tuple[Name, StoredValue]] = []
        for partition, file in self._files.items():
            later = self._unwritten(partition)
            own = [
                (name, value)
                for name, value in later.items()
                if name[2].startswith(prefix) and value.content is not None and after < value.due <= until
            ]
            rows = file.due(until, prefix, after=after)
            for lane, tag, slot, value in rows:
                name = partition, lane, tag
                if name not in later and any(slot in one for one in self._owned[partition]):
                    own.append((name, value))
                    if len(own) >= limit + len(later):
                        break
            found += own
        return sorted(found, key=lambda item: item[1].due)[:limit]

    def next_due(self, prefix: str, *, after: int = 0) -> int | None:
        """A time above ``after``, not later than the earliest of a value of this kind."""
        times = [file.next_due(prefix, after=after) for file in self._files.values()]
        for partition in self._files:
            times += [
                value.due
                for name, value in self._unwritten(partition).items()
                if name[2].startswith(prefix) and value.content is not None and value.due > after
            ]
        return min((due for due in times if due is not None), default=None)

    def _unwritten(self, partition: int) -> dict[Name, StoredValue]:
        """What was put and may not be in the file."""
        return self._flushing.get(partition, {}) | self._pending.get(partition, {})

    async def flush_often(self) -> None:
        """Write what was put into the files, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            for partition in list(self._pending):
                await asyncio.to_thread(self._flush, partition)

    # Blocking, on any thread.

    def take(self, partition: int, slots: Slots) -> None:
        """Restore the values of these slots: see :meth:`take_all`."""
        self.take_all({partition: slots})

    def take_all(self, wanted: Mapping[int, Slots]) -> None:
        """Restore the values of these slots, by partition, as far as they are not here.

        The caller owns the slots: earlier owners have released them or are fenced. Nobody looks them up before the end.
        Raises BrokerError, KeylaneError.
        """
        began = time.monotonic()
        ends = self._cluster.ends(self._app.lane_state, wanted)
        parts: dict[int, _Restore] = {}
        try:
            for partition, slots in wanted.items():
                parts[partition] = self._begin_restore(partition, slots, ends[partition])
            starts = {partition: part.begin for partition, part in parts.items() if part.slots}
            if any(start < ends[partition] for partition, start in starts.items()):
                self._connect().read(starts, ends, lambda partition, *record: parts[partition].take(*record))
        except BaseException:
            for partition, part in parts.items():
                if partition not in self._files:
                    part.file.close()
            raise
        for partition, part in parts.items():
            part.write()
            self._forget_hot(partition, part.slots)
            owned = _merged([*self._owned.get(partition, []), wanted[partition]])
            part.file.cover(owned)
            part.file.write([], ends[partition])
            self._owned[partition] = owned
            self._ends[partition] = max(ends[partition], self._ends.get(partition, 0))
            self._files[partition] = part.file
        if (seconds := time.monotonic() - began) > _LOGGED_SECONDS:
            log.info(
                "lane state restored partitions=%d records=%d seconds=%.1f",
                len(parts),
                sum(part.read for part in parts.values()),
                seconds,
            )

    def _begin_restore(self, partition: int, slots: Slots, end: int) -> _Restore:
        if (file := self._files.get(partition)) is not None:  # it follows what is owned already
            self._flush(partition)
            missing = slots.without(self._owned[partition])
            for part in missing:
                file.forget(part)
            return _Restore(file, 0, missing)
        file = ValueFile.take(
            self._folder, str(partition), self._identity, slots, _REMOVALS_KEPT_SECONDS * _KEPT_SHARE
        )
        if file.offset > end or slots.without(
            file.covered
        ):  # the topic was truncated, or the file misses slots
            file.forget(ALL)
            file.cover([])
        return _Restore(file, file.offset, [slots])

    def release(self, partition: int, slots: Slots) -> None:
        """Give these slots up. The file keeps their values, for whoever takes them here again."""
        file = self._files.get(partition)
        if file is None:
            return
        self._flush(partition)
        left = [rest for one in self._owned[partition] for rest in one.without([slots])]
        self._forget_hot(partition, [slots])
        if left:  # what others write into the released slots is not followed
            self._owned[partition] = left
            file.cover(left)
        else:
            del self._owned[partition]
            file.write([], 0)  # with the present time
            self._files.pop(partition).close()

    def release_all(self) -> None:
        """Give everything up."""
        for partition in list(self._files):
            with suppress(KeylaneError):  # the topic has everything
                self.release(partition, ALL)

    def close(self) -> None:
        """Give everything up and close the reader."""
        self.release_all()
        self._young, self._old, self._young_bytes = {}, {}, 0
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def gather(
        self, slots: Mapping[int, Slots], partitions: int, moved: Callable[[Name, StoredValue], None]
    ) -> None:
        """Find the values of keys that moved into these slots when the source got this many partitions. Blocks.

        Reads all partitions of the topic. Of several values of a name the one written last counts.
        """
        count = self._cluster.partitions(self._app.lane_state)
        found: dict[Name, tuple[int, StoredValue]] = {}
        own: dict[Name, int] = {}

        def take(partition: int, tag: str, lane: bytes, value: StoredValue | None, written: int) -> None:
            home = partition_of(lane, partitions)
            if home not in slots or slot_of(lane, 0) not in slots[home]:
                return
            name = home, lane, tag
            if partition == home:
                own[name] = written
                return
            before = found.get(name)
            if before is None or before[0] <= written:
                found[name] = written, value or _ABSENT

        ends = self._cluster.ends(self._app.lane_state, range(count))
        self._connect().read(dict.fromkeys(range(count), 0), ends, take)
        for name, (_, value) in found.items():
            if name not in own and value.content is not None:
                moved(name, value)

    def _connect(self) -> LaneValueReader:
        if self._reader is None:
            self._reader = LaneValueReader(
                self._settings, self._app.name, self._app.lane_state, self.labels[0]
            )
        return self._reader

    def _flush(self, partition: int) -> None:
        """Write what was put into the file."""
        file = self._files.get(partition)
        with self._flushes:
            with self._lock:
                changes, end = self._pending.pop(partition, None), self._ends.get(partition, 0)
                if not changes or file is None:
                    return
                self._flushing[partition] = changes
            file.write(
                [(lane, tag, slot_of(lane, 0), value) for (_, lane, tag), value in changes.items()], end
            )
            with self._lock:
                del self._flushing[partition]

    def _forget_hot(self, partition: int, slots: Sequence[Slots]) -> None:
        """Forget hot values of these slots. The dicts are replaced, because the loop may be looking into them."""

        def stays(name: Name) -> bool:
            slot = slot_of(name[1], 0)
            return name[0] != partition or not any(slot in one for one in slots)

        self._old = {name: value for name, value in self._old.copy().items() if stays(name)}
        self._young = {name: value for name, value in self._young.copy().items() if stays(name)}


class _Restore:
    """The restore of some slots of one partition into its file."""

    __slots__ = ("_rows", "begin", "file", "read", "slots")

    def __init__(self, file: ValueFile, begin: int, slots: Sequence[Slots]) -> None:
        self.file = file
        self.begin = begin
        self.slots = slots
        self.read = 0
        self._rows: dict[tuple[bytes, str], Row] = {}

    def take(self, tag: str, lane: bytes, value: StoredValue | None, _written: int) -> None:
        """A record; None: the value was removed."""
        slot = slot_of(lane, 0)
        if any(slot in one for one in self.slots):
            self.read += 1
            self._rows[lane, tag] = lane, tag, slot, value or _ABSENT
            if len(self._rows) >= _RESTORE_ROWS:
                self.write()

    def write(self) -> None:
        """Write what was read into the file, which is not complete yet."""
        if self._rows:
            self.file.write(self._rows.values(), 0)
            self._rows = {}


def _merged(slots: Iterable[Slots]) -> list[Slots]:
    """The same slots without overlaps."""
    found: list[Slots] = []
    for one in sorted(slots):
        found += one.without(found)
    return found
