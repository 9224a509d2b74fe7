"""Stopped lanes, and selection of the lanes for a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keylane.cli.arguments import place
from keylane.cli.keys import key_argument, parse_key, printable, show_key
from keylane.errors import SettingsError
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.state.admin import AuditEntry
from keylane.state.commands import Command

WORDS = {LaneStatus.BLOCKED: "blocked", LaneStatus.PARKED: "parked", LaneStatus.SKIPPING: "being skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedLane:
    """A lane that has stopped, has waiting commands, or both."""

    partition: int
    key: bytes | None
    offset: int | None
    """Offset of the message at which it stopped. None if it has not."""
    record: LaneRecord | None
    commands: tuple[Command, ...]

    @property
    def state(self) -> str:
        """The state in words."""
        words = [WORDS[self.record.stop]] if self.record is not None else []
        return (
            ", ".join([*words, *(f"a command to {command.do} is waiting" for command in self.commands)])
            or "not stopped"
        )

    @property
    def position(self) -> str:
        """``partition@offset`` in the source."""
        return f"{self.partition}@{'-' if self.offset is None else self.offset}"

    @property
    def name(self) -> str:
        """Name for a sentence: its key, or the position of its message."""
        return lane_name(self.key, self.position)


def stopped_lanes(records: Iterable[LaneRecord], commands: Iterable[Command]) -> list[StoppedLane]:
    """Return the stopped lanes, in the order of the records, then those that only have waiting commands."""
    by_lane: dict[tuple[int, bytes | None, int | None], list[Command]] = {}
    for command in commands:
        offset = command.offset if command.key is None else None
        by_lane.setdefault((command.partition, command.key, offset), []).append(command)
    found = []
    for record in records:
        mine = by_lane.pop(
            (record.partition, record.key, None if record.key is not None else record.offset), []
        )
        found.append(
            StoppedLane(
                partition=record.partition,
                key=record.key,
                offset=record.offset,
                record=record,
                commands=tuple(mine),
            )
        )
    for (partition, key, offset), mine in by_lane.items():
        found.append(
            StoppedLane(partition=partition, key=key, offset=offset, record=None, commands=tuple(mine))
        )
    return found


def lane_name(key: bytes | None, position: str) -> str:
    """Format for a sentence: ``lane k1``; ``the keyless message at 3@17``."""
    return f"the keyless message at {position}" if key is None else f"lane {printable(show_key(key))}"


def which(key: bytes | None, position: str) -> str:
    """Format the lane as an argument of the commands."""
    return f"--at {position}" if key is None else key_argument(key)


def totals(lanes: Iterable[StoppedLane]) -> str:
    """Count the lanes by state: ``2 blocked, 1 parked``."""
    counts = Counter(None if lane.record is None else lane.record.stop for lane in lanes)
    words = [f"{counts[stop]:,} {word}" for stop, word in WORDS.items() if counts[stop]]
    return ", ".join([*words, f"{counts[None]:,} with only a waiting command"] if counts[None] else words)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLane:
    """The lane that a command names: by its key, or by the position where it stopped."""

    key: bytes | None
    at: tuple[int, int] | None

    @classmethod
    def parse(cls, key: str | None, at: str | None) -> NamedLane:
        """Parse the key or the position. Raises SettingsError unless exactly one is given."""
        if (key is None) == (at is None):
            raise SettingsError("expected one lane: its KEY, or --at PARTITION@OFFSET")
        return cls(key=None if key is None else parse_key(key), at=None if at is None else place(at))

    def of(self, lanes: Iterable[StoppedLane]) -> list[StoppedLane]:
        """Return the matching lanes: usually one; a key may have been in two partitions."""
        if self.at is not None:
            return [lane for lane in lanes if (lane.partition, lane.offset) == self.at]
        return [lane for lane in lanes if lane.key == self.key]

    def takes(self, command: Command) -> bool:
        """Return whether the command is for this lane."""
        return command.key == self.key if self.at is None else (command.partition, command.offset) == self.at

    def __str__(self) -> str:
        """Name for a sentence."""
        return lane_name(self.key, "") if self.at is None else f"the message at {self.at[0]}@{self.at[1]}"

    def not_stopped(self, app: str) -> str:
        """Return a sentence saying that this lane has not stopped."""
        if self.at is not None:
            return f"no lane of app {app!r} has stopped at {self.at[0]}@{self.at[1]}"
        return f"{lane_name(self.key, '')} of app {app!r} has not stopped"


def trail(audit: Sequence[AuditEntry], lane: StoppedLane) -> list[AuditEntry]:
    """Return the commands given for this lane."""
    if lane.key is not None:
        return [action for action in audit if action.key == lane.key and action.partition == lane.partition]
    return [
        action
        for action in audit
        if action.key is None
        and action.offset is not None
        and (action.partition, action.offset) == (lane.partition, lane.offset)
    ]
