from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane import App
from keylane.engine.delivery import Delivery
from keylane.engine.results import ResultRecord
from keylane.errors import BrokerError, Poison
from keylane.kafka.rejection import NO_RULES, TopicRules
from keylane.testing.log import MemoryRecord
from keylane.worker import output as module
from keylane.worker.output import BUSY_LOOP_LANES, KafkaOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.dlq.writer import DeadLetterWriter
    from keylane.engine.engine import Engine
    from keylane.worker.session import WorkerSession


class Client:
    """Takes results as the real one does, but for those of one offset: as after a fatal error, or without its topic."""

    def __init__(self, refuses: int = -1) -> None:
        self.refuses = refuses
        self.taken: list[int] = []
        self.produced: list[tuple[Any, ...]] = []
        self.room = 1_000
        self.reports: list[Callable[[], None]] = []

    def poll(self, _seconds: float) -> None:
        self.room = 1_000
        for report in self.reports:
            report()

    def produce(self, *record: Any) -> None:
        if not self.room:
            raise BufferError
        self.room -= 1
        offset = getattr(record[4], "offset", -2)  # of the delivery, which is also the report of one result
        if offset == self.refuses:
            raise KafkaException(ClientError(ClientError._UNKNOWN_TOPIC))
        self.taken.append(offset)
        self.produced.append(record)


class Bench:
    """An output and the engine that it reports to; ``waiting`` lanes wait for their turn.

    With ``held`` the task is behind by this many messages.
    """

    def __init__(
        self, client: Client, waiting: int, *, held: int = 0, rules: Mapping[str, TopicRules] | None = None
    ) -> None:
        self.refused: list[tuple[int, Any]] = []
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.engine = cast(
            "Engine",
            SimpleNamespace(
                failure=self.failed,
                fail=self._fail,
                source_id="",
                held=held,
                acknowledged=[],
                refused=lambda delivery, error: self.refused.append((delivery.offset, error)),
                behind=bool(held),
                table=SimpleNamespace(ready=range(waiting)),
            ),
        )
        worker_session = cast(
            "WorkerSession",
            SimpleNamespace(
                writer=None,
                producer=lambda _use: client,
                rules=lambda topic: (rules or {}).get(topic, NO_RULES),
                poll=lambda: None,
            ),
        )
        app = App("a", source="in", sinks=("out", "more"))
        self.output = KafkaOutput(worker_session, cast("DeadLetterWriter", None), app.spec, limit=1_000_000)
        for _ in range(2):  # as it was at every look since the last time
            self.output.look(self.engine)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def results(self, *offsets: int) -> None:
        for offset in offsets:
            record = MemoryRecord(topic="in", partition=0, offset=offset, key=b"k", value=b"v", timestamp=0)
            self.output.result(Delivery(record, self.engine), b"v")

    def several(self, offset: int, *records: ResultRecord) -> Delivery:
        made = MemoryRecord(topic="in", partition=0, offset=offset, key=b"k", value=b"v", timestamp=0)
        delivery = Delivery(made, self.engine)
        self.output.all_results(delivery, records)
        return delivery


def record(value: bytes | None, *, topic: str = "out", key: bytes = b"k", timestamp: int = 0) -> ResultRecord:
    return ResultRecord(
        topic=topic, key=key, value=value, headers=[("event-id", b"e")], timestamp=timestamp, plain=False
    )


@pytest.fixture(autouse=True)
def _every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REVIEW_INTERVAL_SECONDS", 0.0)


CALM, MANY = 0, BUSY_LOOP_LANES + 1


@pytest.mark.parametrize("waiting", [CALM, MANY])
def test_client_that_refuses_results_ends_the_task(waiting: int) -> None:
    async def test() -> None:
        bench = Bench(Client(refuses=0), waiting)
        bench.results(0)
        error = await asyncio.wait_for(bench.failed, 2)
        assert isinstance(error, BrokerError)
        assert "'out'" in str(error)

    asyncio.run(test())


@pytest.mark.parametrize("waiting", [CALM, MANY])
def test_nothing_overtakes_a_result_that_the_client_did_not_take(waiting: int) -> None:
    async def test() -> None:
        client = Client(refuses=2)
        bench = Bench(client, waiting)
        bench.results(0, 1, 2, 3)
        await asyncio.wait_for(bench.failed, 2)
        client.refuses = -1  # the topic is back, and the task has not ended yet
        bench.results(4, 5)
        bench.output.look(bench.engine)
        await asyncio.sleep(0.1)
        assert client.taken == [0, 1]

    asyncio.run(test())


