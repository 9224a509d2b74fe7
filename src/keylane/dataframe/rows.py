"""Conversion of DataFrame rows to messages, and of outcomes to rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from keylane.errors import SettingsError
from keylane.message import EVENT_ID, PlainRecord
from keylane.outcome import Outcome
from keylane.spark import outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.results import ResultRecord
    from keylane.message import Headers
    from keylane.policies.failure_info import FailureInfo

ORDER = "order_"
"""Prefix of the columns of ``order_by``, followed by their number."""
RESULTS_DDL = (
    "results ARRAY<STRUCT<topic: STRING, key: BINARY, value: BINARY, "
    "headers: ARRAY<STRUCT<key: STRING, value: BINARY>>, timestamp: TIMESTAMP, event_id: STRING>>"
)
"""The results of a message that gave more than one plain value."""
RESULTS = pa.list_(
    pa.struct(
        [
            ("topic", pa.string()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("event_id", pa.string()),
        ]
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan:
    """The columns of a frame, for its tasks. The driver makes it and sends it to them.

    The columns ``key``, ``value`` (bytes) and ``order_0`` … always exist; the flags say which others do.
    """

    source: str
    """The topic's name, if no column has it."""
    order_by: tuple[str, ...]
    """The user's names of the columns ``order_0`` …"""
    carried: tuple[int, ...]
    """The numbers of those that are added to the outcomes."""
    position: bool
    topic: bool
    timestamp: bool
    headers: bool
    event_id: bool
    stream: bool
    """A stream: Spark does not sort its rows."""
    tasks: int = 1
    """How many tasks share the rows, and the app's rates."""


class FrameRecord(PlainRecord):
    """A row as a record.

    Without columns for them, its topic is the app's source, and its partition and offset are the numbers of the Spark
    task and of the row in it.
    """

    __slots__ = ("order",)

    def __init__(
        self,
        key: bytes | None,
        value: bytes | None,
        place: tuple[str, int, int],
        time: int | None,
        headers: Headers | None,
        order: tuple[Any, ...],
    ) -> None:
        topic, partition, offset = place
        super().__init__(
            topic=topic,
            partition=partition,
            offset=offset,
            key=key,
            value=value,
            headers=headers,
            timestamp=time,
        )
        self.order = order


