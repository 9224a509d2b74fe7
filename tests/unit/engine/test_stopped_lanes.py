"""Records of a key that is blocked in two partitions, as where its writers disagree about its partition."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison
from keylane.engine.engine import Engine
from keylane.engine.stages import open_pipeline
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.policies.failure_info import FailureInfo
from keylane.testing.clock import run_virtual
from keylane.testing.log import MemoryLog
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery

WHY = FailureInfo(stage="work", error="E", message="m", traceback="", attempts=1, failed_at=0.0)


def run(scenario: Any, *, fails: set[bytes] | None = None) -> tuple[list[bytes], MemorySink]:
    """What ran, in its order, and the topics afterwards. Partition 0 has message a, partition 1 message b."""
    ran: list[bytes] = []
    fails = set() if fails is None else fails
    app = App("app", source="in", sink="out", on_failure="block")
    log = MemoryLog(partitions=2)
    sink = MemorySink(app.spec, log, rng=Random(1), latency=(0.001, 0.001))
    records = [
        log.append("in", key=b"k", value=value, timestamp=1, partition=partition)
        for partition, value in enumerate((b"a", b"b"))
    ]

    @app.stage
    async def work(msg: Message) -> bytes:
        ran.append(bytes(msg.value))
        if msg.value in fails:
            raise Poison("no")
        return bytes(msg.value)

    async def main() -> None:
        async with open_pipeline(app.spec) as steps:
            done: list[Delivery] = []
            engine = Engine(app.spec, steps, sink, on_done=done.extend, wall=asyncio.get_running_loop().time)
            await scenario(engine, records)
            await engine.drain(1.0)

    run_virtual(main(), start=0.0, limit=100.0)
    return ran, sink


def blocked(partition: int, stop: LaneStatus = LaneStatus.BLOCKED) -> LaneRecord:
    return LaneRecord(stop=stop, key=b"k", partition=partition, offset=0, since=0.0, letter=WHY)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("released", [0, 1])
def test_key_blocked_in_two_partitions_stays_blocked(order: tuple[int, int], released: int) -> None:
    async def scenario(engine: Engine, records: list[Any]) -> None:
        engine.restore({}, [blocked(partition) for partition in order])
        engine.accept([records[partition] for partition in order])
        await asyncio.sleep(1.0)
        assert engine.stopped_lanes.release(b"k", released, 0) is None
        await asyncio.sleep(1.0)
        assert engine.stopped_lanes.release(b"k", released, 0) is not None, "it is not blocked any more"
        assert engine.stopped_lanes.release(b"k", 1 - released, 0) is None
        await asyncio.sleep(1.0)

    ran, sink = run(scenario)
    assert sorted(ran) == [b"a", b"b"]
    assert sink.notes == {}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_key_blocked_in_two_partitions_runs_nothing(order: tuple[int, int]) -> None:
    async def scenario(engine: Engine, records: list[Any]) -> None:
        engine.restore({}, [blocked(partition) for partition in order])
        engine.accept([records[0]])
        await asyncio.sleep(1.0)
        engine.accept([records[1]])
        await asyncio.sleep(1.0)

    assert run(scenario)[0] == []


def test_key_skipped_in_one_partition_stays_blocked() -> None:
    async def scenario(engine: Engine, records: list[Any]) -> None:
        engine.restore({}, [blocked(0), blocked(1)])
        engine.accept(records)
        await asyncio.sleep(1.0)
        assert engine.stopped_lanes.skip(b"k", 0, 0) is None
        await asyncio.sleep(1.0)

    ran, sink = run(scenario)
    assert ran == []
    assert [letter.value for letter in sink.dead_letters] == [b"a"]


def test_block_in_one_partition_keeps_that_in_another() -> None:
    fails = {b"b"}

    async def scenario(engine: Engine, records: list[Any]) -> None:
        engine.restore({}, [blocked(0)])
        engine.accept([records[1]])  # it comes first, and fails
        await asyncio.sleep(1.0)
        engine.accept([records[0]])
        fails.clear()
        assert engine.stopped_lanes.release(b"k", 1, 0) is None
        await asyncio.sleep(1.0)

    assert run(scenario, fails=fails)[0] == [b"b", b"b"]


@pytest.mark.parametrize("parked_first", [True, False])
def test_redrive_of_a_parked_key_leaves_it_blocked_elsewhere(parked_first: bool) -> None:
    async def scenario(engine: Engine, records: list[Any]) -> None:
        found = [blocked(1, LaneStatus.PARKED), blocked(0)]
        engine.restore({}, found if parked_first else found[::-1])
        engine.stopped_lanes.begin_redrive(b"k")
        engine.stopped_lanes.redrive(b"k", [])
        engine.stopped_lanes.end_redrive(b"k")
        engine.accept([records[1]])
        await asyncio.sleep(1.0)
        engine.accept([records[0]])
        await asyncio.sleep(1.0)

    assert run(scenario)[0] == [b"b"]
