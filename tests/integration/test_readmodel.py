"""Read models as Spark tables: shuffled, repeated and interrupted input gives the same rows."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, ReadModel, SettingsError
from keylane.errors import DataLossError
from keylane.testing import HistoryWriter
from support.order_events import ORDERS, as_message, folded, many_events
from support.tasks import Runner
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from keylane.broker import Broker
    from keylane.readmodel.spark_table import SparkTable
    from keylane.testing import Verdict
    from support.topics import Log

DDL = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, timestamp TIMESTAMP, topic STRING, "
    "partition INT, offset BIGINT"
)


@pytest.fixture
def few(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark settings for little data: compiling a query would take longer than running it."""
    quick = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    for setting, value in quick.items():
        spark.conf.set(setting, value)
    try:
        yield spark
    finally:
        for setting in quick:
            spark.conf.unset(setting)


def frame(spark: SparkSession, events: list[dict[str, Any]]) -> DataFrame:
    rows = [
        (
            event["key"], event["value"], event["headers"],
            datetime.fromtimestamp(event["timestamp"] / 1000, UTC),
            event["topic"], event["partition"], event["offset"],
        )
        for event in events
    ]  # fmt: skip
    return spark.createDataFrame(rows, DDL)


def rows_of(table: SparkTable) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.frame().toArrow().to_pylist()
    return sorted(found, key=lambda row: row["order_id"].encode())


