"""Preparation of a DataFrame for lanes: check its columns, bring its rows together by key and sort them."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from keylane import logs
from keylane.dataframe.rows import ORDER, RESULTS_DDL, FramePlan
from keylane.dataframe.task import FrameTask
from keylane.errors import SettingsError
from keylane.policies.failure_policy import POLICIES
from keylane.spark import outcomes
from keylane.spark.packaging import AppPackage, pack
from keylane.spark.spark_session import refuse_speculation, use_this_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql import Column

    from keylane.spec import AppSpec

_BYTES_TYPES = ("binary", "string")
_SORTABLE_TYPES = (t.NumericType, t.StringType, t.BinaryType, t.DateType, t.TimestampType, t.TimestampNTZType)
_HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_POSITION_TYPES = {"topic": "string", "partition": "int", "offset": "bigint"}
"""Columns of ``keylane.topic`` that give a message its position."""
_LETTER_DDL = "letter STRING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The column names that the user gave."""

    key: str
    value: str
    order_by: tuple[str, ...]
    headers: str | None = None
    timestamp: str | None = None
    event_id: str | None = None


def run(df: DataFrame, app: AppSpec, named: Columns, partitions: int | None) -> DataFrame:
    """Implementation of :func:`keylane.ordered`."""
    if not isinstance(df, DataFrame):
        raise SettingsError(f"ordered(): df must be a DataFrame, got a {type(df).__name__}")
    app.check()
    if not app.order.by_key or app.versions is not None:
        what = f"order={app.order!r}" if not app.order.by_key else "versions="
        raise SettingsError(
            f"ordered() runs the rows of a key in the order of order_by, so the app must not have {what}: leave it out"
        )
    if app.on_failure.blocks and app.on_failure not in POLICIES.values():
        raise SettingsError(
            f"ordered(): a failure policy of your own must not block, got on_failure={app.on_failure!r}; let it skip "
            "or park"
        )
    if partitions is not None and (type(partitions) is not int or partitions < 1):
        raise SettingsError(f"ordered(): partitions must be a whole number of at least 1, got {partitions!r}")
    spark = df.sparkSession
    refuse_speculation(spark)
    use_this_python(spark)
    plan, columns, ddl = _plan(df, app, named)
    if plan.stream:
        _check_stream(app, named, plan)
    count = partitions or spark.sparkContext.defaultParallelism
    plan = replace(plan, tasks=count)
    orders = [f"{ORDER}{number}" for number in range(len(named.order_by))]
    # Rows without a key have no order, so they are spread over all tasks.
    spread = f.when(f.col("key").isNull(), f.hash(*orders))
    rows = df.select(*columns).repartition(count, f.col("key"), spread)
    if not plan.stream:
        # By the order first, so that rows of many keys are mixed and their lanes run in parallel.
        rows = rows.sortWithinPartitions(*orders, "key")
    return map_in_arrow(rows, _function(pack(app), plan), ddl)


