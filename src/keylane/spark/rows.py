"""Messages as rows: the columns of Spark's Kafka source, built column by column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from keylane.errors import BrokerError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.types import StructType

DDL = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT"
)
HEADERS_DDL = "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"

_TIME = pa.timestamp("us", tz="UTC")
_TYPES = {
    "key": ("binary", pa.binary()),
    "value": ("binary", pa.binary()),
    "topic": ("string", pa.string()),
    "partition": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "timestamp": ("timestamp", _TIME),
    "timestampType": ("int", pa.int32()),
    "headers": (
        "array<struct<key:string,value:binary>>",
        pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ),
}
"""Spark's name and Arrow's type of each column."""


class Rows:
    """Builder of rows with a schema's columns: all, or those chosen with ``.schema(…)``."""

    def __init__(self, schema: StructType) -> None:
        for column in schema:
            if column.name not in _TYPES:
                raise SettingsError(f"unknown column {column.name!r}; expected one of {', '.join(_TYPES)}")
            kind = _TYPES[column.name][0]
            if column.dataType.simpleString() != kind:
                raise SettingsError(
                    f"column {column.name!r} must be a {kind}, got {column.dataType.simpleString()}: cast it afterwards"
                )
        self._names = schema.names
        self._schema = pa.schema(
            [pa.field(column.name, _TYPES[column.name][1], nullable=column.nullable) for column in schema]
        )

    def to_arrow(self, topic: str, partition: int, messages: Sequence[Any]) -> pa.RecordBatch:
        """Build one row per message of this partition."""
        count = len(messages)
        if "timestamp" in self._names or "timestampType" in self._names:
            kinds, times = zip(*[message.timestamp() for message in messages], strict=True)
        else:
            kinds, times = (), ()
        make: dict[str, Callable[[], Any]] = {
            "key": lambda: pa.array([message.key() for message in messages], pa.binary()),
            "value": lambda: pa.array([message.value() for message in messages], pa.binary()),
            "topic": lambda: pa.repeat(topic, count),
            "partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), count),
            "offset": lambda: pa.array([message.offset() for message in messages], pa.int64()),
            "timestamp": lambda: _timestamps(kinds, times),
            # The client counts from 1, with 0 for none; Kafka and Spark use 0 writer, 1 broker, -1 none.
            "timestampType": lambda: pa.array([kind - 1 for kind in kinds], pa.int32()),
            "headers": lambda: pa.array([_headers(message) for message in messages], _TYPES["headers"][1]),
        }
        return pa.RecordBatch.from_arrays([make[name]() for name in self._names], schema=self._schema)


def _timestamps(kinds: Sequence[int], times: Sequence[int]) -> pa.Array:
    """Return timestamps, null where a message has none."""
    known: Sequence[int | None] = times
    if 0 in kinds:
        known = [time if kind else None for kind, time in zip(kinds, times, strict=True)]
    return pa.array(known, pa.timestamp("ms", tz="UTC")).cast(_TIME)


def _headers(message: Any) -> list[dict[str, Any]] | None:
    try:
        found = message.headers()
    except UnicodeDecodeError as error:
        raise BrokerError(
            f"{message.topic()}/{message.partition()}@{message.offset()}: a header name is not UTF-8, which the client "
            "cannot represent. Read without includeHeaders, or skip this offset"
        ) from error
    return [{"key": name, "value": value} for name, value in found] if found else None
