"""Middleware around every attempt, as users write it, in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import cloudpickle

from keylane import App, Breaker, CallNext, Message, Poison, Retry, SettingsError, Transient
from keylane.engine.stages import open_pipeline
from keylane.testing import Harness, RunResult

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


def make(**options: Any) -> App:
    return App("shop", source="in", **{"sink": "out", "decode": "text", "retry": SOON, **options})


def run(app: App, *values: str, key: bytes = b"anna") -> RunResult:
    harness = Harness(app)
    for value in values:
        harness.send(key=key, value=value.encode())
    result = harness.run()
    assert not result.verdict.lost
    return result


def values(result: RunResult) -> list[bytes | None]:
    return [written.value for written in result.results]


def noting(app: App, told: list[Any], name: str = "mw") -> None:
    """A middleware that notes what begins and how it ends."""

    @app.middleware
    async def note(msg: Message, call_next: CallNext) -> Any:
        told.append((name, call_next.stage, msg.value, msg.attempt))
        try:
            result = await call_next(msg)
        except Exception as error:
            told.append((name, call_next.stage, type(error).__name__))
            raise
        told.append((name, call_next.stage, result))
        return result


def test_middleware_first_declared_is_the_outermost() -> None:
    told: list[Any] = []
    app = make()
    noting(app, told, "outer")
    noting(app, told, "inner")

    @app.stage
    async def shout(msg: Message) -> str:
        return str(msg.value).upper()

    assert values(run(app, "hi")) == [b"HI"]
    assert told == [
        ("outer", "shout", "hi", 1),
        ("inner", "shout", "hi", 1),
        ("inner", "shout", "HI"),
        ("outer", "shout", "HI"),
    ]


def test_middleware_runs_around_every_stage_and_attempt() -> None:
    told: list[Any] = []
    app = make()

    @app.stage
    async def flaky(msg: Message) -> str:
        if msg.attempt == 1:
            raise Transient("later")
        return str(msg.value)

    @app.stage
    def shout(msg: Message) -> str:
        return str(msg.value).upper()

    noting(app, told)  # also of stages that were declared before it
    assert values(run(app, "hi")) == [b"HI"]
    assert told == [
        ("mw", "flaky", "hi", 1),
        ("mw", "flaky", "Transient"),
        ("mw", "flaky", "hi", 2),
        ("mw", "flaky", "hi"),
        ("mw", "shout", "hi", 1),
        ("mw", "shout", "HI"),
    ]


def test_middleware_runs_around_each_handler() -> None:
    told: list[Any] = []
    app = make(decode=None)
    noting(app, told)

    @app.on("Placed")
    async def first(msg: Message) -> bytes:
        return bytes(msg.value) + b"1"

    @app.on("Placed")
    async def second(msg: Message) -> bytes:
        return bytes(msg.value) + b"2"

    harness = Harness(app)
    harness.send(key=b"a", value=b"v", headers={"event-type": "Placed"})
    assert values(harness.run()) == [b"v1", b"v2"]
    assert [one[1] for one in told] == ["first", "first", "second", "second"]


def test_middleware_error_is_classified_as_the_stages() -> None:
    ran: list[str] = []
    app = make()

    @app.middleware
    async def auth(msg: Message, call_next: CallNext) -> Any:
        if msg.value == "forged":
            raise Poison("the signature is not ours")
        if msg.value == "early" and msg.attempt == 1:
            raise Transient("no keys so far")
        return await call_next(msg)

    @app.stage
    async def work(msg: Message) -> str:
        ran.append(msg.value)
        return str(msg.value)

    result = run(app, "forged", "early", "good")
    assert values(result) == [b"early", b"good"]
    assert [(dead.value, dead.stage, dead.message) for dead in result.dead] == [
        (b"forged", "work", "the signature is not ours")
    ]
    assert ran == ["early", "good"]


def test_middleware_may_change_the_result() -> None:
    app = make()

    @app.middleware
    async def cached(msg: Message, call_next: CallNext) -> Any:
        return "from the cache" if msg.value == "known" else (await call_next(msg)) + "!"

    @app.stage
    async def work(msg: Message) -> str:
        return str(msg.value)

    assert values(run(app, "known", "new")) == [b"from the cache", b"new!"]


def test_middleware_sees_the_stages_time_out() -> None:
    told: list[Any] = []
    app = make(retry=Retry(attempts=1))
    noting(app, told)

    @app.stage(timeout=1.0)
    async def slow(_msg: Message) -> None:
        await asyncio.sleep(60)

    run(app, "hi")
    assert told == [("mw", "slow", "hi", 1), ("mw", "slow", "TimeoutError")]


@pytest.mark.parametrize("batch", [False, True])
def test_middleware_does_not_run_while_the_breaker_is_open(batch: bool) -> None:
    told: list[Any] = []
    app = make(retry=Retry(attempts=10, wait_initial=0.01, wait_max=0.01))
    noting(app, told)
    down = [True]

    def check() -> None:
        if asyncio.get_running_loop().time() < 5:
            raise Transient("down")
        down.clear()

    breaker = Breaker(failure_rate=1.0, minimum=2, open_for=10.0)
    if batch:

        @app.batch_stage(breaker=breaker)
        async def bulk(messages: list[Message]) -> list[str]:
            check()
            return [str(msg.value) for msg in messages]
    else:

        @app.stage(breaker=breaker)
        async def single(msg: Message) -> str:
            check()
            return str(msg.value)

    assert values(run(app, "one", "two")) == [b"one", b"two"]
    assert sum("Transient" in one for one in told) == 2
    assert not any("BreakerOpenError" in one for one in told)


def test_middleware_counts_in_the_breaker() -> None:
    opened: list[str] = []
    app = make(retry=Retry(attempts=10, wait_initial=0.01, wait_max=0.01))

    @app.middleware
    async def auth(msg: Message, call_next: CallNext) -> Any:
        if asyncio.get_running_loop().time() < 5:
            raise Transient("the auth server is away")
        return await call_next(msg)

    @app.on_breaker
    def told(stage: str, _state: object) -> None:
        opened.append(stage)

    @app.stage(breaker=Breaker(failure_rate=1.0, minimum=2, open_for=10.0))
    async def work(msg: Message) -> str:
        return str(msg.value)

    assert values(run(app, "one")) == [b"one"]
    assert opened[0] == "work"


def test_middleware_runs_around_each_message_of_a_batch() -> None:
    told: list[Any] = []
    sizes: list[int] = []
    app = make()
    noting(app, told)

    @app.batch_stage(max_size=8)
    async def score(messages: list[Message]) -> list[Any]:
        sizes.append(len(messages))
        return [Poison("bad") if msg.value == "bad" else str(msg.value).upper() for msg in messages]

    harness = Harness(app)
    for key, value in ((b"a", b"x"), (b"b", b"bad"), (b"c", b"z")):
        harness.send(key=key, value=value)
    result = harness.run()
    assert sorted(written.value or b"" for written in result.results) == [b"X", b"Z"]
    assert sizes == [3]
    assert sorted(str(one[2]) for one in told if len(one) == 3) == ["Poison", "X", "Z"]


@pytest.mark.parametrize("batch", [False, True])
def test_middleware_context_reaches_a_def_stage(batch: bool) -> None:
    app = make()
    span: ContextVar[str] = ContextVar("span", default="none")

    @app.middleware
    async def trace(msg: Message, call_next: CallNext) -> Any:
        span.set(f"span of {msg.value}")
        return await call_next(msg)

    if batch:

        @app.batch_stage
        def bulk(messages: list[Message]) -> list[str]:
            return [span.get() for _ in messages]
    else:

        @app.stage
        def single(_msg: Message) -> str:
            return span.get()

    assert values(run(app, "one", "two")) == [b"span of one", b"span of two"]


def test_middleware_costs_nothing_when_there_is_none() -> None:
    app = make()

    @app.stage
    async def work(msg: Message) -> str:
        return str(msg.value)

    async def opened() -> Callable[..., Any]:
        async with open_pipeline(app.spec) as (step,):
            return step.call

    assert asyncio.run(opened()) is work


def test_middleware_travels_with_its_app() -> None:
    app = make()

    @app.middleware
    async def mark(msg: Message, call_next: CallNext) -> Any:
        return f"<{await call_next(msg)}>"

    @app.stage
    async def work(msg: Message) -> str:
        return str(msg.value)

    travelled = pickle.loads(cloudpickle.dumps(app))  # type: ignore[no-untyped-call]  # noqa: S301 - our own
    assert values(run(travelled, "hi")) == [b"<hi>"]


def _plain(_msg: Message, _call_next: CallNext) -> None: ...
async def _one(_msg: Message) -> None: ...
async def _three(_msg: Message, _call_next: CallNext, _database: object) -> None: ...
async def _keyword(_msg: Message, *, _call_next: CallNext) -> None: ...
async def _generator(_msg: Message, _call_next: CallNext) -> Any:
    yield


@pytest.mark.parametrize("function", [_plain, _one, _three, _keyword, _generator])
def test_middleware_of_a_wrong_signature_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(
        SettingsError, match=r"middleware '_\w+': expected 'async def name\(msg, call_next\)'"
    ):
        make().middleware(function)
