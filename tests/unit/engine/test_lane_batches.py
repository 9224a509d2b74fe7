"""Batches of one lane, in virtual time: order, failures, and what a hot key gains."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from keylane import (
    App,
    Breaker,
    FailureGuard,
    Message,
    Poison,
    Result,
    Retry,
    SettingsError,
    Transient,
    VersionOrdering,
)
from keylane.audit.violation import EventKind
from keylane.engine.engine import Engine
from keylane.engine.stages import open_pipeline
from keylane.testing import (
    Crash,
    Drain,
    Fault,
    Harness,
    MemoryRecord,
    Recut,
    Redrive,
    Release,
    RunResult,
    check_results,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from keylane import CallNext
    from keylane.spec import DeliveryMode

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)
SEEDS = range(int(os.environ.get("KEYLANE_SEEDS", "30")))


def make(**options: Any) -> App:
    return App("hot", source="in", **{"sink": "out", "retry": SOON, "commit_interval": 0.1, **options})


def run(app: App, values: Sequence[bytes], *, key: bytes | None = b"k", **options: Any) -> RunResult:
    harness = Harness(app, **options)
    for value in values:
        harness.send(key=key, value=value)
    return harness.run()


def values(result: RunResult) -> list[bytes]:
    return [written.value for written in result.results]


NUMBERS = [b"%d" % number for number in range(10)]


def test_batch_has_consecutive_messages_of_one_lane_in_order() -> None:
    calls: list[list[bytes]] = []
    app = make()

    @app.batch_stage(of="lane", max_size=4)
    async def work(msgs: list[Message]) -> list[bytes]:
        assert len({msg.key for msg in msgs}) == 1
        calls.append([msg.value for msg in msgs])
        await asyncio.sleep(0.01)
        return [msg.value for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert calls == [NUMBERS[:4], NUMBERS[4:8], NUMBERS[8:]]
    assert values(result) == NUMBERS


def test_hot_key_processes_many_times_as_much() -> None:
    """A call of 5 ms for one message or for 64: messages of one key that are done within a second."""

    def done(app: App) -> int:
        result = run(app, [b"v"] * 20_000, latency=0.0)
        result.verdict.raise_if_bad()
        ends = [event for event in result.history if event.kind is EventKind.END and event.at <= 1.0]
        return len(ends)

    single, batched = make(), make()

    @single.stage
    async def one(_msg: Message) -> None:
        await asyncio.sleep(0.005)

    @batched.batch_stage(of="lane")
    async def many(msgs: list[Message]) -> list[None]:
        await asyncio.sleep(0.005)
        return [None] * len(msgs)

    assert done(batched) >= 20 * done(single)


def test_lanes_run_beside_each_other_and_none_has_two_calls() -> None:
    running: dict[bytes | None, int] = {}
    most: list[int] = []
    app = make()

    @app.batch_stage(of="lane", max_size=3)
    async def work(msgs: list[Message]) -> list[None]:
        key = msgs[0].key
        running[key] = running.get(key, 0) + 1
        assert running[key] == 1
        most.append(sum(running.values()))
        await asyncio.sleep(0.01)
        running[key] -= 1
        return [None] * len(msgs)

    harness = Harness(app)
    for number in range(60):
        harness.send(key=b"k%d" % (number % 6), value=b"v")
    result = harness.run()
    result.verdict.raise_if_bad()
    assert max(most) == 6
    assert result.elapsed < 0.2


@pytest.mark.parametrize("limit", [1, 2])
def test_max_concurrency_is_of_calls(limit: int) -> None:
    running, most = [0], [0]
    app = make()

    @app.batch_stage(of="lane", max_concurrency=limit)
    async def work(msgs: list[Message]) -> list[None]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return [None] * len(msgs)

    harness = Harness(app)
    for number in range(40):
        harness.send(key=b"k%d" % (number % 8), value=b"v")
    harness.run().verdict.raise_if_bad()
    assert most == [limit]


def test_failure_of_one_message_keeps_the_order() -> None:
    calls: list[list[bytes]] = []
    app = make()

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[Any]:
        calls.append([msg.value for msg in msgs])
        await asyncio.sleep(0.01)
        return [Transient("not yet") if msg.value == b"3" and msg.attempt < 3 else msg.value for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert calls == [NUMBERS, [b"3"], [b"3"], NUMBERS[4:]]
    assert values(result) == NUMBERS


def test_poison_in_a_batch_is_one_dead_letter() -> None:
    app = make()

    @app.batch_stage(of="lane")
    def work(msgs: list[Message]) -> list[Any]:
        return [Poison("bad") if msg.value == b"3" else msg.value for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert values(result) == [value for value in NUMBERS if value != b"3"]
    assert [(dead.value, dead.attempts) for dead in result.dead] == [(b"3", 1)]


def test_call_that_raises_is_repeated_message_by_message() -> None:
    calls: list[list[bytes]] = []
    app = make(max_buffered=100)

    @app.batch_stage(of="lane", max_size=5)
    async def work(msgs: list[Message]) -> list[bytes]:
        calls.append([msg.value for msg in msgs])
        await asyncio.sleep(0.01)
        if b"3" in calls[-1]:
            raise ValueError("which one?")
        return [msg.value for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert calls == [NUMBERS[:5], [b"0"], [b"1"], [b"2"], [b"3"], [b"4"], NUMBERS[5:]]
    assert [(dead.value, dead.attempts) for dead in result.dead] == [(b"3", 1)]
    assert values(result) == [value for value in NUMBERS if value != b"3"]


def test_outage_uses_attempts_of_the_first_message_only() -> None:
    app = make(retry=Retry(attempts=2, wait_initial=1.0, wait_max=1.0))

    @app.batch_stage(of="lane", timeout=0.5)
    async def work(msgs: list[Message]) -> list[bytes]:
        if asyncio.get_running_loop().time() < 0.8:
            await asyncio.sleep(60)
        return [msg.value for msg in msgs]

    result = run(app, NUMBERS)
    assert values(result) == NUMBERS
    assert result.verdict.counts.retried == 1


@pytest.mark.parametrize(
    "returned", [None, [1], [1] * 11, "text"], ids=["nothing", "too few", "too many", "text"]
)
def test_result_that_is_no_list_of_the_same_length_is_poison(returned: Any) -> None:
    app = make(failure_guard=None)

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> Any:
        return returned if len(msgs) > 1 else "text" if msgs[0].value == b"0" else [1]

    result = run(app, NUMBERS)
    assert [dead.value for dead in result.dead] == [b"0"]
    assert len(result.results) == 9


def test_payloads_and_decoding_fail_their_message_alone() -> None:
    app = make(decode=int)

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[int]:
        return [msg.value + 1 for msg in msgs]

    result = run(app, [b"1", b"2", b"x", b"3"])
    assert values(result) == [b"2", b"3", b"4"]
    assert [dead.value for dead in result.dead] == [b"x"]


def test_table_ends_before_a_value_that_does_not_fit() -> None:
    sizes: list[int] = []
    app = make(decode="json")

    @app.batch_stage(of="lane")
    def work(rows: pa.Table) -> Any:
        sizes.append(rows.num_rows)
        return rows["value"]

    result = run(app, [b"1", b"2", b'"x"', b"3", b"4"])
    assert not result.dead
    assert values(result) == [b"1", b"2", b"x", b"3", b"4"]
    assert sizes == [2, 1, 2]


def test_several_results_of_each_message_of_a_batch() -> None:
    app = make()

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[Any]:
        return [[Result(msg.value, key="a"), Result(msg.value, key="b")] for msg in msgs]

    result = run(app, NUMBERS)
    for key in (b"a", b"b"):
        assert [written.value for written in result.results if written.key == key] == NUMBERS


def test_rejected_result_keeps_the_order_of_its_batch() -> None:
    app = make(
        encode=lambda value: (
            (_ for _ in ()).throw(ValueError("not this one")) if value == 3 else b"%d" % value
        )
    )

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[int]:
        return [int(msg.value) for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert values(result) == [value for value in NUMBERS if value != b"3"]
    assert [dead.value for dead in result.dead] == [b"3"]


class Slow:
    """A sink that takes each message for 10 ms, one of them at the second attempt."""

    written: ClassVar[list[bytes | None]] = []

    async def open(self) -> None:
        type(self).written = []

    async def write(self, results: Any, /) -> None:
        await asyncio.sleep(0.01)
        if results[0].value == b"3" and b"tried" not in self.written:
            self.written.append(b"tried")
            raise Transient("busy")
        self.written.append(results[0].value)

    async def close(self) -> None: ...


def test_sink_of_ones_own_is_written_message_by_message() -> None:
    calls: list[int] = []
    app = make(sink=Slow())

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[bytes]:
        calls.append(len(msgs))
        return [msg.value for msg in msgs]

    run(app, NUMBERS).verdict.raise_if_bad()
    assert [value for value in Slow.written if value != b"tried"] == NUMBERS
    assert calls == [10, 6], "the write of 3 is tried again without its stage, and those behind it run again"


def test_breaker_admits_a_part_of_a_batch() -> None:
    calls: list[int] = []
    app = make(retry=Retry(attempts=30, wait_initial=0.05, wait_max=0.05))

    @app.batch_stage(of="lane", breaker=Breaker(minimum=3, open_for=1.0, probes=2))
    async def work(msgs: list[Message]) -> list[bytes]:
        calls.append(len(msgs))
        await asyncio.sleep(0.01)
        if asyncio.get_running_loop().time() < 0.5:
            raise ConnectionError("down")
        return [msg.value for msg in msgs]

    result = run(app, NUMBERS)
    result.verdict.raise_if_bad()
    assert values(result) == NUMBERS
    assert calls[0] == 10
    assert max(calls[1:4]) <= 2, "probes"


def test_duplicate_in_a_batch_does_not_run() -> None:
    app = make()

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[bytes]:
        return [msg.value for msg in msgs]

    harness = Harness(app)
    for name in (b"a", b"b", b"a", b"c"):
        harness.send(key=b"k", value=name, headers=[("event-id", name)])
    result = harness.run()
    assert values(result) == [b"a", b"b", b"c"]
    assert len(result.duplicates) == 1


def test_messages_without_a_key_are_batches_of_one() -> None:
    sizes: list[int] = []
    app = make()

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[None]:
        sizes.append(len(msgs))
        return [None] * len(msgs)

    run(app, NUMBERS, key=None)
    assert sizes == [1] * 10


def test_batch_follows_the_order_of_the_app() -> None:
    sizes: list[int] = []
    app = make(order="partition")

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[None]:
        sizes.append(len(msgs))
        assert [msg.offset for msg in msgs] == sorted(msg.offset for msg in msgs)
        return [None] * len(msgs)

    harness = Harness(app, partitions=1)
    for number in range(10):
        harness.send(key=b"%d" % number, value=b"v")
    harness.run().verdict.raise_if_bad()
    assert sizes == [10]


def test_drain_finishes_the_batch_that_runs() -> None:
    calls: list[list[bytes]] = []
    app = make(drain_timeout=5.0)

    @app.batch_stage(of="lane", max_size=4)
    async def work(msgs: list[Message]) -> list[bytes]:
        calls.append([msg.value for msg in msgs])
        await asyncio.sleep(1.0)
        return [msg.value for msg in msgs]

    result = run(app, NUMBERS, faults=[Drain(at=0.5)])
    result.verdict.raise_if_bad()
    assert result.verdict.repeats == 0
    assert calls == [NUMBERS[:4], NUMBERS[4:8], NUMBERS[8:]]


def test_stage_that_never_waits_does_not_take_the_whole_loop() -> None:
    app = make(sink=None)

    @app.batch_stage(of="lane", max_size=1)
    async def work(msgs: list[Message]) -> list[None]:
        return [None] * len(msgs)

    ticks = []

    async def test() -> None:
        async with open_pipeline(app.spec) as steps:
            engine = Engine(
                app.spec, steps, cast("Any", None), on_done=lambda _done: None
            )  # nothing is written
            records = [
                MemoryRecord(topic="in", partition=0, offset=n, key=b"k%d" % (n % 9), value=b"", timestamp=0)
                for n in range(5000)
            ]
            engine.accept(records)
            while engine.held:
                await asyncio.sleep(0)
                ticks.append(engine.held)
            await engine.abort()

    asyncio.run(test())
    assert len(ticks) > 10


# Random schedules.


@pytest.mark.parametrize("seed", SEEDS)
def test_any_schedule_keeps_the_order_of_the_calls(seed: int) -> None:
    rng = random.Random(seed)
    delivery: DeliveryMode = rng.choice(("at_least_once", "exactly_once"))
    policy = rng.choice(("skip", "block", "park"))
    app = make(
        delivery=delivery,
        on_failure=policy,
        drain_timeout=rng.choice((0.05, 5.0)),
        max_buffered=rng.choice((16, 65_536)),
        retry=Retry(attempts=5, wait_initial=0.05, wait_max=0.3),
        failure_guard=FailureGuard(consecutive=10_000, minimum=10_000),
    )
    running: set[bytes | None] = set()
    calls: list[list[int]] = []

    def chance(msg: Message, what: int) -> float:
        return (hash((seed, what, msg.partition, msg.offset)) >> 8 & 0xFFFFFF) / 0x1000000

    @app.batch_stage(of="lane", max_size=rng.choice((2, 5, 64)), max_concurrency=rng.choice((None, 2)))
    async def work(msgs: list[Message]) -> list[Any]:
        key = msgs[0].key
        assert {msg.key for msg in msgs} == {key}
        assert [msg.offset for msg in msgs] == sorted(msg.offset for msg in msgs)
        calls.append([int(msg.value) for msg in msgs])
        assert key not in running, "two calls of one lane at the same time"
        running.add(key)
        try:
            await asyncio.sleep(0.01 + 0.01 * chance(msgs[0], 1))
        finally:
            running.discard(key)
        if any(chance(msg, 2) < 0.05 and msg.attempt == 1 for msg in msgs) and msgs[0].attempt == 1:
            raise ConnectionError("down")
        now = asyncio.get_running_loop().time()
        return [
            Poison("bad")
            if chance(msg, 3) < 0.05 and now < 3
            else Transient("later")
            if chance(msg, 4) < 0.1 and msg.attempt == 1
            else msg.value
            for msg in msgs
        ]

    keys, breaks = rng.choice((1, 3, 10)), []
    for _ in range(rng.randrange(4)):
        at = rng.random() * 3
        breaks.append(rng.choice((Crash(at=at), Drain(at=at), Recut(at=at, tasks=2))))
    faults: list[Fault] = [*breaks]
    for number in range(keys):
        faults += [Release(at=8.0, key=b"k%d" % number), Redrive(at=9.0, key=b"k%d" % number)]
    harness = Harness(app, seed=seed, faults=faults, latency=rng.choice(((0.0, 0.02), (0.0, 0.5))), limit=600)
    sent = []
    for number in range(120):
        key = b"k%d" % rng.randrange(keys)
        sent.append((key, b"%d" % number))
        harness.send(key=key, value=b"%d" % number, at=number * 0.02)
    result = harness.run()
    result.verdict.raise_if_bad()
    numbers: dict[bytes, list[int]] = {}
    for number, (key, _) in enumerate(sent):
        numbers.setdefault(key, []).append(number)
    reached = dict.fromkeys(numbers, 0)
    for call in calls:  # none begins behind a message that was in no call before
        key = sent[call[0]][0]
        assert numbers[key].index(call[0]) <= reached[key]
        reached[key] = max(reached[key], numbers[key].index(call[-1]) + 1)
    values_at = {place: record.value() for place, record in harness.messages().items()}
    order = [(record.key(), record.value()) for record in harness.messages().values()]
    late = {values_at[dead.partition, dead.offset] for dead in result.dead}
    outputs = [(written.key, written.value) for written in result.results]
    check_results(order, outputs, allow_duplicates=delivery == "at_least_once", late=late).raise_if_bad()


# What is refused.


def refused(declare: Any) -> str:
    app = make()

    def build() -> None:
        declare(app)
        app.check()

    with pytest.raises(SettingsError) as caught:
        build()
    return str(caught.value)


async def batch(msgs: list[Message]) -> list[None]:
    return [None] * len(msgs)


async def single(_msg: Message) -> None: ...


def test_stage_with_batches_of_a_lane_is_the_only_one() -> None:
    def before(app: App) -> None:
        app.stage(single)
        app.batch_stage(of="lane")(batch)

    def after(app: App) -> None:
        app.batch_stage(of="lane")(batch)
        app.stage(single)

    for declare in (before, after):
        assert "'batch' has of='lane', so it must be the app's only stage" in refused(declare)


def test_batches_of_a_lane_refuse_what_is_about_single_messages() -> None:
    def wrapped(app: App) -> None:
        app.batch_stage(of="lane")(batch)

        @app.middleware
        async def around(msg: Message, call_next: CallNext) -> Any:
            return await call_next(msg)

    assert "of='lane' does not work with middleware" in refused(wrapped)
    app = make(versions=VersionOrdering())
    app.batch_stage(of="lane")(batch)
    with pytest.raises(SettingsError, match="of='lane' does not work with versions="):
        app.check()
    assert "of must be 'lanes' (one message of each) or 'lane'" in refused(
        lambda app: app.batch_stage(of="key")(batch)
    )
    assert "does not wait for more" in refused(lambda app: app.batch_stage(of="lane", max_wait=1)(batch))