class FrameRows:
    """The rows of one Spark task, batch by batch and in order."""

    def __init__(self, plan: FramePlan, task: int) -> None:
        self._plan = plan
        self._task = task
        self._orders = [f"{ORDER}{number}" for number in range(len(plan.order_by))]
        self._types: list[pa.DataType] = []
        self._last: pa.RecordBatch | None = None
        self._topic: str | None = None
        self._number = 0

    def sort(self, batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Sort the rows of a micro-batch; Spark sorts tables only."""
        if not batches:
            return []
        by = [(name, "ascending") for name in (*self._orders, "key")]
        found: list[pa.RecordBatch] = pa.Table.from_batches(batches).sort_by(by).combine_chunks().to_batches()
        return found

    def records(self, batch: pa.RecordBatch) -> list[FrameRecord]:
        """One record per row. Raises :class:`SettingsError` for rows whose order is undefined."""
        self._check(batch)
        plan, count = self._plan, batch.num_rows
        self._types = [batch.schema.field(name).type for name in self._orders]
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        orders = list(zip(*(batch.column(name).to_pylist() for name in self._orders), strict=True))
        nothing = [None] * count
        times = milliseconds(batch.column("timestamp")) if plan.timestamp else nothing
        ids = batch.column("event_id").to_pylist() if plan.event_id else nothing
        if not plan.event_id and not plan.position:
            ids = [_event_id(order) for order in orders]
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
                    f"order_by={shown!r} is null in some rows, so their order is undefined; filter them out, or order "
                    "by another column"
                )
        if plan.position:
            for name in ("partition", "offset"):
                if batch.column(name).null_count:
                    raise SettingsError(f"column {name!r} is null in some rows; drop the column, or the rows")
            self._check_topic(batch)
        self._check_ties(batch)

    def _check_topic(self, batch: pa.RecordBatch) -> None:
        """Refuse rows of several topics: their offsets are not comparable."""
        if not self._plan.topic:
            return
        found = {topic.as_py() for topic in pc.unique(batch.column("topic"))}
        found |= {self._topic} if self._topic is not None else set()
        if len(found) > 1 or None in found:
            raise SettingsError(
                f"the frame has rows of several topics ({', '.join(sorted(map(str, found)))}), whose offsets are not "
                "comparable: run them one by one, or drop the columns 'topic', 'partition' and 'offset'"
            )
        self._topic = found.pop()

    def _check_ties(self, batch: pa.RecordBatch) -> None:
        """Refuse two rows of a key with equal order. They are neighbours, because rows are sorted by order and key."""
        names = (*self._orders, "key")
        rows = pa.Table.from_batches([batch.select(names)])
        if self._last is not None:
            rows = pa.concat_tables([pa.Table.from_batches([self._last]), rows])
        self._last = batch.select(names).slice(batch.num_rows - 1)
        if rows.num_rows < 2:
            return
        before, after = rows.slice(0, rows.num_rows - 1), rows.slice(1)
        same = pc.equal(before["key"], after["key"])
        if not self._plan.position:  # rows without a key would share an event id
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
                f"two rows of key {row['key']!r} have the same order ({shown}), so which comes first is undefined; add "
                "a column that decides: order_by=[…, '…']"
            )

    def to_arrow(
        self,
        deliveries: list[Delivery],
        letters: dict[tuple[int, int], FailureInfo | None],
        records: dict[tuple[int, int], Sequence[ResultRecord]],
        *,
        owner: str,
        epoch: int,
        results: bool,
        blocks: bool,
    ) -> pa.RecordBatch:
        """Outcome rows. Removes their failures from ``letters``, and their results from ``records``.

        ``blocks``: parked lanes are shown as blocked.
        """
        base = outcomes.to_arrow(deliveries, owner, epoch, results=results)
        found = [letters.pop((d.partition, d.offset), None) for d in deliveries]
        columns = {name: base.column(number) for number, name in enumerate(base.schema.names)}
        if blocks:
            named = [_blocked(d.outcome, letter) for d, letter in zip(deliveries, found, strict=True)]
            columns["outcome"] = pa.array(named, pa.string())
        texts = [None if letter is None else json.dumps(letter.as_json()) for letter in found]
        columns["letter"] = pa.array(texts, pa.string())
        several = [records.pop((d.partition, d.offset), None) for d in deliveries] if records else []
        columns["results"] = (
            pa.array([None if each is None else list(map(_as_row, each)) for each in several], RESULTS)
            if several
            else pa.nulls(len(deliveries), RESULTS)
        )
        for number in self._plan.carried:
            values = [d.record.order[number] for d in deliveries]  # type: ignore[attr-defined]  # ours
            columns[self._plan.order_by[number]] = pa.array(values, self._types[number])
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _blocked(outcome: Outcome, letter: FailureInfo | None) -> str:
    """The outcome of a row in a lane that may have been blocked; the engine parked it instead."""
    if outcome not in (Outcome.PARKED, Outcome.DEAD):
        return outcome.value
    return "blocked" if letter is not None else "stopped"


def _as_row(record: ResultRecord) -> dict[str, Any]:
    """One result as a struct of the column ``results``."""
    return {
        "topic": record.topic or None,
        "key": record.key,
        "value": record.value,
        "headers": [{"key": name, "value": content} for name, content in record.headers],
        "timestamp": None if record.timestamp is None else record.timestamp * 1000,
        "event_id": (record.headers[-1][1] or b"").decode(errors="replace"),
    }


def milliseconds(column: pa.Array) -> list[int | None]:
    """Timestamps as milliseconds since 1970."""
    microseconds = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    return [None if at is None else at // 1000 for at in microseconds]


def headers_of(given: list[dict[str, Any]] | None, event_id: bytes | None) -> Headers | None:
    """A row's headers, with the event id of its column."""
    headers: Headers = [
        (header["key"], header["value"]) for header in given or () if header["key"] is not None
    ]
    if event_id is not None:
        headers.append((EVENT_ID, event_id))  # the last header of a name counts
    return headers or None


def _event_id(order: tuple[Any, ...]) -> bytes:
    """The order values as an event id: the same in every run."""
    return "|".join(map(_as_text, order)).encode()


def _as_text(value: Any) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)
