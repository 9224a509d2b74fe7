"""One key gets most of the messages, or many fail at once: the effect on the others, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, HotKey, Message, Retry, Transient
from keylane.engine.capacity import BufferCapacity
from keylane.engine.engine import Engine
from keylane.engine.hot_keys import WARN_INTERVAL_SECONDS, HotKeyDetector
from keylane.lanes import lane_table as lanes
from keylane.lanes.eviction import LaneEvictor
from keylane.testing import Crash, Drain, EventKind, Fault, Harness, MemoryLog, RunResult, run_virtual
from support.adjust import adjust

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.lanes.heavy_hitters import HeavyHitters
    from keylane.message import Record

HOT = b"hot"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "keylane.engine")


def slow(seconds: float = 0.005, **options: Any) -> App:
    app = App("app", source="in", sink="out", **{"max_buffered": 1000, **options})

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(seconds)
        return bytes(msg.value)

    return app


def skewed(
    app: App,
    *,
    seconds: float = 6.0,
    rate: int = 1000,
    of_ten: int = 9,
    faults: Sequence[Fault] = (),
    seed: int = 0,
) -> tuple[Harness, RunResult]:
    """Of ten messages this many are of the hot key, the others of 100 keys that take turns."""
    harness = Harness(app, partitions=1, faults=faults, seed=seed)
    for number in range(int(seconds * rate)):
        key = HOT if number % 10 < of_ten else b"cold-%d" % (number // 10 % 100)
        harness.send(key=key, value=b"%d" % number, at=number / rate)
    return harness, harness.run()


def waits(harness: Harness, result: RunResult, *, cold: bool) -> list[float]:
    """Seconds from the arrival of a message to its start."""
    return [
        event.at - harness._arrivals[event.partition, event.offset]
        for event in result.history.events
        if event.kind is EventKind.START and (event.key != HOT) is cold
    ]


def test_key_with_nine_of_ten_messages_delays_no_other() -> None:
    """It gets 900 messages a second and can do 200: they would take all the room there is within a second."""
    harness, result = skewed(slow())
    result.verdict.raise_if_bad()
    cold = waits(harness, result, cold=True)
    assert len(cold) == 600
    assert quantiles(cold, n=100)[98] < 0.005, "the cold ones start when they come"
    assert max(cold) < 0.5
    hot = waits(harness, result, cold=False)
    assert len(hot) == 5400
    # 27 seconds of work: what is read again must not take the lane much longer.
    assert result.elapsed < 5400 * 0.005 * 1.05


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_lane_keeps_its_order_over_crashes_and_drains(seed: int) -> None:
    faults: list[Fault] = [Crash(at=2.0 + seed / 7), Drain(at=3.5), Crash(at=5.1 + seed / 3)]
    _, result = skewed(slow(commit_interval=0.2), faults=faults, seed=seed)
    result.verdict.raise_if_bad()


def test_messages_of_a_hot_lane_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = BufferCapacity._check

    def look(capacity: BufferCapacity) -> None:
        real(capacity)
        held.append(capacity.buffered)

    monkeypatch.setattr(BufferCapacity, "_check", look)
    skewed(slow())
    assert held, "there was little room at some time"
    assert max(held) <= 500, "half of the room: the fetcher would have gone on"


def count_relief(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lanes that evict their messages, as often as they do."""
    relieved: list[bytes] = []
    real = lanes.LaneTable.evict

    def evict(table: Any, lane: Any, keep: int, portion: int) -> None:
        relieved.append(lane.key)
        real(table, lane, keep, portion)

    monkeypatch.setattr(lanes.LaneTable, "evict", evict)
    return relieved