def whole(table: SparkTable) -> bytes:
    """The table with its ranks, as bytes."""
    rows = table._before(table._current()).toArrow().to_pylist()
    return repr(sorted(rows, key=lambda row: row["order_id"].encode())).encode()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shuffled_and_repeated_input_gives_the_same_table(few: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(7)
    events = many_events(rng, 600, 40)
    plain = ORDERS.table(few, tmp_path / "plain")
    assert rows_of(plain) == []
    done = plain.merge(frame(few, events))
    assert (done.refused, done.snapshot) == (0, 1)
    expected = folded([as_message(event) for event in events])
    rows = rows_of(plain)
    assert rows == [expected[key] for key in sorted(expected)]

    with ORDERS.sqlite(":memory:") as small:
        small.apply(*[as_message(event) for event in events])
        assert small.rows() == rows, "SQLite and Spark agree"

    wild = events + rng.sample(events, 300)
    rng.shuffle(wild)
    other = ORDERS.table(few, tmp_path / "other", retain=0)
    for at in (0, 450):
        other.merge(frame(few, wild[at : at + 450]))
    assert whole(other) == whole(plain), "byte for byte"
    assert len(list((tmp_path / "other" / "data").iterdir())) < 2, "replaced snapshots were not removed"

    view = plain.view()
    assert few.sql("SELECT status FROM orders WHERE order_id = 'o1'").first() == (expected["o1"]["status"],)
    assert view.columns[0] == "order_id"
    with pytest.raises(SettingsError, match="has a table of another model than 'orders'"):
        ReadModel("orders", fields={"OrderPaid": {"paid_at": datetime}}).table(few, tmp_path / "plain")
    with pytest.raises(SettingsError, match="has no column 'value'"):
        plain.merge(few.range(1).selectExpr("'k' AS key"))
    with pytest.raises(SettingsError, match="'timestamp' must be a timestamp, got a bigint"):
        plain.merge(few.range(1).selectExpr("'k' AS key", "'v' AS value", "id AS timestamp"))


@pytest.mark.timeout(120)
def test_table_survives_crashes_and_shuffled_replays(
    few: SparkSession,
    broker: Broker,
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        unhandled="ignore",
        observer=HistoryWriter(tmp_path / "history"),
    )

    @app.on(*ORDERS.fields)
    async def pass_on(msg: Message) -> bytes:
        if ORDERS.facts(msg) is None:
            raise Poison("never")
        return bytes(msg.value)

    rng = random.Random(3)
    events = many_events(rng, 400, 30, began=int(time.time() * 1000))
    load = [{k: event[k] for k in ("key", "value", "headers", "timestamp")} for event in events]
    bad = {**load[0], "value": b"{", "headers": [("event-type", b"OrderPlaced"), ("event-id", b"bad")]}
    runner = Runner(log, name, tmp_path, app)
    from_source = ORDERS.table(few, tmp_path / "source")
    from_sink = ORDERS.table(few, tmp_path / "sink")

    sent = log.send(f"{name}.in", [*load[:200], bad])
    runner.run()
    first = from_sink.update(f"{name}.out", bootstrap=broker.bootstrap)
    assert first.refused == 0 < first.events < 200, "the malformed event must be a dead letter"
    held, before = from_sink.frame(), rows_of(from_sink)

    sent += log.send(f"{name}.in", load[200:])
    runner.run()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(from_sink._snapshots, "publish", dies)
        with pytest.raises(KeyboardInterrupt):
            from_sink.update(f"{name}.out", bootstrap=broker.bootstrap)
    assert rows_of(ORDERS.table(few, tmp_path / "sink")) == before, "an interrupted update changed the table"

    second = from_sink.update(f"{name}.out", bootstrap=broker.bootstrap)
    assert 0 < second.events <= 200, "old events were read again"
    again = ORDERS.table(few, tmp_path / "sink").update(f"{name}.out", bootstrap=broker.bootstrap)
    assert (again.events, again.snapshot) == (0, second.snapshot), "a snapshot was written without new events"
    following = from_source.start(f"{name}.in", every=60, bootstrap=broker.bootstrap)
    wait_until(lambda: from_source._current() is not None, 30, "the first update")
    following.stop()
    assert not following.isActive
    assert "refused=1 " in caplog.text
    assert "OrderPlaced: the value is not JSON" in caplog.text
    # The rank contains the event id. That of a result names its app first, then the source's id if the event has none.
    source_id = log.cluster.identity(f"{name}.in").source.id
    from_app = (
        whole(from_sink).replace(f" {name}/{source_id}/".encode(), b" ").replace(f" {name}/".encode(), b" ")
    )
    assert whole(from_source) == from_app
    placed = [{**event, "topic": f"{name}.in"} for event in with_places(events, sent)]
    expected = folded([as_message(event) for event in placed])
    assert rows_of(from_sink) == [expected[key] for key in sorted(expected)]
    assert sorted(map(repr, held.toArrow().to_pylist())) == sorted(map(repr, before)), (
        "an update changed the frame of a reader"
    )

    before_replay = whole(from_sink)
    wild = placed + rng.sample(placed, 200)
    rng.shuffle(wild)
    from_sink.merge(frame(few, wild))
    assert whole(from_sink) == before_replay, "byte for byte"

    judge(sent)
    log.delete(f"{name}.out")
    log.create(f"{name}.out", partitions=3)
    with pytest.raises(DataLossError, match="the topic was recreated"):
        from_sink.update(f"{name}.out", bootstrap=broker.bootstrap)


def with_places(events: list[dict[str, Any]], sent: list[Any]) -> list[dict[str, Any]]:
    """Events with their positions in the log, where those of a key are in the order of sending."""
    places: dict[bytes, list[tuple[int, int]]] = {}
    for one in sorted(sent, key=lambda one: one[1:]):
        places.setdefault(one.key, []).append((one.partition, one.offset))
    extra = places[events[0]["key"]]
    found = []
    for number, event in enumerate(events):
        if number == 200:  # skip the malformed event of this key
            extra.pop(0)
        partition, offset = places[event["key"]].pop(0)
        found.append({**event, "partition": partition, "offset": offset})
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_examples_of_the_read_model_page_run(
    spark: SparkSession, broker: Broker, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", broker.bootstrap)
    page = (Path(__file__).parents[2] / "docs" / "readmodels.md").read_text()
    sqlite, on_spark = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"spark": spark}
    exec(sqlite, names)  # noqa: S102 - ours
    log.create("orders.events")
    kinds = ["OrderPlaced", "OrderPaid", "OrderShipped"]
    value = b'{"total": 5, "amount": 5, "address": {"city": "Bonn"}}'
    messages = [
        {"key": b"o%d" % (i % 4), "value": value, "headers": [("event-type", kinds[i % 3].encode())]}
        for i in range(9)
    ]
    log.send("orders.events", messages)
    runner = Runner(log, "shop", tmp_path, names["app"], source="orders.events")
    runner.run()
    # Spark's JVM keeps the folder that it was started in.
    exec(on_spark.replace('"lake/orders"', repr(str(tmp_path / "lake"))), names)  # noqa: S102
    with names["orders"].sqlite("orders.db") as table:
        assert len(table.rows()) == 4
        assert table.rows() == rows_of(names["table"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_driver_never_leaves_a_partial_table(few: SparkSession, tmp_path: Path) -> None:
    # Another process merges the same events repeatedly and is killed at random moments.
    plain = ORDERS.table(few, tmp_path / "plain")
    events = many_events(random.Random(1), 600, 40)
    plain.merge(frame(few, events))
    other = ORDERS.table(few, tmp_path / "other")
    other.merge(frame(few, events))
    for turn in range(4):
        number = other._current().number  # type: ignore[union-attr]
        process = subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "other")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        try:
            wait_until(lambda at=number: other._current().number > at + 1, 60, "two merges")  # type: ignore[misc,union-attr]
            time.sleep(0.2 * turn)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert whole(other) == whole(plain)


if __name__ == "__main__":
    from keylane.spark import session

    with_spark = session("local[1]", "killed", spark_sql_shuffle_partitions="2")
    killed = ORDERS.table(with_spark, Path(sys.argv[1]), retain=5)
    wild = many_events(random.Random(1), 600, 40)
    while True:
        random.shuffle(wild)
        killed.merge(frame(with_spark, wild[:300]))
