"""Event ids that were seen: a producer that sends twice is told from one that has more to say.

A message repeats an earlier one when key and event id are the same, byte for byte, and the earlier one lies in the
window: at most so many offsets before it, and at most so much older. Whether it does depends on the log alone, on
nothing that happened while the messages ran. So a window that is filled again from the log, from ``count`` offsets
before the watermark on, gives the answers that the lost one would have given: the log is the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection

LONGEST = 1024
"""Bytes of key and event id together, at most. What is longer is not remembered: memory stays bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """How far back a message is looked for that had the same event id in the same lane.

    ``count`` is how many messages of a source partition are looked back at (their offsets: holes count). ``age`` is how
    many seconds older the earlier one may be, by the messages' own timestamps; without them only the count decides.
    Only messages with a key and an event id are remembered: a keyless one is a lane of its own, and a position cannot
    come twice. A task remembers fewer than 2.5 times ``count`` ids of a partition, some 300 bytes each.

    Raises :class:`SettingsError` for values that make no sense.
    """

    count: int = 10_000
    age: float = 600.0

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise SettingsError(
                f"Idempotency(count={self.count!r}): needs a whole number of messages, at least 1"
            )
        if not _number(self.age) or not self.age > 0:
            raise SettingsError(f"Idempotency(age={self.age!r}): needs seconds, more than 0")

    def since(self, watermark: int) -> int:
        """The offset from which a partition is read again so that the window knows what it knew at ``watermark``."""
        return max(0, watermark - self.count)


def _number(value: object) -> bool:
    return isinstance(value, int | float)


Place = tuple[int, int | None]
"""Offset, and milliseconds if it has any."""
Chunk = tuple[Sequence[bytes], Sequence[int], Sequence[int | None], Sequence[bytes]]
"""Event ids, offsets, milliseconds and keys of messages that came together, and whose ids nobody had used."""


class _Generation:
    """Messages, by key and event id. Those whose ids nobody else has used stay as they came until somebody does."""

    __slots__ = ("chunks", "ids", "places", "size")

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.chunks: list[Chunk] = []
        self.places: dict[tuple[bytes, bytes], Place] = {}
        self.size = 0

    def find(self, key: bytes, event_id: bytes) -> Place | None:
        """The last message with both."""
        if event_id not in self.ids:
            return None
        self._unfold()
        return self.places.get((key, event_id))

    def put(self, key: bytes, event_id: bytes, place: Place) -> None:
        """Remember a message."""
        if event_id in self.ids:
            self._unfold()
        before = len(self.places)
        self.places[key, event_id] = place
        self.size += len(self.places) - before
        self.ids.add(event_id)

    def forget(self, offsets: Collection[int]) -> None:
        """Without the messages at these offsets."""
        self._unfold()
        self.places = {name: place for name, place in self.places.items() if place[0] not in offsets}
        self.ids = {event_id for _, event_id in self.places}
        self.size = len(self.places)

    def _unfold(self) -> None:
        for ids, offsets, times, keys in self.chunks:
            self.places.update(
                zip(zip(keys, ids, strict=True), zip(offsets, times, strict=True), strict=True)
            )
        self.chunks = []


class SeenWindow:
    """The event ids of one partition. Is told of its messages in the order of the log, once each.

    Two generations of ids, and no work to drop one by one: the older generation goes as a whole when the younger has
    ``count`` ids or more, which are then at least those of the last ``count`` offsets.
    """

    __slots__ = ("_age", "_count", "_old", "_young")

    def __init__(self, rule: Idempotency) -> None:
        self._count = rule.count
        self._age = rule.age * 1000
        self._young, self._old = _Generation(), _Generation()

    def __len__(self) -> int:
        """How much it holds: fewer than two and a half times ``count``."""
        return self._young.size + self._old.size

    def arrived(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """What :meth:`repeated` says of this message, which is remembered from now on."""
        if len(key) + len(event_id) > LONGEST:
            return None
        repeats = self.repeated(key, event_id, offset, at)
        self._young.put(key, event_id, (offset, at))
        self._age_by_one()
        return repeats

    def all_new(self, chunk: Chunk) -> bool:
        """Remember these messages if nobody has used any of the ids, nor two of them the same.

        What is so almost always, in a third of the time that one by one takes. Otherwise nothing is remembered.
        None of them may be longer than :data:`LONGEST`.
        """
        ids, young = chunk[0], self._young
        if len(ids) * 4 > self._count:  # they would take too much room before the generations change
            return False
        fresh = set(ids)
        if len(fresh) < len(ids) or not (young.ids.isdisjoint(fresh) and self._old.ids.isdisjoint(fresh)):
            return False
        young.ids |= fresh
        young.chunks.append(chunk)
        young.size += len(ids)
        self._age_by_one()
        return True

    def repeated(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """The offset of the last message that this one repeats, or None. ``at`` are milliseconds, if it has any."""
        found = self._young.find(key, event_id) or self._old.find(key, event_id)
        if found is None:
            return None
        before, then = found
        near = 0 < offset - before <= self._count
        old = at is not None and then is not None and at - then > self._age
        return before if near and not old else None

    def forget(self, offsets: Collection[int]) -> None:
        """The messages at these offsets never ran and never will: nothing repeats them. Looks at all ids; seldom."""
        self._young.forget(offsets)
        self._old.forget(offsets)

    def _age_by_one(self) -> None:
        if self._young.size >= self._count:
            self._old, self._young = self._young, _Generation()
