"""Attempts of messages that are not done: neither a commit nor a restart gives a message a new budget."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry, Transient, VersionOrdering
from keylane.engine.engine import Engine
from keylane.engine.stages import open_pipeline
from keylane.lanes.lane_record import RetryState
from keylane.testing import Crash, Drain, Fault, Harness, MemoryLog, Release, run_virtual
from keylane.testing.life import TaskLife
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("quiet")

BUDGET = 3
SOON = Retry(attempts=BUDGET, wait_initial=0.1, wait_max=0.1)


def make(**options: Any) -> tuple[App, list[tuple[float, int]]]:
    """An app whose first attempt fails and whose others hang; and when which attempt began."""
    given = {"retry": SOON, "commit_interval": 1.0, "drain_timeout": 2.0, **options}
    app = App("app", source="in", sink="out", **given)
    seen: list[tuple[float, int]] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        seen.append((round(asyncio.get_running_loop().time(), 2), msg.attempt))
        if msg.attempt == 1:
            raise Transient("no")
        await asyncio.sleep(100)
        return b"x"

    return app, seen


def test_attempts_survive_commits_while_a_message_runs() -> None:
    app, seen = make()
    harness = Harness(app, partitions=1, faults=[Drain(at=20.0 * n) for n in range(1, 9)], limit=400)
    harness.send(key=b"k", value=b"v")
    harness.run()
    assert [attempt for _, attempt in seen] == [1, *[2] * 9]


def test_attempts_stay_until_the_result_is_acknowledged() -> None:
    """It came through, other lanes commit, its result is still on its way: a crash must not make it new."""
    app = App("app", source="in", sink="out", retry=SOON, commit_interval=0.1)
    seen: list[int] = []

    @app.stage
    async def work(msg: Message) -> bytes | None:
        if msg.key != b"k":
            return None
        seen.append(msg.attempt)
        if msg.attempt == 1:
            raise Transient("no")
        return b"x"

    harness = Harness(app, partitions=1, latency=(5.0, 5.0), faults=[Crash(at=4.0)])
    harness.send(key=b"k", value=b"v")
    for number in range(20):
        harness.send(key=b"b", value=b"v", at=number * 0.1)
    harness.run()
    assert seen == [1, 2, 2]


def engine_test(check: Callable[[Engine, MemoryLog], Any], **options: Any) -> None:
    """Run a check on an engine of its own."""

    async def body() -> None:
        app, _ = make(**options)
        log = MemoryLog(partitions=1)
        sink = MemorySink(app.spec, log, rng=random.Random(0), latency=(0.0, 0.0), pauses=[], refusals=[])
        loop = asyncio.get_running_loop()
        async with open_pipeline(app.spec) as steps:
            engine = Engine(app.spec, steps, sink, on_done=lambda _done: None, wall=loop.time)
            try:
                await check(engine, log)
            finally:
                await engine.abort()

    run_virtual(body(), start=1000.0, limit=5000.0)


KEPT = RetryState(stage="work", attempt=2, attempts=1, since=900.0, due=990.0)


def test_attempts_of_messages_not_read_yet_are_kept() -> None:
    async def check(engine: Engine, _log: MemoryLog) -> None:
        engine.restore({(0, 7): KEPT})
        assert engine.kept() == {0: {7: KEPT}}

    engine_test(check)


def test_attempts_of_a_message_that_runs_are_kept() -> None:
    async def check(engine: Engine, log: MemoryLog) -> None:
        engine.restore({(0, 0): KEPT})
        engine.accept([log.append("in", key=b"k", value=b"v", headers=[], timestamp=0, partition=0)])
        await asyncio.sleep(10)
        assert engine.table.running == 1
        assert engine.kept()[0][0].attempt == 2

    engine_test(check)


@pytest.mark.parametrize("due", [4600.0, 1e12])
def test_a_restored_backoff_is_no_longer_than_the_retrys_own(due: float) -> None:
    """The machine that wrote it down may have another clock."""

    async def check(engine: Engine, log: MemoryLog) -> None:
        engine.restore({(0, 0): RetryState(stage="work", attempt=2, attempts=1, since=900.0, due=due)})
        engine.accept([log.append("in", key=b"k", value=b"v", headers=[], timestamp=0, partition=0)])
        await asyncio.sleep(0.001)
        assert engine.table.next_due() is not None, "it waits"
        await asyncio.sleep(SOON.wait_asked_max + 0.1)
        assert engine.table.running == 1

    engine_test(check)


def test_a_released_message_has_all_its_attempts() -> None:
    app = App("app", source="in", sink="out", retry=SOON, on_failure="block", commit_interval=0.1)
    seen: list[int] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        seen.append(msg.attempt)
        if msg.attempt == 2:
            raise Poison("no")
        raise Transient("no")

    harness = Harness(app, partitions=1, faults=[Drain(at=5.0), Release(at=10.0, key=b"k"), Drain(at=15.0)])
    harness.send(key=b"k", value=b"v")
    harness.run()
    assert seen == [1, 2, 1, 2]


def test_a_wait_for_a_version_does_not_forget_attempts() -> None:
    """It ran across a gap and failed: after a restart it counts on, although it is early again."""
    versions = VersionOrdering(wait=3.0, on_timeout="process")
    app = App("app", source="in", sink="out", retry=SOON, versions=versions, drain_timeout=0.05)
    seen: list[tuple[int, int]] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.version == 3:
            seen.append((int(asyncio.get_running_loop().time()), msg.attempt))
            await asyncio.sleep(1.0)
            raise Transient("no")
        return b"x"

    harness = Harness(app, partitions=1, faults=[Drain(at=at + 0.2) for at in range(4, 40, 2)])
    for version in (1, 3):
        harness.send(key=b"k", value=b"", headers=[("event-version", b"%d" % version)])
    result = harness.run()
    assert [dead.stage for dead in result.dead] == ["work"]
    assert [attempt for _, attempt in seen if attempt == 1] == [1]
    assert max(attempt for _, attempt in seen) == BUDGET


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_of_restarts_gives_a_message_more_attempts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its budget a message gets only the attempts that a restart cut off, or that no commit knew of."""
    rng = random.Random(seed)
    app = App(
        "app",
        source="in",
        sink="out",
        retry=Retry(attempts=BUDGET, wait_initial=0.3, wait_max=1.0),
        commit_interval=rng.choice([0.05, 0.5]),
        drain_timeout=rng.choice([0.05, 1.0]),
        max_buffered=rng.choice([2, 4, 1000]),
        failure_guard=None,
    )
    began: Counter[bytes] = Counter()
    failed: dict[bytes, int] = {}  # the last attempt that failed
    durable: dict[bytes, int] = {}  # the same as the last commit knew it
    forgotten: list[tuple[bytes, int, int]] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        value: bytes = msg.value
        if not durable.get(value, 0) < msg.attempt <= BUDGET:
            forgotten.append((value, durable.get(value, 0), msg.attempt))
        began[value] += 1
        dice = random.Random(f"{seed} {value!r} {began[value]}")
        await asyncio.sleep(dice.choice([0.0, 0.1, 3.0]))
        if dice.random() < 0.7:
            if msg.attempt < BUDGET:  # else its letter is on its way, and a crash may cut that off
                failed[value] = msg.attempt
            raise Transient("no")
        return value

    class Watched(Harness):
        """Begins with what commits knew of."""

        async def _epoch(self) -> bool:
            failed.clear()  # what a crash has cut off
            failed.update(durable)
            return await super()._epoch()

    snapshot = TaskLife._snapshot

    def noting(self: TaskLife) -> Callable[[], None]:
        known, write = dict(failed), snapshot(self)

        def noted() -> None:
            durable.update(known)
            write()

        return noted

    monkeypatch.setattr(TaskLife, "_snapshot", noting)
    times = sorted(rng.uniform(0, 40) for _ in range(rng.randrange(1, 12)))
    faults: list[Fault] = [Crash(at=at) if rng.random() < 0.5 else Drain(at=at) for at in times]
    harness = Watched(app, seed=seed, partitions=2, faults=faults, latency=(0.001, 1.0))
    for number in range(30):
        harness.send(key=b"k%d" % (number % 6), value=b"%d" % number, at=number * 0.3)
    harness.run()
    assert forgotten == []
