"""Persisted lane state: retry attempts, and lanes that wait for an operator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from keylane import strict_json as wire
from keylane.policies.failure_info import FailureInfo

LANE = b"lane/"
KEYLESS = b"keyless/"


class LaneStatus(StrEnum):
    """Why a lane is stopped."""

    BLOCKED = "blocked"
    """Its next message failed for good; the lane waits until an operator releases or skips it."""
    SKIPPING = "skipping"
    """An operator skipped the blocking message; the record is deleted once the skip is committed."""
    PARKED = "parked"
    """The message that failed for good, and all messages after it, go to the dead-letter topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRecord:
    """A stopped lane: since ``since`` (unix time), because of the message at ``offset``."""

    stop: LaneStatus
    key: bytes | None
    """None for a message without a key: it is a lane of its own."""
    partition: int
    offset: int
    since: float
    letter: FailureInfo
    why: str = ""
    """The reason, if the app's own policy would not have stopped the lane."""

    @property
    def name(self) -> bytes:
        """The record's key in the state topic."""
        return lane_name(self.key, self.offset)

    def encode(self) -> bytes:
        """The record's value in the state topic, for :func:`decode_lane`."""
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
    """The key of a lane's record: the lane's key, or the offset of a message without a key."""
    return KEYLESS + str(offset).encode() if key is None else LANE + key


@wire.decoder
def decode_lane(name: bytes, partition: int, value: bytes) -> LaneRecord:
    """A record from the state topic. Raises MalformedRecordError."""
    stop, offset, since, why, letter = wire.fields(
        wire.loads(value), "stop", "offset", "since", "why", "letter"
    )
    return LaneRecord(
        stop=LaneStatus(wire.text(stop)),
        key=name.removeprefix(LANE) if name.startswith(LANE) else None,
        partition=partition,
        offset=wire.integer(offset),
        since=wire.number(since),
        why=wire.text(why),
        letter=FailureInfo.from_json(letter),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryState:
    """The attempts of a message that has failed and is not done, so that they survive a restart.

    ``attempt`` is the next one at ``stage``, ``attempts`` the number so far at all stages. ``since`` and ``due`` are
    unix time: the first failure of that stage, and the earliest time of the next attempt. ``slot`` is the message's
    slot in its partition: the slot's owner continues the count.

    ``waited`` is the unix time since when the message waits for a lower version; 0: it does not wait.
    ``lives`` is the number of tasks in which it has waited.
    """

    stage: str
    attempt: int
    attempts: int
    since: float
    due: float
    slot: int = 0
    waited: float = 0.0
    lives: int = 0


def encode_retries(retries: dict[int, RetryState], limit: int) -> bytes:
    """Retry states by offset, as one record of at most ``limit`` characters.

    The attempts of messages that do not fit start over after a restart. Messages that only wait are left out first.
    """
    rows: list[str] = []
    size = 2
    for offset, one in sorted(retries.items(), key=lambda item: (not item[1].attempts, item[0])):
        since, due = round(one.since, 3), round(one.due, 3)
        row: list[Any] = [offset, one.slot, one.stage, one.attempt, one.attempts, since, due]
        if one.waited:
            row += [round(one.waited, 3), one.lives]
        text = json.dumps(row, separators=(",", ":"))
        size += len(text) + 1
        if size > limit:
            break
        rows.append(text)
    return f"[{','.join(rows)}]".encode()


@wire.decoder
def decode_retries(value: bytes) -> dict[int, RetryState]:
    """The reverse of :func:`encode_retries`. Raises MalformedRecordError."""
    return dict(map(_retry_state, wire.array(wire.loads(value))))


def _retry_state(found: object) -> tuple[int, RetryState]:
    row = wire.array(found, 9)
    if len(row) not in (7, 9):
        raise wire.MalformedRecordError(f"expected 7 or 9 items, got {len(row)}")
    offset, slot, stage, attempt, attempts, since, due = row[:7]
    waited, lives = row[7:] or (0.0, 0)
    return wire.integer(offset), RetryState(
        stage=wire.text(stage),
        attempt=wire.integer(attempt),
        attempts=wire.integer(attempts),
        since=wire.seconds(since),
        due=wire.seconds(due),
        slot=wire.integer(slot),
        waited=wire.number(waited),
        lives=wire.integer(lives),
    )
