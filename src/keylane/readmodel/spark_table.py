"""A read model as a Parquet table: events merged in, from topics or frames, in any order, any number of times."""

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
_TAKEN = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "timestamp": "timestamp",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "event_id": "binary",
}
"""The columns that are looked at, and what they are cast to; null where a frame has none of the name."""
_KNOWN = ("every", "bootstrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What an update did."""

    events: int
    """Events of the model's types, the refused ones among them."""
    refused: int
    """Events that did not fit, and are not in the table."""
    why: str | None
    """Of one of those: where it is, and why."""
    snapshot: int
    """The number of the snapshot that counts now; 0 before the first."""


class SparkTable:
    """A read model in a folder: Parquet, with a row per key.

    :meth:`update` merges what a topic has had since the last time, :meth:`start` does so again and again; :meth:`merge`
    takes any DataFrame. :meth:`frame` reads it, :meth:`view` makes it known to SQL under the model's name.

    An update writes a whole new snapshot and then switches to it, with the offsets in the same small file: a crash in
    the middle leaves the table as it was. Who reads keeps the snapshot that was there when the frame was made, for
    ``retain`` seconds after it was replaced.

    Raises :class:`SettingsError` when the folder has a table of another model.
    """

    def __init__(
        self, model: ReadModel, spark: SparkSession, path: str | Path, *, retain: float = 600.0
    ) -> None:
        if type(retain) not in (int, float) or not 0 <= retain < inf:
            raise SettingsError(f"{model.name}: retain={retain!r}: needs seconds, 0 or more")
        self.model = model
        self._spark = spark
        self._retain = retain
        self._snapshots = Snapshots(spark, str(path))
        use_this_python(spark)
        self._current()

    def frame(self) -> DataFrame:
        """The key, the fields and the status, as they are now. It stays as it is; ask again for what is newer."""
        model = self.model
        shown = [f.col(_quoted(name)) for name in (model.key, *model.columns)]
        status = model.status_sql("`")
        if status is not None:
            shown.append(f.expr(status).alias("status"))
        return self._before(self._current()).select(*shown)

    def view(self, name: str | None = None) -> DataFrame:
        """Make :meth:`frame` a temporary view, of the model's name if not given, in this session."""
        found = self.frame()
        found.createOrReplaceTempView(name or self.model.name)
        return found

    def merge(self, df: DataFrame) -> Merged:
        """Merge the events of a frame: columns ``key`` and ``value``, and ``headers``, ``timestamp``, ``topic``,
        ``partition``, ``offset`` as ``keylane.topic`` has them, ``event_id`` if there is such a column.
        """  # noqa: D205 - one sentence
        given: object = df
        if not isinstance(given, DataFrame) or given.isStreaming:
            raise SettingsError(
                f"{self.model.name}: merge() needs a DataFrame that is a table; a topic is followed by start(topic)"
            )
        pointer = self._current()
        return self._merge(df, pointer, pointer.offsets if pointer is not None else {})

    def update(self, topic: str, *, bootstrap: str | None = None, **options: Any) -> Merged:
        """Merge what the topic has had since the last update; the first time, all that it has.

        The topic is an app's source, or the sink of one whose results are events. Only what is committed is read. An
        event that does not fit is left out, counted and told. ``bootstrap`` is the broker's address, or the
        environment's ``KEYLANE_BOOTSTRAP``; options that begin with ``kafka.`` go to the client.

        Raises :class:`BrokerError` when there is no answer or no such topic, :class:`keylane.errors.DataLossError` when
        the topic was made anew, and Spark's error when messages were deleted before they were merged.
        """
        settings = settings_from_options(bootstrap, options, known=_KNOWN, what=f"{self.model.name}: update()")
        pointer = self._current()
        offsets = dict(pointer.offsets) if pointer is not None else {}
        begun = {int(partition): at for partition, at in offsets.get(topic, {}).items()}
        extent = OffsetResolver(settings, TopicSelection(topics=(topic,)), committed=True)
        ends = {partition: end for (_, partition), end in extent.latest(extent.places()).items()}
        for partition, at in begun.items():
            if ends.get(partition, 0) < at:
                raise DataLossError(
                    f"{topic}/{partition} ends at offset {ends.get(partition, 0)}, and {at} were merged already: it "
                    f"was made anew. What it has now can be merged by table.merge(df); or remove {self._snapshots.root}"
                )
        if begun == ends and pointer is not None:
            return Merged(events=0, refused=0, why=None, snapshot=pointer.number)
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
    ) -> Following:
        """Update now and then every so many seconds, in a thread, until it is stopped."""
        if type(every) not in (int, float) or not 0 < every < inf:
            raise SettingsError(f"{self.model.name}: every={every!r}: needs seconds, more than 0")
        settings_from_options(bootstrap, options, known=_KNOWN, what=f"{self.model.name}: start()")
        return Following(lambda: self.update(topic, bootstrap=bootstrap, **options), every, self.model.name)

    def _merge(
        self, df: DataFrame, pointer: Pointer | None, offsets: Mapping[str, Mapping[str, int]]
    ) -> Merged:
        model, told = self.model, Observation()
        facts = self._facts(df).observe(
            told,
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
        found = told.get
        # Spark leaves out the count of what it saw to be empty.
        events, refused = found.get("events", 0), found.get("refused", 0)
        done = Merged(events=events, refused=refused, why=found.get("why"), snapshot=number)
        if done.refused:
            log.warning(
                "%s: %d of %d events do not fit and are left out, such as %s",
                model.name, done.refused, done.events, done.why,
            )  # fmt: skip
        return done

    def _joined(self, rows: DataFrame) -> DataFrame:
        """A row for each key: of every event type, the rank and the fields of the row that has the highest rank."""
        model = self.model
        best: list[Column] = []
        ranks: list[Column] = []
        fields: list[Column] = []
        for number, (kind, facts) in enumerate(model.fields.items()):
            column = model.rank_column(kind)
            rank = f.col(_quoted(column))
            # One maximum for a type, not one for each of its fields: Spark sorts for these, and is slow with many.
            whole = f.struct(rank.alias("rank"), *(f.col(_quoted(name)).alias(name) for name in facts))
            best.append(f.max(f.when(rank.isNotNull(), whole)).alias(f"best{number}"))
            ranks.append(f.col(f"best{number}").getField("rank").alias(column))
            fields += [f.col(f"best{number}").getField(name).alias(name) for name in facts]
        key = f.col(_quoted(model.key)).alias("key")
        return rows.groupBy(key).agg(*best).select(f.col("key").alias(model.key), *fields, *ranks)

    def _facts(self, df: DataFrame) -> DataFrame:
        """A row for each event of the model's types: its key, the fields and the rank of its type, all others null."""
        kinds = {column.name: column.dataType.simpleString() for column in df.schema}
        for needed in ("key", "value"):
            if needed not in kinds:
                raise SettingsError(
                    f"{self.model.name}: the frame has no column {needed!r}; it has {', '.join(kinds)}. Rename the one "
                    "that is meant: df.withColumnRenamed(…)"
                )
        taken: list[Column] = []
        for name, kind in _TAKEN.items():
            usual = kinds.get(name, "void")
            column = f.col(name) if name in kinds else f.lit(None)
            if usual not in ("void", kind) and not (kind == "binary" and usual == "string"):
                raise SettingsError(
                    f"{self.model.name}: the column {name!r} is a {usual}, where a {kind} is needed; cast it, or "
                    "rename it if it is something else"
                )
            taken.append(column.cast(kind).alias(name))
        columns = {**self._columns(), _REFUSED: "STRING"}
        ddl = ", ".join(f"{_quoted(name)} {kind}" for name, kind in columns.items())
        return map_in_arrow(df.select(*taken), _reading(self.model), ddl)

    def _columns(self) -> dict[str, str]:
        """Of the table, with its types for Spark."""
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
                f"{self._snapshots.root} has a table of another model than {self.model.name!r} is now: fields, key, "
                "event_type, version or time differ. Choose another folder: the table is made anew there from its topic"
            )
        return pointer


