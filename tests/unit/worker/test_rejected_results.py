"""Results that a sink rejects, against a model of the client and the broker."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import App, Message
from keylane.dlq.spool import Spool, folder_of, foreign
from keylane.engine.engine import Engine
from keylane.engine.stages import open_pipeline
from keylane.errors import BrokerError, Poison
from keylane.kafka.rejection import NO_RULES, Rejections, TopicRules, smallest_limit
from keylane.kafka.settings import KafkaSettings
from keylane.testing import MemoryRecord
from keylane.worker.output import KafkaOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from keylane.dlq.writer import DeadLetterWriter
    from keylane.worker.session import WorkerSession

BAD = b"bad"


class Client:
    """Sends batches of ``size`` records when it is polled; the broker rejects a batch with a bad one as a whole.

    After that a ``gapless`` one writes nothing more. Any other continues, like librdkafka.
    """

    def __init__(self, sink: list[tuple[bytes, bytes]], size: int, *, gapless: bool) -> None:
        self.sink = sink
        self.size = size
        self.gapless = gapless
        self.fatal = False
        self.queue: list[tuple[Any, ...]] = []

    def produce(self, *record: Any) -> None:
        if self.fatal:
            raise KafkaException(ClientError(ClientError._FATAL))
        self.queue.append(record)

    def poll(self, _seconds: float) -> None:
        batch, self.queue = self.queue[: self.size], self.queue[self.size :]
        rejected = any(record[1].startswith(BAD) for record in batch)
        if not rejected:
            self.sink += [(record[2], record[1]) for record in batch]
        error = ClientError(ClientError.MSG_SIZE_TOO_LARGE) if rejected else None
        for record in batch:
            record[4](error, None)
        if rejected and self.gapless:
            self.fatal = True
            for record in self.queue:
                record[4](ClientError(ClientError._PURGE_QUEUE), None)
            self.queue = []


class Model:
    """A task that begins again after a rejection, as :class:`keylane.worker.lane_worker.LaneWorker` does."""

    def __init__(self, values: Sequence[tuple[bytes, bytes]], size: int) -> None:
        self.records = [
            MemoryRecord(topic="in", partition=0, offset=offset, key=key, value=value, timestamp=0)
            for offset, (key, value) in enumerate(values)
        ]
        self.size = size
        self.sink: list[tuple[bytes, bytes]] = []
        self.letters: list[bytes | None] = []
        self.done: set[int] = set()
        self.begun = 0
        self.rejections = Rejections()
        self.app = App("a", source="in", sink="out", failure_guard=None)

        @self.app.stage
        async def work(msg: Message) -> AsyncIterator[bytes]:
            for value in msg.value.split(b"|"):
                yield value

    async def run(self) -> None:
        while len(self.done) < len(self.records):
            self.begun += 1
            assert self.begun < 5, "one rejection tells how to go on"
            await self._once()

    async def _once(self) -> None:
        clients = {
            "results": Client(self.sink, self.size, gapless=True),
            "alone": Client(self.sink, 1, gapless=False),
        }
        loop = asyncio.get_running_loop()

        def letter(delivery: Any, _letter: Any, _kind: str, _park: Any, then: Any) -> None:
            self.letters.append(delivery.original)
            loop.call_soon(then, None)

        worker_session = SimpleNamespace(
            writer=None,
            producer=clients.__getitem__,
            rules=lambda _topic: NO_RULES,
            poll=lambda: clients["alone"].poll(0),
        )
        dead_letters = cast("DeadLetterWriter", SimpleNamespace(letter=letter))
        async with open_pipeline(self.app.spec) as steps:
            output = KafkaOutput(
                cast("WorkerSession", worker_session),
                dead_letters,
                self.app.spec,
                limit=1_000_000,
                rejections=self.rejections,
            )
            engine = Engine(self.app.spec, steps, output, on_done=self._done)
            engine.accept([record for record in self.records if record.offset() not in self.done])
            while not engine.failure.done() and engine.held:
                await asyncio.sleep(0)
                output.poll()
                output.look(engine)
                engine.settle()
            await engine.abort()
            output.close()
            if engine.failure.done():
                assert isinstance(engine.failure.exception(), BrokerError)
                while clients["results"].queue:
                    clients["results"].poll(0)
                assert self.rejections.add_suspects(engine.refusals, time.monotonic())
            engine.settle()

    def _done(self, deliveries: list[Any]) -> None:
        self.done.update(delivery.offset for delivery in deliveries)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from([b"k0", b"k1", b"k2"]), st.booleans()), max_size=40),
    st.integers(1, 12),
)
def test_only_rejected_results_fail_and_order_is_kept(given: list[tuple[bytes, bool]], size: int) -> None:
    values = [(key, (BAD if bad else b"ok") + b"%d" % n) for n, (key, bad) in enumerate(given)]
    model = Model(values, size)
    asyncio.run(model.run())
    for key in {key for key, _ in values}:
        expected = [value for each, value in values if each == key and not value.startswith(BAD)]
        assert [value for each, value in model.sink if each == key] == expected
    assert sorted(model.letters) == sorted(v for _, v in values if v.startswith(BAD))  # type: ignore[type-var]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"k0", b"k1", b"k2"]), st.lists(st.booleans(), min_size=1, max_size=4)),
        max_size=25,
    ),
    st.integers(1, 12),
)
def test_one_rejected_result_of_several_fails_only_its_message(
    given: list[tuple[bytes, list[bool]]], size: int
) -> None:
    """What is before it may be in the sink, also more than once, and nothing of what is behind it."""
    values = [
        (key, b"|".join((BAD if bad else b"ok") + b"%d.%d" % (n, place) for place, bad in enumerate(several)))
        for n, (key, several) in enumerate(given)
    ]
    model = Model(values, size)
    asyncio.run(model.run())
    for key in {key for key, _ in values}:
        expected, optional = [], set()
        for value in (value for each, value in values if each == key):
            before, bad, _ = value.partition(BAD)
            parts = before.rstrip(b"|").split(b"|") if before else []
            expected += parts
            if bad:
                optional.update(parts)
        found = list(dict.fromkeys(value for each, value in model.sink if each == key))
        assert [value for value in expected if value in found] == found
        assert set(expected) - set(found) <= optional
    assert sorted(model.letters) == sorted(v for _, v in values if BAD in v)  # type: ignore[type-var]


def test_many_rejected_results_make_a_task_begin_again_once() -> None:
    model = Model([(b"k%d" % (n % 9), (BAD if n % 3 else b"ok") + b"%d" % n) for n in range(300)], 10)
    asyncio.run(model.run())
    assert model.begun == 2
    assert len(model.letters) == 200


def test_a_rejected_reason_is_given_until_it_is_committed() -> None:
    rejections = Rejections()
    assert rejections.start_over(), "from now on records are sent alone: that is new"
    assert not rejections.start_over(), "nothing was learned"
    rejections.set_reason((0, 7), "too large")
    assert rejections.start_over()
    assert rejections.reason(0, 7) == "too large"
    rejections.collect(None)
    assert rejections.reason(0, 7) == "too large", "its transaction may still be aborted"
    rejections.aborted()
    rejections.collect(None)
    rejections.committed()
    assert rejections.reason(0, 7) is None, "released, it is for the broker to say"


def test_a_time_beyond_the_sinks_rules_is_poison() -> None:
    async def test() -> None:
        worker_session = SimpleNamespace(
            writer=None, producer=lambda _use: None, rules=lambda _topic: TopicRules(max_ahead_ms=1000.0)
        )
        app = App("a", source="in", sink="out")
        output = KafkaOutput(
            cast("WorkerSession", worker_session), cast("DeadLetterWriter", None), app.spec, limit=1_000_000
        )
        now = int(time.time() * 1000)
        output._check_time("out", 0)
        output._check_time("out", now - 10**12)
        output._check_time("out", now + 50_000)  # clocks differ: the broker says
        with pytest.raises(Poison, match=r"message\.timestamp\.after\.max\.ms: 1000"):
            output._check_time("out", now + 100_000)

    asyncio.run(test())


def test_batches_follow_the_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        KafkaSettings, "_make", lambda _self, _kind, base, more, *_: made.append({**base, **more})
    )
    assert smallest_limit(TopicRules(limit=5), NO_RULES, TopicRules(limit=3)) == 3
    KafkaSettings("b:1").producer()
    KafkaSettings("b:1").producer(batch_limit=100_000, record_limit=50_000)
    KafkaSettings("b:1", (("batch.size", "7000"),)).producer(batch_limit=100_000)
    assert [conf.get("batch.size") for conf in made] == [None, 99_872, 7_000]
    assert [conf["message.max.bytes"] for conf in made] == [1_000_000_000, 50_000, 1_000_000_000]


def test_a_spool_knows_the_files_of_other_clusters(tmp_path: Path) -> None:
    own = folder_of(tmp_path, "chat", "c1")
    assert own == tmp_path / "chat" / "c1"
    assert folder_of(tmp_path, "chat", "../x").parent == tmp_path / "chat"
    assert (
        folder_of(tmp_path, "chat", "..") == folder_of(tmp_path, "chat", "") == tmp_path / "chat" / "unknown"
    )
    assert foreign(own) == []
    old, other = tmp_path / "chat" / "h-1-1.spool", tmp_path / "chat" / "c2" / "h-1-1.spool"
    for path in (own / "h-2-1.spool", old, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert foreign(own) == [other, old]
    assert Spool(tmp_path, "chat", "c1").folder == own
