"""The data source ``keylane.topic``: topics as DataFrames, tables and streams, without Spark's connector jar.

Columns, options and their meaning are those of Spark's own Kafka source. The offsets of a stream are in Spark's
checkpoint. A micro-batch is a range of offsets in every partition, and is the same whenever it is read again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow

from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import wait_for_cluster
from keylane.kafka.offset_range import (
    OffsetRange,
    RangeReaderSettings,
    range_reader,
    report_loss,
    split_ranges,
)
from keylane.kafka.offset_resolver import OffsetResolver
from keylane.spark.pushdown import Narrowing
from keylane.spark.rows import DDL, HEADERS_DDL, Rows
from keylane.spark.spark_session import use_this_python
from keylane.spark.topic_options import TopicOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import Filter
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from keylane.kafka.offset_resolver import PartitionId

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register the format ``"keylane.topic"`` for ``spark.read`` and ``spark.readStream``.

    Filters reach the source when ``spark.sql.python.filterPushdown.enabled`` is on. If it is not set, it is turned on
    for this session.
    """
    use_this_python(spark)
    pushes = spark.conf.get(_PUSHDOWN, "true") == "true"  # not turned off
    if pushes:
        spark.conf.set(_PUSHDOWN, "true")
    settings = {"bootstrap": os.environ.get("KEYLANE_BOOTSTRAP"), "pushes": pushes}
    spark.dataSource.register(type("TopicSource", (TopicSource,), settings))


class RangePartition(InputPartition):
    """Spark's unit of work: a range of offsets."""

    def __init__(self, span: OffsetRange) -> None:
        super().__init__(span)
        self.span = span


class TopicSource(DataSource):
    """The data source. :func:`register` makes a subclass with what the driver's process knows."""

    bootstrap: ClassVar[str | None] = None
    pushes: ClassVar[bool] = False
    """True if Spark hands over filters. Spark refuses a reader that can take them when it does not."""

    @classmethod
    def name(cls) -> str:
        """As in ``spark.read.format("keylane.topic")``."""
        return "keylane.topic"

    def schema(self) -> str:
        """Spark's columns for Kafka. ``.schema(…)`` may select some of them: only those are produced."""
        headers = str(self.options.get("includeHeaders", "false")).lower() == "true"
        return f"{DDL}, {HEADERS_DDL}" if headers else DDL

    def reader(self, schema: StructType) -> TopicReader:
        """For a table."""
        options = TopicOptions.parse(self.options, stream=False, bootstrap=self.bootstrap)
        return (FilteringReader if self.pushes else TopicReader)(options, Rows(schema))

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802 - Spark's name
        """For a stream."""
        options = TopicOptions.parse(self.options, stream=True, bootstrap=self.bootstrap)
        return TopicStreamReader(options, Rows(schema))


class _TopicReading:
    """What tables and streams share: turning a range into record batches."""

    def __init__(self, options: TopicOptions, rows: Rows) -> None:
        self._options = options
        self._rows = rows

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, on an executor. A table without rows has one partition that is empty."""
        if not isinstance(partition, RangePartition):
            return
        options, span = self._options, partition.span
        settings = RangeReaderSettings(
            kafka=options.settings,
            group=options.group,
            committed=options.committed,
            fail_on_loss=options.fail_on_loss,
        )
        with range_reader(settings) as reader:
            for messages in reader.read(span):
                yield self._rows.to_arrow(span.topic, span.partition, messages)

    def _extent(self) -> OffsetResolver:
        options = self._options
        return OffsetResolver(options.settings, options.selection, committed=options.committed)

    def _divided(self, spans: list[OffsetRange]) -> list[RangePartition]:
        wanted = self._options.min_partitions
        if wanted is not None and wanted > len(spans):
            spans = split_ranges(spans, wanted)
        return [RangePartition(span) for span in spans]


class TopicReader(_TopicReading, DataSourceReader):
    """A table: the messages between two bounds that are fixed when the query is planned."""

    def __init__(self, options: TopicOptions, rows: Rows) -> None:
        super().__init__(options, rows)
        self._narrowing = Narrowing()

    def partitions(self) -> Sequence[RangePartition]:
        """Plan the read, on the driver: a partition for each one of the topics, or more with ``minPartitions``."""
        options, extent = self._options, self._extent()
        places = extent.places()
        if not places:
            raise BrokerError(f"option subscribePattern={options.selection.pattern!r}: no topic matches it")
        starts = extent.resolve(options.starting, places, fail_on_loss=options.fail_on_loss)
        ends = extent.resolve(options.ending, places, fail_on_loss=options.fail_on_loss)
        if not (options.starting.times or options.ending.times):
            for topic, partition in places:
                start, end = starts[topic, partition], ends[topic, partition]
                if start > end:
                    raise SettingsError(
                        f"{topic}/{partition}: reading begins at offset {start} and ends at {end}"
                    )
        spans = extent.ranges(starts, ends, fail_on_loss=options.fail_on_loss)
        return self._divided(self._narrowed(extent, spans))

    def _narrowed(self, extent: OffsetResolver, spans: list[OffsetRange]) -> list[OffsetRange]:
        narrowing = self._narrowing
        spans = narrowing.apply(spans)
        if narrowing.since is None or not spans:
            return spans
        since = extent.since({(span.topic, span.partition): narrowing.since for span in spans})
        later = [(span, since[span.topic, span.partition]) for span in spans]
        return [
            replace(span, start=max(span.start, offset)) for span, offset in later if 0 <= offset < span.end
        ]


class FilteringReader(TopicReader):
    """A table whose query's filters are known beforehand: excluded ranges are not even fetched."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Note all filters, and leave all of them to Spark as well."""
        for given in filters:
            self._narrowing.add(given)
        return filters


