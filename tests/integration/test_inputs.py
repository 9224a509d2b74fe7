"""Odd messages and wrong settings: each has a defined outcome or a clear error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, BrokerError, Message, SettingsError
from keylane.kafka import cluster
from keylane.testing import HistoryWriter, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from support.topics import Log


def echo(name: str, **more: Any) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out", **more)

    @app.stage
    async def pass_on(msg: Message) -> Any:
        return msg.value

    return app


@pytest.mark.timeout(120)
def test_odd_messages_come_out_as_they_went_in(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", partitions=2)
    log.create(f"{name}.out", partitions=2, max_message_bytes="1010000")
    messages: list[dict[str, Any]] = [
        {"key": b"empty", "value": b"", "headers": [("event-id", b"1")]},
        {"key": None, "value": b"keyless"},
        {"key": b"tombstone", "value": None},
        {"key": b"large", "value": b"x" * 1_000_000},
        {"key": b"too large", "value": bytes(range(256)) * 4000, "timestamp": 1_234_567_890_000},
        {"key": b"\xff\xfe", "value": b"\xff", "headers": [("h", b"\xff\xfe"), ("h", b"again"), ("none", None)]},
        {"key": b"late", "value": b"v", "headers": [("event-id", b"1"), ("event-id", b"2")],
         "timestamp": 1_234_567_890_123},
        *({"key": b"many", "value": b"%d" % i} for i in range(5)),
    ]  # fmt: skip
    sent = log.send(f"{name}.in", messages)
    app = echo(name, observer=HistoryWriter(tmp_path / "history"))
    query = app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert query.awaitTermination(100)
    judge(sent)

    results = {row.key: row for row in log.read(f"{name}.out") if row.key != b"many"}
    assert results[b"empty"].value == b""
    assert results[None].value == b"keyless"
    assert b"tombstone" not in results
    assert results[b"large"].value == b"x" * 1_000_000
    odd = results[b"\xff\xfe"]
    place = next(s for s in sent if s.key == b"\xff\xfe")
    topic_id = log.cluster.identity(f"{name}.in").source.id
    assert odd.headers == [
        ("h", b"\xff\xfe"),
        ("h", b"again"),
        ("none", None),
        ("event-id", f"{name}/{topic_id}/{name}.in/{place.partition}/{place.offset}".encode()),
    ]
    assert results[b"late"].timestamp == 1_234_567_890_123
    assert results[b"late"].headers == [("event-id", b"1"), ("event-id", f"{name}/2".encode())]

    (letter,) = log.read(f"{name}.dlq")
    assert letter.key == b"too large"
    assert letter.value == messages[4]["value"]
    assert letter.header("keylane-error") == b"keylane.errors.Poison"
    assert (
        letter.header("keylane-offset") == str(next(s for s in sent if s.key == b"too large").offset).encode()
    )
    assert b"larger than topic" in (letter.header("keylane-message") or b"")
    assert letter.header("keylane-timestamp") == b"1234567890000"
    assert (
        letter.timestamp > (time.time() - 300) * 1000
    )  # as old as its message it would be gone by retention
    assert b"too large" not in results


@pytest.mark.timeout(120)
def test_outcome_rows_tell_of_every_message(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", partitions=2)
    log.send(
        f"{name}.in", [{"key": b"k%d" % (i % 3), "value": b"bad" if i == 4 else b"%d" % i} for i in range(9)]
    )
    app = App(name, source=f"{name}.in", decode="json")

    @app.stage
    async def count(msg: Message) -> int:
        return int(msg.value)

    query = app.start(
        spark,
        bootstrap=broker.bootstrap,
        available_now=True,
        format="parquet",
        path=str(tmp_path / "outcomes"),
        checkpoint_location=str(tmp_path / "checkpoint"),
    )
    assert query.awaitTermination(100)
    rows = spark.read.parquet(str(tmp_path / "outcomes")).collect()
    assert len(rows) == 9
    assert {(row.partition, row.offset) for row in rows} == {
        (r.partition, r.offset) for r in log.read(f"{name}.in")
    }
    (dead,) = (row for row in rows if row.outcome == "dead")
    assert bytes(dead.key) == b"k1"
    assert dead.error.startswith("JSONDecodeError")
    good = [row for row in rows if row.outcome == "ok"]
    assert all(row.started <= row.finished and row.attempts == 1 and row.error is None for row in good)
    assert {row.epoch for row in rows} == {1}
    assert all("/" in row.owner and row.event_id for row in rows)


def test_a_topic_that_does_not_exist_is_named(
    log: Log, spark: SparkSession, broker: Broker, name: str
) -> None:
    with pytest.raises(
        BrokerError, match=rf"source of app '{name}', topic '{name}.in' does not exist.*Create it"
    ):
        echo(name).start(spark, bootstrap=broker.bootstrap)
    log.create(f"{name}.in")
    with pytest.raises(BrokerError, match=rf"sink of app '{name}', topic '{name}.out' does not exist"):
        echo(name).start(spark, bootstrap=broker.bootstrap)


def test_missing_broker_is_named(spark: SparkSession, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REQUEST_SECONDS", 1.0)
    with pytest.raises(BrokerError, match=r"no Kafka broker answered at 127\.0\.0\.1:9 within 1 s"):
        echo(name).start(spark, bootstrap="127.0.0.1:9")


def test_wrong_settings_are_refused_before_anything_starts(
    spark: SparkSession, broker: Broker, name: str
) -> None:
    with pytest.raises(SettingsError, match="has no stages"):
        App(name, source="a").start(spark, bootstrap=broker.bootstrap)
    with pytest.raises(
        SettingsError, match=r"unknown option 'starting_offset': did you mean 'starting_offsets'\?"
    ):
        echo(name).start(spark, bootstrap=broker.bootstrap, starting_offset="latest")  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"option 'kafka\.acks' cannot be set"):
        echo(name).start(spark, bootstrap=broker.bootstrap, kafka={"acks": "1"})
    with pytest.raises(SettingsError, match="No such configuration property"):
        echo(name).start(spark, bootstrap=broker.bootstrap, kafka={"no.such.thing": "1"})
