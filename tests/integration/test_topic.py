"""Topics as DataFrames. What needs no Spark is asked of the readers themselves, in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keylane.errors import BrokerError, DataLossError, SettingsError
from keylane.kafka import cluster as cluster_module
from keylane.kafka.offset_range import OffsetRange
from keylane.spark.topic import RangePartition, TopicReader, TopicSource, TopicStreamReader, register
from support.topics import Log, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

COLUMNS: dict[str, Any] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def schema(*names: str) -> StructType:
    return StructType([StructField(name, COLUMNS[name]) for name in names or COLUMNS])


class Topics:
    """Reads topics of the test broker without Spark."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def source(self, options: dict[str, str]) -> TopicSource:
        given = {"kafka.bootstrap.servers": self.log.bootstrap, "includeHeaders": "true", **options}
        return TopicSource(CaseInsensitiveDict(given))

    def reader(self, *names: str, **options: str) -> TopicReader:
        return self.source(options).reader(schema(*names))

    def stream(self, *names: str, **options: str) -> TopicStreamReader:
        return self.source(options).streamReader(schema(*names))

    def table(self, *names: str, **options: str) -> list[dict[str, Any]]:
        reader = self.reader(*names, **options)
        return rows(reader, reader.partitions())

    def offsets(self, **options: str) -> dict[int, list[int]]:
        """Of each partition."""
        found: dict[int, list[int]] = {}
        for row in self.table("partition", "offset", **options):
            found.setdefault(row["partition"], []).append(row["offset"])
        return found

    def delete(self, topic: str, partition: int, before: int) -> None:
        """As retention does."""
        asked = [TopicPartition(topic, partition, before)]
        for future in self.log.cluster._admin.delete_records(asked).values():
            future.result(10)


def rows(reader: TopicReader | TopicStreamReader, partitions: Iterable[Any]) -> list[dict[str, Any]]:
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


@pytest.fixture
def topics(log: Log) -> Topics:
    return Topics(log)


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % (i % 7), "value": b"%d" % i, **more} for i in range(count)]


def transactional(log: Log, topic: str, plan: str) -> None:
    """A word for each transaction: c committed, a aborted, o left open; a digit is how many messages it has."""
    for number, (kind, count) in enumerate(zip(plan[::2], plan[1::2], strict=True)):
        producer = Producer(
            {"bootstrap.servers": log.bootstrap, "transactional.id": f"{topic}-{number}", "linger.ms": 0}
        )
        producer.init_transactions(10)
        producer.begin_transaction()
        for i in range(int(count)):
            producer.produce(topic, value=b"%s%d" % (kind.encode(), i), partition=0)
        producer.flush(10)
        if kind == "c":
            producer.commit_transaction(10)
        elif kind == "a":
            producer.abort_transaction(10)
        else:
            _open.append(producer)


_open: list[Producer] = []  # held, or their transactions would be over


def test_the_columns_are_those_of_sparks_own_source(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=1, retention_ms="-1")
    log.send(
        name,
        [
            {
                "key": b"k",
                "value": b"v",
                "headers": [("a", b"1"), ("a", None)],
                "timestamp": 1_700_000_000_123,
            },
            {"key": None, "value": None, "timestamp": 1},
        ],
    )
    first, second = topics.table(subscribe=name)
    assert first["timestamp"].isoformat() == "2023-11-14T22:13:20.123000+00:00"
    del first["timestamp"], second["timestamp"]
    assert first == {
        "key": b"k", "value": b"v", "topic": name, "partition": 0, "offset": 0, "timestampType": 0,
        "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
    }  # fmt: skip
    assert second == {
        "key": None, "value": None, "topic": name, "partition": 0, "offset": 1, "timestampType": 0,
        "headers": None,
    }  # fmt: skip
    log.alter(name, message_timestamp_type="LogAppendTime")
    log.send(name, [{"value": b"later"}])
    assert [row["timestampType"] for row in topics.table("timestampType", subscribe=name)] == [0, 0, 1]


def test_table_has_every_message_once_in_order(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=3)
    sent = log.send(name, numbered(20_000))
    expected = {p: sorted(s.offset for s in sent if s.partition == p) for p in range(3)}
    assert topics.offsets(subscribe=name) == expected
    assert topics.offsets(subscribe=name, minPartitions="17") == expected
    assert len(topics.reader(subscribe=name, minPartitions="17").partitions()) in range(15, 20)
    assert topics.offsets(subscribePattern=f"{name}|nothing.*") == expected
    assert topics.offsets(assign=json.dumps({name: [2, 0]})) == {p: expected[p] for p in (0, 2)}