class Following:
    """A table that is kept up to date by a thread. A method for each question, as of a ``StreamingQuery``."""

    def __init__(self, update: Callable[[], Merged], every: float, name: str) -> None:
        self._update = update
        self._every = every
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"keylane-{name}", daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether it goes on."""
        return self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """What ended it; None as long as nothing did."""
        return self._error

    def stop(self, timeout: float = 60.0) -> None:
        """Let the update that is running finish, and end. Raises what ended it before, if anything did."""
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
                except BrokerError as error:  # it answered before, and will again
                    log.warning("%s; asked again in %g s", error, self._every)
        except BaseException as error:
            self._error = error
            if not self._stopping.is_set():
                log.exception("the read model is not kept up to date any more")


def _json(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): at for partition, at in offsets.items()}})


def _quoted(name: str) -> str:
    doubled = name.replace("`", "``")
    return f"`{doubled}`"


def _reading(model: ReadModel) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """On an executor: rows become facts, by the same function that a handler calls."""
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
    """Rows without a position have none that could be told: the same for all of them, whenever they come."""
    names = [name for name in _TAKEN if name != "timestamp"]
    times = milliseconds(batch.column("timestamp"))
    rows = zip(times, *(batch.column(name).to_pylist() for name in names), strict=True)
    for time, key, value, headers, topic, partition, offset, event_id in rows:
        place = topic or "", partition or 0, offset or 0
        yield Message(FrameRecord(key, value, place, time, headers_of(headers, event_id), ()))
