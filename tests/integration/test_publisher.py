"""What a publisher sends, an app gets: through a real broker and a real task."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, BrokerError, DeliveryError, Message, Publisher
from keylane.kafka.cluster import Cluster
from keylane.testing import HistoryWriter, Sent, Verdict, partition_of
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.broker import Broker
    from support.topics import Log


@dataclass(frozen=True)
class Order:
    id: str
    number: int


def process(log: Log, app: App) -> None:
    """Everything that is there, in one task without Spark."""
    partitions = range(log.cluster.partitions(app.source))
    plan = TaskPlan(
        run="r",
        epoch=1,
        task=0,
        settings=log.settings,
        identity=log.cluster.identity(app.source, app.dlq),
        starts=dict.fromkeys(partitions, 0),
        until=log.cluster.ends(app.source, partitions),
        seconds=40,
        sink_limit=Cluster(log.settings).prepare(app.spec).sink_limit,
        partitions=len(partitions),
    )
    for _ in Task(app.spec, plan).outcomes():
        pass


def test_app_processes_published_events_in_order(
    log: Log, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    source = f"{name}.in"
    log.create(source, partitions=5)
    rng = random.Random(3)
    orders = [Order(id=f"order-{rng.randrange(40)}", number=number) for number in range(2000)]

    async def more(publisher: Publisher) -> list[Any]:
        return await asyncio.gather(
            *(publisher.deliver(order, version=order.number) for order in orders[1000:])
        )

    with Publisher(
        source,
        bootstrap=broker.bootstrap,
        key=lambda order: order.id,
        type=lambda order: type(order).__name__,
        version=lambda order: order.number,
    ) as publisher:
        ids = [publisher.send(order) for order in orders[:1000]]
        delivered = asyncio.run(more(publisher))
    ids += [one.event_id for one in delivered]
    assert len(set(ids)) == 2000

    got: dict[str, list[tuple[int, str, str | None, int | None]]] = {}
    app = App(name, source=source, decode="json", observer=HistoryWriter(tmp_path / "history"))

    @app.stage
    async def take(msg: Message) -> None:
        await asyncio.sleep(0)
        key = (msg.key or b"").decode()
        got.setdefault(key, []).append((msg.value["number"], msg.event_id, msg.type, msg.version))

    process(log, app)
    rows = log.read(source)
    judge([Sent(row.key, row.partition, row.offset) for row in rows])
    for key in {order.id for order in orders}:
        mine = [
            (order.number, ids[order.number], "Order", order.number) for order in orders if order.id == key
        ]
        assert got[key] == mine, "as they were sent"
    places = {(row.partition, row.offset): row.header("event-id") for row in rows}
    assert all(places[one.partition, one.offset] == one.event_id.encode() for one in delivered)


def test_keys_are_partitioned_as_by_java_clients(log: Log, broker: Broker, name: str) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=7)
    keys: list[bytes] = [
        b"", b"21", b"foobar", b"abc", "Grüße".encode(), b"\xff\x00", b"x" * 1000,
        *(b"key-%d" % number for number in range(300)),
    ]  # fmt: skip
    with Publisher(f"{name}.in", bootstrap=broker.bootstrap) as publisher:
        for key in keys:
            publisher.send(key, key=key)
    app = App(name, source=f"{name}.in", sink=f"{name}.out")

    @app.stage
    async def hand_on(msg: Message) -> bytes:
        return bytes(msg.value)

    process(log, app)
    sent = {row.key: row.partition for row in log.read(f"{name}.in")}
    results = {row.key: row.partition for row in log.read(f"{name}.out")}
    assert sent == results == {key: partition_of(key, 7) for key in keys}


def test_unusual_values_arrive_unchanged(log: Log, broker: Broker, name: str) -> None:
    log.create(name, partitions=1)
    with Publisher(name, bootstrap=broker.bootstrap, keyless=True) as publisher:
        publisher.send(None, key="tombstone", event_id="1")
        publisher.send(b"", key=None, event_id="2", timestamp=1_234_567_890_123)
        publisher.send("Grüße", key=7, event_id="3", headers=[("h", b"\xff"), ("h", None)])
    gone, empty, text = log.read(name)
    assert (gone.key, gone.value) == (b"tombstone", None)
    assert (empty.key, empty.value, empty.timestamp) == (None, b"", 1_234_567_890_123)
    assert (text.key, text.value) == (b"7", "Grüße".encode())
    assert text.headers == [("event-id", b"3"), ("h", b"\xff"), ("h", None)]


def test_refused_message_is_raised_with_all_after_it(log: Log, broker: Broker, name: str) -> None:
    log.create(name, partitions=1)
    publisher = Publisher(name, bootstrap=broker.bootstrap, key=lambda _: "k")
    assert publisher.send(b"good")
    publisher.flush()
    log.alter(name, max_message_bytes="1000")  # after it has asked how large they may be
    large = random.Random(1).randbytes(5000)  # so that no compression makes it smaller
    bad = publisher.send(large)
    with pytest.raises(
        DeliveryError, match=f"a message was not delivered to topic '{name}': .*{bad}"
    ) as raised:
        publisher.flush()
    assert [(one.event_id, one.value) for one in raised.value.undelivered] == [(bad, large)]
    with pytest.raises(DeliveryError):
        publisher.send(b"later")
    with pytest.raises(DeliveryError):
        publisher.close()
    assert [row.value for row in log.read(name)] == [b"good"]


def test_missing_topic_or_broker_is_named(broker: Broker, name: str) -> None:
    with pytest.raises(BrokerError, match=rf"topic '{name}' does not exist at .*Create it"):
        Publisher(name, bootstrap=broker.bootstrap)