def map_in_arrow(
    df: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], ddl: str
) -> DataFrame:
    """``df.mapInArrow(function, ddl)`` without its needless requirement of pandas."""
    mapped = UserDefinedFunction(function, returnType=ddl, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    classic: Any = df
    column: Any = mapped(*[df[name] for name in df.columns])
    found: DataFrame = type(classic)(classic._jdf.mapInArrow(column._jc, False, None), df.sparkSession)  # noqa: SLF001
    return found


def _function(
    package: AppPackage, plan: FramePlan
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def lanes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        logs.set_up(logging.INFO)
        context: Any = TaskContext.get()
        batch = context.getLocalProperty("streaming.sql.batchId")
        task = FrameTask(
            package.open(), plan, task=context.partitionId(), epoch=0 if batch is None else int(batch)
        )
        yield from task.run(batches)

    return lanes


def _plan(df: DataFrame, app: AppSpec, named: Columns) -> tuple[FramePlan, list[Column], str]:
    """The plan for the tasks, the input columns in their types, and the schema of the outcomes."""
    kinds = {field.name: field.dataType for field in df.schema}
    if not named.order_by:
        raise SettingsError("ordered(order_by=…): name at least one column")
    for name in named.order_by:
        _check_exists(kinds, name, "order_by")
    if len(set(named.order_by)) < len(named.order_by):
        raise SettingsError(
            f"ordered(order_by={list(named.order_by)!r}): a column is named twice; name it once"
        )
    columns = [
        _bytes(kinds, named.key, "key").alias("key"),
        _bytes(kinds, named.value, "value").alias("value"),
    ]
    for number, name in enumerate(named.order_by):
        if not isinstance(kinds[name], _SORTABLE_TYPES):
            raise SettingsError(
                f"ordered(order_by={name!r}): the column must be a number, a time, text or bytes, got a "
                f"{kinds[name].simpleString()}"
            )
        columns.append(_column(name).alias(f"{ORDER}{number}"))
    position = "partition" in kinds and "offset" in kinds
    own = [name for name in _POSITION_TYPES if name in kinds and position]
    for name in own:
        if kinds[name].simpleString() != _POSITION_TYPES[name]:
            raise SettingsError(
                f"column {name!r} must be a {_POSITION_TYPES[name]}, got a {kinds[name].simpleString()}; cast it, or "
                "rename it if it is something else"
            )
        columns.append(_column(name).alias(name))
    timestamp = _optional(kinds, named.timestamp, "timestamp", "timestamp")
    headers = _optional(kinds, named.headers, "headers", _HEADERS_TYPE)
    for column, shown in ((timestamp, "timestamp"), (headers, "headers")):
        if column is not None:
            columns.append(column.alias(shown))
    if named.event_id is not None:
        columns.append(_bytes(kinds, named.event_id, "event_id").alias("event_id"))
    carried, ddl = _carried(kinds, named.order_by, position=position)
    plan = FramePlan(
        source=app.source,
        order_by=named.order_by,
        carried=carried,
        position=position,
        topic="topic" in own,
        timestamp=timestamp is not None,
        headers=headers is not None,
        event_id=named.event_id is not None,
        stream=df.isStreaming,
    )
    return plan, columns, ddl


def _carried(
    kinds: dict[str, t.DataType], order_by: tuple[str, ...], *, position: bool
) -> tuple[tuple[int, ...], str]:
    """The columns of ``order_by`` that the outcomes do not have, and the schema that includes them."""
    known = {*outcomes.SCHEMA.names, "letter", "results"}
    carried, ddl = [], [outcomes.DDL, _LETTER_DDL, RESULTS_DDL]
    for number, name in enumerate(order_by):
        if position and name in ("partition", "offset"):
            continue
        if name.lower() in known:
            raise SettingsError(
                f"ordered(order_by={name!r}): the outcomes have another column of this name; rename yours: "
                f"df.withColumnRenamed({name!r}, …)"
            )
        carried.append(number)
        quoted = name.replace("`", "``")
        ddl.append(f"`{quoted}` {kinds[name].simpleString()}")
    return tuple(carried), ", ".join(ddl)


def _check_stream(app: AppSpec, named: Columns, plan: FramePlan) -> None:
    if named.order_by != ("offset",) or not plan.position:
        raise SettingsError(
            "ordered() over a stream needs order_by='offset' and the columns 'partition' and 'offset' of its source, "
            "because only the order of the source holds across micro-batches. For another order read a table "
            "(spark.read)"
        )
    if app.keeps_state:
        raise SettingsError(
            "ordered() over a stream does not support State and Timers: nothing is kept from one micro-batch to the "
            "next. Use app.start(spark), or a DataFrame that is not a stream"
        )
    if app.on_failure.stops:
        raise SettingsError(
            f"ordered() over a stream does not support on_failure={app.on_failure!r}: a lane cannot stay stopped "
            "across micro-batches. Use on_failure='skip', or app.start(spark), which keeps lanes stopped"
        )


def _column(name: str) -> Column:
    quoted = name.replace("`", "``")
    return f.col(f"`{quoted}`")


def _check_exists(kinds: dict[str, t.DataType], name: str, argument: str) -> None:
    if not isinstance(name, str):
        raise SettingsError(f"ordered(): {argument} must be the name of a column, got {name!r}")
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(kinds)}"
        raise SettingsError(f"ordered({argument}={name!r}): the frame has no such column{hint}")


def _bytes(kinds: dict[str, t.DataType], name: str, argument: str) -> Column:
    _check_exists(kinds, name, argument)
    kind = kinds[name].simpleString()
    if kind not in _BYTES_TYPES:
        remedy = "to_json(struct(…))" if argument == "value" else "cast('string')"
        raise SettingsError(
            f"ordered({argument}={name!r}): the column must be bytes or text, got a {kind}; convert it with {remedy}"
        )
    return _column(name).cast("binary")


def _optional(kinds: dict[str, t.DataType], name: str | None, usual: str, kind: str) -> Column | None:
    """The named column, or the column of the usual name; None when there is neither."""
    if name is None and usual not in kinds:
        return None
    found = usual if name is None else name
    _check_exists(kinds, found, usual)
    if kinds[found].simpleString() != kind:
        raise SettingsError(
            f"ordered({usual}={found!r}): the column must be of type {kind}, got {kinds[found].simpleString()}; cast "
            "it, or rename it if it is something else"
        )
    return _column(found)