def test_edges_are_offsets_and_times(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=2, retention_ms="-1")
    log.send(name, [{"value": b"%d" % i, "partition": i % 2, "timestamp": 1000 + i} for i in range(20)])
    exact = topics.offsets(
        subscribe=name,
        startingOffsets=json.dumps({name: {"0": 3, "1": -2}}),
        endingOffsets=json.dumps({name: {"0": 5, "1": -1}}),
    )
    assert exact == {0: [3, 4], 1: list(range(10))}
    timed = topics.offsets(subscribe=name, startingTimestamp="1007", endingTimestamp="1012")
    assert timed == {0: [4, 5], 1: [3, 4, 5]}
    each = json.dumps({name: {"0": 1018, "1": 5000}})
    with pytest.raises(SettingsError, match="has no message at or after 5000"):
        topics.table(subscribe=name, startingOffsetsByTimestamp=each)
    latest = {"startingOffsetsByTimestamp": each, "startingOffsetsByTimestampStrategy": "latest"}
    assert topics.offsets(subscribe=name, **latest) == {0: [9]}
    with pytest.raises(SettingsError, match=f"{name}/1 is missing; name every partition"):
        topics.table(subscribe=name, startingOffsets=json.dumps({name: {"0": 3}}))
    with pytest.raises(SettingsError, match=f"{name}/7 is not among the partitions read"):
        topics.table(subscribe=name, startingOffsets=json.dumps({name: {"0": 3, "1": 3, "7": 0}}))
    with pytest.raises(SettingsError, match="begins at offset 5 and ends at 3"):
        topics.table(
            assign=json.dumps({name: [0]}),
            startingOffsets=json.dumps({name: {"0": 5}}),
            endingOffsets=json.dumps({name: {"0": 3}}),
        )
    beyond = {"assign": json.dumps({name: [0]}), "endingOffsets": json.dumps({name: {"0": 99}})}
    with pytest.raises(DataLossError, match=f"{name}/0 ends at offset 10, before 99"):
        topics.table(**beyond)
    assert topics.offsets(failOnDataLoss="false", **beyond) == {0: list(range(10))}


def test_an_empty_topic_is_an_empty_table(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=2)
    assert topics.table(subscribe=name) == []
    assert rows(topics.reader(subscribe=name), [object()]) == [], (
        "Spark's stand-in for a plan without partitions"
    )


def test_missing_topic_error_lists_known_topics(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=1)
    with pytest.raises(BrokerError, match=f"topic '{name}x' does not exist.*existing topics: "):
        topics.table(subscribe=f"{name},{name}x")
    with pytest.raises(BrokerError, match=f"topic '{name}' has no partition 3, only 0 to 0"):
        topics.table(assign=json.dumps({name: [3]}))
    with pytest.raises(BrokerError, match="no topic matches it"):
        topics.table(subscribePattern=f"{name}-.*")
    with pytest.raises(BrokerError, match=f"topic '{name}x' does not exist"):
        topics.stream(subscribe=f"{name}x").initialOffset()


def test_aborted_and_open_transactions_are_not_there(topics: Topics, log: Log, name: str) -> None:
    """Offsets of their markers are holes, also at the very end."""
    log.create(name, partitions=1)
    transactional(log, name, "c3a2c1a4")
    values = [row["value"] for row in topics.table("value", subscribe=name)]
    assert values == [b"c0", b"c1", b"c2", b"c0"]
    assert topics.offsets(subscribe=name) == {0: [0, 1, 2, 7]}
    assert topics.offsets(subscribe=name, minPartitions="9") == {0: [0, 1, 2, 7]}
    every = topics.table("value", subscribe=name, **{"kafka.isolation.level": "read_uncommitted"})
    assert len(every) == 10
    log.create(f"{name}-open", partitions=1)
    transactional(log, f"{name}-open", "c1o2")
    log.send(f"{name}-open", [{"value": b"behind", "partition": 0}])
    assert [row["value"] for row in topics.table("value", subscribe=f"{name}-open")] == [b"c0"]


