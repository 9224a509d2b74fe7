"""Window of recent event ids, used to drop duplicates from producers.

A message repeats an earlier one if both have the same key and event id, byte for byte, and the earlier one is in the
window: at most ``count`` offsets before it, and at most ``age`` seconds older. This depends on the log alone, never on
how the messages ran. So a window that is refilled from the log, starting ``count`` offsets before the watermark, gives
the same answers as the lost one: the log is the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection

ID_BYTES_MAX = 1024
"""Bytes of key and event id together. Longer ones are not remembered, so that memory stays bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """How far back to look for a message with the same event id in the same lane.

    ``count`` is the number of offsets of a source partition to look back (holes count). ``age`` is how many seconds
    older the earlier message may be, by the messages' own timestamps; without timestamps only ``count`` decides.
    Only messages with a key and an event id are remembered: a message without a key is a lane of its own. A task
    remembers fewer than 2.5 times ``count`` ids of a partition, some 300 bytes each.

    Raises :class:`SettingsError` for invalid values.
    """

    count: int = 10_000
    age: float = 600.0

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise SettingsError(
                f"Idempotency(count={self.count!r}): expected a whole number of messages, at least 1"
            )
        if not _number(self.age) or not self.age > 0:
            raise SettingsError(f"Idempotency(age={self.age!r}): expected seconds, more than 0")

    def since(self, watermark: int) -> int:
        """The offset from which to reread a partition to restore the window as it was at ``watermark``."""
        return max(0, watermark - self.count)


def _number(value: object) -> bool:
    return isinstance(value, int | float)


Place = tuple[int, int | None, int]
"""Offset, timestamp in milliseconds if the message has one, and the offset of the first message of its event."""
Chunk = tuple[Sequence[bytes], Sequence[int], Sequence[int | None], Sequence[bytes]]
"""Event ids, offsets, timestamps in milliseconds and keys of one batch of messages."""


class _IdGeneration:
    """Messages by key and event id. Chunks of new ids are indexed only when one of the ids comes again."""

    __slots__ = ("chunks", "ids", "places", "size")

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.chunks: list[Chunk] = []
        self.places: dict[tuple[bytes, bytes], Place] = {}
        self.size = 0

    def find(self, key: bytes, event_id: bytes) -> Place | None:
        """The last message with this key and event id."""
        if event_id not in self.ids:
            return None
        self._index_chunks()
        return self.places.get((key, event_id))

    def put(self, key: bytes, event_id: bytes, place: Place) -> None:
        """Remember a message."""
        if event_id in self.ids:
            self._index_chunks()
        before = len(self.places)
        self.places[key, event_id] = place
        self.size += len(self.places) - before
        self.ids.add(event_id)

    def forget(self, offsets: Collection[int]) -> None:
        """Remove the messages at these offsets."""
        self._index_chunks()
        self.places = {name: place for name, place in self.places.items() if place[0] not in offsets}
        self.ids = {event_id for _, event_id in self.places}
        self.size = len(self.places)

    def _index_chunks(self) -> None:
        for ids, offsets, times, keys in self.chunks:
            self.places.update(
                zip(zip(keys, ids, strict=True), zip(offsets, times, offsets, strict=True), strict=True)
            )
        self.chunks = []


class DedupWindow:
    """The recent event ids of one partition. Add its messages in log order, each once.

    There are two generations of ids. When the younger one has ``count`` ids, the older one is dropped as a whole,
    which avoids removing ids one by one. The younger one then covers at least the last ``count`` offsets.
    """

    __slots__ = ("_age", "_count", "_old", "_young")

    def __init__(self, rule: Idempotency) -> None:
        self._count = rule.count
        self._age = rule.age * 1000
        self._young, self._old = _IdGeneration(), _IdGeneration()

    def __len__(self) -> int:
        """The number of remembered ids: fewer than 2.5 times ``count``."""
        return self._young.size + self._old.size

    def add(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """Remember this message; returns what :meth:`repeated` says about it."""
        if len(key) + len(event_id) > ID_BYTES_MAX:
            return None
        repeats = self._repeated(key, event_id, offset, at)
        self._young.put(key, event_id, (offset, at, offset if repeats is None else repeats[2]))
        self._rotate_if_full()
        return None if repeats is None else repeats[0]

    def first(self, key: bytes, event_id: bytes) -> int | None:
        """The offset of the first message that the last one with this key and event id repeats, also through others."""
        found = self._find(key, event_id)
        return None if found is None else found[2]

    def add_if_all_new(self, chunk: Chunk) -> bool:
        """Remember these messages if all their ids are new and different; otherwise remember none of them.

        The fast path for a batch. No id may be longer than :data:`ID_BYTES_MAX`.
        """
        ids, young = chunk[0], self._young
        if len(ids) * 4 > self._count:  # too many ids for one generation
            return False
        fresh = set(ids)
        if len(fresh) < len(ids) or not (young.ids.isdisjoint(fresh) and self._old.ids.isdisjoint(fresh)):
            return False
        young.ids |= fresh
        young.chunks.append(chunk)
        young.size += len(ids)
        self._rotate_if_full()
        return True

    def repeated(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """The offset of the last message that this one repeats, or None. ``at`` is its timestamp in milliseconds."""
        found = self._repeated(key, event_id, offset, at)
        return None if found is None else found[0]

    def _repeated(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> Place | None:
        found = self._find(key, event_id)
        if found is None:
            return None
        before, then, _ = found
        near = 0 < offset - before <= self._count
        old = at is not None and then is not None and at - then > self._age
        return found if near and not old else None

    def _find(self, key: bytes, event_id: bytes) -> Place | None:
        return self._young.find(key, event_id) or self._old.find(key, event_id)

    def forget(self, offsets: Collection[int]) -> None:
        """Forget messages that never ran and never will: nothing repeats them. Slow: scans all ids."""
        self._young.forget(offsets)
        self._old.forget(offsets)

    def _rotate_if_full(self) -> None:
        if self._young.size >= self._count:
            self._old, self._young = self._young, _IdGeneration()
