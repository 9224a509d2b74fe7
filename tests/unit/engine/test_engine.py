from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import App, BrokerError, KeylaneError, Message, Poison, ResourceError, Retry, Transient
from keylane.engine.engine import Engine
from keylane.engine.message_runner import RUN_MESSAGES_MAX
from keylane.engine.runner_pool import CANCEL_SECONDS_MAX
from keylane.engine.stages import open_pipeline
from keylane.errors import FencedError
from keylane.outcome import Outcome
from keylane.testing import (
    Crash,
    Drain,
    EventKind,
    Fault,
    Harness,
    MemoryLog,
    RunResult,
    check_results,
    run_virtual,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from keylane.engine.delivery import Delivery
    from keylane.engine.output import Then
    from keylane.policies.failure_info import FailureInfo

NEVER_AGAIN = Retry(attempts=1)
NO_WAIT = Retry(attempts=5, wait_initial=1e-6, wait_max=1e-6)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "keylane.engine")


def make(**options: Any) -> App:
    return App("app", source="in", **{"sink": "out", **options})


def run(app: App, *messages: tuple[bytes | None, bytes | None], **options: Any) -> RunResult:
    """Runs these (key, value) pairs to their end; a history that can be judged is judged."""
    harness = Harness(app, **options)
    for key, value in messages:
        harness.send(key=key, value=value)
    result = harness.run()
    if any(count > 1 for key, count in Counter(key for key, _ in messages).items() if key is not None):
        result.verdict.raise_if_bad()
    else:
        assert not result.verdict.lost
    return result


def values(result: RunResult) -> list[bytes]:
    return [written.value for written in result.results]


def judge(harness: Harness, result: RunResult, *, repeated: bool) -> None:
    """Order, loss and repeats, by what ran and by what is in the sink."""
    result.verdict.raise_if_bad()
    dead = {(letter.partition, letter.offset) for letter in result.dead}
    inputs = [
        (r.key(), r.value()) for r in harness.log.records("in") if (r.partition(), r.offset()) not in dead
    ]
    outputs = [(r.key(), r.value()) for r in harness.log.records("out")]
    check_results(inputs, outputs, allow_duplicates=repeated).raise_if_bad()


# Order, under anything that can happen.


def unsteady(seed: int, **options: Any) -> App:
    """Two stages that wait, fail and give up depending on the seed, differently for every message and attempt."""
    app = make(commit_interval=0.7, **options)

    async def behave(msg: Message, stage: str) -> Any:
        rng = random.Random(f"{seed} {stage} {msg.position} {msg.attempt}")
        await asyncio.sleep(rng.choice([0, 0, rng.uniform(0, 0.5)]))
        chance = rng.random()
        if chance < 0.2:
            raise Transient("not now")
        if chance < 0.24:
            raise TimeoutError
        if chance < 0.27:
            raise Poison("never")
        return msg.value

    @app.stage(retry=Retry(attempts=3))
    async def one(msg: Message) -> Any:
        return await behave(msg, "one")

    @app.stage
    async def two(msg: Message) -> Any:
        return await behave(msg, "two")

    return app


def feed(harness: Harness, seed: int, count: int = 120) -> None:
    rng = random.Random(seed)
    for number in range(count):
        key = None if rng.random() < 0.1 else b"key-%d" % int(rng.expovariate(0.4))
        harness.send(key=key, value=b"%d" % number, at=rng.uniform(0, 2))


@pytest.mark.parametrize("seed", range(30))
def test_key_order_survives_delays_failures_and_dead_letters(seed: int) -> None:
    harness = Harness(unsteady(seed), seed=seed, partitions=1 + seed % 4, latency=(0.0, 0.3), holes=0.1)
    feed(harness, seed)
    result = harness.run()
    judge(harness, result, repeated=False)
    assert result.verdict.repeats == 0
    assert len(result.results) + len(result.dead) == 120
    assert result.verdict.counts.retried > 0


