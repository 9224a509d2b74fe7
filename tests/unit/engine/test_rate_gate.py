"""Rates of stages, in virtual time: how many calls start, who waits, and what a wait costs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Breaker, Message, Poison, Rate, Result, Retry, SettingsError, Transient
from keylane.audit.violation import EventKind
from keylane.testing import Crash, Drain, Flaw, Harness, Recut, RunResult

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.usefixtures("quiet")


def make(**options: Any) -> App:
    return App("calls", source="in", **{"sink": "out", "commit_interval": 0.1, **options})


def working(app: App, lasts: float = 0.001, **options: Any) -> list[tuple[float, bytes | None]]:
    """A stage with these options; when each call started, and its key."""
    starts: list[tuple[float, bytes | None]] = []

    @app.stage(**options)
    async def work(msg: Message) -> bytes:
        starts.append((asyncio.get_running_loop().time(), msg.key))
        await asyncio.sleep(lasts)
        return bytes(msg.value)

    return starts


def send(harness: Harness, count: int, keys: int) -> RunResult:
    for number in range(count):
        harness.send(key=b"k%d" % (number % keys), value=b"%d" % number)
    return harness.run()


def judge(result: RunResult) -> None:
    """Order, unless no lane had two messages; and nothing lost."""
    if Flaw.THIN not in result.verdict.tally:
        result.verdict.raise_if_bad()
    assert not result.verdict.lost


def in_any(starts: Iterable[float], seconds: float) -> tuple[int, int]:
    """The fewest and the most starts in any such time."""
    found = sorted(starts)
    windows = [at for at in found if at + seconds <= found[-1]]
    counts = [
        sum(at <= other < at + seconds for other in found) for at in windows[:: max(1, len(windows) // 200)]
    ]
    return min(counts), max(counts)


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_rate_is_that_of_the_app_however_many_tasks(tasks: int) -> None:
    app = make()
    starts = working(app, rate=Rate(500))
    result = send(Harness(app, faults=[Recut(at=1.0, tasks=tasks)], seed=tasks), 9000, 200)
    judge(result)
    # Not the end, when the keys of one task are done before those of another.
    fewest, most = in_any([at for at, _ in starts if 1.5 < at < 15], 10.0)
    assert fewest >= 0.95 * 5000
    assert most <= 1.05 * 5000


def test_rate_holds_while_tasks_come_and_go() -> None:
    app = make()
    starts = working(app, rate=Rate(500))
    faults = [Recut(at=3.0 * number, tasks=tasks) for number, tasks in enumerate((2, 4, 1, 4, 2, 1, 4), 1)]
    result = send(Harness(app, faults=faults), 14_000, 1000)
    judge(result)
    assert result.epochs == 8
    assert result.verdict.counts.retried == 0
    fewest, most = in_any([at for at, _ in starts], 10.0)
    assert fewest >= 0.95 * 5000
    assert most <= 1.05 * 5000


def test_rate_of_a_key_delays_no_other_key() -> None:
    app = make()
    starts = working(app, per_key=Rate(10))
    harness = Harness(app)
    for number in range(50):
        harness.send(key=b"hot", value=b"%d" % number)
    for number in range(500):
        harness.send(key=b"k%d" % number, value=b"v")
    result = harness.run()
    judge(result)
    hot = [at for at, key in starts if key == b"hot"]
    assert in_any(hot, 1.0) in ((10, 10), (10, 11), (9, 10))
    assert max(at for at, key in starts if key != b"hot") < 0.1


def test_both_rates_hold_together() -> None:
    app = make()
    starts = working(app, rate=Rate(100), per_key=Rate(20))
    result = send(Harness(app), 1500, 10)
    judge(result)
    assert in_any([at for at, _ in starts], 2.0)[1] <= 215
    assert 14.0 < result.elapsed < 16.5
    for number in range(10):
        assert in_any([at for at, key in starts if key == b"k%d" % number], 2.0)[1] <= 42


def test_lane_that_waits_for_the_rate_uses_no_attempt() -> None:
    app = make(retry=Retry(attempts=1))
    working(app, rate=Rate(20))
    result = send(Harness(app), 100, 100)
    judge(result)
    assert not result.dead
    assert result.verdict.counts.retried == 0


def test_lanes_wait_in_the_order_in_which_they_came() -> None:
    app = make()
    starts = working(app, rate=Rate(5))
    send(Harness(app, partitions=1), 40, 40)
    assert [key for _, key in starts] == [b"k%d" % number for number in range(40)]


def test_keyless_messages_have_no_rate_of_a_key() -> None:
    app = make()
    working(app, per_key=Rate(1, per=60))
    harness = Harness(app)
    for _ in range(20):
        harness.send(key=None, value=b"v")
    assert harness.run().elapsed < 1


def test_drain_does_not_wait_for_the_rate() -> None:
    app = make(drain_timeout=30.0)
    starts = working(app, rate=Rate(1), per_key=Rate(1, per=10))
    result = send(Harness(app, faults=[Drain(at=2.5)]), 20, 10)
    judge(result)
    assert result.verdict.repeats == 0
    assert min(at for at, _ in starts if at > 2.5) < 3.6, "the next epoch began at once"


def test_crash_keeps_the_rate() -> None:
    app = make()
    starts = working(app, rate=Rate(100))
    result = send(Harness(app, faults=[Crash(at=1.0), Crash(at=2.0)]), 500, 50)
    judge(result)
    assert in_any([at for at, _ in starts], 1.0)[1] <= 120


@pytest.mark.parametrize("of", ["lane", "lanes"])
def test_rate_of_a_batch_stage_counts_messages(of: Any) -> None:
    app = make()
    seen: list[tuple[float, int]] = []

    @app.batch_stage(of=of, max_size=50, rate=Rate(100))
    async def work(msgs: list[Message]) -> list[None]:
        seen.append((asyncio.get_running_loop().time(), len(msgs)))
        await asyncio.sleep(0.05)
        return [None] * len(msgs)

    result = send(Harness(app), 600, 30)
    judge(result)
    assert sum(count for _, count in seen) == 600
    assert 5.0 < result.elapsed < 6.6
    assert max(count for _, count in seen) > 1


def test_rate_of_a_handler_delays_no_other_type() -> None:
    app = make()

    @app.on("slow", rate=Rate(2))
    async def slow(msg: Message) -> bytes:
        return bytes(msg.value)

    @app.on("quick")
    async def quick(msg: Message) -> bytes:
        return bytes(msg.value)

    harness = Harness(app)
    for number in range(20):
        harness.send(key=b"s%d" % number, value=b"v", headers=[("event-type", b"slow")])
        harness.send(key=b"q%d" % number, value=b"v", headers=[("event-type", b"quick")])
    result = harness.run()
    judge(result)
    ends = {
        event.key: event.at
        for event in result.history
        if event.kind is EventKind.END and event.outcome == "ok"
    }
    assert max(at for key, at in ends.items() if key is not None and key[:1] == b"q") < 0.1
    assert max(at for key, at in ends.items() if key is not None and key[:1] == b"s") > 9


def test_open_breaker_takes_nothing_of_the_rate() -> None:
    app = make(retry=Retry(attempts=50, wait_initial=0.01, wait_max=0.01))
    calls: list[float] = []

    @app.stage(rate=Rate(10), breaker=Breaker(minimum=3, open_for=2.0, probes=1))
    async def work(_msg: Message) -> None:
        now = asyncio.get_running_loop().time()
        calls.append(now)
        if now < 1.0:
            raise ConnectionError("down")

    result = send(Harness(app), 100, 100)
    judge(result)
    assert in_any(calls, 1.0)[1] <= 12
    assert result.elapsed < 15


# A service that asks for a pause.


class TooManyError(Exception):
    """As HTTP clients raise it."""

    def __init__(self, seconds: str) -> None:
        super().__init__("429 Too Many Requests")
        self.response = SimpleNamespace(status_code=429, headers={"Retry-After": seconds})


def busy(error: BaseException, **options: Any) -> tuple[App, list[tuple[float, bytes | None]]]:
    """A stage whose first call fails with this error, and another one behind it."""
    app, starts = make(), list[tuple[float, bytes | None]]()

    @app.stage
    async def before(msg: Message) -> bytes:
        return bytes(msg.value)

    @app.stage(**options)
    async def work(msg: Message) -> bytes:
        starts.append((asyncio.get_running_loop().time(), msg.key))
        if len(starts) == 1:
            raise error
        return bytes(msg.value)

    return app, starts


@pytest.mark.parametrize("options", [{}, {"rate": Rate(1000)}])
def test_http_429_slows_the_stage_and_not_only_its_lane(options: Any) -> None:
    app, starts = busy(TooManyError("3"), **options)
    harness = Harness(app)
    for number in range(50):
        harness.send(key=b"k%d" % number, value=b"v", at=0.1 * number)
    result = harness.run()
    judge(result)
    assert not [at for at, _ in starts[1:] if at < 3.0]
    assert result.verdict.counts.retried == 1, "only the message that was refused used an attempt"


def test_other_waits_are_of_their_lane() -> None:
    app, starts = busy(Transient("busy", retry_after=3.0))
    harness = Harness(app)
    for number in range(5):
        harness.send(key=b"k%d" % number, value=b"v", at=0.1 * number)
    harness.run()
    assert len([at for at, _ in starts if at < 1.0]) == 5


def test_429_as_the_cause_of_an_error_counts() -> None:
    error = Transient("the service is busy", retry_after=2.0)
    error.__cause__ = TooManyError("2")
    app, starts = busy(error)
    harness = Harness(app)
    for number in range(5):
        harness.send(key=b"k%d" % number, value=b"v", at=0.1 * number)
    harness.run()
    assert not [at for at, _ in starts[1:] if at < 2.0]


def test_drain_does_not_wait_for_a_service_that_asks_for_a_pause() -> None:
    app, _ = busy(TooManyError("50"))
    harness = Harness(app, faults=[Drain(at=1.0)])
    for number in range(5):
        harness.send(key=b"k%d" % number, value=b"v", at=0.1 * number)
    result = harness.run()
    judge(result)
    assert result.epochs == 2


@pytest.mark.parametrize("option", ["rate", "per_key"])
def test_rate_must_be_a_rate(option: str) -> None:
    app = make()
    options: Any = {option: 100}
    with pytest.raises(SettingsError, match=rf"{option} must be a Rate, such as Rate\("):
        app.stage(**options)(lambda msg: msg)


def test_results_and_poison_are_as_without_a_rate() -> None:
    app = make()

    @app.stage(rate=Rate(50))
    async def work(msg: Message) -> Any:
        if msg.value == b"3":
            raise Poison("bad")
        return [Result(msg.value), Result(b"more")]

    result = send(Harness(app), 5, 1)
    assert [written.value for written in result.results] == [
        b"0",
        b"more",
        b"1",
        b"more",
        b"2",
        b"more",
        b"4",
        b"more",
    ]
    assert [dead.value for dead in result.dead] == [b"3"]
