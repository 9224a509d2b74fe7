"""Event ids that were seen: a producer that sends twice is told from one that has more to say.

A message repeats an earlier one when key and event id are the same, byte for byte, and the earlier one lies in the
window: at most so many offsets before it, and at most so much older. Whether it does depends on the log alone, on
nothing that happened while the messages ran. So a window that is filled again from the log, from ``count`` offsets
before the watermark on, gives the answers that the lost one would have given: the log is the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

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


Name = tuple[str | bytes, bytes]
"""Of an event in its partition: the header with its id, or where an id is in use in several lanes, key and id."""
Place = tuple[int, int | None, bytes]
"""Offset, milliseconds if it has any, and the key."""


class SeenWindow:
    """The event ids of one partition. Is told of its messages in the order of the log, once each.

    Two generations of ids, and no work to drop one by one: the older generation goes as a whole when the younger has
    ``count`` ids or more, which are then at least those of the last ``count`` offsets.

    Almost every id belongs to one message, so an id alone is a name: the header as it came, which is there already.
    Where a second lane uses the same id while the first one's is remembered, key and id together are its name.
    """

    __slots__ = ("_age", "_count", "_header", "_old", "_young")

    def __init__(self, rule: Idempotency, header: str) -> None:
        self._count = rule.count
        self._age = rule.age * 1000
        self._header = header
        self._young: dict[Name, Place] = {}
        self._old: dict[Name, Place] = {}

    def __len__(self) -> int:
        """How much it holds: fewer than two and a half times ``count``."""
        return len(self._young) + len(self._old)

    def arrived(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """What :meth:`repeated` says of this message, which is remembered from now on."""
        if len(key) + len(event_id) > LONGEST:
            return None
        repeats = self.repeated(key, event_id, offset, at)
        self._put(self._young, key, event_id, (offset, at, key))
        self._age_by_one()
        return repeats

    def all_new(self, headers: Collection[tuple[str, bytes]], places: Iterable[Place]) -> bool:
        """Remember these messages, by their headers with the event id, if nobody has used any of the ids.

        What is so almost always, in two thirds of the time that one by one took. Otherwise nothing is remembered.
        None of them may be longer than :data:`LONGEST`.
        """
        young = self._young
        if len(headers) * 4 > self._count:  # they would take too much room before the generations change
            return False
        fresh: dict[Name, Place] = dict(zip(headers, places, strict=True))
        new = len(fresh) == len(headers)
        if not (new and young.keys().isdisjoint(fresh) and self._old.keys().isdisjoint(fresh)):
            return False
        young.update(fresh)
        self._age_by_one()
        return True

    def repeated(self, key: bytes, event_id: bytes, offset: int, at: int | None) -> int | None:
        """The offset of the last message that this one repeats, or None. ``at`` are milliseconds, if it has any."""
        for generation in (self._young, self._old):
            for name in ((self._header, event_id), (key, event_id)):
                found = generation.get(name)
                if found is not None and found[2] == key:
                    before, then, _ = found
                    near = 0 < offset - before <= self._count
                    old = at is not None and then is not None and at - then > self._age
                    return before if near and not old else None
        return None

    def forget(self, offsets: Collection[int]) -> None:
        """The messages at these offsets never ran and never will: nothing repeats them. Looks at all ids; seldom."""
        for generation in (self._young, self._old):
            left = [(name[1], place) for name, place in generation.items() if place[0] not in offsets]
            generation.clear()
            for event_id, place in left:  # anew: no key with an id may stay without another lane's id alone
                self._put(generation, place[2], event_id, place)

    def _age_by_one(self) -> None:
        if len(self._young) >= self._count:
            self._old, self._young = self._young, {}

    def _put(self, generation: dict[Name, Place], key: bytes, event_id: bytes, place: Place) -> None:
        name: Name = (self._header, event_id)
        there = generation.get(name)
        generation[name if there is None or there[2] == key else (key, event_id)] = place
