"""Rows as messages, and outcomes as rows: the two ends of a frame that runs through lanes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from keylane.errors import SettingsError
from keylane.message import EVENT_ID
from keylane.outcome import Outcome
from keylane.spark import outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery
    from keylane.message import Headers
    from keylane.policies.failure_info import FailureInfo

ORDER = "order_"
"""With a number: the columns that say the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan:
    """What a frame's task needs to know of its columns. Made beside the driver, travels to the tasks.

    The columns are ``key``, ``value`` and ``order_0`` …, as bytes; the others are there or not.
    """

    source: str
    """The topic's name when no column has it."""
    order_by: tuple[str, ...]
    """The names that the user knows."""
    carried: tuple[int, ...]
    """Which of them the outcomes carry along."""
    position: bool
    topic: bool
    timestamp: bool
    headers: bool
    event_id: bool
    stream: bool
    """Its rows come unsorted."""


class FrameRecord:
    """A row, in the shape of a record of a log."""

    __slots__ = ("_headers", "_key", "_offset", "_partition", "_time", "_topic", "_value", "order")

    def __init__(
        self,
        key: bytes | None,
        value: bytes | None,
        place: tuple[str, int, int],
        time: int | None,
        headers: Headers | None,
        order: tuple[Any, ...],
    ) -> None:
        self._key = key
        self._value = value
        self._topic, self._partition, self._offset = place
        self._time = time
        self._headers = headers
        self.order = order

    def topic(self) -> str:
        """Its column, or the app's source."""
        return self._topic

    def partition(self) -> int:
        """Its column, or the Spark task's number."""
        return self._partition

    def offset(self) -> int:
        """Its column, or the row's number in the task."""
        return self._offset

    def key(self) -> bytes | None:
        """The lane."""
        return self._key

    def value(self) -> bytes | None:
        """As it is in the frame."""
        return self._value

    def headers(self) -> Headers | None:
        """Its column's, and the event id."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds."""
        return (0, -1) if self._time is None else (1, self._time)


