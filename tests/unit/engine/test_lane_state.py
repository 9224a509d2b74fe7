"""Lane state in the engine, on the harness: what counts, what is discarded, and what the next message sees."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from keylane import App, Idempotency, Message, Poison, Retry, State, Transient
from keylane.engine.lane_state import LaneStates, MemoryValues, StoredValue
from keylane.testing import Crash, Drain, Harness, Redrive, Release, RunResult


@dataclass
class Order:
    n: int


def app(**settings: Any) -> App:
    return App(
        "a", source="in", sink="out", decode="text", retry=Retry(attempts=3, wait_initial=0.1), **settings
    )


def remembering(**settings: Any) -> App:
    """Remembers what it has seen; fails as the message says."""
    found = app(**settings)

    @found.stage
    async def remember(msg: Message, seen: State[list[str]]) -> str:
        seen.value.append(msg.value)
        if msg.value.startswith("once") and msg.attempt == 1:
            raise Transient("again")
        if msg.value.startswith("bad"):
            raise Poison("never")
        return ",".join(seen.value)

    return found


def run(found: App, *values: str, key: str | None = "k", faults: Any = (), **options: Any) -> RunResult:
    harness = Harness(found, faults=faults, **options)
    for number, value in enumerate(values):
        harness.send(value, key=key, at=number * 0.01)
    return harness.run()


def texts(result: RunResult) -> list[str]:
    return [one.value.decode() for one in result.results]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_next_message_sees_what_the_one_before_has_changed(delivery: str) -> None:
    # Acknowledged after a second: nothing is committed when the later ones run.
    result = run(remembering(delivery=delivery), "a", "b", "c", latency=1.0, commits=1.0)
    assert texts(result) == ["a", "a,b", "a,b,c"]
    assert result.states == {b"k": {"seen": ["a", "b", "c"]}}


def test_change_of_a_failed_attempt_is_discarded() -> None:
    result = run(remembering(), "a", "once", "b")
    assert texts(result) == ["a", "a,once", "a,once,b"]


def test_message_that_failed_for_good_changes_nothing() -> None:
    result = run(remembering(), "a", "bad", "b")
    assert texts(result) == ["a", "a,b"]
    assert result.states == {b"k": {"seen": ["a", "b"]}}


def test_change_of_an_earlier_stage_survives_retries_and_not_a_dead_letter() -> None:
    found = app()

    @found.stage
    async def first(msg: Message, seen: State[list[str]]) -> str:
        seen.value.append(msg.value)
        return str(msg.value)

    @found.stage
    async def second(msg: Message, seen: State[list[str]]) -> str:
        seen.value[-1] += "!"
        if msg.value == "bad" or (msg.value == "once" and msg.attempt < 3):
            raise Transient("later")
        return ",".join(seen.value)

    result = run(found, "once", "bad", "c")
    assert texts(result) == ["once!", "once!,c!"]
    assert len(result.dead) == 1


def test_released_lane_continues_with_its_changes() -> None:
    found = app(on_failure="block")
    broken = [True]

    @found.stage
    async def first(msg: Message, count: State[int]) -> str:
        count.value += 1
        return str(msg.value)

    @found.stage
    async def second(msg: Message, count: State[int]) -> str:
        if broken.pop() if broken else False:
            raise Poison("not yet")
        return f"{msg.value}{count.value}"

    result = run(found, "a", "b", faults=[Release(at=1, key=b"k")])
    assert texts(result) == ["a1", "b2"]


def test_redriven_message_changes_the_present_state() -> None:
    found = app()
    mended = [False]

    @found.stage
    async def remember(msg: Message, seen: State[list[str]]) -> None:
        if msg.value == "bad" and asyncio.get_running_loop().time() < 5:
            raise Poison("not yet")
        seen.value.append(msg.value)

    assert not mended[0]
    result = run(found, "a", "bad", "b", faults=[Redrive(at=10, key=b"k")])
    assert result.states == {b"k": {"seen": ["a", "b", "bad"]}}


def test_message_that_letters_overtake_begins_again_at_its_first_stage() -> None:
    found = app()

    @found.stage
    async def remember(msg: Message, seen: State[list[str]]) -> str:
        now = asyncio.get_running_loop().time()
        if msg.value == "bad" and now < 5:
            raise Poison("not yet")
        seen.value.append(msg.value)
        return str(msg.value)

    @found.stage(retry=Retry(attempts=100, wait_initial=0.5, wait_max=0.5))
    async def send(msg: Message) -> str:
        if msg.value == "slow" and asyncio.get_running_loop().time() < 12:
            raise Transient("down")
        return str(msg.value)

    result = run(found, "bad", "slow", faults=[Redrive(at=10, key=b"k")])
    assert result.states == {b"k": {"seen": ["bad", "slow"]}}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("fault", [Crash, Drain])
def test_restart_falls_back_to_the_last_commit(delivery: str, fault: Any) -> None:
    values = [f"{n}" for n in range(60)]
    result = run(
        remembering(delivery=delivery, commit_interval=0.1), *values, faults=[fault(at=0.2), fault(at=0.45)]
    )
    assert result.states == {b"k": {"seen": values}}
    if delivery == "exactly_once":
        assert [len(text.split(",")) for text in texts(result)] == list(range(1, 61))


def test_handlers_by_type_share_the_state() -> None:
    found = app(event_type=lambda msg: msg.value[0])

    @found.on("a")
    async def one(msg: Message, count: State[int]) -> str:
        count.value += 1
        return f"a{count.value}"

    @found.on("a", "b")
    async def two(msg: Message, count: State[int]) -> str:
        count.value += 10
        return f"b{count.value}"

    result = run(found, "a", "b")
    assert texts(result) == ["a1", "b11", "b21"]


def test_failed_handler_discards_those_before_it_at_the_end() -> None:
    found = app(event_type=lambda _msg: "x")

    @found.on("x")
    async def one(msg: Message, count: State[int]) -> None:
        count.value += 1

    @found.on("x")
    async def two(msg: Message) -> None:
        if msg.value == "bad":
            raise Poison("never")

    assert run(found, "a", "bad", "b").states == {b"k": {"count": 2}}


def test_batch_stage_has_a_state_for_each_message() -> None:
    found = app()

    @found.batch_stage(max_size=10)
    async def score(msgs: list[Message], counts: list[Annotated[State[int], "count"]]) -> list[Any]:
        for count in counts:
            count.value += 1
        return [
            Poison("never") if msg.value == "bad" else f"{msg.key!r}{count.value}"
            for msg, count in zip(msgs, counts, strict=True)
        ]

    harness = Harness(found)
    for value in ("x", "bad", "y"):
        for key in ("a", "b"):
            harness.send(value, key=key)
    result = harness.run()
    assert sorted(texts(result)) == ["b'a'1", "b'a'2", "b'b'1", "b'b'2"]
    assert result.states == {b"a": {"count": 2}, b"b": {"count": 2}}


def test_stage_in_a_thread_takes_states() -> None:
    found = app()

    @found.stage
    def work(msg: Message, count: State[int]) -> str:
        count.value += 1
        return f"{count.value}"

    assert texts(run(found, "a", "b")) == ["1", "2"]


def test_payload_message_resource_and_state_come_together() -> None:
    found = App("b", source="in", sink="out")

    @found.resource
    def times() -> int:
        return 10

    @found.stage
    async def work(order: Order, total: State[int], times: int, msg: Message) -> str:
        total.value += order.n * times
        return f"{msg.key!r}{total.value}"

    harness = Harness(found)
    harness.send({"n": 2}, key="k")
    harness.send({"n": 3}, key="k")
    assert texts(harness.run()) == ["b'k'20", "b'k'50"]


def test_middleware_wraps_a_stage_with_state() -> None:
    found = remembering()
    seen: list[str] = []

    @found.middleware
    async def around(msg: Message, call_next: Any) -> Any:
        seen.append(call_next.stage)
        return await call_next(msg)

    assert texts(run(found, "a", "once")) == ["a", "a,once"]
    assert seen == ["remember"] * 3


def test_cut_off_attempt_changes_nothing() -> None:
    found = app()
    leaked: list[State[int]] = []

    @found.stage(timeout=1.0)
    async def work(msg: Message, count: State[int]) -> str:
        count.value += 1
        if msg.attempt == 1:
            leaked.append(count)
            await asyncio.sleep(10)
        return f"{count.value}"

    assert texts(run(found, "a", "b")) == ["1", "2"]
    with pytest.raises(RuntimeError, match="after its attempt had ended"):
        leaked[0].value = 5


def test_message_without_a_key_is_refused() -> None:
    result = run(remembering(), "a", key=None)
    assert result.dead[0].message.startswith("message in/")
    assert "has no key, so it has no lane and no state" in result.dead[0].message


@pytest.mark.parametrize(("order", "lanes"), [("partition", 2), ("global", 1)])
def test_state_belongs_to_the_lane_whatever_it_is(order: Any, lanes: int) -> None:
    found = remembering(order=order, on_failure="block")
    harness = Harness(found, partitions=2)
    for number in range(20):
        harness.send(f"{number}", key=f"k{number}")
    result = harness.run()
    assert len(result.states) == lanes
    assert sum(len(state["seen"]) for state in result.states.values()) == 20


def test_duplicate_changes_nothing() -> None:
    found = remembering(idempotency=Idempotency())
    harness = Harness(found)
    for value in ("a", "b", "a"):
        harness.send(value, key="k", headers={"event-id": value})
    assert harness.run().states == {b"k": {"seen": ["a", "b"]}}


def test_value_that_does_not_fit_is_a_dead_letter_that_names_the_field() -> None:
    found = app()
    found.lane_state("seen", max_bytes=30)

    @found.stage
    async def remember(msg: Message, seen: State[list[str]]) -> str:
        seen.value.append(msg.value)
        return "ok"

    result = run(found, "a" * 10, "b" * 20, "c")
    assert "state 'seen' of key b'k' has 37 bytes, and its limit is 30" in result.dead[0].message
    assert result.states == {b"k": {"seen": ["a" * 10, "c"]}}
    assert len(result.results) == 2, "the message that failed has no result"


def test_value_expires_after_its_time() -> None:
    found = remembering()
    found.lane_state("seen", ttl=60)
    harness = Harness(found)
    for value, at in (("a", 0), ("b", 50), ("c", 100), ("d", 161)):
        harness.send(value, key="k", at=at)
    result = harness.run()
    assert texts(result) == ["a", "a,b", "a,b,c", "d"], "each change renews it"


def test_state_follows_its_keys_to_new_partitions() -> None:
    harness = Harness(remembering(), partitions=2)
    keys = [f"k{number}" for number in range(30)]
    for key in keys:
        harness.send("a", key=key)
    harness.run()
    harness.add_partitions(4)
    for key in keys:
        harness.send("b", key=key)
    assert harness.run().states == {key.encode(): {"seen": ["a", "b"]} for key in keys}


# What commits see.


class Delivered:
    def __init__(self, states: LaneStates, offset: int) -> None:
        from keylane.engine.lane_state import MessageState  # noqa: PLC0415
        from keylane.outcome import Outcome  # noqa: PLC0415

        self.state = MessageState(0, b"k")
        self.outcome = Outcome.OK
        self.state.changes["s/n"] = StoredValue(b"%d" % offset, 0, offset)
        states.passed(self)  # type: ignore[arg-type]


def test_change_stays_visible_until_its_own_commit_is_durable() -> None:
    found = app()

    @found.stage
    async def work(msg: Message, n: State[int]) -> None:
        pass

    store = MemoryValues()
    states = LaneStates(found.spec, store, wall=lambda: 0.0)
    name = 0, b"k", "s/n"

    def sees() -> Any:
        value = states.current(name)
        return None if value is None else json.loads(value.content or b"")

    first = Delivered(states, 1)
    assert (sees(), states.changed()) == (1, {})
    states.done([first])  # type: ignore[list-item]
    collected = states.changed()
    second = Delivered(states, 2)
    states.done([second])  # type: ignore[list-item]
    states.written(collected)
    assert store.values[name].content == b"1"
    assert sees() == 2
    assert [value.content for value in states.changed().values()] == [b"2"]
    states.written(states.changed())
    assert (sees(), states.changed(), states.is_pending(name)) == (2, {}, False)
