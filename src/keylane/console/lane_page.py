"""One lane in full: what it does, the attempts of its head, and the backlog behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.errors import BrokerError
from keylane.kafka.offset_range import OffsetRange, RangeReader, RangeReaderSettings
from keylane.key_text import show_key
from keylane.offsets.assignment import AssignedRange
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import slot_of
from keylane.state.facts import full_facts
from keylane.state.stopped_lanes import StoppedLane, trail

if TYPE_CHECKING:
    from keylane.console.watch import AppWatch, Reading
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import RetryState
    from keylane.state.admin import AdminClient, AuditEntry

_SCAN_SECONDS = 3.0
_SCAN_MESSAGES = 200_000
"""How much of the log is searched for a lane's messages."""
_BACKLOG_SHOWN = 50
_AUDIT_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A lane's messages in the log, from an offset on."""

    count: int
    first: tuple[dict[str, Any], ...]
    complete: bool
    """False if the search ended before the end of the log."""
    searched: int
    """Offset up to which the log was searched."""


def lane_facts_of(
    watch: AppWatch, settings: KafkaSettings, *, key: bytes | None, at: tuple[int, int] | None
) -> dict[str, Any]:
    """The page of the lane with this key, or of the one that stopped at this position. Raises BrokerError.

    Reads the source, so it may take a few seconds.
    """
    reading = watch.reading
    if reading.view is None:
        raise BrokerError(f"app {watch.app!r} cannot be read now: {reading.facts['sentence']}")
    found = next(
        (
            lane
            for lane in reading.stopped
            if (at is None and lane.key is not None and lane.key == key)
            or (at is not None and (lane.partition, lane.offset) == at)
        ),
        None,
    )
    if found is None:
        if at is not None:
            raise BrokerError(f"no lane of app {watch.app!r} has stopped at {at[0]}@{at[1]}")
        partition = partition_of(key or b"", reading.partitions)
        found = StoppedLane(partition=partition, key=key, offset=None, record=None, commands=())

    def asked(operator: AdminClient) -> list[AuditEntry]:
        return trail(operator.audit(), found)

    actions = watch.ask(asked).result(15)
    reached = {one.partition: one.reached for one in reading.view.partitions}
    start = found.offset if found.offset is not None else reached.get(found.partition, 0)
    backlog = None if found.key is None else _backlog(settings, watch.app, reading, found, start)
    retries = reading.attempts.get(found.partition, {})
    head = _retrying(backlog, retries)
    slot = None if found.key is None else slot_of(found.key, 0)
    return {
        **full_facts(watch.app, found, actions[-_AUDIT_SHOWN:], settings.bootstrap),
        "state": _state(found, head, reading, slot),
        "blocked": found.record is not None and found.record.stop.value == "blocked",
        "position": found.position,
        "slot": slot,
        "owner": _owner(reading, found.partition, slot),
        "retry": None
        if head is None
        else {
            "offset": head[0],
            "stage": head[1].stage,
            "attempt": head[1].attempt,
            "attempts": head[1].attempts,
            "since": head[1].since,
            "due": head[1].due,
        },
        "hot": next(
            (
                hot
                for hot in reading.detail.get("hot", ())
                if found.key is not None
                and hot["partition"] == found.partition
                and hot["key"] == show_key(found.key)
            ),
            None,
        ),
        "reached": reached.get(found.partition),
        "backlog": None
        if backlog is None
        else {
            "from": start,
            "count": backlog.count,
            "first": list(backlog.first),
            "complete": backlog.complete,
            "searched": backlog.searched,
        },
    }


def _state(lane: StoppedLane, head: object, reading: Reading, slot: int | None) -> str:
    """What the lane does, in words."""
    if lane.record is not None or lane.commands:
        return lane.state
    if head is not None:
        return "retrying"
    if _owner(reading, lane.partition, slot) is None:
        return "not stopped; no task of the app runs it now"
    return "not stopped"


def _owner(reading: Reading, partition: int, slot: int | None) -> dict[str, Any] | None:
    """The running task that has this slot of the partition, by the plan."""
    plan = reading.detail.get("plan")
    if plan is None:
        return None
    running = {task["task"]: task for task in reading.detail["tasks"]}
    for number, ranges in enumerate(plan["tasks"]):
        for text in ranges:
            mine = AssignedRange.parse(text)
            if mine.partition == partition and (slot is None or slot in mine.slots) and number in running:
                return {"task": number, "owner": running[number]["owner"]}
    return None


def _retrying(backlog: Backlog | None, retries: dict[int, RetryState] | Any) -> tuple[int, RetryState] | None:
    """The lane's message that has failed and is not done, and its record."""
    if backlog is None:
        return None
    for message in backlog.first:
        kept = retries.get(message["offset"])
        if kept is not None:
            return message["offset"], kept
    return None


def _backlog(settings: KafkaSettings, app: str, reading: Reading, lane: StoppedLane, start: int) -> Backlog:
    """Search the source for the lane's messages."""
    view = reading.view
    end = (
        next((one.offsets.end for one in view.partitions if one.partition == lane.partition), 0)
        if view
        else 0
    )
    begin = (
        next((one.offsets.begin for one in view.partitions if one.partition == lane.partition), 0)
        if view
        else 0
    )
    start = max(start, begin)
    stop = min(end, start + _SCAN_MESSAGES)
    first: list[dict[str, Any]] = []
    count, searched = 0, start
    deadline = time.monotonic() + _SCAN_SECONDS
    reader = RangeReader(RangeReaderSettings(kafka=settings, group=app, fail_on_loss=False))
    try:
        for messages in reader.read(OffsetRange(reading.source, lane.partition, start, stop)):
            for message in messages:
                searched = message.offset() + 1
                if message.key() != lane.key:
                    continue
                count += 1
                if len(first) < _BACKLOG_SHOWN:
                    kind, milliseconds = message.timestamp()
                    value = message.value()
                    first.append(
                        {
                            "offset": message.offset(),
                            "at": milliseconds / 1000 if kind else None,
                            "size": None if value is None else len(value),
                        }
                    )
            if time.monotonic() > deadline:
                break
        else:
            searched = stop
    finally:
        reader.close()
    return Backlog(count=count, first=tuple(first), complete=searched >= end, searched=searched)
