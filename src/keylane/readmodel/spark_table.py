"""Read model as a Parquet table, into which events of topics or DataFrames are merged."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from keylane.dataframe.arrange import map_in_arrow
from keylane.dataframe.rows import FrameRecord, headers_of, milliseconds
from keylane.errors import BrokerError, DataLossError, Poison, SettingsError
from keylane.kafka.offset_resolver import EARLIEST, OffsetResolver, TopicSelection
from keylane.kafka.settings import settings_from_options
from keylane.message import Message
from keylane.readmodel.snapshots import Snapshots
from keylane.spark.spark_session import use_this_python
from keylane.spark.topic import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import Column, SparkSession

    from keylane.readmodel.model import ReadModel
    from keylane.readmodel.snapshots import Pointer

log = logging.getLogger("keylane.readmodel.model")

_DDL = {int: "BIGINT", float: "DOUBLE", str: "STRING", bool: "BOOLEAN", datetime: "TIMESTAMP"}
_ARROW = {
    int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_(), datetime: pa.timestamp("us", tz="UTC"),
}  # fmt: skip
_REFUSED = "_refused"
_INPUT_COLUMNS = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "timestamp": "timestamp",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "event_id": "binary",
}
"""The columns that are read, with their types; a column that a frame does not have is null."""
_OWN_OPTIONS = ("every", "bootstrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """The result of an update."""

    events: int
    """Events of the model's types, including the refused ones."""
    refused: int
    """Events that did not fit and were left out."""
    why: str | None
    """The position of one of those, and why it was refused."""
    snapshot: int
    """The number of the current snapshot; 0 before the first."""


