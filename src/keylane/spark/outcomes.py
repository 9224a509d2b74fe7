"""Outcome rows: what Spark receives for every message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from keylane.engine.delivery import Delivery
    from keylane.engine.hot_keys import HotName

DDL = (
    "key BINARY, partition INT, offset BIGINT, event_id STRING, outcome STRING, attempts INT, "
    "started TIMESTAMP, finished TIMESTAMP, error STRING, owner STRING, epoch BIGINT, result BINARY, "
    "hot BOOLEAN"
)

_TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("event_id", pa.string()),
        ("outcome", pa.string()),
        ("attempts", pa.int32()),
        ("started", _TIME),
        ("finished", _TIME),
        ("error", pa.string()),
        ("owner", pa.string()),
        ("epoch", pa.int64()),
        ("result", pa.binary()),
        ("hot", pa.bool_()),
    ]
)


def to_arrow(
    deliveries: list[Delivery], owner: str, epoch: int, *, results: bool, hot: Collection[HotName] = ()
) -> pa.RecordBatch:
    """Build one row per delivery, column by column: a dict per row would cost more than the engine.

    ``results``: include the last stage's results. ``hot``: keys with a large share of recent messages.
    """
    count = len(deliveries)
    columns = [
        pa.array([d.key for d in deliveries], pa.binary()),
        pa.array([d.partition for d in deliveries], pa.int32()),
        pa.array([d.offset for d in deliveries], pa.int64()),
        pa.array([_event_id(d) for d in deliveries], pa.string()),
        pa.array([d.outcome.value for d in deliveries], pa.string()),
        pa.array([d.attempts for d in deliveries], pa.int32()),
        pa.array([int(d.started * 1e6) for d in deliveries], pa.int64()).cast(_TIME),
        pa.array([int(d.finished * 1e6) for d in deliveries], pa.int64()).cast(_TIME),
        pa.array([d.error for d in deliveries], pa.string()),
        pa.repeat(owner, count),
        pa.repeat(epoch, count).cast(pa.int64()),
        pa.array([_result(d) for d in deliveries], pa.binary()) if results else pa.nulls(count, pa.binary()),
        pa.array([(d.key, d.partition) in hot for d in deliveries], pa.bool_())
        if hot
        else pa.repeat(pa.scalar(False), count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _result(delivery: Delivery) -> bytes | None:
    return delivery.value if delivery.outcome is Outcome.OK else None


def _event_id(delivery: Delivery) -> str:
    try:
        return delivery.event_id
    except UnicodeDecodeError:  # a header name is not UTF-8: such a message is dead; use its position
        return delivery.position
