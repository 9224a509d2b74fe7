"""Stopped lanes, with the commands that wait for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.key_text import key_argument, printable, show_key
from keylane.lanes.lane_record import LaneRecord, LaneStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