class SparkTable:
    """A read model in a folder: Parquet, with a row per key.

    :meth:`update` merges the new events of a topic, :meth:`start` does so repeatedly, and :meth:`merge` takes any
    DataFrame. :meth:`frame` reads the table; :meth:`view` registers it for SQL.

    An update writes a complete new snapshot and then switches to it, with the offsets in the same file: a crash in
    between leaves the table unchanged. A frame keeps reading the snapshot of its creation, which is kept for
    ``retain`` seconds after it was replaced.

    Raises :class:`SettingsError` when the folder has a table of another model.
    """

    def __init__(
        self, model: ReadModel, spark: SparkSession, path: str | Path, *, retain: float = 600.0
    ) -> None:
        if type(retain) not in (int, float) or not 0 <= retain < inf:
            raise SettingsError(
                f"{model.name}: retain must be a number of seconds, 0 or more, got {retain!r}"
            )
        self.model = model
        self._spark = spark
        self._retain = retain
        self._snapshots = Snapshots(spark, str(path))
        use_this_python(spark)
        self._current()

    def frame(self) -> DataFrame:
        """The key, the fields and the status of the current snapshot. A later update does not change the frame."""
        model = self.model
        shown = [f.col(_quoted(name)) for name in (model.key, *model.columns)]
        status = model.status_sql("`")
        if status is not None:
            shown.append(f.expr(status).alias("status"))
        return self._before(self._current()).select(*shown)

    def view(self, name: str | None = None) -> DataFrame:
        """Register :meth:`frame` as a temporary view of this session, by default under the model's name."""
        found = self.frame()
        found.createOrReplaceTempView(name or self.model.name)
        return found

    def merge(self, df: DataFrame) -> MergeResult:
        """Merge the events of a DataFrame.

        It needs the columns ``key`` and ``value``. The columns ``headers``, ``timestamp``, ``topic``, ``partition`` and
        ``offset``, as in ``keylane.topic``, and ``event_id`` are used if they exist.
        """
        given: object = df
        if not isinstance(given, DataFrame) or given.isStreaming:
            raise SettingsError(
                f"{self.model.name}: merge() needs a DataFrame that is not streaming; follow a topic with start(topic)"
            )
        pointer = self._current()
        return self._merge(df, pointer, pointer.offsets if pointer is not None else {})

    def update(self, topic: str, *, bootstrap: str | None = None, **options: Any) -> MergeResult:
        """Merge the topic's events since the last update; the first update merges all of them.

        The topic is an app's source, or the sink of an app whose results are events. Only committed messages are read.
        An event that does not fit is left out, counted and logged. ``bootstrap`` is the broker's address, by default
        the environment's ``KEYLANE_BOOTSTRAP``; options that begin with ``kafka.`` go to the client.

        Raises :class:`BrokerError` when no broker answers or the topic does not exist,
        :class:`keylane.errors.DataLossError` when the topic was recreated, and Spark's error when messages were
        deleted before they were merged.
        """
        settings = settings_from_options(
            bootstrap, options, known=_OWN_OPTIONS, what=f"{self.model.name}: update()"
        )
        pointer = self._current()
        offsets = dict(pointer.offsets) if pointer is not None else {}
        begun = {int(partition): at for partition, at in offsets.get(topic, {}).items()}
        resolver = OffsetResolver(settings, TopicSelection(topics=(topic,)), committed=True)
        ends = {partition: end for (_, partition), end in resolver.latest(resolver.places()).items()}
        for partition, at in begun.items():
            if ends.get(partition, 0) < at:
                raise DataLossError(
                    f"{topic}/{partition} ends at offset {ends.get(partition, 0)}, but it was merged up to {at}: the "
                    "topic was recreated. Merge its messages with table.merge(df), or remove "
                    f"{self._snapshots.root}"
                )
        if begun == ends and pointer is not None:
            return MergeResult(events=0, refused=0, why=None, snapshot=pointer.number)
        register(self._spark)
        reader = self._spark.read.format("keylane.topic").options(
            **{f"kafka.{name}": value for name, value in settings.extra},
            **{
                "kafka.bootstrap.servers": settings.bootstrap,
                "subscribe": topic,
                "includeHeaders": "true",
                "startingOffsets": _json(topic, {p: begun.get(p, EARLIEST) for p in ends}),
                "endingOffsets": _json(topic, ends),
            },
        )
        offsets[topic] = {str(partition): end for partition, end in sorted(ends.items())}
        return self._merge(reader.load(), pointer, offsets)

    def start(
        self, topic: str, *, every: float = 10.0, bootstrap: str | None = None, **options: Any
    ) -> TableUpdater:
        """Update in a thread until stopped: at once, and then ``every`` seconds after each update."""
        if type(every) not in (int, float) or not 0 < every < inf:
            raise SettingsError(
                f"{self.model.name}: every must be a number of seconds above 0, got {every!r}"
            )
        settings_from_options(bootstrap, options, known=_OWN_OPTIONS, what=f"{self.model.name}: start()")
        return TableUpdater(
            lambda: self.update(topic, bootstrap=bootstrap, **options), every, self.model.name
        )

    def _merge(
        self, df: DataFrame, pointer: Pointer | None, offsets: Mapping[str, Mapping[str, int]]
    ) -> MergeResult:
        model, observed = self.model, Observation()
        facts = self._facts(df).observe(
            observed,
            f.count(f.lit(1)).alias("events"),
            f.count(_REFUSED).alias("refused"),
            f.min(_REFUSED).alias("why"),
        )
        rows = facts.where(f.col(_REFUSED).isNull()).drop(_REFUSED)
        if pointer is not None:
            rows = self._before(pointer).unionByName(rows)
        folder = self._snapshots.new_folder()
        self._joined(rows).write.parquet(self._snapshots.data(folder))
        number = self._snapshots.publish(folder, model.form, offsets).number
        self._snapshots.tidy(self._retain)
        found = observed.get
        # Spark omits the counts of an empty frame.
        events, refused = found.get("events", 0), found.get("refused", 0)
        done = MergeResult(events=events, refused=refused, why=found.get("why"), snapshot=number)
        if done.refused:
            log.warning(
                "left out events that do not fit model=%s refused=%d events=%d example=%s",
                model.name, done.refused, done.events, done.why,
            )  # fmt: skip
        return done

    def _joined(self, rows: DataFrame) -> DataFrame:
        """One row per key: of every event type, the fields of the row with the highest rank."""
        model = self.model
        best: list[Column] = []
        ranks: list[Column] = []
        fields: list[Column] = []
        for number, (kind, facts) in enumerate(model.fields.items()):
            column = model.rank_column(kind)
            rank = f.col(_quoted(column))
            # One maximum per type instead of one per field: Spark sorts for each of them.
            whole = f.struct(rank.alias("rank"), *(f.col(_quoted(name)).alias(name) for name in facts))
            best.append(f.max(f.when(rank.isNotNull(), whole)).alias(f"best{number}"))
            ranks.append(f.col(f"best{number}").getField("rank").alias(column))
            fields += [f.col(f"best{number}").getField(name).alias(name) for name in facts]
        key = f.col(_quoted(model.key)).alias("key")
        return rows.groupBy(key).agg(*best).select(f.col("key").alias(model.key), *fields, *ranks)

    def _facts(self, df: DataFrame) -> DataFrame:
        """One row per event of the model's types: its key, fields and rank; the columns of other types are null."""
        kinds = {column.name: column.dataType.simpleString() for column in df.schema}
        for needed in ("key", "value"):
            if needed not in kinds:
                raise SettingsError(
                    f"{self.model.name}: the frame has no column {needed!r}; it has {', '.join(kinds)}. Rename the "
                    "right one: df.withColumnRenamed(…)"
                )
        taken: list[Column] = []
        for name, kind in _INPUT_COLUMNS.items():
            usual = kinds.get(name, "void")
            column = f.col(name) if name in kinds else f.lit(None)
            if usual not in ("void", kind) and not (kind == "binary" and usual == "string"):
                raise SettingsError(
                    f"{self.model.name}: the column {name!r} must be a {kind}, got a {usual}; cast it, or rename it if "
                    "it is something else"
                )
            taken.append(column.cast(kind).alias(name))
        columns = {**self._columns(), _REFUSED: "STRING"}
        ddl = ", ".join(f"{_quoted(name)} {kind}" for name, kind in columns.items())
        return map_in_arrow(df.select(*taken), _reading(self.model), ddl)

    def _columns(self) -> dict[str, str]:
        """The table's columns with their Spark types."""
        model = self.model
        columns = {model.key: "STRING"}
        columns |= {name: _DDL[fact.kind] for name, fact in model.columns.items()}
        return columns | {model.rank_column(kind): "STRING" for kind in model.fields}

    def _before(self, pointer: Pointer | None) -> DataFrame:
        ddl = ", ".join(f"{_quoted(name)} {kind}" for name, kind in self._columns().items())
        if pointer is None:
            return self._spark.createDataFrame([], ddl)
        return self._spark.read.schema(ddl).parquet(self._snapshots.data(pointer.folder))

    def _current(self) -> Pointer | None:
        pointer = self._snapshots.current()
        if pointer is not None and pointer.form != self.model.form:
            raise SettingsError(
                f"{self._snapshots.root} has a table of another model than {self.model.name!r}: fields, key, "
                "event_type, version or time differ. Choose another folder, and build the table from its topic again"
            )
        return pointer


