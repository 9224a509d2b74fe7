"""The lane that a command of the command line names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keylane.cli.arguments import place
from keylane.errors import SettingsError
from keylane.key_text import parse_key
from keylane.state.commands import Command
from keylane.state.stopped_lanes import StoppedLane, lane_name


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