class FrameRows:
    """The rows of one task, batch by batch in their order."""

    def __init__(self, plan: FramePlan, task: int) -> None:
        self._plan = plan
        self._task = task
        self._orders = [f"{ORDER}{number}" for number in range(len(plan.order_by))]
        self._types: list[pa.DataType] = []
        self._last: pa.RecordBatch | None = None
        self._topic: str | None = None
        self._number = 0

    def sort(self, batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """The rows in their order. Spark sorts a table by itself, and no stream."""
        if not batches:
            return []
        by = [(name, "ascending") for name in (*self._orders, "key")]
        found: list[pa.RecordBatch] = pa.Table.from_batches(batches).sort_by(by).combine_chunks().to_batches()
        return found

    def records(self, batch: pa.RecordBatch) -> list[FrameRecord]:
        """One for each row. Raises :class:`SettingsError` when the order is not said."""
        self._check(batch)
        plan, count = self._plan, batch.num_rows
        self._types = [batch.schema.field(name).type for name in self._orders]
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        orders = list(zip(*(batch.column(name).to_pylist() for name in self._orders), strict=True))
        nothing = [None] * count
        times = milliseconds(batch.column("timestamp")) if plan.timestamp else nothing
        ids = batch.column("event_id").to_pylist() if plan.event_id else nothing
        if not plan.event_id and not plan.position:
            ids = [_text(order) for order in orders]
        headers = batch.column("headers").to_pylist() if plan.headers else nothing
        return [
            FrameRecord(key, value, place, time, headers_of(given, event_id), order)
            for key, value, place, time, given, event_id, order in zip(
                keys, values, self._places(batch), times, headers, ids, orders, strict=True
            )
        ]

    def _places(self, batch: pa.RecordBatch) -> list[tuple[str, int, int]]:
        plan, count = self._plan, batch.num_rows
        topics = batch.column("topic").to_pylist() if plan.topic else [plan.source] * count
        if plan.position:
            partitions, offsets = batch.column("partition").to_pylist(), batch.column("offset").to_pylist()
        else:
            partitions = [self._task] * count
            offsets = list(range(self._number, self._number + count))
            self._number += count
        return list(zip(topics, partitions, offsets, strict=True))

    def _check(self, batch: pa.RecordBatch) -> None:
        plan = self._plan
        for name, shown in zip(self._orders, plan.order_by, strict=True):
            if batch.column(name).null_count:
                raise SettingsError(
                    f"order_by={shown!r} is null in some rows: they have no place in the order. Filter them out, or "
                    "order by another column"
                )
        if plan.position:
            for name in ("partition", "offset"):
                if batch.column(name).null_count:
                    raise SettingsError(f"column {name!r} is null in some rows; drop the column, or the rows")
            self._check_topic(batch)
        self._check_ties(batch)

    def _check_topic(self, batch: pa.RecordBatch) -> None:
        """Offsets of two topics would be mistaken for each other."""
        if not self._plan.topic:
            return
        found = {topic.as_py() for topic in pc.unique(batch.column("topic"))}
        found |= {self._topic} if self._topic is not None else set()
        if len(found) > 1 or None in found:
            raise SettingsError(
                f"the frame has rows of several topics ({', '.join(sorted(map(str, found)))}), whose offsets do not "
                "fit together: run them one by one, or drop the columns 'topic', 'partition' and 'offset'"
            )
        self._topic = found.pop()

    def _check_ties(self, batch: pa.RecordBatch) -> None:
        """Rows are sorted by the order and then by the key: two of a key with the same order are neighbours."""
        names = (*self._orders, "key")
        rows = pa.Table.from_batches([batch.select(names)])
        if self._last is not None:
            rows = pa.concat_tables([pa.Table.from_batches([self._last]), rows])
        self._last = batch.select(names).slice(batch.num_rows - 1)
        if rows.num_rows < 2:
            return
        before, after = rows.slice(0, rows.num_rows - 1), rows.slice(1)
        same = pc.equal(before["key"], after["key"])
        if not self._plan.position:  # without a key, but with the same event id
            same = pc.or_kleene(same, pc.and_(pc.is_null(before["key"]), pc.is_null(after["key"])))
        for name in self._orders:
            same = pc.and_kleene(same, pc.equal(before[name], after[name]))
        at = pc.index(pc.fill_null(same, False), True).as_py()
        if at >= 0:
            row = after.slice(at, 1).to_pylist()[0]
            shown = ", ".join(
                f"{name}={row[column]!r}"
                for name, column in zip(self._plan.order_by, self._orders, strict=True)
            )
            raise SettingsError(
                f"two rows of key {row['key']!r} have the same place in the order ({shown}): which comes first is not "
                "said. Add a column that decides: order_by=[…, '…']"
            )

    def to_arrow(
        self,
        deliveries: list[Delivery],
        letters: dict[tuple[int, int], FailureInfo | None],
        *,
        owner: str,
        epoch: int,
        results: bool,
        blocks: bool,
    ) -> pa.RecordBatch:
        """Outcome rows. ``letters`` are taken out of it; ``blocks``: what was set aside stands still instead."""
        base = outcomes.to_arrow(deliveries, owner, epoch, results=results)
        found = [letters.pop((d.partition, d.offset), None) for d in deliveries]
        columns = {name: base.column(number) for number, name in enumerate(base.schema.names)}
        if blocks:
            named = [_blocked(d.outcome, letter) for d, letter in zip(deliveries, found, strict=True)]
            columns["outcome"] = pa.array(named, pa.string())
        texts = [None if letter is None else json.dumps(letter.as_json()) for letter in found]
        columns["letter"] = pa.array(texts, pa.string())
        for number in self._plan.carried:
            values = [d.record.order[number] for d in deliveries]  # type: ignore[attr-defined]  # ours
            columns[self._plan.order_by[number]] = pa.array(values, self._types[number])
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _blocked(outcome: Outcome, letter: FailureInfo | None) -> str:
    """The engine set aside what stands still: a table has no operator who could let it go on."""
    if outcome not in (Outcome.PARKED, Outcome.DEAD):
        return outcome.value
    return "blocked" if letter is not None else "stopped"


def milliseconds(column: pa.Array) -> list[int | None]:
    """Times as a message has them."""
    microseconds = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    return [None if at is None else at // 1000 for at in microseconds]


def headers_of(given: list[dict[str, Any]] | None, event_id: bytes | None) -> Headers | None:
    """A row's headers as a message has them, and the event id that its column says."""
    headers: Headers = [
        (header["key"], header["value"]) for header in given or () if header["key"] is not None
    ]
    if event_id is not None:
        headers.append((EVENT_ID, event_id))  # the last of a name counts
    return headers or None


def _text(order: tuple[Any, ...]) -> bytes:
    """The place in the order as an event id: the same whoever writes it, whenever."""
    return "|".join(map(_one, order)).encode()


def _one(value: Any) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)
