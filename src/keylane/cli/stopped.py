"""The lanes that do not go on as usual, and which of them a command means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keylane.cli.arguments import place
from keylane.cli.keys import key_argument, parse_key, printable, show_key
from keylane.core.record import LaneRecord, Stop
from keylane.errors import SettingsError
from keylane.kafka.operator import Action
from keylane.kafka.orders import Order

WORDS = {Stop.BLOCKED: "blocked", Stop.PARKED: "parked", Stop.SKIPPING: "being skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedLane:
    """A lane that does not go on as usual: it has stopped, orders stand for it, or both."""

    partition: int
    key: bytes | None
    offset: int | None
    """Of the message at which it stopped. None when it has not."""
    record: LaneRecord | None
    orders: tuple[Order, ...]

    @property
    def state(self) -> str:
        """In words."""
        words = [WORDS[self.record.stop]] if self.record is not None else []
        return (
            ", ".join([*words, *(f"an order to {order.do} stands" for order in self.orders)]) or "not stopped"
        )

    @property
    def position(self) -> str:
        """``partition/offset`` in the source."""
        return f"{self.partition}/{'-' if self.offset is None else self.offset}"

    @property
    def name(self) -> str:
        """For a sentence: its key, or the place of its message."""
        return lane_name(self.key, self.position)


def stopped_lanes(records: Iterable[LaneRecord], orders: Iterable[Order]) -> list[StoppedLane]:
    """Lanes that have stopped, in the order of the records; then those that only have orders."""
    by_lane: dict[tuple[int, bytes | None, int | None], list[Order]] = {}
    for order in orders:
        keyless = order.key is None and order.do != "redrive"
        by_lane.setdefault((order.partition, order.key, order.offset if keyless else None), []).append(order)
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
                orders=tuple(mine),
            )
        )
    for (partition, key, offset), mine in by_lane.items():
        found.append(
            StoppedLane(partition=partition, key=key, offset=offset, record=None, orders=tuple(mine))
        )
    return found


def lane_name(key: bytes | None, position: str) -> str:
    """For a sentence: ``lane k1``; ``the keyless message at 3/17``."""
    return f"the keyless message at {position}" if key is None else f"lane {printable(show_key(key))}"


def which(key: bytes | None, position: str) -> str:
    """The lane as the commands take it."""
    return f"--at {position}" if key is None else key_argument(key)


def totals(lanes: Iterable[StoppedLane]) -> str:
    """``2 blocked, 1 parked``."""
    counts = Counter(None if lane.record is None else lane.record.stop for lane in lanes)
    words = [f"{counts[stop]:,} {word}" for stop, word in WORDS.items() if counts[stop]]
    return ", ".join([*words, f"{counts[None]:,} for which only an order stands"] if counts[None] else words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The lane that a command names: by its key, or by the place where it stopped."""

    key: bytes | None
    at: tuple[int, int] | None

    @classmethod
    def parse(cls, key: str | None, at: str | None) -> Named:
        """Raises SettingsError unless it is exactly one of them."""
        if (key is None) == (at is None):
            raise SettingsError("say which lane: its KEY, or --at PARTITION/OFFSET")
        return cls(key=None if key is None else parse_key(key), at=None if at is None else place(at))

    def of(self, lanes: Iterable[StoppedLane]) -> list[StoppedLane]:
        """Usually one; a key may have been in two partitions."""
        if self.at is not None:
            return [lane for lane in lanes if (lane.partition, lane.offset) == self.at]
        return [lane for lane in lanes if lane.key == self.key]

    def not_stopped(self, app: str) -> str:
        """Says that there is none."""
        if self.at is not None:
            return f"no lane of app {app!r} has stopped at {self.at[0]}/{self.at[1]}"
        return f"{lane_name(self.key, '')} of app {app!r} has not stopped"


def trail(audit: Sequence[Action], lane: StoppedLane) -> list[Action]:
    """What was ordered for this lane."""
    if lane.key is not None:
        return [action for action in audit if action.key == lane.key and action.partition == lane.partition]
    return [
        action
        for action in audit
        if action.key is None
        and action.do != "redrive"
        and (action.partition, action.offset) == (lane.partition, lane.offset)
    ]
