"""The course of a message that fails, in virtual time: every sentence of docs/guarantees.md about failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from keylane import (
    App,
    Breaker,
    CircuitState,
    FailureGuard,
    FailureGuardError,
    Message,
    Poison,
    Retry,
    SettingsError,
    Transient,
)
from keylane.engine import stopped_lanes as stops
from keylane.lanes import lane_table as lanes
from keylane.lanes.lane_record import LaneRecord
from keylane.testing import Crash, Drain, Fault, Harness, Redrive, Refuse, Release, RunResult, Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane import FailureInfo

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


def failing(bad: Callable[[Message, float], BaseException | None], **options: Any) -> App:
    """One stage of 10 ms that hands its message on, unless ``bad`` has an error for it at this time."""
    app = App("app", source="in", sink="out", **{"retry": SOON, "commit_interval": 0.2, **options})

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.01)
        error = bad(msg, asyncio.get_running_loop().time())
        if error is not None:
            raise error
        return bytes(msg.value)

    return app


def run(app: App, faults: Sequence[Fault] = (), *, keys: int = 4, each: int = 10, seed: int = 0) -> RunResult:
    """Keys a, b, c … get the values 0, 1, 2 … one every 50 ms."""
    harness = Harness(app, faults=faults, seed=seed)
    for number in range(each):
        for key in range(keys):
            harness.send(key=b"abcdefgh"[key : key + 1], value=b"%d" % number, at=number * 0.05)
    return harness.run()


def values(result: RunResult, key: bytes) -> list[int]:
    return [int(written.value) for written in result.results if written.key == key]


def is_bad(
    key: bytes, value: bytes, until: float = float("inf")
) -> Callable[[Message, float], Poison | None]:
    return lambda msg, now: Poison("no") if (msg.key, msg.value) == (key, value) and now < until else None


# The four policies.


def test_skip_makes_a_dead_letter_and_the_lane_continues() -> None:
    result = run(failing(is_bad(b"a", b"3")))
    result.verdict.raise_if_bad()
    assert values(result, b"a") == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [(letter.key, letter.value, letter.kind) for letter in result.dead] == [(b"a", b"3", "dead")]


@pytest.mark.parametrize(
    "faults", [[], [Crash(at=2)], [Drain(at=1)], [Drain(at=1), Crash(at=2), Drain(at=3)]]
)
def test_block_stops_the_lane_until_it_is_released(faults: list[Fault]) -> None:
    result = run(
        failing(is_bad(b"a", b"3", until=5), on_failure="block"), [*faults, Release(at=10, key=b"a")]
    )
    result.verdict.raise_if_bad()
    for key in (b"a", b"b", b"c", b"d"):
        assert values(result, key) == list(range(10))
    assert result.dead == []
    attempts = [event for event in result.history.events if event.key == b"a" and event.outcome is None]
    between = [event for event in attempts if 2.5 < event.at < 10]
    assert between == [], "neither the blocked message nor one behind it ran before it was released"
    others = [event.at for event in result.history.events if event.key != b"a"]
    assert max(others) < 3, "no other lane waited"


def test_unreleased_lane_leaves_its_messages_undone() -> None:
    result = run(failing(is_bad(b"a", b"3"), on_failure="block"))
    assert values(result, b"a") == [0, 1, 2]
    assert len({partition for partition, _ in result.waiting}) == 1
    assert len(result.waiting) == 7
    result.verdict.raise_if_bad()


@pytest.mark.parametrize("faults", [[], [Crash(at=2)], [Drain(at=1)]])
def test_block_and_dlq_archives_a_copy_and_stops(faults: list[Fault]) -> None:
    result = run(
        failing(is_bad(b"a", b"3", until=5), on_failure="block_and_dlq"), [*faults, Release(at=10, key=b"a")]
    )
    result.verdict.raise_if_bad()
    assert values(result, b"a") == list(range(10))
    assert {(letter.key, letter.value, letter.kind) for letter in result.dead} == {(b"a", b"3", "archived")}


@pytest.mark.parametrize("crash", [None, 9.99, 10.0, 10.001, 10.002, 10.01, 10.1, 10.3, 12.0])
def test_skipped_message_becomes_a_dead_letter(crash: float | None) -> None:
    faults: list[Fault] = [Skip(at=10, key=b"a")]
    if crash is not None:
        faults.append(Crash(at=crash))
    result = run(failing(is_bad(b"a", b"3"), on_failure="block"), faults)
    assert values(result, b"a")[-6:] == [4, 5, 6, 7, 8, 9]
    assert {(letter.value, letter.kind) for letter in result.dead} == {(b"3", "dead")}
    result.verdict.raise_if_bad()


@pytest.mark.parametrize("faults", [[], [Crash(at=0.3)], [Crash(at=0.6)], [Drain(at=0.25)], [Crash(at=2)]])
@pytest.mark.parametrize("seed", range(3))
def test_park_and_redrive_keep_lane_order(faults: list[Fault], seed: int) -> None:
    app = failing(is_bad(b"a", b"3", until=5), on_failure="park")
    result = run(app, [*faults, Redrive(at=10, key=b"a")], seed=seed)
    parked = [letter for letter in result.dead if letter.key == b"a"]
    assert {letter.kind for letter in parked} == {"parked"}
    places = list(dict.fromkeys((letter.offset, letter.value) for letter in parked))
    assert places == sorted(places)
    assert [value for _, value in places] == [b"%d" % number for number in range(3, 10)]
    assert {letter.park for letter in parked} == {places[0][0]}
    assert (parked[0].error, parked[0].stage) == ("keylane.errors.Poison", "stage")
    assert list(dict.fromkeys(values(result, b"a"))) == list(range(10))
    assert values(result, b"a") == sorted(values(result, b"a")) or faults
    for key in (b"b", b"c", b"d"):
        assert list(dict.fromkeys(values(result, key))) == list(range(10))
    result.verdict.raise_if_bad()


def test_messages_that_come_while_a_lane_is_redriven_wait_for_it() -> None:
    def bad(msg: Message, now: float) -> Poison | None:
        return Poison("no") if (msg.key, msg.value) == (b"a", b"3") and now < 0.2 else None

    app = failing(bad, on_failure="park")
    result = run(app, [Redrive(at=0.3, key=b"a")], each=40)
    result.verdict.raise_if_bad()
    assert values(result, b"a") == list(range(40))
    assert 0 < sum(letter.kind == "parked" for letter in result.dead) < 30


@pytest.mark.parametrize("latency", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("at", [1.9, 2.0, 2.03])
def test_a_redrive_waits_for_letters_that_are_on_their_way(latency: float, at: float) -> None:
    app = failing(is_bad(b"a", b"3", until=at), on_failure="park")
    harness = Harness(app, partitions=1, latency=latency, faults=[Redrive(at=at, key=b"a")])
    for number in range(50):
        harness.send(key=b"a", value=b"%d" % number, at=number * 0.05)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result, b"a") == list(range(50))


def test_parked_messages_read_again_run_once_when_redriven() -> None:
    """Nothing was committed when the lane was parked: after the crash it is among the letters and in the log."""
    app = App("app", source="in", sink="out", on_failure="park", commit_interval=100)

    @app.stage
    async def work(msg: Message) -> Any:
        await asyncio.sleep(0.01)
        if msg.value == b"0" and asyncio.get_running_loop().time() < 1:
            raise Poison("no")
        return msg.value

    harness = Harness(app, partitions=1, faults=[Crash(at=2), Redrive(at=2.0, key=b"a")])
    for number in range(3):
        harness.send(key=b"a", value=b"%d" % number)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert [written.value for written in result.results] == [b"0", b"1", b"2"]


def test_redriven_message_that_fails_again_stays_parked() -> None:
    app = failing(is_bad(b"a", b"3", until=15), on_failure="park")
    result = run(app, [Redrive(at=10, key=b"a"), Redrive(at=20, key=b"a")])
    result.verdict.raise_if_bad()
    assert values(result, b"a") == list(range(10))
    tries = [event for event in result.history.events if event.key == b"a" and event.outcome == "retry"]
    assert len(tries) == 2, "once when it was parked, once when it was redriven in vain"
    assert len([letter for letter in result.dead if letter.value == b"3" and letter.key == b"a"]) == 1


def test_a_dead_letter_can_be_redriven_and_becomes_one_again() -> None:
    app = failing(is_bad(b"a", b"3"))
    result = run(app, [Redrive(at=10, key=b"a")])
    assert [(letter.value, letter.kind) for letter in result.dead] == [(b"3", "dead"), (b"3", "dead")]


def test_failed_redrive_without_a_new_letter_keeps_the_old_one() -> None:
    app = failing(is_bad(b"a", b"3", until=15))
    result = run(app, [Redrive(at=10, key=b"a"), Refuse(at=9, for_=2), Redrive(at=20, key=b"a")])
    assert [letter.value for letter in result.dead] == [b"3"]
    assert sorted(values(result, b"a")) == list(range(10))


def test_a_keyless_message_is_parked_alone() -> None:
    app = failing(lambda msg, now: Poison("no") if msg.value == b"3" else None, on_failure="park")
    harness = Harness(app, partitions=1)
    for number in range(6):
        harness.send(key=None, value=b"%d" % number)
    result = harness.run()
    assert sorted(written.value for written in result.results) == [b"0", b"1", b"2", b"4", b"5"]
    assert [(letter.value, letter.kind) for letter in result.dead] == [(b"3", "dead")]


def test_order_global_with_skip_is_refused_when_the_app_is_built() -> None:
    with pytest.raises(SettingsError, match=r"order='global' with on_failure='skip'.*'block'"):
        App("app", source="in", order="global")


@pytest.mark.parametrize("seed", range(5))
def test_lane_stops_when_its_dead_letter_cannot_be_written(
    seed: int,
) -> None:
    app = failing(is_bad(b"a", b"3"))
    result = run(app, [Refuse(at=0, for_=5), Release(at=10, key=b"a")], seed=seed)
    result.verdict.raise_if_bad()
    assert values(result, b"a") == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [letter.value for letter in result.dead] == [b"3"]


@pytest.mark.parametrize("seed", range(5))
def test_a_parked_lane_waits_for_the_dead_letters_to_come_back(seed: int) -> None:
    app = failing(is_bad(b"a", b"3", until=5), on_failure="park")
    result = run(app, [Refuse(at=0.1, for_=6), Redrive(at=30, key=b"a")], seed=seed)
    result.verdict.raise_if_bad()
    assert values(result, b"a") == list(range(10))


# Attempts.


def test_attempts_survive_an_epoch_shorter_than_the_backoff() -> None:
    seen: list[int] = []

    def bad(msg: Message, _now: float) -> Transient | None:
        if msg.value != b"3":
            return None
        seen.append(msg.attempt)
        return Transient("not now")

    app = failing(bad, retry=Retry(attempts=4, wait_initial=20, wait_max=20), drain_timeout=0.5)
    result = run(app, [Drain(at=float(at)) for at in range(1, 100, 2)], keys=1)
    result.verdict.raise_if_bad()
    assert seen == [1, 2, 3, 4]
    assert [(letter.value, letter.attempts) for letter in result.dead] == [(b"3", 4)]
    assert result.epochs > 10


def test_a_wait_that_lasts_longer_than_an_epoch_is_not_cut_short() -> None:
    times: list[float] = []

    def bad(msg: Message, now: float) -> Transient | None:
        if msg.value == b"3":
            times.append(now)
            return Transient("not now", retry_after=30) if len(times) == 1 else None
        return None

    app = failing(bad, drain_timeout=0.5)
    run(app, [Drain(at=float(at)) for at in range(1, 40, 3)], keys=1).verdict.raise_if_bad()
    assert times[1] - times[0] == pytest.approx(30, abs=1)


def test_retries_resume_at_the_failed_stage_with_its_input() -> None:
    app = App("app", source="in", sink="out", retry=SOON)
    ran: list[str] = []

    @app.stage
    async def one(msg: Message) -> bytes:
        ran.append(f"one {msg.attempt}")
        return bytes(msg.value) + b"!"

    @app.stage
    async def two(msg: Message) -> bytes:
        ran.append(f"two {msg.attempt} {msg.value.decode()}")
        if msg.attempt < 3:
            raise Transient("not yet")
        return bytes(msg.value)

    harness = Harness(app)
    harness.send(key=b"a", value=b"x")
    assert [written.value for written in harness.run().results] == [b"x!"]
    assert ran == ["one 1", "two 1 x!", "two 2 x!", "two 3 x!"]


def test_the_budget_of_time_ends_retries() -> None:
    app = failing(
        lambda msg, now: Transient("not now") if msg.value == b"3" else None,
        retry=Retry(attempts=1000, wait_initial=0.5, wait_max=0.5, total=5),
    )
    result = run(app, keys=1)
    (letter,) = result.dead
    assert 10 < letter.attempts < 40
    assert result.elapsed < 7


# Breaker and failure guard.


@pytest.mark.parametrize("seed", range(10))
def test_open_breaker_admits_only_probes_and_uses_no_attempt(seed: int) -> None:
    calls: list[float] = []
    states: list[CircuitState] = []
    app = App("app", source="in", sink="out", retry=Retry(attempts=4), commit_interval=0.2)

    @app.on_breaker
    def changed(stage: str, state: CircuitState) -> None:
        assert stage == "downstream"
        states.append(state)

    @app.stage(
        breaker=Breaker(failure_rate=0.5, window=2, minimum=10, open_for=1, probes=2),
        retry=Retry(attempts=4, wait_initial=0.05, wait_max=0.1),
    )
    async def downstream(msg: Message) -> bytes:
        now = asyncio.get_running_loop().time()
        calls.append(now)
        await asyncio.sleep(0.01)
        if 1 <= now < 6:
            raise ConnectionError("refused")
        return bytes(msg.value)

    harness = Harness(app, seed=seed)
    for number in range(2000):
        harness.send(key=b"%d" % (number % 50), value=b"%d" % number, at=number * 0.005)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert result.dead == []
    assert states[0] is CircuitState.OPEN
    assert states[-1] is CircuitState.CLOSED
    # From the opening on at most the probes of each half-open second reach it.
    opened = next(at for at in sorted(calls) if at >= 1) + 1
    assert len([at for at in calls if opened <= at < 6]) <= 2 * 6
    assert max(event.at for event in result.history.events) < 12


def test_breaker_leaves_lanes_without_its_stage_alone() -> None:
    app = App("app", source="in", sink="out", retry=SOON)

    @app.stage(breaker=Breaker(minimum=5, open_for=1, probes=1))
    async def downstream(msg: Message) -> bytes:
        if msg.key == b"sick" and asyncio.get_running_loop().time() < 5:
            raise ConnectionError
        return bytes(msg.value)

    @app.stage
    async def after(msg: Message) -> bytes:
        await asyncio.sleep(8)
        return bytes(msg.value)

    harness = Harness(app)
    for number in range(10):
        harness.send(key=b"well%d" % number, value=b"1")
    for number in range(200):
        harness.send(key=b"sick%d" % number if number < 199 else b"sick", value=b"1", at=1)
    result = harness.run()
    assert not result.verdict.lost
    ended = [
        event.at for event in result.history.events if str(event.key).startswith("b'well") and event.outcome
    ]
    assert max(ended) < 8.2, "they were beyond the stage when its breaker opened"


def test_failing_every_message_stops_the_app() -> None:
    app = failing(
        lambda msg, now: KeyError("a typo"),
        failure_guard=FailureGuard(ratio=0.5, minimum=100, consecutive=20),
    )
    harness = Harness(app)
    for number in range(2000):
        harness.send(key=b"%d" % (number % 500), value=b"%d" % number)
    with pytest.raises(FailureGuardError, match=r"app 'app' stopped: .*KeyError: 'a typo'.*dlq redrive app"):
        harness.run()
    assert len(harness._sink.dead_letters) <= 20


def test_one_bad_lane_does_not_stop_the_app() -> None:
    app = failing(
        lambda msg, now: Poison("no") if msg.key == b"a" else None,
        failure_guard=FailureGuard(ratio=0.5, minimum=20, consecutive=5),
    )
    result = run(app, each=60)
    result.verdict.raise_if_bad()
    assert len(result.dead) == 60


# Stuck lanes evict their messages.


@pytest.mark.parametrize("policy", ["block", "park", "skip"])
@pytest.mark.parametrize("seed", range(3))
def test_evicted_messages_of_a_stuck_lane_return_in_order(policy: str, seed: int) -> None:
    def bad(msg: Message, now: float) -> BaseException | None:
        if (msg.key, msg.value) != (b"a", b"3") or now >= 20:
            return None
        return Transient("not now", retry_after=15) if policy == "skip" else Poison("no")

    app = failing(bad, on_failure=policy, retry=Retry(attempts=10))
    action: list[Fault] = [Release(at=25, key=b"a")] if policy == "block" else []
    action += [Redrive(at=25, key=b"a")] if policy == "park" else []
    harness = Harness(app, faults=[*action, Crash(at=22)] if seed == 1 else action, seed=seed, holes=0.1)
    for number in range(1500):
        harness.send(key=b"a", value=b"%d" % number, at=number * 0.01)
        harness.send(key=b"b", value=b"%d" % number, at=number * 0.01)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(values(result, b"a"))) == list(range(1500))
    assert list(dict.fromkeys(values(result, b"b"))) == list(range(1500))


def test_a_stuck_lane_holds_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[lanes.LaneTable[Any]] = []
    real = lanes.LaneTable.stop

    def stop(table: lanes.LaneTable[Any], lane: lanes.Lane[Any], now: float) -> None:
        tables.append(table)
        real(table, lane, now)

    monkeypatch.setattr(lanes.LaneTable, "stop", stop)
    harness = Harness(failing(is_bad(b"a", b"3"), on_failure="block"), partitions=1)
    for number in range(3000):
        harness.send(key=b"a", value=b"%d" % number, at=number * 0.01)
    harness.run()
    (table,) = tables
    # In addition to what came in the first second, before the lane counted as stuck.
    assert table.statistics().away >= 3000 - 4 - max(lanes.STUCK_LANE_ENTRIES_MAX, 100)


# Hooks.


def test_hooks_run_before_the_wait_and_may_fail() -> None:
    heard: list[tuple[str, Any]] = []
    app = failing(lambda msg, now: Transient("x") if msg.value == b"3" else None, on_failure="skip")

    @app.on_retry
    def retry(msg: Message, error: BaseException, wait: float) -> None:
        heard.append(("retry", (msg.attempt, str(error), 0 <= wait <= 0.1)))
        raise RuntimeError("a broken hook")

    @app.on_dead
    def dead(msg: Message, letter: FailureInfo) -> None:
        heard.append(("dead", (letter.stage, len(letter.failures), letter.attempts)))
        raise RuntimeError("a broken hook")

    result = run(app, keys=1)
    result.verdict.raise_if_bad()
    assert heard == [("retry", (1, "x", True)), ("retry", (2, "x", True)), ("dead", ("stage", 3, 3))]


def test_on_block_fires_for_blocked_and_parked_lanes() -> None:
    for policy in ("block", "block_and_dlq", "park"):
        heard: list[bytes | None] = []
        app = failing(is_bad(b"a", b"3"), on_failure=policy)
        app.on_block(lambda msg, letter, heard=heard: heard.append(msg.key))
        run(app)
        assert heard == [b"a"]


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    app = App("app", source="in")
    with pytest.raises(SettingsError, match=r"on_retry: it must take 3 arguments"):
        app.on_retry(lambda msg: None)

    async def slow(msg: Message, letter: FailureInfo) -> None: ...

    with pytest.raises(SettingsError, match=r"on_dead: it is 'async def'"):
        app.on_dead(slow)


# Very many stopped lanes.


def one_task(app: App) -> RunResult:
    """Four keys with one message each."""
    harness = Harness(app, partitions=1)
    for key in (b"a", b"b", b"c", b"d"):
        harness.send(key=key, value=b"1")
    return harness.run()


@pytest.mark.parametrize("policy", ["block", "park"])
def test_records_of_many_stopped_lanes_are_brief(monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    monkeypatch.setattr(stops, "FULL_RECORDS", 2)
    monkeypatch.setattr(stops, "BRIEF_CHARACTERS", 5)
    written: list[FailureInfo] = []
    sent: list[FailureInfo] = []
    real = LaneRecord.encode

    def encode(record: LaneRecord) -> bytes:
        written.append(record.letter)
        return real(record)

    monkeypatch.setattr(LaneRecord, "encode", encode)
    app = failing(lambda _msg, _now: Poison("no good at all"), on_failure=policy, failure_guard=None)
    app.on_dead(lambda _message, letter: sent.append(letter))
    one_task(app)
    assert [letter.message for letter in written] == ["no good at all"] * 2 + ["no go"] * 2
    assert [bool(letter.traceback) for letter in written] == [True, True, False, False]
    if policy == "park":
        assert [letter.message for letter in sent] == ["no good at all"] * 4, "the letters leave nothing out"


def test_more_stopped_lanes_than_a_task_keeps_end_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "STOPPED_LANES_MAX", 3)
    app = failing(lambda _msg, _now: Poison("no"), on_failure="block", failure_guard=None)
    with pytest.raises(
        FailureGuardError, match="3 lanes have stopped, which is all that one task keeps; the next one"
    ):
        one_task(app)
