"""Which letters are to be redriven, lane by lane, and the orders that say so."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping

from keylane.cli.keys import key_argument, printable, show_key
from keylane.cli.layout import counted
from keylane.cli.survey import Cause, Causes
from keylane.core.record import LaneRecord, Stop
from keylane.errors import SettingsError
from keylane.kafka.letter import Kind, Letter, Unreadable
from keylane.kafka.operator import new_order
from keylane.kafka.orders import Order

LIMIT = 900_000
"""Bytes of an order, below a topic's usual limit of 1 MiB: some 60,000 letters."""

Takes = Callable[[Letter, Cause, float | None], bool]
Place = tuple[int, bytes | None]
"""A lane among the letters: partition and key. Letters without a key count as one lane of their partition."""


class Lot:
    """The letters of one lane that can be redriven. Written by :class:`Choice` only.

    Numbers in arrays: there may be millions of letters.
    """

    __slots__ = ("_chosen", "_offsets", "_sources", "_twins", "key", "parked", "partition")

    def __init__(self, partition: int, key: bytes | None, *, parked: bool) -> None:
        self.partition = partition
        self.key = key
        self.parked = parked
        self._offsets = array("q")  # among the dead letters, ascending
        self._sources = array("q")  # of their messages
        self._chosen = bytearray()
        self._twins: dict[int, list[int]] = {}  # further offsets of a letter that lies there more than once

    def __len__(self) -> int:
        """How many letters there are."""
        return len(self._offsets)

    @property
    def name(self) -> str:
        """For a sentence."""
        if self.key is None:
            return f"letters without a key in partition {self.partition}"
        return f"lane {printable(show_key(self.key))}"

    @property
    def chosen(self) -> int:
        """How many of them are chosen."""
        return sum(self._chosen)

    def letters(self) -> tuple[int, ...]:
        """The places of the chosen ones, and of their repetitions: both count as redriven then."""
        found: list[int] = []
        for offset, chosen in zip(self._offsets, self._chosen, strict=True):
            if chosen:
                found += (offset, *self._twins.get(offset, ()))
        return tuple(sorted(found))

    def sources(self) -> list[int]:
        """Where the chosen ones' messages lay, in the order in which they will run."""
        return sorted(source for source, chosen in zip(self._sources, self._chosen, strict=True) if chosen)

    def add(self, letter: Letter, *, chosen: bool) -> None:
        """The next letter of the lane."""
        self._offsets.append(letter.offset)
        self._sources.append(letter.source_offset)
        self._chosen.append(chosen)

    def repeat(self, first: int, again: int, *, chosen: bool) -> None:
        """The letter at ``first`` lies at ``again`` once more."""
        self._twins.setdefault(first, []).append(again)
        if chosen:
            self._chosen[bisect_left(self._offsets, first)] = True


class Choice:
    """Made letter by letter, of all letters of the partitions concerned, each partition in its order.

    ``takes`` says whether a letter is wanted. Left out, and counted when they were wanted: letters that were redriven,
    archived ones, and those of lanes that are blocked, where nothing moves before the message at which they stand.
    """

    def __init__(
        self, takes: Takes, redriven: Mapping[int, Container[int]], stopped: Iterable[LaneRecord]
    ) -> None:
        self.archived = 0
        self.redriven = 0
        self.unreadable = 0  # wanted or not: nobody can tell
        self.blocked: Counter[Place] = Counter()
        self._takes = takes
        self._redriven = redriven
        self._stopped: dict[Place, Stop] = {
            (record.partition, record.key): record.stop for record in stopped if record.key is not None
        }
        self._causes = Causes()
        self._lots: dict[Place, Lot] = {}
        self._firsts: dict[tuple[str, int, int, Kind], dict[int, int]] = {}  # as kafka.letters.Repeats tells

    def add(self, letter: Letter | Unreadable) -> None:
        """Take the next one."""
        if isinstance(letter, Unreadable):
            self.unreadable += 1
            return
        wanted = self._takes(letter, *self._causes.of(letter))
        if letter.kind is Kind.ARCHIVED:
            self.archived += wanted
            return
        kin = self._firsts.setdefault(
            (letter.topic, letter.source_partition, letter.redrives, letter.kind), {}
        )
        first = kin.setdefault(letter.source_offset, letter.offset)
        redriven = self._redriven.get(letter.partition, ())
        if first in redriven or letter.offset in redriven:
            self.redriven += wanted and first == letter.offset
            return
        place = letter.partition, letter.key
        if self._stopped.get(place) is Stop.BLOCKED:
            self.blocked[place] += wanted and first == letter.offset
            return
        lot = self.lane(*place)
        if first == letter.offset:
            lot.add(letter, chosen=wanted)
        else:
            lot.repeat(first, letter.offset, chosen=wanted)

    def lane(self, partition: int, key: bytes | None) -> Lot:
        """The lot of this lane; made when there is none."""
        lot = self._lots.get((partition, key))
        if lot is None:
            parked = self._stopped.get((partition, key)) is Stop.PARKED
            lot = self._lots[partition, key] = Lot(partition, key, parked=parked)
        return lot

    def lots(self) -> list[Lot]:
        """Those with letters that are chosen, and parked lanes that have none left."""
        return [lot for lot in self._lots.values() if lot.chosen or (lot.parked and not len(lot))]


def order_for(app: str, lot: Lot, standing: Order | None, *, whole: bool) -> Order:
    """The order that redrives what is chosen of this lane: the one that stands, if it says so already.

    ``whole``: all of the lane's letters, also those that come meanwhile; so it is for a lane that is parked, whose
    order would be lost otherwise. What a standing order names is in the new one too, which takes its place.

    Raises SettingsError for a part of a parked lane, and for more letters than an order can name.
    """
    if lot.parked and lot.chosen < len(lot) and not whole:
        raise SettingsError(
            f"{lot.name} is parked, and can only be redriven whole, in its order: "
            f"{lot.chosen:,} of its {counted(len(lot), 'letter')} are chosen. "
            f"Use: keylane dlq redrive {app}{_lane_option(lot)}"
        )
    letters: tuple[int, ...] | None = None if whole or lot.parked else lot.letters()
    if standing is not None:
        if standing.letters is None:
            return standing
        if letters is not None:
            letters = tuple(sorted({*letters, *standing.letters}))
        if letters == standing.letters:
            return standing
    order = new_order("redrive", partition=lot.partition, key=lot.key, letters=letters)
    if len(order.encode()) + len(order.name) <= LIMIT:
        return order
    if lot.chosen == len(lot):
        return new_order("redrive", partition=lot.partition, key=lot.key)
    raise SettingsError(
        f"{lot.name}: {lot.chosen:,} single letters are more than an order can name. Choose fewer "
        f"at a time, or all of them: keylane dlq redrive {app}{_lane_option(lot)}"
    )


def _lane_option(lot: Lot) -> str:
    return " --all" if lot.key is None else f" --lane {key_argument(lot.key)}"
