"""What is written down about lanes, so that another task knows: attempts, and lanes that do not go on by themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from keylane.core.letter import DeadLetter

LANE = b"lane/"
KEYLESS = b"keyless/"


class Stop(StrEnum):
    """Why a lane does not go on as usual."""

    BLOCKED = "blocked"
    """It stands before a message that failed for good, until an operator releases or skips it."""
    SKIPPING = "skipping"
    """An operator skipped the message at which it was blocked; the record goes when that is committed."""
    PARKED = "parked"
    """The message that failed for good, and all that follow it, go to the dead-letter topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRecord:
    """A lane that does not go on as usual, since ``since`` (unix time), because of the message at ``offset``."""

    stop: Stop
    key: bytes | None
    """None for a message without a key, which is a lane of its own."""
    partition: int
    offset: int
    since: float
    letter: DeadLetter
    why: str = ""
    """What made a lane stop that the app's policy would not have stopped."""

    @property
    def name(self) -> bytes:
        """The record's key in the state topic."""
        return lane_name(self.key, self.offset)

    def encode(self) -> bytes:
        """For :func:`decode_lane`."""
        return json.dumps(
            {
                "stop": self.stop,
                "offset": self.offset,
                "since": self.since,
                "why": self.why,
                "letter": self.letter.as_json(),
            }
        ).encode()


def lane_name(key: bytes | None, offset: int) -> bytes:
    """The key of a lane's record: the lane's own key, or the place of a message that has none."""
    return KEYLESS + str(offset).encode() if key is None else LANE + key


def decode_lane(name: bytes, partition: int, value: bytes) -> LaneRecord:
    """A record from the state topic. Raises ValueError when it makes no sense."""
    try:
        found = json.loads(value)
        return LaneRecord(
            stop=Stop(found["stop"]),
            key=name.removeprefix(LANE) if name.startswith(LANE) else None,
            partition=partition,
            offset=int(found["offset"]),
            since=float(found["since"]),
            why=str(found["why"]),
            letter=DeadLetter.from_json(found["letter"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no record of a lane: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The attempts of a message that has failed and is not done: they count on after a restart.

    ``attempt`` is the next one at ``stage``, ``attempts`` how many there were at all stages. ``since`` and ``due`` are
    unix time: when that stage failed first, and before when the message does not run again.
    """

    stage: str
    attempt: int
    attempts: int
    since: float
    due: float


def encode_kept(kept: dict[int, Kept], limit: int) -> bytes:
    """Offsets and their attempts, as one record; what is beyond ``limit`` characters is left out and starts over."""
    rows: list[list[Any]] = []
    size = 0
    for offset, one in sorted(kept.items()):
        row = [offset, one.stage, one.attempt, one.attempts, round(one.since, 3), round(one.due, 3)]
        size += len(one.stage) + 80
        if size > limit:
            break
        rows.append(row)
    return json.dumps(rows, separators=(",", ":")).encode()


def decode_kept(value: bytes) -> dict[int, Kept]:
    """Raises ValueError when it makes no sense."""
    try:
        return {
            int(offset): Kept(
                stage=str(stage),
                attempt=int(attempt),
                attempts=int(attempts),
                since=float(since),
                due=float(due),
            )
            for offset, stage, attempt, attempts, since, due in json.loads(value)
        }
    except TypeError as error:
        raise ValueError(f"no record of attempts: {error!r}") from error