@pytest.mark.parametrize("keys", [5, 20])
def test_lanes_equally_behind_evict_nothing(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """A backlog of keys that are all alike: whatever is read further ahead is for lanes that are busy as well.

    5 keys do 62 messages between two checks: fewer than 50 would prove nothing, and lanes would be evicted as before.
    """
    relieved = count_relief(monkeypatch)
    rng = random.Random(keys)
    harness = Harness(slow(0.02), partitions=1)
    for number in range(6000):
        harness.send(key=b"%d" % rng.randrange(keys), value=b"%d" % number)
    harness.run().verdict.raise_if_bad()
    assert len(relieved) <= keys // 10, "but for the last ones, when the others are through"


def test_slow_lanes_are_evicted_while_others_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten slow keys get half of the messages: 150 each, 15 seconds of work. The others are through long before."""
    relieved = count_relief(monkeypatch)
    app = App("app", source="in", sink="out", max_buffered=1000)

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.1 if msg.key is not None and msg.key.startswith(b"slow") else 0.001)
        return bytes(msg.value)

    harness = Harness(app, partitions=1)
    for number in range(3000):
        key = b"quick-%d" % (number // 2 % 90) if number % 2 else b"slow-%d" % (number // 2 % 10)
        harness.send(key=key, value=b"%d" % number)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert len(set(relieved)) == 10
    quick = [
        e.at
        for e in result.history.events
        if e.kind is EventKind.START and (e.key or b"").startswith(b"quick")
    ]
    first = min(e.at for e in result.history.events)
    assert len(quick) == 1500
    assert max(quick) - first < 5


def test_cold_keys_of_a_backlog_do_not_wait_for_a_hot_one() -> None:
    """Of what is read first almost nothing finds its lane idle, and then there is no room: it is made all the same."""
    harness = Harness(slow(0.01, max_buffered=16_000), partitions=1)
    for number in range(20_000):
        key = HOT if number % 400 else b"cold-%d" % (number // 400 % 8)
        harness.send(key=key, value=b"%d" % number)
    result = harness.run()
    result.verdict.raise_if_bad()
    ended = [event.at for event in result.history.events if event.kind is EventKind.END and event.key != HOT]
    assert len(ended) == 50
    assert max(ended) < 3.0, "the hot lane takes 200 seconds"


def test_keys_behind_a_wall_of_a_single_key_are_reached() -> None:
    """They are unknown so far: only reading on finds them."""
    harness = Harness(slow(0.01, max_buffered=2000), partitions=1)
    for number in range(10_000):
        harness.send(key=HOT, value=b"%d" % number)
    for number in range(20):
        harness.send(key=b"cold-%d" % number, value=b"")
    result = harness.run()
    result.verdict.raise_if_bad()
    ended = [event.at for event in result.history.events if event.kind is EventKind.END and event.key != HOT]
    assert max(ended) < 5.0, "the hot lane takes 100 seconds"


def in_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most messages in memory, and being read again, after anything was read."""
    most = [0]
    for name in ("accept", "returned"):
        real = getattr(Engine, name)

        def counting(engine: Engine, *given: Any, _real: Any = real) -> None:
            _real(engine, *given)
            most[0] = max(most[0], engine.capacity.buffered)

        monkeypatch.setattr(Engine, name, counting)
    return most


@pytest.mark.parametrize("capacity", [20, 200, 1000])
def test_lanes_released_together_share_the_room(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """An outage: 30 lanes stop for 10 seconds and want everything back at the same moment."""
    most = in_memory(monkeypatch)
    app = App("app", source="in", sink="out", max_buffered=capacity, failure_guard=None, idempotency=None)
    adjust(app, retry=Retry(attempts=1000, wait_initial=2.0, wait_max=2.0))

    @app.stage
    async def stage(msg: Message) -> bytes:
        if asyncio.get_running_loop().time() < 10:
            raise Transient("outage")
        await asyncio.sleep(0.01)
        return bytes(msg.value)

    harness = Harness(app, partitions=1)
    for number in range(3_000):
        harness.send(key=b"%d" % (number % 30), value=b"%d" % number, at=number * 0.001)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert most[0] <= capacity
    ended = {event.key: event.at for event in result.history.events if event.kind is EventKind.END}
    assert len(ended) == 30
    last = max(ended.values())
    if capacity > 30:  # else some were not even read during the outage
        spread = last - min(ended.values())
        assert spread < 2.0 + 0.2 * (last - 10), "the first ones wake up 2 seconds before the last"


def test_stuck_lanes_leave_room_for_others() -> None:
    """Ten of them, with more behind each of their heads than all the room there is."""
    app = slow(0.001, max_buffered=200, on_failure="block", failure_guard=None)

    @app.stage
    async def refuse(msg: Message) -> bytes:
        if msg.key is not None and msg.key.startswith(b"bad"):
            raise ValueError("no")
        return bytes(msg.value)

    harness = Harness(app, partitions=1)
    for number in range(3000):
        kind = b"bad-%d" if number % 2 else b"good-%d"
        harness.send(key=kind % (number // 2 % 10), value=b"%d" % number)
    result = harness.run()
    good = [written for written in result.results if (written.key or b"").startswith(b"good")]
    assert len(good) == 1500


def test_a_lane_that_is_busy_and_quick_lets_go_of_nothing() -> None:
    """Reading again what will run in a moment would only cost."""
    evictor: LaneEvictor[Any] = LaneEvictor()
    table = fill(1000)
    lane = table.take()
    assert lane is not None

    def passes(count: int) -> None:
        for _ in range(count):
            assert table.turn(lane) is lane

    assert evictor.check(table.lanes.values(), 1.0, 2000) == []
    passes(500)
    assert evictor.check(table.lanes.values(), 1.25, 2000) == [], "it does 2,000 a second and has 500"
    assert evictor.watching
    passes(10)
    (excess,) = evictor.check(table.lanes.values(), 1.5, 2000)
    assert excess.keep == 40, "a second of what it did lately"
    assert excess.portion == 125, "a sixteenth of the room"


def test_a_lane_that_waits_for_its_turn_lets_go_of_nothing() -> None:
    """It is slow because of others: it would be quick without them."""
    evictor: LaneEvictor[Any] = LaneEvictor()
    table = fill(1000)
    for now in range(1, 10):
        assert evictor.check(table.lanes.values(), now, 2000) == []
    assert not evictor.watching


def test_hot_keys_checked_less_often_while_no_lane_is_large() -> None:
    evictor: LaneEvictor[Any] = LaneEvictor()
    table = fill(20)
    for _ in range(6):
        assert evictor.check(table.lanes.values(), 1.0, 100_000) == []
    assert evictor.wait == 2.0
    assert not evictor.watching
    evictor.forget()
    assert evictor.wait == 0.25


class Item:
    def __init__(self, offset: int) -> None:
        self.next: Any = None
        self.lane: Any = None
        self.settled = False
        self.partition = 0
        self.offset = offset
        self.failure_state: Any = None
        self.begun = False


def fill(count: int) -> lanes.LaneTable[Any]:
    table: lanes.LaneTable[Any] = lanes.LaneTable()
    for number in range(count):
        table.arrive(b"k", Item(number))
    return table


# Retries.


def test_retries_take_turns_with_others() -> None:
    table: lanes.LaneTable[Any] = lanes.LaneTable(retry_share=0.25)
    for number in range(40):
        table.arrive(b"again-%d" % number, Item(number))
    while (lane := table.take()) is not None:
        table.retry(lane, 1.0)
    for number in range(40):
        table.arrive(b"new-%d" % number, Item(number))
    assert table.wake(1.0) == 40
    assert table.statistics().ready == 80
    taken = [lane.key for _ in range(80) if (lane := table.take()) is not None]
    again = [str(key).startswith("b'again") for key in taken]
    assert len(taken) == 80
    assert sum(again[:40]) == 10, "a quarter, while others are ready"
    assert all(sum(again[at : at + 4]) == 1 for at in range(0, 40, 4)), "evenly"
    assert table.take() is None


def test_retries_alone_take_every_turn() -> None:
    table: lanes.LaneTable[Any] = lanes.LaneTable(retry_share=0.1)
    for number in range(5):
        table.arrive(b"%d" % number, Item(number))
    while (lane := table.take()) is not None:
        table.retry(lane, 1.0)
    table.wake(1.0)
    assert [table.take() is not None for _ in range(6)] == [True] * 5 + [False]


def limited(kind: str, **options: Any) -> App:
    """A stage of which 10 run at once. Half of the keys are bad: their calls take a second, and fail."""
    app = App(
        "app",
        source="in",
        sink="out",
        retry=Retry(attempts=4, wait_initial=0.01, wait_max=0.01),
        failure_guard=None,
        **options,
    )
    if kind == "async def":

        @app.stage(max_concurrency=10)
        async def call(msg: Message) -> bytes:
            bad = msg.key is not None and msg.key.startswith(b"bad")
            await asyncio.sleep(0.5 if bad else 0.005)
            if bad:
                raise Transient("no answer")
            return bytes(msg.value)

    return app


@pytest.mark.parametrize(("share", "held_up"), [(0.5, False), (1.0, True)])
def test_a_burst_of_retries_leaves_room_at_a_limited_stage(share: float, held_up: bool) -> None:
    harness = Harness(limited("async def", retry_share=share), partitions=1)
    for number in range(40):
        harness.send(key=b"bad-%d" % number, value=b"v")
    for number in range(200):
        harness.send(key=b"good-%d" % number, value=b"v", at=3.0 + number * 0.01)  # after the first attempts
    result = harness.run()
    good = sorted(
        event.at - harness._arrivals[event.partition, event.offset]
        for event in result.history.events
        if event.kind is EventKind.END and event.key is not None and event.key.startswith(b"good")
    )
    assert len(good) == 200
    assert (good[190] > 0.1) is held_up, good[190]


def test_a_burst_of_retries_leaves_threads_for_others() -> None:
    app = App(
        "app",
        source="in",
        sink="out",
        retry=Retry(attempts=2, wait_initial=0.001, wait_max=0.001),
        failure_guard=None,
    )
    running: set[bytes | None] = set()
    most = [0]
    guard = threading.Lock()

    @app.stage(max_concurrency=4)
    def call(msg: Message) -> bytes:
        if msg.attempt > 1:
            with guard:
                running.add(msg.key)
                most[0] = max(most[0], len(running))
            time.sleep(0.002)
            with guard:
                running.discard(msg.key)
            return b""
        raise Transient("no", retry_after=1.0)  # all at the same time

    harness = Harness(app, partitions=1)
    for number in range(40):
        harness.send(key=b"%d" % number, value=b"v")
    harness.run()
    assert most == [2]


# Names.


def records(*keys: bytes | None) -> list[Record]:
    log = MemoryLog()
    return [log.append("in", key=key, value=b"") for key in keys]


def test_hot_key_is_named_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "keylane.engine")
    told: list[HotKey] = []
    app = slow(1.0, max_buffered=100_000)
    app.on_hot(told.append)
    some = records(*(HOT if number % 4 == 0 else b"cold-%d" % number for number in range(4000)))

    async def main() -> None:
        engine = await started(app)
        for at in range(0, 4000, 250):
            engine.skew.arrived(some[at : at + 250])
            engine.accept(some[at : at + 250])
        engine.skew.look(100.0)
        engine.skew.look(105.0)
        engine.skew.look(100.0 + WARN_INTERVAL_SECONDS)
        await engine.abort()

    run_virtual(main())
    assert len(told) == 2
    assert (told[0].key, told[0].partition) == (HOT, 0)
    assert told[0].share == pytest.approx(0.25, abs=0.08)
    assert told[0].waiting == 1000
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("key b'hot' of partition 0 is hot: 2")
    assert "1000 wait in its lane" in lines[0]


def test_hot_key_whose_lane_keeps_up_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    table: lanes.LaneTable[Any] = lanes.LaneTable()
    skew = HotKeyDetector(table, tell=lambda hot: pytest.fail(f"{hot}"))
    skew.arrived(records(*[HOT] * 16, *[None] * 16))
    (hot,) = skew.hot()
    assert (hot.key, hot.share, hot.waiting) == (HOT, 0.5, 0)
    skew.look(1.0)
    assert not caplog.records


def test_keys_that_take_turns_are_all_met_alike() -> None:
    """A part of the messages is looked at: every third, say, and of a hundred keys some would look hot."""
    skew = HotKeyDetector(lanes.LaneTable(), tell=lambda _hot: None)
    batch = records(*(b"%d" % (number % 100) for number in range(100)))
    for _ in range(400):
        skew.arrived(batch)
    summary: HeavyHitters[Any] = skew._summary
    assert max(share for _, share in summary.top(0.0)) < 0.02


@pytest.mark.parametrize("seed", range(30))
def test_a_few_samples_make_no_key_hot(seed: int) -> None:
    """Of a drain's large batches few messages are looked at: keys with 0.6% each look like more by chance."""
    random.seed(seed)
    skew = HotKeyDetector(lanes.LaneTable(), tell=lambda _hot: None)
    batch = records(*(b"%d" % (number % 170) for number in range(3_400)))
    for number in range(60):
        skew.arrived(batch)
        if number % 10 == 9:
            skew.look(5.0 * number)
            assert len(skew.names) <= 1


def test_a_key_that_is_met_often_is_hot_soon() -> None:
    skew = HotKeyDetector(lanes.LaneTable(), tell=lambda _hot: None)
    batch = records(*[HOT] * 100, *(b"%d" % number for number in range(900)))
    for _ in range(10):
        skew.arrived(batch)
    assert [hot.key for hot in skew.hot()] == [HOT]


def test_a_key_too_long_to_print_is_not_named() -> None:
    skew = HotKeyDetector(lanes.LaneTable(), tell=lambda _hot: None)
    skew.arrived(records(*[b"x" * 2000] * 50))
    assert skew.hot() == []


async def started(app: App) -> Engine:
    from keylane.engine.stages import open_pipeline  # noqa: PLC0415

    class Nowhere:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_given: None

    async with open_pipeline(app.spec) as steps:
        return Engine(app.spec, steps, Nowhere(), on_done=lambda _done: None)