@given(
    seed=st.integers(0, 2**32),
    breaks=st.lists(st.tuples(st.sampled_from([Crash, Drain]), st.floats(0, 5)), min_size=1, max_size=6),
    capacity=st.sampled_from([4, 20, 65_536]),
)
@settings(max_examples=50, deadline=None)
def test_a_crash_anywhere_loses_nothing_and_keeps_the_order(
    seed: int, breaks: list[tuple[type[Crash | Drain], float]], capacity: int
) -> None:
    faults: list[Fault] = [kind(at=at) for kind, at in breaks]
    app = unsteady(seed, max_buffered=capacity)
    harness = Harness(app, seed=seed, partitions=3, latency=(0.0, 0.4), holes=0.1, faults=faults)
    feed(harness, seed, count=60)
    result = harness.run()
    judge(harness, result, repeated=True)


@pytest.mark.parametrize("seed", range(5))
def test_only_uncommitted_messages_run_again_after_a_crash(seed: int) -> None:
    app = make(commit_interval=1.0)

    @app.stage
    async def steady(msg: Message) -> Any:
        await asyncio.sleep(0.1)
        return msg.value

    harness = Harness(app, seed=seed, latency=0.01, holes=0.2, faults=[Crash(at=6.95)])
    for number in range(100):
        for key in (b"a", b"b", b"c"):
            harness.send(key=key, value=b"%d" % number)
    result = harness.run()
    judge(harness, result, repeated=True)
    # Commits are at most 1 second and a bit apart, and each of the three lanes does ten a second.
    assert 0 < result.verdict.repeats <= 3 * 12


# Retries.


def test_retry_resumes_at_the_failed_stage_with_its_input() -> None:
    app = make()
    calls: list[tuple[str, Any, int]] = []

    @app.stage
    async def first(msg: Message) -> str:
        calls.append(("first", msg.value, msg.attempt))
        return "from first"

    @app.stage
    async def second(msg: Message) -> str:
        calls.append(("second", msg.value, msg.attempt))
        if msg.attempt < 3:
            raise Transient
        return "from second"

    @app.stage
    async def third(msg: Message) -> str:
        calls.append(("third", msg.value, msg.attempt))
        return "from third"

    assert values(run(app, (b"a", b"v"))) == [b"from third"]
    assert calls == [
        ("first", b"v", 1),
        ("second", "from first", 1),
        ("second", "from first", 2),
        ("second", "from first", 3),
        ("third", "from second", 1),
    ]


def test_used_up_attempts_make_a_dead_letter() -> None:
    app = make(retry=Retry(attempts=3))

    @app.stage
    async def picky(msg: Message) -> Any:
        if msg.value == b"bad":
            raise ConnectionResetError("gone")
        return msg.value

    result = run(app, (b"a", b"1"), (b"a", b"bad"), (b"a", b"2"))
    assert values(result) == [b"1", b"2"]
    (dead,) = result.dead
    assert (dead.value, dead.attempts, dead.stage) == (b"bad", 3, "picky")
    assert (dead.error, dead.message) == ("builtins.ConnectionResetError", "gone")


def test_attempts_count_per_stage_with_the_stages_own_retry() -> None:
    app = make(retry=Retry(attempts=2))
    tried: Counter[str] = Counter()

    @app.stage
    async def twice(msg: Message) -> Any:
        tried["twice"] += 1
        if msg.attempt == 1:
            raise Transient
        return msg.value

    @app.stage(retry=Retry(attempts=4))
    async def four_times(msg: Message) -> Any:
        tried["four_times"] += 1
        raise Transient

    result = run(app, (b"a", b"v"))
    assert tried == {"twice": 2, "four_times": 4}
    # The first attempt at the second stage is part of the attempt that passed the first one.
    assert result.dead[0].attempts == 5


def test_poison_is_dead_at_once() -> None:
    app = make()

    @app.stage
    async def never(msg: Message) -> Any:
        raise Poison("no good")

    result = run(app, (b"a", b"1"), (b"a", b"2"))
    assert [(dead.value, dead.attempts) for dead in result.dead] == [(b"1", 1), (b"2", 1)]
    assert result.elapsed < 0.1


def test_an_unexpected_error_is_poison() -> None:
    app = make()

    @app.stage
    async def buggy(msg: Message) -> Any:
        return {}[msg.value]

    (dead,) = run(app, (b"a", b"1")).dead
    assert (dead.error, dead.attempts) == ("builtins.KeyError", 1)