def test_a_compacted_topic_has_holes(topics: Topics, log: Log, name: str) -> None:
    log.create(
        name,
        partitions=1,
        cleanup_policy="compact",
        min_cleanable_dirty_ratio="0.001",
        segment_ms="100",
        max_compaction_lag_ms="100",
        min_compaction_lag_ms="0",
    )
    for _ in range(3):
        log.send(name, numbered(70))
    wait_until(lambda: (log.send(name, numbered(7)), len(log.read(name)) < 100)[1], 40, "compaction")

    def read_upto(end: int) -> dict[int, list[int]]:
        return topics.offsets(subscribe=name, endingOffsets=json.dumps({name: {"0": end}}))

    def reads_agree() -> bool:
        """Compaction continues while the topic is read: all three reads must have seen the same log."""
        there = [row.offset for row in log.read(name)]
        middle = there[-8] + 1 if there[-8] + 1 not in there else there[-2]
        whole, part = read_upto(there[-1] + 1), read_upto(middle)
        return whole == {0: there} and part == {0: [o for o in there if o < middle]}

    wait_until(reads_agree, 30, "a table with the offsets that are in the log")


def test_messages_that_retention_took_are_an_error_or_left_out(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=1)
    log.send(name, numbered(100))
    topics.delete(name, 0, 40)
    asked = {"subscribe": name, "startingOffsets": json.dumps({name: {"0": 10}})}
    with pytest.raises(DataLossError, match=rf"{name}/0: offsets 10 to 39 are gone.*failOnDataLoss=false"):
        topics.table(**asked)
    assert topics.offsets(failOnDataLoss="false", **asked) == {0: list(range(40, 100))}
    assert topics.offsets(subscribe=name) == {0: list(range(40, 100))}, "earliest is what there is"


def test_messages_lost_after_the_plan_are_an_error_or_skipped(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=1)
    log.send(name, numbered(100))
    planned = [RangePartition(OffsetRange(name, 0, 10, 90)), RangePartition(OffsetRange(name, 0, 0, 20))]
    topics.delete(name, 0, 40)
    with pytest.raises(DataLossError, match="offsets 10 to 39 are gone"):
        rows(topics.reader("offset", subscribe=name), planned[:1])
    lenient = topics.reader("offset", subscribe=name, failOnDataLoss="false")
    assert [row["offset"] for row in rows(lenient, planned)] == list(range(40, 90))