class TableUpdater:
    """A thread that keeps a table up to date, with the methods of a ``StreamingQuery``."""

    def __init__(self, update: Callable[[], MergeResult], every: float, name: str) -> None:
        self._update = update
        self._every = every
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"keylane-{name}", daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """True while the thread runs."""
        return self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """The error that ended it; None otherwise."""
        return self._error

    def stop(self, timeout: float = 60.0) -> None:
        """End after the running update, waiting up to ``timeout`` seconds. Raises the error that ended it before."""
        self._stopping.set()
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._update()
            while not self._stopping.wait(self._every):
                try:
                    self._update()
                except BrokerError as error:  # the first update worked, so the broker will answer again
                    log.warning("could not update the read model retry_in=%gs error=%s", self._every, error)
        except BaseException as error:
            self._error = error
            if not self._stopping.is_set():
                log.exception("stopped updating the read model")


def _json(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): at for partition, at in offsets.items()}})


def _quoted(name: str) -> str:
    doubled = name.replace("`", "``")
    return f"`{doubled}`"


def _reading(model: ReadModel) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for executors: it turns rows into the fields that they write, exactly as a handler does."""
    kinds = {model.key: pa.string()}
    kinds |= {name: _ARROW[fact.kind] for name, fact in model.columns.items()}
    kinds |= {model.rank_column(kind): pa.string() for kind in model.fields}
    schema = pa.schema([*kinds.items(), (_REFUSED, pa.string())])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [row for msg in _messages(batch) if (row := _row(model, msg)) is not None]
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    return read


def _row(model: ReadModel, msg: Message) -> dict[str, Any] | None:
    try:
        facts = model.facts(msg)
    except Poison as error:
        return {_REFUSED: f"{msg.position}: {error}"}
    if facts is None:
        return None
    fields = zip(model.fields[facts.type], facts.values, strict=True)
    return {model.key: facts.key, model.rank_column(facts.type): facts.rank, **dict(fields)}


def _messages(batch: pa.RecordBatch) -> Iterator[Message]:
    """The rows as messages. Rows without a position all get the same one, so that their ranks do not depend on it."""
    names = [name for name in _INPUT_COLUMNS if name != "timestamp"]
    times = milliseconds(batch.column("timestamp"))
    rows = zip(times, *(batch.column(name).to_pylist() for name in names), strict=True)
    for time, key, value, headers, topic, partition, offset, event_id in rows:
        place = topic or "", partition or 0, offset or 0
        yield Message(FrameRecord(key, value, place, time, headers_of(headers, event_id), ()))
