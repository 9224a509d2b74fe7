"""Batch stages, in virtual time: every sentence of docs/guarantees.md about them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keylane import (
    App,
    Breaker,
    FailureGuard,
    Message,
    Poison,
    Retry,
    SettingsError,
    Transient,
    VersionOrdering,
)
from keylane.testing import Crash, Drain, Fault, Flaw, Harness, RunResult, check_results

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)
SEEDS = range(int(os.environ.get("KEYLANE_SEEDS", "20")))


def make(**options: Any) -> App:
    return App("scores", source="in", **{"sink": "out", "retry": SOON, "commit_interval": 0.1, **options})


def run(app: App, messages: Sequence[tuple[bytes | None, bytes | None]], **options: Any) -> RunResult:
    """All of them arrive at once."""
    harness = Harness(app, **options)
    for key, value in messages:
        harness.send(key=key, value=value)
    return harness.run()


def judge(result: RunResult) -> None:
    """Order, unless no lane had two messages; and nothing lost."""
    if Flaw.THIN not in result.verdict.tally:
        result.verdict.raise_if_bad()
    assert not result.verdict.lost


def now() -> float:
    return asyncio.get_running_loop().time()


class Calls(list[list[Message]]):
    """What a stage was called with."""

    def saw(self, messages: Sequence[Message]) -> None:
        self.append(list(messages))

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self]


def scored(calls: Calls, app: App, lasts: float = 0.01, **options: Any) -> App:
    """A batch stage that hands its messages on."""

    @app.batch_stage(**options)
    async def score(msgs: list[Message]) -> list[Any]:
        calls.saw(msgs)
        await asyncio.sleep(lasts)
        return [msg.value for msg in msgs]

    return app


# Who is in a batch.


def test_batch_never_has_two_messages_of_one_lane() -> None:
    calls = Calls()
    app = scored(calls, make(), max_size=16)
    messages = [(b"k%d" % (n % 40), b"%d" % n) for n in range(800)]
    result = run(app, messages)
    judge(result)
    assert len(result.results) == 800
    assert max(calls.sizes) == 16
    assert sum(calls.sizes) / len(calls) > 12
    for call in calls:
        assert len({msg.key for msg in call}) == len(call)


def test_a_batch_waits_for_others_no_longer_than_max_wait() -> None:
    calls, at = Calls(), []
    app = make()

    @app.batch_stage(max_wait=0.5)
    async def score(msgs: list[Message]) -> list[Any]:
        calls.saw(msgs)
        at.append(now())
        return [msg.value for msg in msgs]

    harness = Harness(app)
    for number, when in enumerate((1.0, 1.3, 1.49, 1.51)):
        harness.send(key=b"k%d" % number, value=b"%d" % number, at=when)
    harness.run()
    assert calls.sizes == [3, 1]
    assert at == pytest.approx([1.5, 2.01], abs=1e-3)


def test_full_batch_starts_at_once() -> None:
    calls = Calls()
    result = run(scored(calls, make(), max_size=5, max_wait=1000), [(b"k%d" % n, b"v") for n in range(10)])
    assert calls.sizes == [5, 5]
    assert result.elapsed < 1


def test_batch_of_busy_lanes_does_not_wait_for_absent_ones() -> None:
    calls = Calls()
    app = scored(calls, make(), max_wait=10)
    result = run(app, [(b"k%d" % (n % 3), b"%d" % n) for n in range(300)])
    judge(result)
    assert set(calls.sizes[:-1]) == {3}
    assert result.elapsed < 1 + 10 + 1, "only the last of all waits"


def test_batch_without_a_wait_takes_ready_messages() -> None:
    calls = Calls()
    result = run(scored(calls, make(), max_wait=0), [(b"k%d" % n, b"v") for n in range(50)])
    assert calls.sizes == [50]
    assert result.elapsed < 0.2


def test_while_all_batches_run_the_next_one_grows() -> None:
    calls = Calls()
    app = scored(calls, make(), lasts=1.0, max_concurrency=1, max_size=100, max_wait=0.01)
    harness = Harness(app)
    for number in range(60):
        harness.send(key=b"k%d" % number, value=b"v", at=number * 0.02)
    result = harness.run()
    assert calls.sizes == [1, 50, 9]
    assert len(result.results) == 60


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_as_many_batches_run_at_once_as_the_limit_says(kind: str, limit: int) -> None:
    running, most = [0], [0]
    app = make()

    def enter() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])

    if kind == "async def":

        @app.batch_stage(max_concurrency=limit, max_size=4)
        async def score(msgs: list[Message]) -> list[Any]:
            enter()
            await asyncio.sleep(0.1)
            running[0] -= 1
            return [msg.value for msg in msgs]

    else:
        together = threading.Barrier(limit, timeout=10)

        @app.batch_stage(max_concurrency=limit, max_size=4)
        def blocking(msgs: list[Message]) -> list[Any]:
            assert threading.current_thread() is not threading.main_thread()
            enter()
            together.wait()
            running[0] -= 1
            return [msg.value for msg in msgs]

    result = run(app, [(b"k%d" % (n % 24), b"%d" % n) for n in range(24 * limit)])
    judge(result)
    assert most == [limit]


def test_batch_of_a_retry_holds_only_retries() -> None:
    calls = Calls()
    app = make()

    @app.batch_stage(max_wait=0.2, retry=Retry(attempts=4, wait_initial=0.05, wait_max=0.05))
    async def score(msgs: list[Message]) -> list[Any]:
        calls.saw(msgs)
        await asyncio.sleep(0.01)
        assert len({msg.attempt > 1 for msg in msgs}) == 1
        return [Transient("later") if msg.value == b"sick" and msg.attempt < 3 else None for msg in msgs]

    harness = Harness(app)
    for number in range(200):
        harness.send(key=b"k%d" % number, value=b"sick" if number % 5 == 0 else b"v", at=number * 0.01)
    result = harness.run()
    judge(result)
    assert not result.dead
    assert result.verdict.counts.retried == 40


def test_retries_take_their_share_of_the_batches_at_most() -> None:
    running = Counter[bool]()
    most = Counter[bool]()
    app = make(retry=Retry(attempts=9, wait_initial=0.01, wait_max=0.01), failure_guard=None)

    @app.batch_stage(max_concurrency=4, max_size=2, max_wait=0.0)
    async def score(msgs: list[Message]) -> list[Any]:
        again = msgs[0].attempt > 1
        running[again] += 1
        most[again] = max(most[again], running[again])
        await asyncio.sleep(1.0)
        running[again] -= 1
        return [Transient("no") if msg.value == b"sick" else msg.value for msg in msgs]

    run(app, [(b"k%d" % n, b"sick" if n % 2 else b"v") for n in range(100)])
    assert most[True] == 2, "half of the limit"
    assert most[False] == 4


def test_where_a_call_is_dear_batches_do_twenty_times_as_much() -> None:
    """5 ms for a call and 0.05 ms for each message, one call at a time, 2,000 lanes; through Kafka: bench/batch.py."""
    single, batched = make(), make()

    @single.stage(max_concurrency=1)
    async def one(msg: Message) -> bytes:
        await asyncio.sleep(0.00505)
        return bytes(msg.value)

    @batched.batch_stage(max_concurrency=1)
    async def many(msgs: list[Message]) -> list[bytes]:
        await asyncio.sleep(0.005 + 0.00005 * len(msgs))
        return [msg.value for msg in msgs]

    messages = [(b"k%d" % (n % 2000), b"%d" % n) for n in range(4000)]
    took = []
    for app in (single, batched):
        result = run(app, messages)
        judge(result)
        took.append(result.elapsed)
    assert took[0] / took[1] > 20


@pytest.mark.parametrize(("order", "most"), [("partition", 3), ("global", 1), ("none", 64)])
def test_an_order_with_fewer_lanes_makes_smaller_batches(order: str, most: int) -> None:
    calls = Calls()
    app = make(order=order, on_failure="block" if order == "global" else "skip")
    scored(calls, app, max_wait=5.0)
    result = run(app, [(b"k%d" % (n % 50), b"%d" % n) for n in range(300)], partitions=3)
    judge(result)
    assert max(calls.sizes) == most
    assert len(result.results) == 300
    if order == "global":
        assert result.elapsed < 300 * 0.02, "nobody waits for a second lane"


# The outcome of each message.


def test_results_and_failures_are_each_messages_own() -> None:
    app = make()
    before: Counter[bytes] = Counter()

    @app.stage
    async def prepare(msg: Message) -> bytes:
        before[msg.value] += 1
        return b"p" + bytes(msg.value)

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        def one(msg: Message) -> Any:
            if msg.value == b"p7":
                return Poison("never")
            if msg.value == b"p8" and msg.attempt < 3:
                return Transient("not yet")
            return None if msg.value == b"p9" else {"value": msg.value.decode(), "attempt": msg.attempt}

        return [one(msg) for msg in msgs]

    @app.stage
    async def finish(msg: Message) -> Any:
        assert msg.attempt == 1
        return msg.value

    result = run(app, [(b"k%d" % n, b"%d" % n) for n in range(10)])
    judge(result)
    got = {written.key: json.loads(written.value) for written in result.results}
    assert got == {
        b"k%d" % n: {"value": f"p{n}", "attempt": 3 if n == 8 else 1} for n in (0, 1, 2, 3, 4, 5, 6, 8)
    }
    assert set(before.values()) == {1}, "a retry resumes at the batch stage"
    (dead,) = result.dead
    assert (dead.key, dead.stage, dead.message, dead.attempts) == (b"k7", "score", "never", 1)


def test_batch_that_raises_fails_each_message_separately() -> None:
    app = make()
    calls = Calls()

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        calls.saw(msgs)
        if any(msg.value == b"sick" for msg in msgs):
            raise ConnectionError("down")
        return [msg.value for msg in msgs]

    messages = [(b"k%d" % n, b"sick" if n == 3 else b"v") for n in range(8)]
    result = run(app, messages)
    judge(result)
    # Backoffs differ, so they meet in other batches; only the sick one, and who is always with it, uses up all.
    assert calls.sizes[0] == 8
    assert b"k3" in {dead.key for dead in result.dead}
    assert len(result.results) + len(result.dead) == 8
    assert all(dead.attempts == 3 and dead.message == "down" for dead in result.dead)
    assert "score" in result.dead[0].traceback


def test_a_shared_exception_does_not_grow_with_every_message() -> None:
    app = make(failure_guard=None)

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        raise ValueError("a bug")

    result = run(app, [(b"k%d" % n, b"v") for n in range(50)])
    assert len(result.dead) == 50
    assert len({dead.traceback for dead in result.dead}) == 1
    assert all(dead.attempts == 1 for dead in result.dead)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (
            lambda msgs: [1] * (len(msgs) - 1),
            "returned 5 results for 6 messages; it must return one for each",
        ),
        (lambda msgs: pa.array([1] * 9), "returned 9 results for 6 messages"),
        (lambda msgs: None, "returned a NoneType; it must return a list, or an Arrow array"),
        (lambda msgs: b"abcdef", "returned a bytes; it must return a list"),
        (lambda msgs: {msg.key: 1 for msg in msgs}, "returned a dict; it must return a list"),
    ],
)
def test_result_of_wrong_length_is_poison_for_all(
    returned: Callable[[list[Message]], Any], told: str
) -> None:
    app = make()

    @app.batch_stage
    async def score(msgs: list[Message]) -> Any:
        return returned(msgs)

    result = run(app, [(b"k%d" % n, b"v") for n in range(6)])
    assert len(result.dead) == 6
    assert all(told in dead.message and "'score'" in dead.message for dead in result.dead)


def test_a_time_out_ends_the_call_for_all_of_its_messages() -> None:
    app = make()

    @app.batch_stage(timeout=2.0, max_wait=0)
    async def score(msgs: list[Message]) -> list[Any]:
        if msgs[0].attempt == 1:
            await asyncio.sleep(1000)
        return [msg.value for msg in msgs]

    result = run(app, [(b"k%d" % n, b"v") for n in range(20)])
    judge(result)
    assert len(result.results) == 20
    assert result.verdict.counts.retried == 20
    assert 2 < result.elapsed < 3


def test_batch_cancelled_from_inside_fails_its_messages() -> None:
    app = make()

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        return [await future]

    result = run(app, [(b"k%d" % n, b"v") for n in range(5)])
    assert {dead.message for dead in result.dead} == {"the stage was cancelled from inside"}
    assert len(result.dead) == 5


def test_strange_exceptions_in_the_list_are_failures_too() -> None:
    app = make(failure_guard=None)
    shared = Poison("the same for two")
    strange = [StopIteration("over"), SystemExit(3), asyncio.CancelledError(), shared, shared]

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        return list(strange)

    result = run(app, [(b"k%d" % n, b"v") for n in range(5)])
    assert len(result.dead) == 5


def test_a_batch_stage_has_resources_by_name() -> None:
    app = make()

    @app.resource
    async def model() -> AsyncIterator[int]:
        yield 7

    @app.batch_stage
    def score(msgs: list[Message], model: int) -> list[int]:
        return [model + int(msg.value) for msg in msgs]

    result = run(app, [(b"a", b"1"), (b"b", b"2")])
    assert sorted(written.value for written in result.results) == [b"8", b"9"]


# Breakers.


def outage(*, ends: float, limit: int | None, lanes: int) -> tuple[RunResult, int]:
    """A stage that is down at first; its results, and how often it was called."""
    calls = Calls()
    app = make(retry=Retry(attempts=4, wait_initial=0.1, wait_max=0.2))

    @app.batch_stage(max_size=10, max_concurrency=limit, breaker=Breaker(minimum=20, open_for=1.0, probes=2))
    async def score(msgs: list[Message]) -> list[Any]:
        calls.saw(msgs)
        await asyncio.sleep(0.01)
        if now() < ends:
            raise ConnectionError("down")
        return [msg.value for msg in msgs]

    result = run(app, [(b"k%d" % (n % lanes), b"%d" % n) for n in range(lanes * 4)])
    return result, len(calls)


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("lanes", [30, 200])
def test_batch_with_open_breaker_uses_no_attempts(limit: int | None, lanes: int) -> None:
    result, calls = outage(ends=10.0, limit=limit, lanes=lanes)
    judge(result)
    assert not result.dead
    assert len(result.results) == 4 * lanes
    assert calls < 4 * lanes / 2 + 150
    assert result.elapsed < 20


def test_failures_in_the_list_open_the_breaker_too() -> None:
    opened = []
    app = make(retry=Retry(attempts=9, wait_initial=0.01, wait_max=0.01))

    @app.batch_stage(max_size=10, breaker=Breaker(minimum=20, open_for=5.0))
    async def score(msgs: list[Message]) -> list[Any]:
        return [Transient("busy") if now() < 3 else msg.value for msg in msgs]

    @app.on_breaker
    def told(_stage: str, state: Any) -> None:
        opened.append((state.value, now()))

    result = run(app, [(b"k%d" % n, b"v") for n in range(100)])
    assert len(result.results) == 100
    assert opened[0][0] == "open"
    assert opened[0][1] < 0.1


# Tables and payloads.


def test_a_stage_may_take_an_arrow_table_and_return_an_array() -> None:
    seen: list[pa.Table] = []
    app = make(decode="json", versions=None)

    @app.batch_stage
    def score(table: pa.Table) -> pa.Array:
        seen.append(table)
        amounts = pc.struct_field(table["value"], "amount")
        return pc.multiply(amounts, 2)

    harness = Harness(app)
    for n in range(4):
        harness.send(
            key=b"k%d" % n,
            value=json.dumps({"amount": n}).encode(),
            headers=[("event-id", b"e%d" % n), ("event-type", b"Paid"), ("event-version", b"%d" % (n + 1))],
            at=1.5,
        )
    result = harness.run()
    assert sorted(written.value for written in result.results) == [b"0", b"2", b"4", b"6"]
    (table,) = seen
    assert table.column_names == [
        "key", "value", "headers", "topic", "partition", "offset", "timestamp", "event_id", "type", "version",
        "attempt", "request_id",
    ]  # fmt: skip
    (row,) = (row for row in table.to_pylist() if row["key"] == b"k2")
    assert row["value"] == {"amount": 2}
    assert row["headers"][0] == {"key": "event-id", "value": b"e2"}
    assert (row["topic"], row["event_id"], row["type"], row["version"], row["attempt"]) == (
        "in", "e2", "Paid", 3, 1,
    )  # fmt: skip
    assert row["timestamp"].timestamp() == 1.5
    assert len(row["request_id"]) == 32


@pytest.mark.parametrize(
    ("decode", "value", "kind"),
    [(None, b"\xff", pa.binary()), ("text", b"a", pa.string()), ("json", b"1.5", pa.float64())],
)
def test_the_column_of_values_is_of_their_type(decode: Any, value: bytes, kind: pa.DataType) -> None:
    kinds = []
    app = make(decode=decode)

    @app.batch_stage
    async def score(table: pa.Table) -> pa.ChunkedArray:
        kinds.append(table.schema.field("value").type)
        return table["value"]

    run(app, [(b"a", value), (b"b", None)])
    assert kinds == [kind]


def test_batch_value_that_fits_no_table_fails_alone() -> None:
    app = make(decode="json")

    @app.batch_stage
    async def score(table: pa.Table) -> pa.Table:
        return table.select(["event_id"])

    odd = {
        b"k3": b'"text"',
        b"k5": b'{"a": "b"}',
        b"k7": b'"\\ud800"',
        b"k8": b"123456789012345678901234567890",
    }
    messages = [(b"k%d" % n, odd.get(b"k%d" % n, b'{"a": %d}' % n)) for n in range(12)]
    harness = Harness(app)
    for key, value in messages:
        harness.send(key=key, value=value, headers=[("event-version", b"no number")])
    result = harness.run()
    assert {dead.key for dead in result.dead} == odd.keys()
    assert "does not fit with the others of its batch (struct<a: int64>)" in next(
        dead.message for dead in result.dead if dead.key == b"k5"
    )
    assert len(result.results) == 8
    assert set(json.loads(result.results[0].value)) == {"event_id"}, "a row of a table is an object"


def test_values_that_fit_into_no_table_at_all_are_poison() -> None:
    app = make(decode=lambda value: object())

    @app.batch_stage
    async def score(table: pa.Table) -> pa.Table:
        raise AssertionError("not called")

    result = run(app, [(b"k%d" % n, b"v") for n in range(3)])
    assert [dead.message.partition(":")[0] for dead in result.dead] == [
        "the value, a object, has no place in a table"
    ] * 3


def test_numpy_results_are_read_as_a_list() -> None:
    class Array:
        def tolist(self) -> list[float]:
            return [0.5, 1.5]

    app = make()

    @app.batch_stage
    async def score(msgs: list[Message]) -> Array:
        return Array()

    result = run(app, [(b"a", b"v"), (b"b", b"v")])
    assert sorted(written.value for written in result.results) == [b"0.5", b"1.5"]


@dataclass
class Paid:
    amount: int


def test_batch_payload_that_does_not_fit_is_poison_alone() -> None:
    app = make()

    @app.batch_stage
    async def score(events: list[Paid]) -> list[int]:
        return [event.amount + 1 for event in events]

    result = run(app, [(b"a", b'{"amount": 1}'), (b"b", b'{"amount": "x"}'), (b"c", b'{"amount": 3}')])
    assert sorted(written.value for written in result.results) == [b"2", b"4"]
    (dead,) = result.dead
    assert dead.key == b"b"
    assert dead.message == "no Paid: amount: Input should be a valid integer"


# Declaring.


def refused(declare: Callable[[App], Any]) -> str:
    def build() -> None:
        app = make()
        declare(app)
        app.check()

    with pytest.raises(SettingsError) as caught:
        build()
    return str(caught.value)


def _takes(annotation: Any) -> Callable[[Any], Any]:
    async def score(msgs: Any) -> Any:
        return msgs

    score.__annotations__["msgs"] = annotation
    return score


def test_invalid_batch_options_are_refused_at_build_time() -> None:
    def nothing() -> None: ...
    def keyword(*, msgs: list[Message]) -> None: ...
    def unknown(msgs: list[Message], nobody: Any) -> None: ...
    def generator(msgs: list[Message]) -> Any:
        yield msgs

    def plain(msgs: list[Message]) -> None: ...

    assert (
        "App 'scores', batch stage 'plain': max_size must be a whole number of at least 1, got 0"
        in refused(lambda app: app.batch_stage(max_size=0)(plain))
    )
    assert "0 or more" in refused(lambda app: app.batch_stage(max_wait=-1)(plain))
    assert "0 or more" in refused(lambda app: app.batch_stage(max_wait="1")(plain))  # type: ignore[call-overload]
    assert "needs an 'async def' stage" in refused(lambda app: app.batch_stage(timeout=1)(plain))
    assert "it takes no argument; a batch stage is given a list" in refused(
        lambda app: app.batch_stage(nothing)
    )
    assert "keyword-only" in refused(lambda app: app.batch_stage(keyword))
    assert "which is not a resource" in refused(lambda app: app.batch_stage(unknown))
    assert "it is a generator" in refused(lambda app: app.batch_stage(generator))
    for annotation in (Message, dict, list[int], "Message", "dict[str, Message]", "list[Unknown]", pa.Array):
        takes = _takes(annotation)
        told = refused(lambda app, takes=takes: app.batch_stage(takes))  # type: ignore[misc]
        assert "a batch stage takes list[Message], a list of payloads" in told

    def with_handler(app: App) -> None:
        app.on("Paid")(_takes(Message))
        app.batch_stage(plain)

    assert "an app has either stages" in refused(with_handler)


def test_the_usual_annotations_are_understood() -> None:
    for annotation in (
        list,
        list[Message],
        "list[Message]",
        "Sequence[keylane.Message]",
        "pa.Table",
        pa.Table,
        Any,
    ):
        app = make()
        app.batch_stage(_takes(annotation))
        app.check()


# Ends.


@pytest.mark.parametrize("fault", [Drain(at=1.0), Crash(at=1.0)])
def test_batch_does_not_wait_at_the_end_of_an_epoch(fault: Fault) -> None:
    calls = Calls()
    app = scored(calls, make(drain_timeout=5.0), max_wait=3.0)
    harness = Harness(app, faults=[fault])
    for number in range(10):
        harness.send(key=b"k%d" % number, value=b"v", at=0.9)
    result = harness.run()
    judge(result)
    assert len(result.results) == 10
    assert set(calls.sizes) == {10}
    if isinstance(fault, Drain):
        assert len(calls) == 1
        assert result.elapsed < 2, "the drain does not wait for others"


def test_batch_that_takes_too_long_is_ended_by_a_drain() -> None:
    cancelled = []
    app = make(drain_timeout=1.0)

    @app.batch_stage
    async def score(msgs: list[Message]) -> list[Any]:
        try:
            await asyncio.sleep(100 if now() < 50 else 0)
        except asyncio.CancelledError:
            cancelled.append(len(msgs))
            raise
        return [msg.value for msg in msgs]

    harness = Harness(app, faults=[Drain(at=49.0)])
    for number in range(10):
        harness.send(key=b"k%d" % number, value=b"v", at=40.0)
    result = harness.run()
    judge(result)
    assert cancelled == [10]
    assert len(result.results) == 10


def test_versions_keep_their_order_through_batches() -> None:
    calls = Calls()
    app = scored(calls, make(versions=VersionOrdering()), max_size=8)
    harness = Harness(app, seed=3)
    rng = random.Random(5)
    events = [(b"k%d" % (n % 20), n // 20 + 1) for n in range(200)]
    for start in range(0, 200, 60):  # disorder inside of a window
        window = events[start : start + 60]
        rng.shuffle(window)
        events[start : start + 60] = window
    for number, (key, version) in enumerate(events):
        harness.send(
            key=key, value=b"%d" % version, headers=[("event-version", b"%d" % version)], at=number * 0.002
        )
    result = harness.run()
    judge(result)
    for key in {key for key, _ in events}:
        assert [int(w.value) for w in result.results if w.key == key] == list(range(1, 11))
    assert max(calls.sizes) > 1


# Any schedule.


def unsteady(rng: random.Random, seed: int) -> App:
    app = make(
        retry=Retry(attempts=40, wait_initial=0.05, wait_max=0.3),
        commit_interval=rng.choice([0.05, 0.5]),
        drain_timeout=rng.choice([0.1, 2.0, 30.0]),
        max_buffered=rng.choice([16, 65_536]),
        failure_guard=FailureGuard(consecutive=10_000, minimum=10_000),
    )
    outage = rng.uniform(0, 8)
    outage_ends = outage + rng.choice([0, 1, 2])
    # A drain that is too short for a letter leaves its end to the next epoch, in which nothing began it.
    poison = rng.choice([0.0, 0.02]) if app.spec.drain_timeout > 1 else 0.0

    def chance(msg: Message, what: str) -> float:
        return random.Random(f"{seed} {what} {msg.position}").random()

    @app.stage
    async def before(msg: Message) -> bytes:
        await asyncio.sleep(chance(msg, "before") * rng.choice([0, 0.05]))
        return bytes(msg.value)

    @app.batch_stage(
        max_size=rng.choice([2, 7, 64]),
        max_wait=rng.choice([0.0, 0.005, 0.1]),
        max_concurrency=rng.choice([None, 1, 3]),
        timeout=rng.choice([None, 0.2]),
        breaker=rng.choice([None, Breaker(minimum=5, window=2, open_for=0.5, probes=2)]),
    )
    async def batched(msgs: list[Message]) -> list[Any]:
        draw = random.Random(f"{seed} call {msgs[0].position} {msgs[0].attempt}")
        await asyncio.sleep(draw.choice([0.0, 0.01, 0.3 if msgs[0].attempt < 3 else 0.1]))
        if outage <= now() < outage_ends:
            raise ConnectionError("down")
        if draw.random() < 0.05 and msgs[0].attempt < 4:
            raise draw.choice([Transient("all of us"), TimeoutError(), ConnectionResetError("gone")])
        return [
            Poison("never")
            if chance(msg, "poison") < poison
            else Transient("not yet", retry_after=draw.choice([None, 0.2]))
            if msg.attempt < 3 and chance(msg, "flaky") < 0.1
            else msg.value
            for msg in msgs
        ]

    if rng.random() < 0.5:

        @app.batch_stage(max_size=5, max_wait=0.01)
        async def another(msgs: list[Message]) -> list[Any]:
            await asyncio.sleep(0.002)
            return [msg.value for msg in msgs]

    else:

        @app.stage
        async def after(msg: Message) -> bytes:
            return bytes(msg.value)

    return app


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_keeps_the_order_in_any_schedule(seed: int) -> None:
    rng = random.Random(seed)
    app = unsteady(rng, seed)
    faults: list[Fault] = []
    for _ in range(rng.randrange(4)):
        at = rng.random() * 10
        faults.append(Crash(at=at) if rng.random() < 0.5 else Drain(at=at))
    harness = Harness(
        app, seed=seed, partitions=rng.randrange(1, 5), faults=faults, latency=(0.001, 0.03), holes=0.1
    )
    keys = rng.choice([1, 5, 60, 300])
    for number in range(300):
        key = None if rng.random() < 0.05 else b"k%d" % rng.randrange(keys)
        harness.send(key=key, value=b"%d" % number, at=number * rng.choice([0.001, 0.03]))
    result = harness.run()
    judge(result)
    dead = {letter.value for letter in result.dead}  # one of them may have come through before a crash
    inputs = [(r.key(), r.value()) for r in harness.log.records("in") if r.value() not in dead]
    outputs = [(r.key(), r.value()) for r in harness.log.records("out") if r.value() not in dead]
    assert len(dead) < 20, "only the poison"
    check_results(inputs, outputs, allow_duplicates=bool(faults)).raise_if_bad()
