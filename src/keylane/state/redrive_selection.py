"""Selection of dead letters to redrive, lane by lane, and the commands for it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.dlq.summary import Cause, Causes
from keylane.errors import SettingsError
from keylane.key_text import key_argument, printable, show_key
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.state.admin import new_command
from keylane.wording import counted

if TYPE_CHECKING:
    from keylane.offsets.identity import TopicIdentity
    from keylane.state.commands import Command

COMMAND_BYTES_MAX = 900_000
"""Largest size of a command in bytes, below a topic's usual limit of 1 MiB: about 60,000 dead letters."""

Takes = Callable[[DeadLetter, Cause, float | None], bool]
Place = tuple[int, bytes | None]
"""A lane of dead letters: partition and key. Those without a key count as one lane per partition."""


class LaneSelection:
    """The dead letters of one lane that can be redriven. Written by :class:`RedriveSelection` only.

    Offsets are kept in arrays: there may be millions.
    """

    __slots__ = ("_chosen", "_offsets", "_sources", "_twins", "key", "parked", "partition")

    def __init__(self, partition: int, key: bytes | None, *, parked: bool) -> None:
        self.partition = partition
        self.key = key
        self.parked = parked
        self._offsets = array("q")  # in the dead-letter topic, ascending
        self._sources = array("q")  # in the source
        self._chosen = bytearray()
        self._twins: dict[int, list[int]] = {}  # further offsets of a dead letter written more than once

    def __len__(self) -> int:
        """Return the number of dead letters."""
        return len(self._offsets)

    @property
    def name(self) -> str:
        """Name of the lane for a sentence."""
        if self.key is None:
            return f"dead letters without a key in partition {self.partition}"
        return f"lane {printable(show_key(self.key))}"

    @property
    def chosen(self) -> int:
        """Number of chosen dead letters."""
        return sum(self._chosen)

    def letters(self) -> tuple[int, ...]:
        """Return the offsets of the chosen ones and of their repeats, which then count as redriven too."""
        found: list[int] = []
        for offset, chosen in zip(self._offsets, self._chosen, strict=True):
            if chosen:
                found += (offset, *self._twins.get(offset, ()))
        return tuple(sorted(found))

    def sources(self) -> list[int]:
        """Return the source offsets of the chosen ones, in the order in which they will run."""
        return sorted(source for source, chosen in zip(self._sources, self._chosen, strict=True) if chosen)

    def add(self, letter: DeadLetter, *, chosen: bool) -> None:
        """Add the lane's next dead letter."""
        self._offsets.append(letter.offset)
        self._sources.append(letter.source_offset)
        self._chosen.append(chosen)

    def repeat(self, first: int, again: int, *, chosen: bool) -> None:
        """Record that the dead letter at ``first`` was written again at ``again``."""
        self._twins.setdefault(first, []).append(again)
        if chosen:
            self._chosen[bisect_left(self._offsets, first)] = True


class RedriveSelection:
    """A selection, built from all dead letters of the partitions concerned, each partition in order.

    ``takes`` decides whether a dead letter is wanted. Left out, but counted: those already redriven, archived ones,
    and those of blocked lanes, where nothing moves before the message that blocks the lane.
    """

    def __init__(
        self, takes: Takes, redriven: Mapping[int, Container[int]], stopped: Iterable[LaneRecord]
    ) -> None:
        self.archived = 0
        self.redriven = 0
        self.unreadable = 0  # whether wanted is unknown
        self.blocked: Counter[Place] = Counter()
        self._takes = takes
        self._redriven = redriven
        self._stopped: dict[Place, LaneStatus] = {
            (record.partition, record.key): record.stop for record in stopped if record.key is not None
        }
        self._causes = Causes()
        self._lots: dict[Place, LaneSelection] = {}
        self._firsts: dict[
            tuple[TopicIdentity, int, int, DeadLetterKind], dict[int, int]
        ] = {}  # by source: the first letter of each message

    def add(self, letter: DeadLetter | UnreadableDeadLetter) -> None:
        """Add the next dead letter."""
        if isinstance(letter, UnreadableDeadLetter):
            self.unreadable += 1
            return
        wanted = self._takes(letter, *self._causes.of(letter))
        if letter.kind is DeadLetterKind.ARCHIVED:
            self.archived += wanted
            return
        kin = self._firsts.setdefault(
            (letter.identity, letter.source_partition, letter.redrives, letter.kind), {}
        )
        first = kin.setdefault(letter.source_offset, letter.offset)
        redriven = self._redriven.get(letter.partition, ())
        if first in redriven or letter.offset in redriven:
            self.redriven += wanted and first == letter.offset
            return
        place = letter.partition, letter.key
        if self._stopped.get(place) is LaneStatus.BLOCKED:
            self.blocked[place] += wanted and first == letter.offset
            return
        lot = self.lane(*place)
        if first == letter.offset:
            lot.add(letter, chosen=wanted)
        else:
            lot.repeat(first, letter.offset, chosen=wanted)

    def lane(self, partition: int, key: bytes | None) -> LaneSelection:
        """Return this lane's selection, creating it if needed."""
        lot = self._lots.get((partition, key))
        if lot is None:
            parked = self._stopped.get((partition, key)) is LaneStatus.PARKED
            lot = self._lots[partition, key] = LaneSelection(partition, key, parked=parked)
        return lot

    def lots(self) -> list[LaneSelection]:
        """Return the lanes with chosen dead letters, and parked lanes without any left."""
        return [lot for lot in self._lots.values() if lot.chosen or (lot.parked and not len(lot))]


def command_for(
    app: str,
    lot: LaneSelection,
    open_commands: Iterable[Command],
    *,
    whole: bool,
    reason: str = "",
    who: str | None = None,
) -> Command:
    """Return the command that redrives this lane's selection, reusing an equal one that is waiting.

    ``whole``: all of the lane's dead letters, also those that arrive meanwhile. A parked lane is always redriven
    whole: its order would be lost otherwise.

    Raises SettingsError for a part of a parked lane, and for more dead letters than a command can name.
    """
    if lot.parked and lot.chosen < len(lot) and not whole:
        raise SettingsError(
            f"{lot.name} is parked, and can only be redriven whole, in its order, but "
            f"{lot.chosen:,} of its {counted(len(lot), 'dead letter')} were chosen. "
            f"Use: keylane dlq redrive {app}{_lane_option(lot)}"
        )
    letters: tuple[int, ...] | None = None if whole or lot.parked else lot.letters()
    for command in open_commands:
        if command.letters is None or (letters is not None and set(letters) <= set(command.letters)):
            return command
    command = new_command(
        "redrive", partition=lot.partition, key=lot.key, letters=letters, reason=reason, who=who
    )
    if len(command.encode()) + len(command.name) <= COMMAND_BYTES_MAX:
        return command
    if lot.chosen == len(lot):
        return new_command("redrive", partition=lot.partition, key=lot.key, reason=reason, who=who)
    raise SettingsError(
        f"{lot.name}: {lot.chosen:,} single dead letters are too many for one command. Choose fewer "
        f"at a time, or all of them: keylane dlq redrive {app}{_lane_option(lot)}"
    )


def _lane_option(lot: LaneSelection) -> str:
    return " --all" if lot.key is None else f" --lane {key_argument(lot.key)}"