def test_backoff_is_bounded_and_delays_no_other_lane() -> None:
    app = make(retry=Retry(attempts=4, wait_initial=10.0, wait_max=30.0))

    @app.stage
    async def shaky(msg: Message) -> Any:
        if msg.key == b"bad":
            raise Transient
        await asyncio.sleep(0.1)
        return msg.value

    result = run(app, (b"bad", b"x"), *((b"good", b"%d" % n) for n in range(10)), seed=5)
    good = [event.at for event in result.history if event.key == b"good"]
    assert max(good) == pytest.approx(1.0), "ten times a tenth of a second, as if it were alone"
    bad = [event.at for event in result.history if event.key == b"bad" and event.kind is EventKind.START]
    waits = [after - before for before, after in pairwise(bad)]
    assert len(waits) == 3
    assert all(0 < wait <= ceiling for wait, ceiling in zip(waits, (10, 20, 30), strict=True))


def test_many_lanes_in_backoff_wake_each_at_its_time() -> None:
    app = make(retry=Retry(attempts=2, wait_initial=100.0, wait_max=100.0))

    @app.stage
    async def once(msg: Message) -> Any:
        if msg.attempt == 1:
            raise Transient
        return msg.value

    result = run(app, *((b"%d" % n, b"v") for n in range(50)), seed=2)
    assert len(result.results) == 50
    again = sorted(
        event.at for event in result.history if event.kind is EventKind.START and event.attempt == 2
    )
    assert len(set(again)) > 40
    assert again[0] < 10
    assert 90 < again[-1] <= 100


# Time-outs, limits and threads.


def test_timeout_is_retried_and_named_in_the_dead_letter() -> None:
    app = make(retry=Retry(attempts=3))

    @app.stage(timeout=2.0)
    async def slow(msg: Message) -> Any:
        await asyncio.sleep(3.0 if msg.attempt < 3 or msg.value == b"hopeless" else 1.0)
        return msg.value

    result = run(app, (b"a", b"hopeless"), (b"a", b"slow"))
    assert values(result) == [b"slow"]
    (dead,) = result.dead
    assert (dead.attempts, dead.message) == (3, "stage 'slow' took longer than 2 s")


def test_a_timeout_of_the_stages_own_keeps_its_words() -> None:
    app = make(retry=NEVER_AGAIN)

    @app.stage(timeout=2.0)
    async def slow(msg: Message) -> Any:
        raise TimeoutError("the database said so")

    assert run(app, (b"a", b"1")).dead[0].message == "the database said so"


