"""Batches: the arguments and results of a batch stage. Messages as a list or a table, one result for each."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.errors import Poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from keylane.message import Message

_COLUMNS = (
    "key",
    "value",
    "headers",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "event_id",
    "type",
    "version",
    "attempt",
    "request_id",
)
_INT64_END = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """When a batch stage's messages form a batch."""

    max_size: int
    """Messages in a batch, at most."""
    max_wait: float
    """Seconds that the first message waits for others, at most."""
    of_lane: bool = False
    """A batch has consecutive messages of one lane, not one message of each of several."""


def as_table(messages: Sequence[Message]) -> tuple[pa.Table | None, dict[int, Exception]]:
    """A table with one row per message, in order, and the errors of messages without a row, by their position.

    The column ``value`` is binary for bytes, text for text, and otherwise of the type that Arrow infers. A value that
    does not fit the type of most others gets no row.
    """
    rows: dict[int, tuple[Any, ...]] = {}
    failed: dict[int, Exception] = {}
    for place, message in enumerate(messages):
        try:
            rows[place] = _row(message)
        except Exception as error:  # the name of a header is not UTF-8
            failed[place] = error
    values, unfit = _values({place: messages[place].value for place in rows})
    failed |= unfit
    if len(failed) == len(messages):
        return None, failed
    return _table([row for place, row in rows.items() if place not in failed], values), failed


def read_results(stage: str, returned: Any, count: int) -> list[Any]:
    """The results of a batch stage, one per message.

    Raises :class:`Poison` if there is not exactly one result per message.
    """
    results: list[Any] | None = None
    if isinstance(returned, list | tuple):
        results = list(returned)
    else:
        for name in ("to_pylist", "tolist"):  # of Arrow's arrays, columns and tables; of NumPy's arrays
            if callable(convert := getattr(returned, name, None)):
                results = convert()
                break
    if not isinstance(results, list):
        raise Poison(
            f"batch stage {stage!r} returned a {type(returned).__name__}; it must return a list, or an Arrow array, "
            "with one result for each message, in order (None: no result; an exception: that message failed)"
        )
    if len(results) != count:
        raise Poison(
            f"batch stage {stage!r} returned {len(results)} results for {count} messages; it must return one for each, "
            "in order (None: no result; an exception: that message failed)"
        )
    return results


def _row(message: Message) -> tuple[Any, ...]:
    return (
        message.key,
        [{"key": name, "value": value} for name, value in message.headers],
        message.topic,
        message.partition,
        message.offset,
        message.timestamp,
        message.event_id,
        message.type,
        _version(message),
        message.attempt,
        message.request_id,
    )


def _version(message: Message) -> int | None:
    """The version; None if it is not a number, as most stages do not use it."""
    try:
        version = message.version
    except ValueError:
        return None
    return version if version is not None and -_INT64_END <= version < _INT64_END else None


def _table(rows: Sequence[tuple[Any, ...]], values: pa.Array) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415 - a slow import

    types = (
        pa.binary(),
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        pa.string(),
        pa.int32(),
        pa.int64(),
        pa.timestamp("ms", tz="UTC"),
        pa.string(),
        pa.string(),
        pa.int64(),
        pa.int32(),
        pa.string(),
    )
    key, *others = (
        pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)
    )
    return pa.Table.from_arrays([key, values, *others], names=list(_COLUMNS))


def _values(found: dict[int, Any]) -> tuple[pa.Array, dict[int, Exception]]:
    """The column of these values, and the errors of those that do not fit into it, by their position."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    kinds = {type(value) for value in found.values()}
    if kinds <= {bytes, type(None)}:
        return pa.array(list(found.values()), pa.binary()), {}
    with suppress(Exception):  # it does not say which of them
        return pa.array(list(found.values())), {}
    alone: dict[int, Any] = {}
    unfit: dict[int, Exception] = {}
    for place, value in found.items():
        try:
            alone[place] = pa.infer_type([value])
        except Exception as error:
            unfit[place] = Poison(f"the value, a {type(value).__name__}, has no place in a table: {error}")
    if not alone:
        return None, unfit
    kind = Counter(alone.values()).most_common(1)[0][0]
    fit = []
    for place, own in alone.items():
        try:
            pa.array([found[place]], kind)
            fit.append(found[place])
        except Exception:
            unfit[place] = Poison(
                f"the value ({own}) does not fit with the others of its batch ({kind}); give the app a decode= that "
                "makes them alike, or let the stage take list[Message]"
            )
    return pa.array(fit, kind), unfit
