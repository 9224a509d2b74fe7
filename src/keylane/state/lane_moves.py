"""Release and skip of a stopped lane, as the command line and the console give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from keylane.state.admin import cancel_command, new_command

if TYPE_CHECKING:
    from keylane.state.commands import Command
    from keylane.state.stopped_lanes import StoppedLane


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMove:
    """The command that moves a lane. Only ``fresh`` are still to be written."""

    command: Command
    """What to wait for; it may be one that was given before and waits to be carried out."""
    fresh: tuple[Command, ...]
    replaced: tuple[Command, ...] = ()
    """Other commands about the same message, which ``fresh`` cancels."""


def plan_move(
    do: Literal["release", "skip"], lane: StoppedLane, *, reason: str = "", who: str | None = None
) -> LaneMove:
    """Plan the move of this lane. A command that waits already and does the same is used again."""
    same = [command for command in lane.commands if command.offset == lane.offset]  # for the same message
    for waiting in same:
        if waiting.do == do:
            return LaneMove(command=waiting, fresh=())
    command = new_command(
        do, partition=lane.partition, key=lane.key, offset=lane.offset, reason=reason, who=who
    )
    cancels = [cancel_command(other, reason=reason, who=who) for other in same]
    return LaneMove(command=command, fresh=(*cancels, command), replaced=tuple(same))