class Gauge:
    """How many are inside at once, at most. Safe to use from several threads."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


def test_a_limit_is_how_many_of_a_stage_run_at_once() -> None:
    app = make()
    limited, free = Gauge(), Gauge()

    @app.stage(max_concurrency=3)
    async def narrow(msg: Message) -> Any:
        with limited.inside():
            await asyncio.sleep(1.0)
        return msg.value

    @app.stage
    async def wide(msg: Message) -> Any:
        with free.inside():
            await asyncio.sleep(10.0)
        return msg.value

    result = run(app, *((b"%d" % n, b"v") for n in range(12)))
    assert (limited.most, free.most) == (3, 12)
    assert result.elapsed == pytest.approx(14.0, abs=0.01)


def test_timeout_excludes_waiting_for_a_limited_stage() -> None:
    app = make(retry=NEVER_AGAIN)

    @app.stage(max_concurrency=1, timeout=1.5)
    async def narrow(msg: Message) -> Any:
        await asyncio.sleep(1.0)
        return msg.value

    result = run(app, *((b"%d" % n, b"v") for n in range(5)))
    assert len(result.results) == 5


def test_without_a_limit_every_lane_runs_at_once() -> None:
    app = make()
    gauge = Gauge()

    @app.stage
    async def slow(msg: Message) -> Any:
        with gauge.inside():
            await asyncio.sleep(1.0)
        return msg.value

    result = run(app, *((b"%d" % n, b"v") for n in range(500)))
    assert gauge.most == 500
    assert result.elapsed == pytest.approx(1.0, abs=0.01)


def test_keyless_messages_run_in_parallel() -> None:
    app = make()

    @app.stage
    async def slow(msg: Message) -> Any:
        await asyncio.sleep(1.0)
        return msg.value

    result = run(app, *((None, b"%d" % n) for n in range(20)))
    assert len(result.results) == 20
    assert result.elapsed == pytest.approx(1.0, abs=0.01)


def test_an_empty_key_is_a_key() -> None:
    app = make()

    @app.stage
    async def slow(msg: Message) -> Any:
        await asyncio.sleep(1.0)
        return msg.value

    result = run(app, *((b"", b"%d" % n) for n in range(5)))
    assert values(result) == [b"0", b"1", b"2", b"3", b"4"]
    assert result.elapsed == pytest.approx(5.0, abs=0.01)


def test_plain_stages_use_their_own_bounded_threads() -> None:
    app = make()
    threads: set[str] = set()
    gauge = Gauge()

    @app.stage(max_concurrency=2)
    def blocking(msg: Message) -> Any:
        threads.add(threading.current_thread().name)
        with gauge.inside():
            time.sleep(0.005)
        return msg.value

    @app.stage
    async def then(msg: Message) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return msg.value

    result = run(app, *((b"%d" % (n % 6), b"%d" % n) for n in range(24)))
    assert len(result.results) == 24
    assert gauge.most == 2
    assert all(name.startswith("stage-blocking") for name in threads)


def test_plain_stages_fail_and_retry_as_others_do() -> None:
    app = make()

    @app.stage
    def shaky(msg: Message) -> Any:
        if msg.attempt < 3:
            raise ConnectionError("again")
        if msg.value == b"bad":
            raise SystemExit(3)
        return msg.value

    result = run(app, (b"a", b"1"), (b"a", b"bad"), (b"a", b"2"))
    assert values(result) == [b"1", b"2"]
    assert (result.dead[0].error, result.dead[0].attempts) == ("builtins.SystemExit", 3)


# What a stage may do to the engine: nothing.


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        asyncio.CancelledError(),
        RecursionError(),
        MemoryError(),
        StopAsyncIteration(),
        StopIteration(),
    ],
    ids=repr,
)
def test_any_exception_of_a_stage_makes_a_dead_letter(error: BaseException) -> None:
    app = make()

    @app.stage
    async def rude(msg: Message) -> Any:
        if msg.value == b"bad":
            raise error
        return msg.value

    result = run(app, (b"a", b"1"), (b"a", b"bad"), (b"a", b"2"), (b"b", b"3"))
    assert sorted(values(result)) == [b"1", b"2", b"3"]
    assert [dead.value for dead in result.dead] == [b"bad"]


def test_stage_awaiting_a_cancelled_task_makes_a_dead_letter() -> None:
    app = make()

    @app.stage
    async def careless(msg: Message) -> Any:
        job = asyncio.ensure_future(asyncio.sleep(10))
        asyncio.get_running_loop().call_soon(job.cancel)
        await job

    result = run(app, (b"a", b"1"), (b"a", b"2"))
    assert [dead.value for dead in result.dead] == [b"1", b"2"]


def test_a_stage_that_cancels_itself_makes_a_dead_letter() -> None:
    app = make()

    @app.stage(timeout=5.0)
    async def suicidal(msg: Message) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if msg.value == b"bad":
            task.cancel()
        await asyncio.sleep(1)
        return msg.value

    result = run(app, (b"a", b"bad"), (b"a", b"1"))
    assert values(result) == [b"1"]
    assert [dead.value for dead in result.dead] == [b"bad"]


def test_plain_stage_raising_stop_iteration_makes_a_dead_letter() -> None:
    app = make()

    @app.stage
    def first_line(msg: Message) -> Any:
        return next(iter(msg.value.splitlines()))

    result = run(app, (b"a", b""), (b"a", b"one\ntwo"))
    assert values(result) == [b"one"]
    assert [dead.value for dead in result.dead] == [b""]


def test_an_error_that_cannot_be_printed_makes_a_dead_letter() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise AttributeError("response")

    app = make()

    @app.stage
    async def mute(msg: Message) -> Any:
        if msg.value == b"bad":
            raise MuteError
        return msg.value

    result = run(app, (b"a", b"bad"), (b"a", b"1"))
    assert values(result) == [b"1"]
    assert [dead.value for dead in result.dead] == [b"bad"]


def test_a_drain_ends_a_stage_that_will_not_be_cancelled() -> None:
    app = make(drain_timeout=1.0)

    @app.stage
    async def stubborn(msg: Message) -> Any:
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            return msg.value
        return msg.value

    result = run(app, (b"a", b"1"), (b"a", b"2"), faults=[Drain(at=10.0)])
    assert values(result)[-2:] == [b"1", b"2"]


# Results.


@pytest.mark.parametrize(
    ("returned", "written"),
    [
        (b"raw", b"raw"),
        (bytearray(b"array"), b"array"),
        (memoryview(b"view"), b"view"),
        ("naïve", "naïve".encode()),
        ("", b""),
        (b"", b""),
        ({"a": [1, None, True]}, b'{"a":[1,null,true]}'),
        ({"ä": "ö"}, '{"ä":"ö"}'.encode()),
        ([1, 2], b"[1,2]"),
        (5, b"5"),
        (0, b"0"),
        (False, b"false"),
        (1.5, b"1.5"),
    ],
)
def test_results_are_bytes_text_or_json(returned: Any, written: bytes) -> None:
    app = make()

    @app.stage
    async def give(msg: Message) -> Any:
        return returned

    assert values(run(app, (b"a", b"v"))) == [written]


loop: list[Any] = []
loop.append(loop)


@pytest.mark.parametrize(
    "returned", [object(), {1, 2}, float("nan"), {"a": float("inf")}, {(1, 2): 3}, loop, 1j, "\ud800"]
)
def test_a_result_that_is_none_of_these_makes_a_dead_letter(returned: Any) -> None:
    app = make()

    @app.stage
    async def fine(msg: Message) -> Any:
        return msg.value

    @app.stage
    async def give(msg: Message) -> Any:
        return returned if msg.value == b"bad" else msg.value

    result = run(app, (b"a", b"bad"), (b"a", b"1"))
    assert values(result) == [b"1"]
    (dead,) = result.dead
    assert (dead.stage, dead.attempts, dead.value) == ("give", 1, b"bad")


def test_none_from_the_last_stage_means_no_result() -> None:
    app = make()

    @app.stage
    async def pass_on(msg: Message) -> None:
        return None

    @app.stage
    async def sometimes(msg: Message) -> Any:
        assert msg.value is None, "None from a stage in between is what the next one gets"
        return "some" if msg.offset == 1 else None

    result = run(app, *((b"a", b"v") for _ in range(3)), partitions=1)
    assert values(result) == [b"some"]
    assert result.dead == []


def test_last_result_is_ignored_without_a_sink() -> None:
    app = make(sink=None)

    @app.stage
    async def give(msg: Message) -> Any:
        return object()

    result = run(app, (b"a", b"1"), (b"a", b"2"))
    assert (result.results, result.dead) == ([], [])


def test_null_value_reaches_the_stage_undecoded_as_none() -> None:
    app = make(decode="json")

    @app.stage
    async def look(msg: Message) -> str:
        return f"{msg.value!r}"

    assert values(run(app, (b"a", None), (b"a", b"{}"))) == [b"None", b"{}"]


@pytest.mark.parametrize(
    ("decode", "good", "seen", "bad"),
    [
        ("json", b'{"a": 1}', "{'a': 1}", b'{"a":'),
        ("json", b"[]", "[]", b""),
        ("text", "naïve".encode(), "'naïve'", b"\xff"),
        (int, b"12", "12", b"twelve"),
    ],
)
def test_a_value_that_cannot_be_decoded_makes_a_dead_letter(
    decode: Any, good: bytes, seen: str, bad: bytes
) -> None:
    app = make(decode=decode)

    @app.stage
    async def look(msg: Message) -> str:
        return f"{msg.value!r}"

    result = run(app, (b"a", good), (b"a", bad), (b"a", good))
    assert values(result) == [seen.encode()] * 2
    (dead,) = result.dead
    assert (dead.value, dead.attempts, dead.stage) == (bad, 1, "look")


def test_a_decode_that_fails_for_a_moment_is_tried_again() -> None:
    """A registry of schemas may be out of reach: the stage must never get the bytes in place of what they mean."""
    answers = iter([TimeoutError("registry"), {"decoded": 1}])

    def registry(value: bytes) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    app = make(decode=registry)

    @app.stage
    async def look(msg: Message) -> Any:
        return msg.value

    assert [json.loads(value) for value in values(run(app, (b"a", b"raw")))] == [{"decoded": 1}]


# Resources.


def test_resources_open_once_and_close_once_in_reverse() -> None:
    app = make()
    happened: list[str] = []

    @app.resource
    async def pool() -> AsyncIterator[str]:
        happened.append("open pool")
        await asyncio.sleep(1)
        yield "pool"
        await asyncio.sleep(1)
        happened.append("close pool")

    @app.resource
    def client(pool: str) -> Iterator[str]:
        happened.append(f"open client on {pool}")
        yield "client"
        happened.append("close client")

    @app.resource
    def number() -> int:
        happened.append("make number")
        return 5

    @app.resource
    async def model(number: int) -> str:
        happened.append("load model")
        return f"model {number}"

    @app.stage
    async def ask(msg: Message, client: str, model: str) -> str:
        return f"{client} {model}"

    @app.stage
    def answer(msg: Message, number: int) -> str:
        return f"{msg.value} {number}"

    result = run(app, *((b"%d" % n, b"v") for n in range(20)))
    assert set(values(result)) == {b"client model 5 5"}
    assert happened == [
        "open pool",
        "open client on pool",
        "make number",
        "load model",
        "close client",
        "close pool",
    ]


@pytest.mark.parametrize("when", ["opened", "closed"])
@pytest.mark.parametrize("kind", ["async", "plain"])
def test_failed_resource_is_named_and_earlier_ones_closed(when: str, kind: str) -> None:
    app = make()
    closed: list[str] = []

    @app.resource
    def first() -> Iterator[str]:
        yield "first"
        closed.append("first")

    def misbehave(moment: str) -> None:
        if moment == when:
            raise OSError("no route")

    async def waits(first: str) -> AsyncIterator[str]:
        misbehave("opened")
        yield "broken"
        misbehave("closed")

    def plain(first: str) -> Iterator[str]:
        misbehave("opened")
        yield "broken"
        misbehave("closed")

    resource: Callable[..., Any] = waits if kind == "async" else plain
    resource.__name__ = "broken"
    app.resource(resource)

    @app.stage
    async def use(msg: Message, broken: str) -> str:
        return broken

    with pytest.raises(
        ResourceError, match=f"resource 'broken' of app 'app' could not be {when}: OSError: no route"
    ):
        run(app, (b"a", b"1"))
    assert closed == ["first"]


@pytest.mark.parametrize("kind", ["returns", "awaits"])
def test_a_resource_that_is_returned_and_fails_is_named_too(kind: str) -> None:
    app = make()

    async def connect() -> str:
        raise ConnectionRefusedError("nobody there")

    def build() -> Awaitable[str]:
        if kind == "returns":
            raise ConnectionRefusedError("nobody there")
        return connect()

    app.resource(build)

    @app.stage
    async def use(msg: Message, build: str) -> str:
        return build

    with pytest.raises(
        ResourceError, match=r"resource 'build' of app 'app' could not be opened.*nobody there"
    ):
        run(app, (b"a", b"1"))


# The engine alone.


class Sink:
    """Keeps what it gets, and acknowledges on request."""

    def __init__(self) -> None:
        self.given: list[Delivery] = []
        self.letters: dict[int, Then] = {}

    def result(self, delivery: Delivery, value: bytes) -> None:
        if value == b"too large":
            raise Poison("too large")
        self.given.append(delivery)

    def all_results(self, delivery: Delivery, values: Any) -> None:
        raise AssertionError("an app with stages has one result")

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        asyncio.get_running_loop().call_soon(then, None)

    def letter(
        self, delivery: Delivery, letter: FailureInfo | None, kind: str, park: int | None, then: Then
    ) -> None:
        self.letters[delivery.offset] = then

    def acknowledge(self, *offsets: int, error: Any = None) -> None:
        for offset in offsets:
            if offset in self.letters:
                self.letters.pop(offset)(error)
                continue
            next(delivery for delivery in self.given if delivery.offset == offset)(error, None)


def with_engine(
    app: App,
    scenario: Callable[[Engine, Sink, list[int]], Awaitable[None]],
    messages: list[tuple[bytes | None, bytes]],
    on_done: Callable[[list[Delivery]], None] | None = None,
) -> None:
    """Hands these messages to an engine and lets the scenario look at it; the list fills with offsets that are done."""
    log = MemoryLog()
    records = [log.append("in", key=key, value=value) for key, value in messages]

    async def main() -> None:
        done: list[int] = []
        async with open_pipeline(app.spec) as steps:
            sink = Sink()
            engine = Engine(
                app.spec,
                steps,
                sink,
                on_done=on_done or (lambda deliveries: done.extend(d.offset for d in deliveries)),
                wall=asyncio.get_running_loop().time,
            )
            engine.accept(records)
            await scenario(engine, sink, done)

    run_virtual(main())


def echo(delay: float | None = None, **options: Any) -> App:
    app = make(**options)

    @app.stage
    async def stage(msg: Message) -> Any:
        if delay is not None:
            await asyncio.sleep(delay)
        return msg.value

    return app


def test_lane_is_done_in_order_whatever_is_acknowledged_first() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(1)
        assert (engine.held, done) == (4, [])
        sink.acknowledge(2, 3)
        engine.settle()
        assert (engine.held, done) == (3, [3])
        sink.acknowledge(0)
        engine.settle()
        assert done == [3, 0]
        sink.acknowledge(1)
        engine.settle()
        assert done == [3, 0, 1, 2]
        await engine.finish()
        statistics = engine.statistics()
        assert (statistics.held, statistics.done, statistics.outcomes, statistics.lanes.lanes) == (
            0,
            4,
            {Outcome.OK: 4},
            0,
        )
        assert await engine.drain(1.0)

    with_engine(echo(), scenario, [(b"a", b"0"), (b"a", b"1"), (b"a", b"2"), (b"b", b"3")])


def test_stages_that_never_wait_need_few_runners() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(1)
        assert len(sink.given) == 2000
        assert engine.statistics().runners < 10
        await engine.drain(0)

    with_engine(echo(), scenario, [(b"%d" % (n % 100), b"v") for n in range(2000)])


def test_stages_that_never_wait_give_the_loop_back_now_and_then() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        counts = [0]
        while len(sink.given) < 20_000:
            await asyncio.sleep(0)
            counts.append(len(sink.given))
        assert max(after - before for before, after in pairwise(counts)) <= 2 * RUN_MESSAGES_MAX, (
            "a runner and its standby"
        )
        await engine.drain(0)

    with_engine(echo(), scenario, [(b"%d" % n, b"v") for n in range(20_000)])


def test_runners_are_used_again() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(100)
        assert len(sink.given) == 200
        assert engine.statistics().runners <= 22
        await engine.drain(0)

    with_engine(echo(delay=1.0), scenario, [(b"%d" % (n % 20), b"v") for n in range(200)])


def test_stage_that_swallows_cancellation_delays_no_end() -> None:
    app, over = make(), asyncio.Event()

    @app.stage
    async def deaf(msg: Message) -> Any:
        times = 0
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                times += 1
                if times == int(msg.value):
                    raise
        return msg.value

    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(1)
        began = engine.clock.now()
        assert not await engine.drain(5.0)
        assert engine.clock.now() - began == pytest.approx(5.0 + CANCEL_SECONDS_MAX, abs=2)
        assert engine.statistics().runners == 1, "the one that was cancelled three times has ended"
        assert not await engine.abort()
        assert engine.clock.now() - began < 6.0 + CANCEL_SECONDS_MAX, "it is not waited for again"
        over.set()

    with_engine(app, scenario, [(b"a", b"0"), (b"b", b"3")])


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_failed_engine_starts_nothing_more(delay: float) -> None:
    """Whatever still arrives or comes to its turn: another task may own these messages by now."""
    app = make()
    started: list[bytes] = []

    @app.stage
    async def work(msg: Message) -> Any:
        started.append(msg.value)
        if delay:
            await asyncio.sleep(delay)
        return msg.value

    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        log = MemoryLog()
        later = [log.append("in", key=b"%d" % n, value=b"later") for n in range(6)]
        await asyncio.sleep(0.5)
        before = list(started)
        engine.fail(FencedError("another one has it"))
        engine.accept(later[:3])
        await asyncio.sleep(10)
        await engine.abort()
        engine.accept(later[3:])
        await asyncio.sleep(10)
        assert started == before

    with_engine(app, scenario, [(b"%d" % (n % 3), b"v") for n in range(9)])


def test_drain_finishes_started_messages_with_their_retries() -> None:
    app = make(retry=Retry(attempts=2, wait_initial=20.0, wait_max=20.0))

    @app.stage
    async def second_time(msg: Message) -> Any:
        await asyncio.sleep(1)
        if msg.attempt == 1:
            raise Transient
        return msg.value

    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(0.5)
        draining = asyncio.create_task(engine.drain(100.0))
        await asyncio.sleep(25)
        assert engine.draining
        sink.acknowledge(0)
        engine.settle()
        assert await draining
        assert done == [0]
        assert engine.held == 1

    with_engine(app, scenario, [(b"a", b"0"), (b"a", b"1")])


def test_a_drain_waits_for_acknowledgements_and_gives_up_in_time() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        assert await engine.drain(30.0) is False
        assert asyncio.get_running_loop().time() == pytest.approx(began + 30.0)
        assert done == []

    with_engine(echo(), scenario, [(b"a", b"0")])


def test_result_that_the_sink_cannot_take_makes_a_dead_letter() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(0.5)
        sink.acknowledge(0)  # the lane continues when its dead letter is durable
        await asyncio.sleep(0.5)
        sink.acknowledge(1)
        engine.settle()
        await engine.finish()
        assert engine.statistics().outcomes[Outcome.DEAD] == 1
        assert await engine.drain(1.0)

    with_engine(echo(), scenario, [(b"a", b"too large"), (b"a", b"fits")])


def test_result_refused_for_good_stops_the_engine() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(0.5)
        sink.acknowledge(0, error="message too large")
        with pytest.raises(
            BrokerError, match=r"what message in/0@0 caused could not be written: message too large"
        ):
            await engine.finish()
        assert done == []
        with pytest.raises(BrokerError):
            await engine.drain(5.0)

    with_engine(echo(), scenario, [(b"a", b"0"), (b"a", b"1")])


def test_the_first_failure_of_an_engine_counts() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        engine.fail(KeylaneError("first"))
        engine.fail(KeylaneError("second"))
        with pytest.raises(KeylaneError, match="first"):
            await engine.finish()
        await engine.drain(0)

    with_engine(echo(), scenario, [(b"a", b"0")])


def test_failure_to_record_progress_stops_the_engine() -> None:
    def broken(deliveries: list[Delivery]) -> None:
        raise ZeroDivisionError

    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        await asyncio.sleep(0.5)
        sink.acknowledge(0)
        engine.settle()
        with pytest.raises(KeylaneError, match="internal error: ZeroDivisionError"):
            await engine.failure
        await engine.drain(0)

    with_engine(echo(), scenario, [(b"a", b"0")], on_done=broken)


def test_an_engine_that_failed_can_be_left_without_a_drain() -> None:
    """The loop's end cancels its runners: their messages have not failed, and nothing must hang."""
    sinks: list[Sink] = []

    async def scenario(engine: Engine, sink: Sink, done: list[int]) -> None:
        sinks.append(sink)
        await asyncio.sleep(0.5)
        engine.fail(KeylaneError("the broker is gone"))
        await engine.finish()

    with pytest.raises(KeylaneError, match="the broker is gone"):
        with_engine(echo(delay=10.0), scenario, [(b"a", b"0"), (b"b", b"1")])
    assert sinks[0].given == [], "no dead letters"
