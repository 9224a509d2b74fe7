"""What a publisher sends, and that nothing goes missing without a word; the client is a fake."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import BrokerError, DeliveryError, Publisher, SettingsError
from keylane.event import encode_key, encode_value, new_event_id
from keylane.kafka import cluster
from keylane.kafka.rejection import TopicRules
from keylane.kafka.settings import KafkaSettings
from keylane.rights import Operation

if TYPE_CHECKING:
    from collections.abc import Iterator


class Refused:
    def __init__(self, why: str) -> None:
        self._why = why

    def code(self) -> int:
        return 87  # INVALID_RECORD

    def str(self) -> str:
        return self._why


class Sent:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        return lambda: self.__dict__[f"_{name}"]


class Client:
    """A producer in memory: reports what the test tells it to, when it is polled."""

    def __init__(self, conf: dict[str, Any]) -> None:
        self.conf = conf
        self.sent: list[Sent] = []
        self.waiting: deque[tuple[Any, Sent]] = deque()
        self.reports: deque[tuple[Any, Any, Sent]] = deque()
        self.room = 1000
        self.hold = False
        self.bad: set[bytes] = set()
        self.purged = 0

    def produce(
        self, topic: str, value: Any, key: Any, *, on_delivery: Any, timestamp: int, headers: Any
    ) -> None:
        if len(self.waiting) >= self.room:
            raise BufferError("full")
        sent = Sent(
            _topic=topic,
            _value=value,
            _key=key,
            _headers=headers,
            _timestamp=timestamp,
            _partition=0,
            _offset=len(self.sent),
        )
        self.sent.append(sent)
        self.waiting.append((on_delivery, sent))

    def poll(self, timeout: float) -> None:
        if not self.hold and self.waiting:
            then, sent = self.waiting.popleft()
            then(Refused("it is bad") if sent.value() in self.bad else None, sent)
        elif self.reports:
            then, error, sent = self.reports.popleft()
            then(error, sent)
        else:
            time.sleep(0.001)

    def purge(self, *, in_flight: bool) -> None:
        assert not in_flight
        self.purged += 1
        while self.waiting:
            then, sent = self.waiting.popleft()
            self.reports.append((then, Refused("purged"), sent))


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Client]]:
    made: list[Client] = []

    def producer(settings: KafkaSettings, **more: Any) -> Client:
        made.append(Client({**dict(settings.extra), **more}))
        return made[-1]

    class FakeCluster:
        def __init__(self, settings: KafkaSettings) -> None:
            assert settings.bootstrap == "b:1"

        def partitions(self, topic: str, *, operation: Operation) -> int:
            assert operation is Operation.WRITE
            if topic != "orders":
                raise BrokerError(f"topic {topic!r} does not exist")
            return 4

        def rules(self, topics: list[str]) -> dict[str, TopicRules]:
            return {topic: TopicRules(limit=2000) for topic in topics}

    monkeypatch.setattr(KafkaSettings, "producer", producer)
    monkeypatch.setattr(cluster, "Cluster", FakeCluster)
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "b:1")
    yield made
    for client in made:
        client.hold = False


@dataclass
class Line:
    sku: str


@dataclass
class Order:
    id: str
    amount: int = 1
    lines: list[Line] = field(default_factory=list)


def test_event_has_key_id_type_and_version(clients: list[Client]) -> None:
    with Publisher(
        "orders", key=lambda order: order.id, type=lambda order: type(order).__name__, version=3
    ) as orders:
        first = orders.send(Order("o-1", 12, [Line("a")]))
        second = orders.send(
            Order("o-2"),
            key=b"k",
            event_id="e-2",
            type="Other",
            version=9,
            headers={"trace": "t", "none": None},
            timestamp=5,
        )
    one, two = clients[0].sent
    assert (one.key(), one.value()) == (b"o-1", b'{"id":"o-1","amount":12,"lines":[{"sku":"a"}]}')
    assert one.headers() == [("event-id", first.encode()), ("event-type", b"Order"), ("event-version", b"3")]
    assert (one.topic(), one.timestamp()) == ("orders", 0)
    assert UUID(first).version == 7
    assert second == "e-2"
    assert two.key() == b"k"
    assert two.headers() == [
        ("event-id", b"e-2"), ("event-type", b"Other"), ("event-version", b"9"), ("trace", b"t"), ("none", None),
    ]  # fmt: skip
    assert two.timestamp() == 5


def test_functions_extract_id_and_version(clients: list[Client]) -> None:
    with Publisher(
        "orders",
        key=lambda _: "k",
        event_id=lambda v: v["id"],
        version=lambda v: v["version"],
        encode=lambda v: b"!",
    ) as orders:
        orders.send({"id": "e-7", "version": 4})
    (sent,) = clients[0].sent
    assert sent.headers() == [("event-id", b"e-7"), ("event-version", b"4")]
    assert sent.value() == b"!"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (b"\xff", b"\xff"),
        (bytearray(b"a"), b"a"),
        ("Grüße", "Grüße".encode()),
        (None, None),
        ({"a": [1, None]}, b'{"a":[1,null]}'),
        (7, b"7"),
        (Order("x"), b'{"id":"x","amount":1,"lines":[]}'),
    ],
)
def test_values_are_bytes_text_json_or_null(value: Any, encoded: bytes | None) -> None:
    assert encode_value(value) == encoded


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (object(), "a value of object is neither bytes, nor text, nor JSON: .*encode=function"),
        (float("nan"), "a value of float is neither"),
        ({"at": object()}, "field .at.: object is not JSON"),
        ({"a": "\ud800"}, "a value of dict is neither"),
    ],
)
def test_value_of_another_type_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        encode_value(value)


def test_keys_are_text_or_bytes_or_become_text() -> None:
    one = UUID(int=1)
    assert [encode_key(key) for key in ("ü", b"\xff", 17, one, "")] == [
        "ü".encode(),
        b"\xff",
        b"17",
        str(one).encode(),
        b"",
    ]
    for bad in (1.5, True, ["a"], ("a",)):
        with pytest.raises(TypeError, match="a key is text, bytes, a whole number or a UUID"):
            encode_key(bad)


def test_event_ids_do_not_come_from_a_seeded_generator() -> None:
    found = set()
    for _ in range(100):
        random.seed(42)
        found.add(new_event_id())
    assert len(found) == 100


@given(st.integers(1, 50))
def test_event_ids_are_all_different_and_sort_by_their_time(count: int) -> None:
    before = time.time_ns() // 1_000_000
    found = [UUID(new_event_id()) for _ in range(count)]
    assert len(set(found)) == count
    assert {one.version for one in found} == {7}
    assert {one.variant for one in found} == {UUID(int=0x8 << 60).variant}
    times = [one.int >> 80 for one in found]
    assert before <= times[0] <= times[-1] <= time.time_ns() // 1_000_000
    assert times == sorted(times)


def test_message_without_a_key_is_refused_by_default(clients: list[Client]) -> None:
    with Publisher("orders") as orders:
        with pytest.raises(ValueError, match=r"has no key, so nothing keeps its order.*keyless=True"):
            orders.send(b"v")
        with pytest.raises(ValueError, match="has no key"):
            orders.send(b"v", key=None)
        orders.send(b"v", key="")
    with Publisher("orders", keyless=True, key=lambda value: value or None) as orders:
        orders.send(b"", event_id="none")
        orders.send(b"k", event_id="k")
    assert [sent.key() for sent in clients[0].sent] == [b""]
    assert [sent.key() for sent in clients[1].sent] == [None, b"k"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"event_id": ""}, "an event id is text and not empty"),
        ({"event_id": 5}, "an event id is text"),
        ({"type": 5}, "an event's type is text"),
        ({"version": "1"}, "an event's version is a whole number"),
        ({"version": True}, "an event's version is a whole number"),
        ({"headers": {"event-id": "x"}}, "the header 'event-id' is the event's own: give it as event_id="),
        ({"headers": [("x", 5)]}, "a header is a name and text, bytes or None"),
        ({"value": b"x" * 2000}, "larger than topic 'orders' takes"),
        ({"key": 1.5}, "a key is text"),
    ],
)
def test_refused_message_leaves_the_publisher_usable(
    given: dict[str, Any], complaint: str, clients: list[Client]
) -> None:
    with Publisher("orders") as orders:
        with pytest.raises((TypeError, ValueError), match=complaint):
            orders.send(**{"value": b"v", "key": "k", **given})
        orders.send(b"fine", key="k")
    assert [sent.value() for sent in clients[0].sent] == [b"fine"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"key": "id"}, r"Publisher\('orders'\): key must be a function.*'id'.*send\(value, key=…\)"),
        ({"encode": 5}, "encode must be a function of the value, got 5"),
        ({"timeout": 0}, "timeout must be .* seconds, got 0"),
        ({"timeout": True}, "timeout must be .* seconds, got True"),
        ({"keyles": True}, r"Publisher\('orders'\): unknown option 'keyles'; did you mean 'keyless'"),
        ({"linger": 5}, "unknown option 'linger'. Known: key"),
        ({"kafka.acks": "1"}, "option 'kafka.acks' cannot be set"),
        ({"kafka.partitioner": "random"}, "option 'kafka.partitioner' cannot be set"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], complaint: str, clients: list[Client]) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Publisher("orders", **given)


def test_missing_broker_or_topic_is_an_error_at_once(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BrokerError, match="topic 'order' does not exist"):
        Publisher("order")
    monkeypatch.delenv("KEYLANE_BOOTSTRAP")
    with pytest.raises(SettingsError, match="no broker given"):
        Publisher("orders")


def test_client_settings_are_passed_on(clients: list[Client]) -> None:
    given: dict[str, Any] = {"kafka.linger.ms": 50, "kafka.queue.buffering.max.messages": "5"}
    with Publisher("orders", timeout=7, bootstrap="b:1", **given):
        pass
    conf = clients[0].conf
    assert (conf["linger.ms"], conf["message.timeout.ms"]) == ("50", 7000)
    assert conf["queue.buffering.max.messages"] == "5"
    assert conf["batch_limit"] == 2000
    assert conf["queue.buffering.max.kbytes"] == 262_144


def test_undelivered_messages_are_raised_by_every_call(clients: list[Client]) -> None:
    orders = Publisher("orders", key=lambda _: "k")
    client = clients[0]
    client.hold = True
    client.bad = {b"2"}
    for number in range(5):
        orders.send(b"%d" % number, event_id=f"e{number}", headers={"h": "x"})
    client.hold = False
    with pytest.raises(
        DeliveryError, match=r"not delivered to topic 'orders': it is bad \(the first: event e2"
    ) as raised:
        orders.flush()
    lost = raised.value.undelivered
    assert [one.event_id for one in lost] == ["e2", "e3", "e4"], "and nothing overtakes it"
    assert client.purged == 1
    assert (lost[0].key, lost[0].value, lost[0].why) == (b"k", b"2", "it is bad")
    assert lost[0].headers == (("event-id", b"e2"), ("h", b"x"))
    with pytest.raises(DeliveryError):
        orders.send(b"5")
    assert len(client.sent) == 5
    with pytest.raises(DeliveryError) as again:
        orders.close()
    assert again.value.undelivered == lost
    orders.close()
    assert pickle.loads(pickle.dumps(raised.value)).undelivered == lost  # noqa: S301 - its own


def test_with_block_raises_undelivered_and_hides_no_error(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    def block(error: BaseException | None) -> None:
        with Publisher("orders") as orders:
            clients[-1].bad = {b"v"}
            orders.send(b"v", key="k")
            if error is not None:
                raise error

    with pytest.raises(DeliveryError):
        block(None)
    assert not caplog.records
    with pytest.raises(KeyError):
        block(KeyError("x"))
    assert "a message was not delivered to topic 'orders'" in caplog.text


def test_error_of_the_block_does_not_hide_undelivered(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Publisher("orders", key=lambda _: "k") as orders:
            clients[0].hold = True
            clients[0].bad = {b"bad"}
            waiting = asyncio.create_task(orders.deliver(b"bad"))
            await asyncio.sleep(0.01)
            orders.send(b"behind it", event_id="e2")
            clients[0].hold = False
            await waiting

    with pytest.raises(DeliveryError) as raised:
        asyncio.run(main())
    assert len(raised.value.undelivered) == 1
    assert "2 messages were not delivered" in caplog.text


def test_closed_publisher_refuses_messages(clients: list[Client]) -> None:
    with Publisher("orders") as orders:
        pass
    with pytest.raises(ValueError, match="is closed; make a new one"):
        orders.send(b"v", key="k")


def test_send_waits_for_room_and_keeps_the_order(clients: list[Client]) -> None:
    with Publisher("orders") as orders:
        clients[0].room = 3
        for number in range(50):
            orders.send(b"%d" % number, key="k")
    assert [int(sent.value()) for sent in clients[0].sent] == list(range(50))


def test_deliver_waits_for_the_report_and_keeps_the_order(clients: list[Client]) -> None:
    async def main() -> None:
        async with Publisher("orders", key=lambda _: "k") as orders:
            clients[0].room = 3
            delivered = await asyncio.gather(*(orders.deliver(b"%d" % number) for number in range(40)))
            assert [(one.partition, one.offset) for one in delivered] == [(0, number) for number in range(40)]
            orders.send(b"40")
            await orders.drain()
            assert len(clients[0].sent) == 41

    asyncio.run(main())
    assert [int(sent.value()) for sent in clients[0].sent] == list(range(41))


def test_deliver_raises_the_failure_of_its_message(clients: list[Client]) -> None:
    async def main() -> None:
        async with Publisher("orders", key=lambda _: "k") as orders:
            clients[0].bad = {b"bad"}
            await orders.deliver(b"good")
            with pytest.raises(DeliveryError) as raised:
                await orders.deliver(b"bad", event_id="e")
            assert [one.event_id for one in raised.value.undelivered] == ["e"]
            with pytest.raises(DeliveryError):
                await orders.deliver(b"good")
            raise ValueError("the block's own")

    with pytest.raises(ValueError, match="the block's own"):
        asyncio.run(main())


def test_cancelled_caller_affects_no_other_call(clients: list[Client]) -> None:
    async def main() -> None:
        async with Publisher("orders", key=lambda _: "k") as orders:
            clients[0].hold = True
            waiting = asyncio.create_task(orders.deliver(b"1"))
            await asyncio.sleep(0.01)
            waiting.cancel()
            clients[0].hold = False
            await orders.deliver(b"2")

    asyncio.run(main())
    assert len(clients[0].sent) == 2


def test_many_threads_may_send(clients: list[Client]) -> None:
    with Publisher("orders") as orders:
        threads = [
            threading.Thread(target=lambda n=n: [orders.send(b"%d" % i, key=f"{n}") for i in range(100)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        mine = [int(sent.value()) for sent in clients[0].sent if sent.key() == b"%d" % number]
        assert mine == list(range(100))


def test_a_publisher_of_another_process_is_refused(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher("orders") as orders:
        here = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(RuntimeError, match="make it after the fork"):
            orders.send(b"v", key="k")
        monkeypatch.undo()
        monkeypatch.setenv("KEYLANE_BOOTSTRAP", "b:1")


def test_unclosed_publisher_is_flushed_at_exit_with_a_warning(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    orders = Publisher("orders")
    orders.send(b"v", key="k")
    with caplog.at_level(logging.WARNING, "keylane.publisher"):
        orders._left_open()
    assert "was not closed" in caplog.text
    assert not clients[0].waiting


def test_keylane_is_imported_without_a_kafka_client() -> None:
    """Those who only declare an app, or publish nothing, do not wait for it."""
    code = "import sys, keylane; print('confluent_kafka' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert told.stdout.strip() == "False"
