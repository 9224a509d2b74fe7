"""What ``order=`` promises, in virtual time: every sentence of docs/guarantees.md about it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry, SettingsError, Transient
from keylane.testing import Crash, Drain, Harness, Redrive, Release, RunResult, Skip
from keylane.testing.log import partition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.testing import Fault

pytestmark = pytest.mark.usefixtures("quiet")


def run(
    order: Any, seed: int, faults: Sequence[Fault] = (), *, each: int = 20, bad: str = "", **more: Any
) -> RunResult:
    """Ten keys and some messages without one; a stage of 5 to 30 ms that fails now and then."""
    rng = random.Random(seed)
    app = App(
        "app",
        source="in",
        sink="out",
        order=order,
        retry=Retry(wait_initial=0.01),
        commit_interval=0.1,
        **more,
    )

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.005 + rng.random() * 0.025)
        if bytes(msg.value).decode() == bad and asyncio.get_running_loop().time() < 5:
            raise Poison("bad")
        if msg.attempt == 1 and rng.random() < 0.1:
            raise Transient("not yet")
        return bytes(msg.value)

    harness = Harness(app, faults=faults, seed=seed)
    for number in range(each):
        for key in range(11):
            harness.send(
                key=b"k%d" % key if key < 10 else None, value=b"%d-%d" % (key, number), at=number * 0.1
            )
    return harness.run()


def in_flight(result: RunResult, *, of: str = "") -> int:
    """How many attempts were open at once, at most; of one lane."""
    open_: dict[object, int] = {}
    most = 0
    for event in result.history.events:
        lane = getattr(event, of) if of else ""
        open_[lane] = open_.get(lane, 0) + (1 if event.kind == "start" else -1)
        most = max(most, open_[lane])
    return most


@pytest.mark.parametrize("order", ["key", "partition", "global", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_ordering_holds_over_crashes_and_epochs(order: str, seed: int) -> None:
    rng = random.Random(seed)
    faults: list[Fault] = [Crash(at=0.1 + rng.random()), Drain(at=1.2 + rng.random()), Crash(at=2.5)]
    result = run(order, seed, faults, on_failure="block" if order == "global" else "skip")
    result.verdict.raise_if_bad()
    assert len({written.value for written in result.results}) == 220


@pytest.mark.parametrize(("order", "most"), [("key", 11), ("partition", 3), ("global", 1), ("none", 11)])
def test_how_many_run_at_once(order: str, most: int) -> None:
    result = run(order, 1, on_failure="block" if order == "global" else "skip")
    assert in_flight(result) >= most if order != "global" else in_flight(result) == 1
    if order == "partition":
        assert in_flight(result) == 3


STUCK = partition_of(b"k3", 3)
LANE = {"partition": b"partition %d" % STUCK, "global": b"global"}


@pytest.mark.parametrize("on_failure", ["block", "block_and_dlq"])
@pytest.mark.parametrize("order", ["partition", "global"])
@pytest.mark.parametrize("seed", range(6))
def test_order_blocked_lane_holds_partition_or_everything(order: str, seed: int, on_failure: str) -> None:
    """Also over a restart, when messages of other partitions may come before the one that is blocked."""
    released = 8.0
    result = run(
        order,
        seed,
        [Crash(at=3.0), Drain(at=4.0), Crash(at=6.0), Release(at=released, key=LANE[order])],
        bad="3-5",
        on_failure=on_failure,
    )
    result.verdict.raise_if_bad()
    assert len({written.value for written in result.results}) == 220
    waited = [
        event
        for event in result.history.events
        if event.kind == "start"
        and 5.0 < event.at < released
        and (order == "global" or event.partition == STUCK)
    ]
    assert not waited


@pytest.mark.parametrize("order", ["partition", "none"])
def test_a_redriven_message_runs_in_its_lane(order: str) -> None:
    result = run(order, 3, [Redrive(at=6.0, key=b"k3")], bad="3-5", on_failure="skip", each=80)
    result.verdict.raise_if_bad()
    assert [letter.value for letter in result.dead] == [b"3-5"]
    assert len({written.value for written in result.results}) == 880
    if order == "partition":
        assert in_flight(result) == 3


def test_a_message_is_skipped_in_global_order() -> None:
    result = run("global", 2, [Crash(at=4.0), Skip(at=5.0, key=b"global")], bad="3-5", on_failure="block")
    result.verdict.raise_if_bad()
    assert len({written.value for written in result.results}) == 219


@pytest.mark.parametrize("order", ["partition", "global", "none"])
def test_park_needs_lanes_of_keys(order: Any) -> None:
    with pytest.raises(SettingsError, match="puts the lane of a key aside"):
        App("app", source="in", order=order, on_failure="park")