def test_log_shorter_than_planned_is_an_error_or_skipped(
    topics: Topics, log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.kafka.offset_range.SHORT_LOG_SECONDS", 0.5)
    log.create(name, partitions=1)
    log.send(name, numbered(20))
    beyond = [RangePartition(OffsetRange(name, 0, 10, 90)), RangePartition(OffsetRange(name, 0, 50, 90))]
    for planned in beyond:
        with pytest.raises(DataLossError, match=f"{name}/0 ends at offset 20"):
            rows(topics.reader("offset", subscribe=name), [planned])
    lenient = topics.reader("offset", subscribe=name, failOnDataLoss="false")
    assert [row["offset"] for row in rows(lenient, beyond)] == list(range(10, 20))


def test_stream_continues_and_its_batches_are_repeatable(topics: Topics, log: Log, name: str) -> None:
    log.create(name, partitions=2)
    log.send(name, [{"value": b"old", "partition": 0}])
    stream = topics.stream("partition", "offset", subscribe=name)
    start = stream.initialOffset()
    assert start == {name: {"0": 1, "1": 0}}
    assert stream.latestOffset(start, ReadAllAvailable()) == start
    log.send(name, [{"value": b"%d" % i, "partition": i % 2} for i in range(10)])
    end = stream.latestOffset(start, ReadAllAvailable())
    assert end == {name: {"0": 6, "1": 5}}
    log.send(name, [{"value": b"more", "partition": 0}])
    again = topics.stream("partition", "offset", subscribe=name)
    first = rows(stream, stream.partitions(start, end))
    assert len(first) == 10
    assert rows(again, again.partitions(start, end)) == first
    assert stream.reportLatestOffset() == end
    assert stream.partitions(end, end) == []
    limited = stream.latestOffset(start, ReadMaxRows(4))
    assert limited == {name: {"0": 3, "1": 1}}
    assert topics.stream(subscribe=name, maxOffsetsPerTrigger="4").getDefaultReadLimit() == ReadMaxRows(4)


def test_added_partitions_and_topics_are_read_completely(topics: Topics, log: Log, name: str) -> None:
    log.create(f"{name}-a", partitions=1)
    stream = topics.stream("topic", "partition", subscribePattern=f"{name}-.*")
    start = stream.initialOffset()
    log.create(f"{name}-a", partitions=2)
    log.create(f"{name}-b", partitions=1)
    log.send(f"{name}-a", [{"value": b"1", "partition": 1}])
    log.send(f"{name}-b", [{"value": b"2", "partition": 0}])
    end = stream.latestOffset(start, ReadAllAvailable())
    assert end == {f"{name}-a": {"0": 0, "1": 1}, f"{name}-b": {"0": 1}}
    assert len(rows(stream, stream.partitions(start, end))) == 2


def test_stream_of_a_deleted_topic_fails_or_waits(
    topics: Topics, log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PLANNER_RETRY_SECONDS", 0.2)
    log.create(name, partitions=1)
    log.send(name, numbered(10))
    strict = topics.stream("offset", subscribe=name, startingOffsets="earliest")
    lenient = topics.stream("offset", subscribe=name, startingOffsets="earliest", failOnDataLoss="false")
    stood = strict.latestOffset(strict.initialOffset(), ReadAllAvailable())
    assert stood == {name: {"0": 10}}
    log.delete(name)
    with pytest.raises(BrokerError, match=f"topic '{name}' is being read and no longer exists"):
        strict.latestOffset(stood, ReadAllAvailable())
    assert lenient.latestOffset(stood, ReadAllAvailable()) == stood
    log.create(name, partitions=1)
    log.send(name, numbered(3))
    with pytest.raises(DataLossError, match=f"{name}/0 ends at offset 3, before 10, up to which it was read"):
        strict.latestOffset(stood, ReadAllAvailable())
    back = lenient.latestOffset(stood, ReadAllAvailable())
    assert back == {name: {"0": 0}}
    assert lenient.partitions(stood, back) == []
    assert lenient.latestOffset(back, ReadAllAvailable()) == {name: {"0": 3}}


@pytest.mark.timeout(120)
def test_spark_reads_tables_and_streams(spark: SparkSession, log: Log, name: str, tmp_path: Path) -> None:
    log.create(name, partitions=3)
    sent = log.send(name, numbered(3_000, headers=[("event-id", b"e")]))
    register(spark)

    def table(**options: str) -> Any:
        read = spark.read.format("keylane.topic").options(
            **{"kafka.bootstrap.servers": log.bootstrap, "subscribe": name, **options}
        )
        return read.load()

    from pyspark.sql import functions as f  # noqa: PLC0415

    everything = table(includeHeaders="true")
    assert everything.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert everything.where("headers[0].key = 'event-id'").count() == 3_000
    assert everything.select(f.sum(f.col("value").cast("string").cast("int"))).first()[0] == sum(range(3_000))
    some = table().where("partition = 1 and offset >= 10 and offset < 20")
    assert [row.offset for row in some.collect()] == list(range(10, 20))
    assert some.rdd.getNumPartitions() == 1, "filters reach the source"
    late = table().where(f.col("timestamp") >= f.lit("2199-01-01").cast("timestamp"))
    assert late.collect() == []
    since = table().agg(f.max("timestamp")).first()[0]
    assert table().where(f.col("timestamp") >= f.lit(since)).count() >= 1
    narrow = spark.read.format("keylane.topic").schema("offset BIGINT, partition INT")
    found = narrow.options(bootstrap=log.bootstrap, subscribe=name).load().collect()
    assert {(r.partition, r.offset) for r in found} == {(s.partition, s.offset) for s in sent}
    assert len(table(minPartitions="8").where("offset >= 0").collect()) == 3_000

    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def stream() -> None:
        read = spark.readStream.format("keylane.topic").options(
            **{
                "kafka.bootstrap.servers": log.bootstrap,
                "subscribe": name,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": "1000",
            }
        )
        query = (
            read.load()
            .writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert query.exception() is None

    stream()
    log.send(name, numbered(500))
    stream()
    got = [(row.partition, row.offset) for row in spark.read.parquet(out).collect()]
    assert len(got) == len(set(got)) == 3_500


def test_mistakes_are_reported_on_load_or_use(spark: SparkSession, log: Log, name: str) -> None:
    register(spark)
    read = spark.read.format("keylane.topic").option("kafka.bootstrap.servers", log.bootstrap)
    with pytest.raises(Exception, match="did you mean 'startingOffsets'"):
        read.option("subscribe", name).option("startingOfset", "earliest").load().count()
    with pytest.raises(Exception, match=f"topic '{name}-none' does not exist"):
        spark.read.format("keylane.topic").options(
            **{"kafka.bootstrap.servers": log.bootstrap, "subscribe": f"{name}-none"}
        ).load().count()
