"""Pauses by command, in virtual time: nothing that is paused starts, and nothing is lost or used up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import App, Message, Retry
from keylane.audit.violation import EventKind
from keylane.engine.pauses import Pauses
from keylane.testing import Crash, Drain, Fault, Flaw, Harness, Hold, Recut, RunResult

pytestmark = pytest.mark.usefixtures("quiet")


def make(**options: Any) -> App:
    return App(
        "held", source="in", **{"sink": "out", "commit_interval": 0.1, "retry": Retry(attempts=1), **options}
    )


def two_stages(app: App) -> dict[str, list[float]]:
    """When each stage was called."""
    calls: dict[str, list[float]] = {"first": [], "second": []}

    @app.stage
    async def first(msg: Message) -> bytes:
        calls["first"].append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        return bytes(msg.value)

    @app.stage
    async def second(msg: Message) -> bytes:
        calls["second"].append(asyncio.get_running_loop().time())
        return bytes(msg.value)

    return calls


def send(harness: Harness, count: int = 60, keys: int = 6) -> RunResult:
    for number in range(count):
        harness.send(key=b"k%d" % (number % keys), value=b"%d" % number, at=number * 0.1)
    result = harness.run()
    if Flaw.THIN not in result.verdict.tally:
        result.verdict.raise_if_bad()
    assert len(result.results) == count
    assert not result.dead
    assert result.verdict.counts.retried == 0, "a wait uses no attempt"
    return result


def within(times: list[float], begin: float, end: float) -> list[float]:
    return [at for at in times if begin <= at < end]


def test_paused_app_starts_nothing_and_continues_in_order() -> None:
    app = make()
    calls = two_stages(app)
    send(Harness(app, faults=[Hold(at=1.0, for_=3.0)]))
    assert not within(calls["first"], 1.0, 4.0)
    assert within(calls["first"], 4.0, 4.1)


def test_paused_stage_lets_the_stages_before_it_run() -> None:
    app = make()
    calls = two_stages(app)
    send(Harness(app, faults=[Hold(at=1.0, for_=3.0, stage="second")]))
    assert not within(calls["second"], 1.0, 4.0)
    assert len(within(calls["first"], 1.0, 4.0)) == 6, "the head of each lane"


def test_paused_partition_and_key_delay_no_other() -> None:
    app = make()
    two_stages(app)
    result = send(
        Harness(
            app, partitions=3, faults=[Hold(at=1.0, for_=3.0, partition=1), Hold(at=1.0, for_=3.0, key=b"k0")]
        )
    )
    starts = [event for event in result.history if event.kind is EventKind.END and event.outcome == "ok"]
    paused = [event for event in starts if event.partition == 1 or event.key == b"k0"]
    assert paused
    assert not [event for event in paused if 1.02 <= event.at < 4.0]
    others = [event for event in starts if event.partition != 1 and event.key != b"k0"]
    assert len([event for event in others if 1.0 <= event.at < 4.0]) > 5


def test_pause_holds_over_restarts() -> None:
    app = make(drain_timeout=5.0)
    calls = two_stages(app)
    faults: list[Fault] = [Hold(at=1.0, for_=3.0), Drain(at=1.5), Crash(at=2.0), Recut(at=2.5, tasks=2)]
    result = send(Harness(app, faults=faults))
    assert result.epochs == 4
    assert not within(calls["first"], 1.0, 4.0)
    assert len(calls["first"]) == 60, "a drain does not wait for it, and nothing runs twice"


def test_two_pauses_end_one_after_the_other() -> None:
    app = make()
    calls = two_stages(app)
    send(Harness(app, faults=[Hold(at=1.0, for_=3.0), Hold(at=2.0, for_=4.0, stage="first")]))
    assert not within(calls["first"], 1.0, 6.0)


def test_pause_of_a_handler_delays_no_other_type() -> None:
    app = make()
    calls: dict[str, list[float]] = {"slow": [], "quick": []}

    @app.on("slow")
    async def slow(msg: Message) -> bytes:
        calls["slow"].append(asyncio.get_running_loop().time())
        return bytes(msg.value)

    @app.on("quick")
    async def quick(msg: Message) -> bytes:
        calls["quick"].append(asyncio.get_running_loop().time())
        return bytes(msg.value)

    harness = Harness(app, faults=[Hold(at=1.0, for_=3.0, stage="slow")])
    for number in range(50):
        for kind in (b"slow", b"quick"):
            harness.send(key=kind, value=b"v", headers=[("event-type", kind)], at=number * 0.1)
    harness.run().verdict.raise_if_bad()
    assert not within(calls["slow"], 1.0, 4.0)
    assert len(within(calls["quick"], 1.0, 4.0)) == 30


def test_pause_of_a_stage_with_batches_of_a_lane() -> None:
    app = make()
    calls: list[float] = []

    @app.batch_stage(of="lane")
    async def work(msgs: list[Message]) -> list[bytes]:
        calls.append(asyncio.get_running_loop().time())
        return [msg.value for msg in msgs]

    send(Harness(app, faults=[Hold(at=1.0, for_=3.0, stage="work")]))
    assert not within(calls, 1.0, 4.0)
    assert len(within(calls, 4.0, 4.05)) == 6, "what has gathered is one batch for each lane"


def test_holds_are_in_words_for_telemetry() -> None:
    async def test() -> None:

        pauses = Pauses(asyncio.get_running_loop())
        scopes = [("app", None), ("partition", 3), ("stage", "pay"), ("key", b"\xff" + b"k" * 900)]
        pauses.order(dict.fromkeys(scopes))
        shown = list(pauses.holds())
        assert shown[:3] == ["app paused", "partition 3 paused", "stage pay paused"]
        assert len(shown[3]) < 220
        pauses.order({})
        assert not pauses.active
        pauses.close()

    asyncio.run(test())
