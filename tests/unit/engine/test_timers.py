"""Timers in the engine, on the harness: when they fire, in which order, and what is left when they fail."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import App, Message, Poison, Retry, SettingsError, State, Timers, Transient
from keylane.testing import Crash, Drain, Harness, Redrive, Release, RunResult


def app(**settings: Any) -> App:
    return App(
        "a", source="in", sink="out", decode="text", retry=Retry(attempts=3, wait_initial=0.1), **settings
    )


def chat(after: float = 600.0, **settings: Any) -> App:
    """Answers, and says goodbye after a while without messages."""
    found = app(**settings)

    @found.stage
    async def answer(msg: Message, seen: State[list[str]], timers: Timers) -> str:
        seen.value.append(msg.value)
        timers.set("idle", after=after, value={"last": msg.value})
        return str(msg.value)

    @found.on_timer("idle")
    async def goodbye(msg: Message, seen: State[list[str]]) -> str:
        told = ",".join(seen.value)
        seen.delete()
        return f"bye {told}"

    return found


def texts(result: RunResult) -> list[str]:
    return [one.value.decode() for one in result.results]


def run(
    found: App, *sent: tuple[float, str], faults: Any = (), until: float | None = None, **options: Any
) -> RunResult:
    harness = Harness(found, faults=faults, **options)
    for at, value in sent:
        harness.send(value, key="k", at=at)
    return harness.run(until)


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_timer_fires_once_after_the_last_message(delivery: str) -> None:
    result = run(chat(delivery=delivery), (0, "a"), (500, "b"), (900, "c"))
    assert texts(result) == ["a", "b", "c", "bye a,b,c"]
    assert result.states == {}
    assert 1500 <= result.elapsed < 1502


def test_message_of_a_timer_says_what_it_is() -> None:
    found = app()
    seen: list[Message] = []

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set("later", after=10, value=[1, "x"])

    @found.on_timer("later")
    async def later(msg: Message) -> None:
        seen.append(msg)

    run(found, (5, "a"))
    (msg,) = seen
    assert (msg.key, msg.value, msg.timestamp, msg.attempt) == (
        b"k",
        [1, "x"],
        15_001,
        1,
    ) or msg.timestamp == 15_000
    assert msg.header("keylane-timer") == "later"
    assert msg.event_id.startswith("timer/later/")
    assert msg.topic == "in"


def test_result_of_a_timer_has_the_key_and_an_id_of_its_own() -> None:
    result = run(chat(), (0, "a"))
    bye = result.results[-1]
    assert bye.key == b"k"
    assert b"timer/idle" in (dict(bye.headers)["event-id"] or b"")


def test_cancelled_timer_does_not_fire() -> None:
    found = app()

    @found.stage
    async def work(msg: Message, timers: Timers) -> str:
        if msg.value == "set":
            timers.set("late", after=10)
        else:
            timers.cancel("late")
        return str(msg.value)

    @found.on_timer("late")
    async def late(msg: Message) -> str:
        return "fired"

    assert texts(run(found, (0, "set"), (5, "cancel"))) == ["set", "cancel"]
    assert texts(run(found, (0, "set"), (15, "cancel"))) == ["set", "fired", "cancel"]


def test_timers_of_a_lane_are_listed_by_time() -> None:
    found = app()
    listed: list[Any] = []

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set(msg.value, after=float(len(msg.value)) * 10, value=msg.value)
        listed.append([(timer.name, timer.value) for timer in timers.list()])

    @found.on_timer("aaa")
    async def first(msg: Message) -> None:
        pass

    @found.on_timer("b")
    async def second(msg: Message) -> None:
        pass

    run(found, (0, "aaa"), (1, "b"))
    assert listed == [[("aaa", "aaa")], [("b", "b"), ("aaa", "aaa")]]


def test_timers_are_listed_in_a_thread() -> None:
    found = app()
    listed: list[int] = []

    @found.stage
    def work(msg: Message, timers: Timers) -> None:
        listed.append(len(timers.list()))
        timers.set("t", after=100)

    @found.on_timer("t")
    def handler(msg: Message) -> None:
        pass

    run(found, (0, "a"), (10, "b"))
    assert listed == [0, 1]


def test_change_of_a_failed_attempt_is_discarded() -> None:
    found = app()

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set("t", after=5)
        raise Poison("no")

    @found.on_timer("t")
    async def fired(msg: Message) -> str:
        return "fired"

    assert texts(run(found, (0, "a"))) == []


def test_handler_sets_its_timer_again() -> None:
    found = app()

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set("tick", after=10)

    @found.on_timer("tick")
    async def tick(msg: Message, count: State[int], timers: Timers) -> str:
        count.value += 1
        if count.value < 4:
            timers.set("tick", after=10)
        return f"{count.value}"

    assert texts(run(found, (0, "a"))) == ["1", "2", "3", "4"]


def test_failed_handler_is_retried_and_then_leaves_a_copy() -> None:
    found = app(on_failure="block")
    attempts: list[int] = []

    @found.stage
    async def work(msg: Message, n: State[int], timers: Timers) -> str:
        n.value += 1
        timers.set("t", after=1)
        return str(msg.value)

    @found.on_timer("t")
    async def fails(msg: Message, n: State[int]) -> None:
        n.value = 100
        attempts.append(msg.attempt)
        raise Transient("down")

    result = run(found, (0, "a"), (60, "b"))
    assert attempts == [1, 2, 3] * 2
    assert texts(result) == ["a", "b"], "its lane continues"
    assert [(dead.kind, dead.stage, dead.key) for dead in result.dead] == [("archived", "fails", b"k")] * 2
    assert result.states == {b"k": {"n": 2}}


def test_timer_runs_between_messages_and_in_their_order() -> None:
    found = app()
    running: list[str] = []

    @found.stage
    async def work(msg: Message, log: State[list[str]], timers: Timers) -> None:
        assert not running, f"{running} runs"
        running.append(msg.value)
        await asyncio.sleep(2)
        log.value.append(msg.value)
        if msg.value == "a":
            timers.set("t", after=1)
        running.clear()

    @found.on_timer("t")
    async def fired(msg: Message, log: State[list[str]]) -> None:
        assert not running, f"{running} runs"
        log.value.append("timer")

    result = run(found, (0, "a"), (0, "b"), (0, "c"), (0, "d"))
    log = result.states[b"k"]["log"]
    assert [one for one in log if one != "timer"] == ["a", "b", "c", "d"]
    assert log.count("timer") == 1
    assert log[-1] != "timer", "it comes before messages that wait"


def test_message_before_it_in_the_lane_may_cancel_it() -> None:
    found = app()

    @found.stage
    async def work(msg: Message, timers: Timers) -> str:
        if msg.value == "set":
            timers.set("t", after=5)
        else:
            await asyncio.sleep(10)  # it is due meanwhile
            timers.cancel("t")
        return str(msg.value)

    @found.on_timer("t")
    async def fired(msg: Message) -> str:
        return "fired"

    assert texts(run(found, (0, "set"), (3, "cancel"))) == ["set", "cancel"]


@pytest.mark.parametrize("policy", ["block", "park"])
def test_timer_of_a_stopped_lane_waits(policy: Any) -> None:
    found = app(on_failure=policy)

    @found.stage
    async def work(msg: Message, timers: Timers) -> str:
        timers.set("t", after=5)
        if msg.value == "bad" and asyncio.get_running_loop().time() < 50:
            raise Poison("not yet")
        return str(msg.value)

    @found.on_timer("t")
    async def fired(msg: Message) -> str:
        return f"fired {asyncio.get_running_loop().time() > 60}"

    act = Release(at=60, key=b"k") if policy == "block" else Redrive(at=60, key=b"k")
    result = run(found, (0, "a"), (2, "bad"), faults=[act])
    assert texts(result) == ["a", "bad", "fired True"] or texts(result) == [
        "a",
        "fired True",
        "bad",
        "fired True",
    ]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("fault", [Crash, Drain])
def test_timers_survive_restarts(delivery: str, fault: Any) -> None:
    harness = Harness(chat(after=30, delivery=delivery), faults=[fault(at=10), fault(at=30.5), fault(at=31)])
    for n in range(40):
        harness.send("a", key=f"k{n}", at=n / 40)
    result = harness.run()
    byes = [one.key for one in result.results if one.value.startswith(b"bye")]
    assert set(byes) == {b"k%d" % n for n in range(40)}
    if delivery == "exactly_once":
        assert len(byes) == 40
    assert result.states == {}


def test_due_timers_fire_in_the_order_of_their_times() -> None:
    found = app()
    order: list[Any] = []

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set("t", at=float(msg.value), value=float(msg.value))

    @found.on_timer("t")
    async def fired(msg: Message) -> None:
        order.append(msg.value)

    harness = Harness(found)
    for n, at in enumerate((9.0, 3.0, 7.0, 5.0, 1.0)):
        harness.send(f"{at}", key=f"k{n}", at=20)  # all are in the past
    harness.run()
    assert order == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_ten_thousand_due_at_once_fire_at_a_bounded_rate() -> None:
    found = app(commit_interval=0.05)
    times: list[float] = []

    @found.stage
    async def work(msg: Message, timers: Timers) -> None:
        timers.set("t", at=100.0)

    @found.on_timer("t")
    async def fired(msg: Message) -> None:
        times.append(asyncio.get_running_loop().time())

    harness = Harness(found)
    for n in range(10_000):
        harness.send("x", key=f"k{n}", at=n / 1000)
    harness.run()
    assert len(times) == 10_000
    assert 100 <= times[0] < 100.1
    assert 0.5 < times[-1] - times[0] < 2


def test_timer_a_year_ahead_is_kept() -> None:
    result = run(chat(after=365 * 86_400.0), (0, "a"), until=1000)
    assert texts(result) == ["a"]
    result = run(chat(after=365 * 86_400.0), (0, "a"), limit=400 * 86_400.0)
    assert texts(result) == ["a", "bye a"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "either after= or at="),
        ({"after": 1, "at": 2}, "either after= or at="),
        ({"after": -1}, "expected seconds from 0 on, got -1"),
        ({"after": float("nan")}, "expected seconds from 0 on"),
        ({"after": "5"}, "expected seconds from 0 on, got '5'"),
        ({"after": 1e12}, "and the limit is 3,153,600,000"),
        ({"at": datetime(2030, 1, 1)}, "has no time zone"),  # noqa: DTZ001 - that is the point
        ({"after": 1, "value": {1, 2}}, "its value cannot be stored"),
        ({"after": 1, "value": "x" * 70_000}, "its value has 70,002 bytes"),
    ],
)
def test_bad_timers_are_refused(options: dict[str, Any], problem: str) -> None:
    timers = Timers(frozenset({"t"}), dict, lambda: 0.0)
    with pytest.raises(Poison, match=problem):
        timers.set("t", **options)


def test_time_may_be_a_datetime() -> None:
    timers = Timers(frozenset({"t"}), dict, lambda: 0.0)
    timers.set("t", at=datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=90))
    assert [timer.at for timer in timers.list()] == [90.0]


def test_timer_without_a_handler_is_refused() -> None:
    timers = Timers(frozenset({"idle"}), dict, lambda: 0.0)
    with pytest.raises(Poison, match=r"no handler for timer 'idel': declare one .* there are: 'idle'"):
        timers.set("idel", after=1)


def test_declarations_that_cannot_be_are_refused() -> None:
    found = app()
    with pytest.raises(SettingsError, match="expected 1 to 100 letters"):
        found.on_timer("a b")

    @found.on_timer("t")
    async def handler(msg: Message) -> None:
        pass

    with pytest.raises(SettingsError, match="timer 't' has a handler already"):
        found.on_timer("t")
    with pytest.raises(SettingsError, match="a batch stage takes no Timers"):

        @found.batch_stage
        async def batch(msgs: list[Message], timers: Timers) -> None:
            pass


def test_handlers_by_type_set_and_are_called_by_timers() -> None:
    found = app(event_type=lambda msg: msg.value)

    @found.on("a")
    async def one(msg: Message, timers: Timers) -> str:
        timers.set("t", after=1, value="x")
        return "one"

    @found.on_timer("t")
    async def fired(msg: Message, count: State[int]) -> str:
        count.value += 1
        return f"fired {msg.value}"

    result = run(found, (0, "a"))
    assert texts(result) == ["one", "fired x"]
    assert result.states == {b"k": {"count": 1}}
