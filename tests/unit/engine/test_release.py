"""A range that an engine releases while its other ranges run, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry, Transient
from keylane.engine.engine import Engine
from keylane.engine.stages import open_pipeline
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.offsets.slots import ALL, SLOTS, Slots, slot_of
from keylane.policies.failure_info import FailureInfo
from keylane.testing import run_virtual
from keylane.testing.log import MemoryLog
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from keylane.engine.delivery import Delivery

KEYS = [b"%d" % n for n in range(4)]
"""Keys 0 and 2 are in partition 0, the others in partition 1."""


class Started:
    """What began and what is done, as (partition, offset)."""

    def __init__(self) -> None:
        self.began: list[tuple[int, int]] = []
        self.done: list[tuple[int, int]] = []


def run(
    use: Callable[[Engine, MemoryLog, Started], Awaitable[None]],
    stage: Callable[[Message], Awaitable[Any]],
    **options: Any,
) -> Started:
    """Use an engine of an app with this stage."""
    app, seen = App("app", source="in", sink="out", **options), Started()

    @app.stage
    async def work(msg: Message) -> Any:
        seen.began.append((msg.partition, msg.offset))
        return await stage(msg)

    async def main() -> None:
        log = MemoryLog(partitions=2)
        sink = MemorySink(app.spec, log, rng=Random(1), latency=(0.001, 0.001))

        def on_done(deliveries: list[Delivery]) -> None:
            seen.done += [(one.partition, one.offset) for one in deliveries]

        async with open_pipeline(app.spec) as steps:
            engine = Engine(app.spec, steps, sink, on_done=on_done)
            await use(engine, log, seen)
            await engine.abort()

    run_virtual(main())
    return seen


def send(log: MemoryLog, count: int) -> list[Any]:
    """This many messages of each key."""
    for n in range(count):
        for key in KEYS:
            log.append("in", key=key, value=b"%d" % n, partition=int(key) % 2)
    return log.records("in")


async def a_second(msg: Message) -> bytes:
    await asyncio.sleep(1.0)
    return bytes(msg.value)


def test_what_runs_is_finished_and_nothing_else_starts() -> None:
    async def use(engine: Engine, log: MemoryLog, seen: Started) -> None:
        engine.accept(send(log, 5))
        await asyncio.sleep(0.5)
        assert await engine.release(1, ALL, timeout=10.0)
        assert {place for place in seen.done if place[0] == 1} == {(1, 0), (1, 1)}
        await asyncio.sleep(10.0)

    seen = run(use, a_second)
    assert {place for place in seen.began if place[0] == 1} == {(1, 0), (1, 1)}
    assert sorted(place for place in seen.done if place[0] == 0) == [(0, n) for n in range(10)]


def test_part_of_a_partition_is_released() -> None:
    middle = SLOTS // 2
    low = {key for key in KEYS if slot_of(key, 0) < middle}
    assert 0 < len(low) < len(KEYS)

    async def use(engine: Engine, log: MemoryLog, _seen: Started) -> None:
        engine.accept(send(log, 3))
        await asyncio.sleep(0.5)
        parts = [engine.release(p, Slots(0, middle - 1), timeout=10.0) for p in (0, 1)]
        assert await asyncio.gather(*parts) == [True, True]
        await asyncio.sleep(10.0)
        assert engine.held == 0

    seen = run(use, a_second)
    assert len(seen.done) == len(low) + 3 * (len(KEYS) - len(low))


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    """Those of other ranges are not."""

    async def use(engine: Engine, log: MemoryLog, seen: Started) -> None:
        engine.accept(send(log, 2))
        await asyncio.sleep(0.5)
        assert await engine.release(1, ALL, timeout=0.2)
        assert seen.done == []
        assert engine.table.running == 2
        await asyncio.sleep(10.0)

    seen = run(use, a_second)
    assert sorted(seen.done) == [(0, n) for n in range(4)]
    assert [place for place in seen.began if place[0] == 1] == [(1, 0), (1, 1)]


def test_a_call_that_swallows_its_cancellation_is_reported() -> None:
    async def stubborn(msg: Message) -> bytes:
        for _ in range(10):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)
        return bytes(msg.value)

    async def use(engine: Engine, log: MemoryLog, _seen: Started) -> None:
        engine.accept(send(log, 1))
        await asyncio.sleep(0.5)
        assert not await engine.release(1, ALL, timeout=0.2)
        await asyncio.sleep(10.0)

    run(use, stubborn)


def test_attempts_of_a_released_message_are_kept_until_they_are_forgotten() -> None:
    async def fails(_msg: Message) -> None:
        raise Transient("not now")

    async def use(engine: Engine, log: MemoryLog, _seen: Started) -> None:
        engine.accept(send(log, 2))
        await asyncio.sleep(0.5)
        assert await engine.release(1, ALL, timeout=10.0)
        assert sorted(engine.kept()) == [0, 1]
        engine.forget({1: ALL})
        assert sorted(engine.kept()) == [0]
        assert {lane.head.partition for lane in engine.table.lanes.values() if lane.head} == {0}
        assert engine.held == 4

    run(use, fails, retry=Retry(attempts=9, wait_initial=5, wait_max=5))


@pytest.mark.parametrize("on_failure", ["block", "park"])
def test_stopped_lanes_leave_with_their_range(on_failure: str) -> None:
    async def fails(_msg: Message) -> None:
        raise Poison("never")

    async def use(engine: Engine, log: MemoryLog, _seen: Started) -> None:
        engine.accept(send(log, 2))
        await asyncio.sleep(0.5)
        assert await engine.release(1, ALL, timeout=10.0)
        assert {record.partition for record in engine.stopped_lanes.records.values()} == {0, 1}
        engine.forget({1: ALL})
        assert {record.partition for record in engine.stopped_lanes.records.values()} == {0}
        assert engine.stopped_lanes.release(b"1", 1, 0) is not None

    run(use, fails, on_failure=on_failure)


def test_a_range_comes_back_with_its_stopped_lanes() -> None:
    async def works(msg: Message) -> bytes:
        return bytes(msg.value)

    async def use(engine: Engine, log: MemoryLog, seen: Started) -> None:
        records = send(log, 2)
        assert await engine.release(1, ALL, timeout=10.0)
        engine.forget({1: ALL})
        letter = FailureInfo(
            stage="work", error="Poison", message="never", traceback="", attempts=1, failed_at=1.0
        )
        stopped = LaneRecord(
            stop=LaneStatus.BLOCKED, key=b"1", partition=1, offset=0, since=1.0, letter=letter
        )
        engine.restore({}, [stopped])
        engine.accept(records)
        await asyncio.sleep(1.0)
        assert sorted(set(seen.began)) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]

    run(use, works)