@pytest.mark.parametrize("waiting", [CALM, MANY])
def test_a_client_without_room_is_waited_for(waiting: int) -> None:
    async def test() -> None:
        client = Client()
        client.room = 2
        Bench(client, waiting).results(*range(4))
        await asyncio.sleep(0.1)
        assert client.taken == [0, 1, 2, 3]

    asyncio.run(test())


@pytest.mark.parametrize("waiting", [CALM, MANY])
def test_no_result_is_sent_after_an_earlier_delivery_fails(
    waiting: int,
) -> None:
    async def test() -> None:
        client = Client()
        client.room = 2
        bench = Bench(client, waiting)
        client.reports.append(lambda: bench.engine.fail(BrokerError("not written")))
        bench.results(*range(4))
        await asyncio.wait_for(bench.failed, 2)
        await asyncio.sleep(0.1)
        assert client.taken == [0, 1]

    asyncio.run(test())


@pytest.mark.parametrize(("waiting", "held"), [(MANY, 0), (CALM, 20_000)])
def test_results_are_gathered_only_while_many_lanes_wait(waiting: int, held: int) -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, waiting, held=held)
        bench.results(0, 1)
        assert client.taken == []
        bench.engine.table.ready = range(CALM)  # type: ignore[assignment]
        bench.engine.behind = False  # type: ignore[misc]
        bench.output.look(bench.engine)
        bench.results(2)
        assert client.taken == [0, 1, 2]

    asyncio.run(test())


def test_gathered_results_are_sent_in_order_after_a_while() -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, MANY)
        bench.results(*range(10))
        await asyncio.sleep(0.1)
        assert client.taken == list(range(10))

    asyncio.run(test())


def test_gathered_results_are_not_sent_after_the_end() -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, MANY)
        bench.results(0)
        bench.output.close()
        await asyncio.sleep(0.1)
        assert client.taken == []

    asyncio.run(test())


# Several results of a message.


def test_results_of_a_message_are_handed_over_in_order() -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, CALM)
        bench.several(0, record(b"1"), record(None, topic="more", key=b"x", timestamp=5))
        assert [(each[0], each[1], each[2], each[6]) for each in client.produced] == [
            ("out", b"1", b"k", 0),
            ("more", None, b"x", 5),
        ]

    asyncio.run(test())


def test_message_is_acknowledged_when_all_its_results_are() -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, CALM)
        delivery = bench.several(0, record(b"1"), record(b"2"), record(b"3"))
        for produced in client.produced:
            assert bench.engine.acknowledged == []
            produced[4](None, None)
        assert bench.engine.acknowledged == [delivery]

    asyncio.run(test())


def test_message_with_a_lost_result_is_never_acknowledged() -> None:
    """A later result is in another partition, and is acknowledged after the earlier one has failed."""

    async def test() -> None:
        client = Client()
        bench = Bench(client, CALM)
        bench.several(0, record(b"1"), record(b"2", topic="more"))
        error = ClientError(ClientError.MSG_SIZE_TOO_LARGE)
        client.produced[0][4](error, None)
        client.produced[1][4](None, None)
        assert bench.engine.acknowledged == []
        assert bench.refused == [(0, error)]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (
            record(b"x" * 2000, topic="more"),
            "larger than topic 'more' takes (max.message.bytes less overhead: 872)",
        ),
        (
            record(b"2", topic="more", timestamp=1 << 50),
            "which topic 'more' does not take (message.timestamp.after",
        ),
    ],
    ids=["size", "time"],
)
def test_no_result_is_sent_when_a_sink_can_never_take_one(bad: ResultRecord, complaint: str) -> None:
    async def test() -> None:
        client = Client()
        rules = {"more": TopicRules(limit=1000, max_ahead_ms=1000.0)}
        with pytest.raises(Poison) as caught:
            Bench(client, CALM, rules=rules).several(0, record(b"x" * 2000), bad)
        assert complaint in str(caught.value)
        assert client.produced == []

    asyncio.run(test())


def test_sink_that_stamps_records_gets_the_origin_time() -> None:
    async def test() -> None:
        client = Client()
        bench = Bench(client, CALM, rules={"more": TopicRules(stamps=True)})
        bench.several(0, record(b"1"), record(b"2", topic="more"))
        assert [[name for name, _ in each[7]] for each in client.produced] == [
            ["event-id"],
            ["event-id", "origin-time"],
        ]

    asyncio.run(test())
