"""Ordered DataFrames: a backfill gives the same rows as the live run."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as f

from keylane import App, Message, Poison, Retry, SettingsError, Transient, ordered
from keylane.spark.topic import register
from keylane.testing import HistoryWriter, check, read_history
from support.adjust import adjust

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from keylane.broker import Broker
    from support.topics import Log


def bank(name: str, history: Path, **settings: Any) -> App:
    """An app whose messages fail once, always or never, by their number; results name their message."""
    quick = Retry(attempts=3, wait_initial=0.001, wait_max=0.01)
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        decode="json",
        retry=quick,
        observer=HistoryWriter(history),
        **settings,
    )

    @app.stage
    async def look(msg: Message) -> dict[str, Any]:
        number = msg.value["number"]
        if number % 97 == 5:
            raise Poison(f"number {number} is invalid")
        if number % 11 == 3 and msg.attempt == 1:
            raise Transient("later")
        return {**msg.value, "looked": msg.attempt}

    @app.stage
    async def book(msg: Message) -> dict[str, Any]:
        if msg.value["number"] % 211 == 7:
            raise Transient(f"never, {msg.attempt}")
        return {
            **msg.value, "position": msg.position, "event": msg.event_id, "request": msg.request_id,
            "at": msg.timestamp, "type": msg.type, "attempt": msg.attempt,
        }  # fmt: skip

    return app


def load(count: int, keys: int) -> list[dict[str, Any]]:
    """Messages, some without a key, some without an event id, some sent twice."""
    messages: list[dict[str, Any]] = []
    began = int(time.time() * 1000) - count  # the broker's retention would delete older messages
    for number in range(count):
        message: dict[str, Any] = {
            "key": None if number % 50 == 49 else b"k%d" % (number * 7 % keys),
            "value": json.dumps({"number": number}),
            "headers": [("event-type", b"Booked")],
            "timestamp": began + number,
        }
        if number % 3:
            message["headers"] = [("event-id", b"e%d" % number), *message["headers"]]
        messages.append(message)
        if number % 40 == 20:
            messages.append(message)
    return messages


WHAT = ("key", "partition", "offset", "event_id", "outcome", "attempts", "error")


def rows_of(frame: DataFrame) -> dict[tuple[int, int], tuple[Any, ...]]:
    """The rows by position, each exactly once."""
    found = {}
    for row in frame.select(*WHAT).toArrow().to_pylist():
        place = row["partition"], row["offset"]
        assert place not in found, f"{place} came twice"
        found[place] = tuple(row[name] for name in WHAT)
    return found


def backfill_equals_live(
    count: int, keys: int, log: Log, spark: SparkSession, broker: Broker, name: str, folder: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    sent = log.send(f"{name}.in", load(count, keys))
    live = bank(name, folder / "live")
    query = live.start(
        spark,
        bootstrap=broker.bootstrap,
        available_now=True,
        format="parquet",
        path=str(folder / "rows"),
        checkpoint_location=str(folder / "checkpoint"),
    )
    assert query.awaitTermination(240)
    assert query.exception() is None

    register(spark)
    topic = spark.read.format("keylane.topic").options(
        **{"kafka.bootstrap.servers": broker.bootstrap, "includeHeaders": "true"}
    )
    again = ordered(
        topic.option("subscribe", f"{name}.in").load(), app=bank(name, folder / "again"), order_by="offset"
    )
    again.write.parquet(str(folder / "again-rows"))
    rows = spark.read.parquet(str(folder / "again-rows"))

    first, second = rows_of(spark.read.parquet(str(folder / "rows"))), rows_of(rows)
    assert len(first) == len(sent)
    assert second == first, [(first[at], second.get(at)) for at in first if first[at] != second.get(at)][:5]
    outcomes = {row[WHAT.index("outcome")] for row in first.values()}
    assert outcomes == {"ok", "dead", "duplicate"}

    # The results, by position.
    def by_position(values: list[bytes]) -> dict[str, bytes]:
        found = {json.loads(value)["position"]: bytes(value) for value in values}
        assert len(found) == len(values)
        return found

    written = by_position([row.value or b"" for row in log.read(f"{name}.out")])
    made = by_position(
        [row["result"] for row in rows.where("outcome = 'ok'").select("result").toArrow().to_pylist()]
    )
    assert made == written

    # The dead letters in their topic.
    def summary(letter: dict[str, Any]) -> tuple[Any, ...]:
        tried = [(failed["stage"], failed["attempt"], failed["error"]) for failed in letter["failures"]]
        return letter["stage"], letter["error"], letter["message"], int(letter["attempts"]), tried

    letters = {}
    for lying in log.read(f"{name}.dlq"):
        had = {known.removeprefix("keylane-"): (text or b"").decode() for known, text in lying.headers}
        letter = {**had, "failures": json.loads(had["failures"])}
        letters[int(had["partition"]), int(had["offset"])] = summary(letter)
    kept = {}
    for row in rows.where("letter is not null").toArrow().to_pylist():
        kept[row["partition"], row["offset"]] = summary(json.loads(row["letter"]))
    assert kept == letters
    assert len(kept) > count // 100

    # Both ran in order, one message at a time in every lane.
    twice = {at for at, row in first.items() if row[WHAT.index("outcome")] == "duplicate"}
    ran = [message for message in sent if (message.partition, message.offset) not in twice]
    for history in ("live", "again"):
        check(read_history(folder / history), sent=ran).raise_if_bad()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_backfill_equals_the_live_run(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path
) -> None:
    backfill_equals_live(4_000, 200, log, spark, broker, name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_backfill_of_200_000_messages_equals_the_live_run(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path
) -> None:
    backfill_equals_live(200_000, 5_000, log, spark, broker, name, tmp_path)


@pytest.fixture
def app() -> App:
    app = App("count", source="in", commit="epoch", retry=Retry(wait_initial=0.001, wait_max=0.01))

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value.endswith(b"!"):
            raise Poison("broken")
        return bytes(msg.value.upper())

    return app


@pytest.mark.timeout(120)
def test_table_runs_in_the_order_of_its_columns(spark: SparkSession, app: App, tmp_path: Path) -> None:
    adjust(app, observer=HistoryWriter(tmp_path / "history"))
    rows = [(f"customer-{i % 20}", f"{(i * 31) % 1_000:03d}", i) for i in range(1_000)]
    table = spark.createDataFrame(rows, "customer string, text string, row long")
    found = ordered(table, app=app, key="customer", value="text", order_by=["text", "row"], partitions=3)
    assert found.schema.names[-4:] == ["letter", "results", "text", "row"]
    got = found.toArrow().to_pylist()
    assert len(got) == 1_000
    assert {row["owner"].rpartition("/")[2] for row in got} == {"0", "1", "2"}
    expected = {(customer, text, row): text.upper().encode() for customer, text, row in rows}
    assert {(row["key"].decode(), row["text"], row["row"]): row["result"] for row in got} == expected
    # By start, because only the engine knows in which order they ran.
    starts: dict[bytes | None, list[int]] = {}
    for event in sorted(read_history(tmp_path / "history"), key=lambda event: event.seq):
        if event.outcome is None:
            starts.setdefault(event.key, []).append(event.offset)
    assert len(starts) == 20
    for offsets in starts.values():
        assert offsets == sorted(offsets)
    numbers = {(row["key"], row["offset"]): row["text"] for row in got}
    for key, offsets in starts.items():
        texts = [numbers[key or b"", offset] for offset in offsets]
        assert texts == sorted(texts)


@pytest.mark.timeout(120)
def test_stream_runs_micro_batch_by_micro_batch(
    spark: SparkSession, app: App, log: Log, name: str, tmp_path: Path
) -> None:
    register(spark)
    log.create(name)
    sent = log.send(name, [{"key": b"k%d" % (i % 30), "value": b"v%d" % i} for i in range(1_500)])
    adjust(app, observer=HistoryWriter(tmp_path / "history"))
    rows = (
        spark.readStream.format("keylane.topic")
        .option("kafka.bootstrap.servers", log.bootstrap)
        .option("subscribe", name)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "700")
        .load()
    )
    query = (
        ordered(rows, app=app, order_by="offset")
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "rows"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert query.exception() is None
    found = spark.read.parquet(str(tmp_path / "rows"))
    assert found.where("outcome = 'ok' and result is not null").count() == 1_500
    assert sorted(row[0] for row in found.select("epoch").distinct().collect()) == [0, 1, 2]
    check(read_history(tmp_path / "history"), sent=sent).raise_if_bad()


def test_wrong_arguments_are_refused_before_anything_runs(
    spark: SparkSession, app: App, log: Log, name: str
) -> None:
    table = spark.createDataFrame(
        [("a", b"x", 1, 1.5, {"a": 1}, "then")],
        "key string, value binary, at long, weight double, map map<string,int>, epoch string",
    )

    def complaint(frame: Any = table, **given: Any) -> str:
        with pytest.raises(SettingsError) as caught:
            ordered(frame, **{"app": app, "order_by": "at", **given})
        return str(caught.value)

    assert "did you mean 'at'" in complaint(order_by="att")
    assert "the frame has no such column; it has key, value" in complaint(key="customer")
    assert "name at least one column" in complaint(order_by=[])
    assert "named twice" in complaint(order_by=["at", "at"])
    assert "must be a number, a time, text or bytes, got a map" in complaint(order_by="map")
    assert "order_by must be the name of a column" in complaint(order_by=[f.col("at")])
    assert "must be bytes or text, got a bigint; convert it with cast('string')" in complaint(key="at")
    assert "to_json(struct(…))" in complaint(value="map")
    assert "the column must be of type timestamp" in complaint(timestamp="at")
    assert "rename yours" in complaint(order_by="epoch")
    assert "partitions must be a whole number" in complaint(partitions=0)
    assert "df must be a DataFrame" in complaint(frame=[1])
    assert "must be an App" in complaint(app="shop")
    assert "has no stages" in complaint(app=App("empty", source="in"))
    wrong = table.withColumn("offset", f.lit("x")).withColumn("partition", f.lit(1))
    assert "column 'offset' must be a bigint, got a string" in complaint(frame=wrong)
    assert "the column must be of type array" in complaint(frame=table.withColumn("headers", f.lit("x")))
    stream = (
        spark.readStream.format("rate")
        .load()
        .selectExpr("cast(value as string) key", "cast(value as string) value", "value at")
    )
    assert "ordered() over a stream needs order_by='offset'" in complaint(frame=stream)
    placed = stream.selectExpr("key", "value", "1 partition", "at offset")
    blocking = App("blocking", source="in", on_failure="block")
    blocking.stage(app.spec.stages[0].function)
    assert "does not support on_failure='block'" in complaint(frame=placed, order_by="offset", app=blocking)


def test_rows_with_undefined_order_end_the_query(spark: SparkSession, app: App) -> None:
    rows = [("a", "x", 1), ("b", "y", 1), ("a", "z", 1)]
    table = spark.createDataFrame(rows, "key string, value string, at long")
    with pytest.raises(Exception, match="two rows of key b'a' have the same order"):
        ordered(table, app=app, order_by="at").collect()
    nothing = spark.createDataFrame([("a", "x", None)], "key string, value string, at long")
    with pytest.raises(Exception, match="order_by='at' is null in some rows"):
        ordered(nothing, app=app, order_by="at").collect()
    empty = table.where("at > 5")
    assert ordered(empty, app=app, order_by="at").collect() == []
