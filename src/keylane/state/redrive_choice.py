"""The choice of dead letters to redrive, and the commands for it, as the command line and the console give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.errors import BrokerError, KeylaneError, SettingsError
from keylane.key_text import key_argument, printable, show_key
from keylane.lanes.lane_record import LaneStatus
from keylane.state.redrive_selection import LaneSelection, Place, RedriveSelection, Takes, command_for
from keylane.topic_names import dead_letter_topic

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings
    from keylane.state.admin import AdminClient
    from keylane.state.commands import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveWay:
    """How dead letters are chosen. ``whole``: whole lanes, with what arrives meanwhile."""

    takes: Takes
    whole: bool = False
    key: bytes | None = None
    places: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedrivePlan:
    """What a redrive would do: the lanes, and one command for each of them, in the same order."""

    choice: RedriveSelection
    lots: list[LaneSelection]
    commands: list[Command]
    fresh: list[Command] = field(default_factory=list)
    """Of the commands, those that do not wait in the state topic already."""

    @classmethod
    def of(
        cls,
        operator: AdminClient,
        choice: RedriveSelection,
        *,
        whole: bool,
        reason: str = "",
        who: str | None = None,
    ) -> RedrivePlan:
        """Plan the redrive. Commands that wait already and do the same are used again. Raises SettingsError."""
        lots = choice.lots()
        waiting: dict[Place, list[Command]] = {}
        for command in operator.open_commands():
            if command.do == "redrive":
                waiting.setdefault((command.partition, command.key), []).append(command)
        commands = [
            command_for(
                operator.app,
                lot,
                waiting.get((lot.partition, lot.key), ()),
                whole=whole,
                reason=reason,
                who=who,
            )
            for lot in lots
        ]
        known = {command.id for group in waiting.values() for command in group}
        fresh = [command for command in commands if command.id not in known]
        return cls(choice=choice, lots=lots, commands=commands, fresh=fresh)


def choose(settings: KafkaSettings, way: RedriveWay, operator: AdminClient) -> RedriveSelection:
    """Read the dead letters and choose among them.

    Raises KeylaneError when a dead letter that is named does not exist or cannot be redriven.
    """
    name = operator.app
    stopped = operator.lanes()
    choice = RedriveSelection(way.takes, operator.redriven(), stopped)
    met = False
    missing = set(way.places)
    partitions = sorted({partition for partition, _ in missing}) or None
    for each in read_dead_letters(settings, dead_letter_topic(name), partitions=partitions):
        checked = operator.home.check(each, former=(each.partition, each.offset) in way.places)
        choice.add(checked)
        met = met or each.key == way.key
        if missing and (each.partition, each.offset) in missing:
            missing.discard((each.partition, each.offset))
            _refuse(name, checked)
    if missing:
        partition, offset = min(missing)
        raise BrokerError(
            f"no dead letter at {name}.dlq/{partition}@{offset}: the partition ends before it, or retention deleted "
            f"it. 'keylane dlq list {name} --letters' lists those that exist"
        )
    if way.whole:
        for record in stopped:  # also those whose dead letters are gone: nothing else ends the parking
            if record.stop is LaneStatus.PARKED and way.key in (None, record.key):
                choice.lane(record.partition, record.key)
                met = True
    if way.key is not None and not met:
        raise KeylaneError(f"no dead letter of app {name!r} has the key {show_key(way.key)}")
    named = way.key is not None or way.places
    for (_, key), count in choice.blocked.items():
        if named and count and key is not None:
            raise KeylaneError(
                f"lane {show_key(key)} is blocked: its dead letters cannot run before the message that blocks it. "
                f"Release or skip that first: keylane lanes show {name} {key_argument(key)}"
            )
    return choice


def _refuse(name: str, each: DeadLetter | UnreadableDeadLetter) -> None:
    """Raise if a chosen dead letter can never be redriven."""
    if isinstance(each, UnreadableDeadLetter):
        raise KeylaneError(f"{name}.dlq/{each.position} cannot be redriven: {printable(each.reason)}")
    if each.kind is DeadLetterKind.ARCHIVED:
        raise SettingsError(
            f"dead letter {name}.dlq/{each.position} is an archived copy: its message is still in its lane, or was "
            f"released since. 'keylane lanes release {name} --at {each.source_partition}@{each.source_offset}' runs it "
            "again"
        )