class TopicStreamReader(_TopicReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. An offset is ``{"topic": {"0": 23}}``, as in Spark's own source: the next offset of each partition."""

    def __init__(self, options: TopicOptions, rows: Rows) -> None:
        super().__init__(options, rows)
        self._target: dict[PartitionId, int] | None = None
        # Made in the planner's process, where they are used; never pickled.
        self._asked: OffsetResolver | None = None
        self._latest: dict[PartitionId, int] = {}
        self._told: set[str] = set()  # missing topics that were logged

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's names, here and below
        """``maxOffsetsPerTrigger``."""
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The start of a new query; a restarted one has its position in the checkpoint."""
        options, extent = self._options, self._connect()
        return _json(extent.resolve(options.starting, extent.places(), fail_on_loss=options.fail_on_loss))

    @wait_for_cluster
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember the current ends of the topics: nothing beyond them is read."""
        extent = self._connect()
        self._target = extent.latest(extent.places(strict=False))

    @wait_for_cluster
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next micro-batch."""
        extent, begun = self._connect(), _places(start)
        ends = self._latest = extent.latest(extent.places(strict=False))
        if self._target is not None:
            ends = {place: min(ends.get(place, end), end) for place, end in self._target.items()}
        ends = self._with_what_is_missing(begun, ends)
        ends = self._with_what_is_new(begun, ends)
        if isinstance(limit, ReadMaxRows):
            ends = _limited(begun, ends, limit.max_rows)
        return _json(ends)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The ends of the topics, for the query's progress."""
        return _json(self._latest) if self._latest else None

    @wait_for_cluster
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[RangePartition]:
        """The micro-batch between two offsets: always the same for the same offsets."""
        begun, ends = _places(start), _places(end)
        # A partition that was added to a topic is read from its first message.
        starts = {place: begun.get(place, 0) for place in ends}
        wanted = {place: to for place, to in ends.items() if starts[place] < to}
        spans = self._connect().ranges(starts, wanted, fail_on_loss=self._options.fail_on_loss)
        return self._divided(spans)

    def _connect(self) -> OffsetResolver:
        if self._asked is None:
            self._asked = self._extent()
        return self._asked

    def _with_what_is_missing(
        self, begun: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]
    ) -> dict[PartitionId, int]:
        """Keep the position of a topic that is missing, if that is allowed: it may come back."""
        missing = {place: at for place, at in begun.items() if place not in ends}
        topics = {topic for topic, _ in missing}
        if topics and self._options.fail_on_loss:
            raise BrokerError(
                f"topic {', '.join(map(repr, sorted(topics)))} is being read and no longer exists. "
                "With the option failOnDataLoss=false, reading continues without it"
            )
        for topic in topics - self._told:
            report_loss(f"topic {topic!r} no longer exists", fail=False)
        self._told = topics
        return {**ends, **missing}

    def _with_what_is_new(
        self, begun: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]
    ) -> dict[PartitionId, int]:
        """Read a partition from its beginning if it ends before the current position: it was created again."""
        behind = {place for place, end in ends.items() if end < begun.get(place, 0)}
        for topic, partition in sorted(behind):
            end, read = ends[topic, partition], begun[topic, partition]
            what = f"{topic}/{partition} ends at offset {end}, before {read}, up to which it was read"
            report_loss(what, fail=self._options.fail_on_loss)
        return {**ends, **self._connect().earliest(behind)}


def _limited(
    begun: Mapping[PartitionId, int], ends: Mapping[PartitionId, int], most: int
) -> dict[PartitionId, int]:
    """Ends that cover about this many offsets, shared out in proportion to what each partition has; at least one."""
    sizes = {place: max(0, end - begun.get(place, 0)) for place, end in ends.items()}
    total = sum(sizes.values())
    if total <= most:
        return dict(ends)
    return {
        place: begun.get(place, 0) + max(1, size * most // total) if size else ends[place]
        for place, size in sizes.items()
    }


def _places(offset: Mapping[str, Mapping[str, int]]) -> dict[PartitionId, int]:
    return {(topic, int(p)): at for topic, partitions in offset.items() for p, at in partitions.items()}


def _json(places: Mapping[PartitionId, int]) -> dict[str, Any]:
    """JSON that is always in the same order: Spark compares the text."""
    found: dict[str, Any] = {}
    for (topic, partition), at in sorted(places.items()):
        found.setdefault(topic, {})[str(partition)] = at
    return found
