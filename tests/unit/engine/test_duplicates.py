"""Events that were sent twice, in virtual time: every sentence of docs/guarantees.md about idempotency."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Idempotency, Message, Outcome, Poison, Retry, Transient
from keylane.engine.engine import Engine
from keylane.engine.message_runner import RUN_MESSAGES_MAX
from keylane.engine.redrive import RedriveItem, Redriver
from keylane.engine.stages import open_pipeline
from keylane.errors import SourceChangedError
from keylane.testing import (
    Crash,
    Drain,
    Fault,
    Harness,
    MemoryLog,
    MemoryRecord,
    Pause,
    Redrive,
    Refuse,
    Release,
    RunResult,
    Skip,
    run_virtual,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.message import Headers

    Bad = Callable[[Message, float], BaseException | None]
    Sends = Sequence[tuple[bytes | None, bytes, float]]

pytestmark = pytest.mark.usefixtures("quiet")


def make(bad: Bad | None = None, **options: Any) -> App:
    """One stage of 10 ms that hands its message on, unless ``bad`` has an error for it at this time."""
    given = {"retry": Retry(attempts=3, wait_initial=0.1, wait_max=0.1), "commit_interval": 0.2, **options}
    app = App("app", source="in", **{"sink": "out", **given})

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.01)
        error = bad(msg, asyncio.get_running_loop().time()) if bad else None
        if error is not None:
            raise error
        return bytes(msg.value)

    return app


def header(event_id: bytes | None) -> Headers:
    return [("event-id", event_id)]


def run(app: App, sends: Sends, faults: Sequence[Fault] = (), **options: Any) -> RunResult:
    """Messages of (key, event id, second): the value says which send of its event it is: ``id.1``, ``id.2`` …"""
    harness = Harness(app, faults=faults, **{"partitions": 1, **options})
    count: dict[tuple[bytes | None, bytes], int] = {}
    for key, event_id, at in sends:
        number = count[key, event_id] = count.get((key, event_id), 0) + 1
        harness.send(key=key, value=b"%b.%d" % (event_id, number), headers=header(event_id), at=at)
    return harness.run()


def lane(*ids: bytes, key: bytes = b"a", every: float = 0.0) -> list[tuple[bytes | None, bytes, float]]:
    return [(key, event_id, place * every) for place, event_id in enumerate(ids)]


def others(number: int, key: bytes = b"z", at: float = 1.0) -> list[tuple[bytes | None, bytes, float]]:
    """This many messages of another lane of the same partition."""
    return [(key, b"other-%d" % each, at) for each in range(number)]


def values(result: RunResult, key: bytes = b"a") -> list[bytes]:
    return [written.value for written in result.results if written.key == key]


# What is a duplicate.


def test_an_event_that_was_sent_twice_runs_once() -> None:
    result = run(make(), lane(b"1", b"2", b"1", b"1", b"3", b"2"))
    result.verdict.raise_if_bad()
    assert values(result) == [b"1.1", b"2.1", b"3.1"]
    assert result.duplicates == [(0, 2), (0, 3), (0, 5)]
    assert result.verdict.counts.attempts == 3, "the observer is told of no attempt at a duplicate"


def test_the_same_event_id_in_another_lane_is_another_event() -> None:
    result = run(make(), [*lane(b"1", b"2"), *lane(b"1", b"2", key=b"b")])
    result.verdict.raise_if_bad()
    assert (values(result), values(result, b"b")) == ([b"1.1", b"2.1"], [b"1.1", b"2.1"])


def test_keyless_messages_repeat_nothing() -> None:
    result = run(make(), [(None, b"1", 0.0), (None, b"1", 0.0)])
    assert sorted(written.value for written in result.results) == [b"1.1", b"1.2"]


@pytest.mark.parametrize("headers", [[], header(None), header(b""), [("event-type", b"1")]], ids=repr)
def test_a_message_without_an_event_id_repeats_nothing(headers: Headers) -> None:
    harness = Harness(make(), partitions=1)
    for _ in range(3):
        harness.send(key=b"a", value=b"same", headers=headers)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert len(result.results) == 3


def test_of_several_event_ids_the_last_counts() -> None:
    harness = Harness(make(), partitions=1)
    for first, last in ((b"1", b"2"), (b"1", b"3"), (b"4", b"2")):
        harness.send(key=b"a", value=first + last, headers=header(first) + header(last))
    assert values(harness.run()) == [b"12", b"13"]


def test_event_ids_are_compared_by_their_bytes() -> None:
    assert values(run(make(), lane(b"\xff", rb"\xff", b"\xff"))) == [b"\xff.1", rb"\xff.1"]


def test_without_idempotency_everything_runs() -> None:
    result = run(make(idempotency=None), lane(b"1", b"1", b"1"), [Crash(at=0.02)])
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(values(result))) == [b"1.1", b"1.2", b"1.3"]


def test_id_is_forgotten_beyond_its_window_of_messages() -> None:
    app = make(idempotency=Idempotency(count=4))
    near = run(app, lane(b"1", b"2", b"3", b"4", b"1"))
    assert values(near) == [b"1.1", b"2.1", b"3.1", b"4.1"]
    far = run(app, lane(b"1", b"2", b"3", b"4", b"5", b"1"))
    assert values(far) == [b"1.1", b"2.1", b"3.1", b"4.1", b"5.1", b"1.2"]


def test_id_is_forgotten_beyond_its_window_of_seconds() -> None:
    app = make(idempotency=Idempotency(age=10))
    assert values(run(app, [(b"a", b"1", 0.0), (b"a", b"1", 10.0)])) == [b"1.1"]
    assert values(run(app, [(b"a", b"1", 0.0), (b"a", b"1", 10.1)])) == [b"1.1", b"1.2"]


def test_a_duplicate_is_remembered_like_the_message_it_repeats() -> None:
    app = make(idempotency=Idempotency(count=2))
    assert values(run(app, lane(b"1", b"2", b"1", b"2", b"1", b"3"))) == [b"1.1", b"2.1", b"3.1"]


# The outcome of the original.


def test_duplicate_waits_while_its_original_is_retried() -> None:
    result = run(
        make(lambda msg, now: Transient("not yet") if msg.value == b"1.1" and msg.attempt < 3 else None),
        lane(b"1", b"1", b"2"),
    )
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1"], [(0, 1)])
    assert result.verdict.counts.attempts == 4


def test_duplicate_of_a_dead_letter_does_not_run() -> None:
    app = make(lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 5 else None)
    result = run(app, lane(b"1", b"1", b"2"), [Redrive(at=10, key=b"a")])
    assert [letter.value for letter in result.dead] == [b"1.1"]
    assert (values(result), result.duplicates) == ([b"2.1", b"1.1"], [(0, 1)])


@pytest.mark.parametrize("faults", [[], [Crash(at=2)], [Drain(at=2)], [Crash(at=10.05)], [Crash(at=10.5)]])
def test_a_duplicate_waits_behind_a_blocked_lane(faults: list[Fault]) -> None:
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 5 else None,
        on_failure="block",
        idempotency=Idempotency(count=10),
    )
    result = run(app, [*lane(b"1", b"1", b"2"), *others(50)], [*faults, Release(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    assert (list(dict.fromkeys(values(result))), result.duplicates) == ([b"1.1", b"2.1"], [(0, 1)])


@pytest.mark.parametrize("faults", [[], [Crash(at=2)], [Drain(at=2)], [Crash(at=10.05)], [Crash(at=10.5)]])
def test_stopped_lane_in_a_moving_partition_forgets_nothing(faults: list[Fault]) -> None:
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"2.1" and now < 5 else None,
        on_failure="block",
        idempotency=Idempotency(count=10),
    )
    result = run(app, [*lane(b"1", b"2", b"1", b"3"), *others(50)], [*faults, Release(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(values(result))) == [b"1.1", b"2.1", b"3.1"]
    assert result.duplicates == [(0, 2)]


@pytest.mark.parametrize("crash", [None, 10.0, 10.002, 10.1, 12.0])
def test_duplicate_of_a_skipped_message_does_not_run(crash: float | None) -> None:
    app = make(lambda msg, now: Poison("no") if msg.value == b"1.1" else None, on_failure="block")
    faults: list[Fault] = [Skip(at=10, key=b"a")]
    if crash is not None:
        faults.append(Crash(at=crash))
    result = run(app, lane(b"1", b"1", b"2"), faults)
    assert list(dict.fromkeys(values(result))) == [b"2.1"]
    assert {letter.value for letter in result.dead} == {b"1.1"}
    assert result.duplicates == [(0, 1)]
    result.verdict.raise_if_bad()


def test_duplicate_of_a_parked_message_is_parked_and_never_runs() -> None:
    app = make(lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 5 else None, on_failure="park")
    result = run(app, lane(b"1", b"2", b"1"), [Redrive(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    assert [letter.value for letter in result.dead] == [b"1.1", b"2.1", b"1.2"]
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1"], [(0, 2)])


def test_duplicate_in_lane_and_letters_after_a_crash_never_runs() -> None:
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 1 else None,
        on_failure="park",
        commit_interval=100,
    )
    result = run(app, lane(b"1", b"2", b"1"), [Crash(at=2), Redrive(at=2.0, key=b"a")])
    assert result.epochs == 2
    assert {letter.value for letter in result.dead} == {b"1.1", b"2.1", b"1.2"}
    assert values(result) == [b"1.1", b"2.1"], "from the letters; what comes from the log is passed over"
    result.verdict.raise_if_bad()


def test_a_redrive_in_two_goes_runs_an_event_once() -> None:
    fixed = {b"1.1": 5.0, b"2.1": 15.0}
    app = make(lambda msg, now: Poison("no") if now < fixed.get(msg.value, 0) else None, on_failure="park")
    result = run(app, lane(b"1", b"2", b"1", b"3"), [Redrive(at=10, key=b"a"), Redrive(at=20, key=b"a")])
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1", b"3.1"], [(0, 2)])


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("stop", [Crash(at=12), Drain(at=12)])
def test_a_redrive_that_a_restart_cuts_off_runs_an_event_once(stop: Fault, delivery: str) -> None:
    def bad(msg: Message, now: float) -> BaseException | None:
        if msg.value == b"1.1" and now < 5:
            return Poison("no")
        return Transient("later", retry_after=1.5) if msg.value == b"2.1" and 10 < now < 13 else None

    app = make(bad, on_failure="park", delivery=delivery)
    result = run(app, lane(b"1", b"2", b"1", b"3"), [Redrive(at=10, key=b"a"), stop])
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1", b"3.1"], [(0, 2)])


def test_a_letter_whose_original_runs_from_the_log_does_not_run() -> None:
    app = make(lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 2 else None, on_failure="park")
    sends = [(b"a", b"1", 0.0), (b"a", b"2", 2.0), (b"a", b"1", 2.1), (b"a", b"3", 2.2)]
    faults: list[Fault] = [Refuse(at=0, for_=1), Crash(at=3), Redrive(at=3, key=b"a")]
    result = run(app, sends, faults, reading=0.2)
    result.verdict.raise_if_bad()
    assert [letter.value for letter in result.dead] == [b"2.1", b"1.2", b"3.1"]
    assert values(result) == [b"1.1", b"2.1", b"3.1"]


@pytest.mark.parametrize("faults", [[], [Crash(at=2)], [Drain(at=2)], [Crash(at=0.05)]])
def test_duplicate_of_a_message_done_before_parking_is_no_letter(
    faults: list[Fault],
) -> None:
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"2.1" and now < 5 else None,
        on_failure="park",
        idempotency=Idempotency(count=10),
    )
    result = run(app, [*lane(b"1", b"2", b"1", b"3"), *others(50)], [*faults, Redrive(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    # After a crash before the first commit even the first one, which ran, goes there.
    assert {letter.value for letter in result.dead} - {b"1.1"} == {b"2.1", b"3.1"}
    assert list(dict.fromkeys(values(result))) == [b"1.1", b"2.1", b"3.1"]
    assert result.duplicates == [(0, 2)]


def test_a_parked_duplicate_of_a_duplicate_does_not_run() -> None:
    """The third one is too young to repeat the first one by itself, but repeats the second one."""
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 5 else None,
        on_failure="park",
        idempotency=Idempotency(age=2.0),
    )
    sends = [(b"a", b"1", 0.0), (b"a", b"1", 1.5), (b"a", b"1", 3.0), (b"a", b"2", 3.0)]
    result = run(app, sends, [Redrive(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1"], [(0, 1), (0, 2)])


@pytest.mark.parametrize("faults", [[], [Crash(at=2)], [Crash(at=3.2)]])
def test_an_event_done_before_its_lane_was_parked_runs_once(faults: list[Fault]) -> None:
    """However often it comes again: the last two repeat a message that came when the lane was parked."""
    app = make(
        lambda msg, now: Poison("no") if msg.value == b"2.1" and now < 5 else None,
        on_failure="park",
        idempotency=Idempotency(count=10),
    )
    sends = [*lane(b"1", b"2", b"1", b"1", b"3"), (b"a", b"1", 3.0)]
    result = run(app, sends, [*faults, Redrive(at=10, key=b"a")])
    result.verdict.raise_if_bad()
    assert values(result) == [b"1.1", b"2.1", b"3.1"]
    assert result.duplicates == [(0, 2), (0, 3), (0, 5)]


def test_event_repeated_after_its_redrive_does_not_run() -> None:
    app = make(lambda msg, now: Poison("no") if msg.value == b"1.1" and now < 5 else None, on_failure="park")
    sends = [(b"a", b"1", 0.0), (b"a", b"2", 0.0), (b"a", b"1", 15.0), (b"a", b"3", 15.0)]
    result = run(app, sends, [Redrive(at=10, key=b"a"), Crash(at=12)])
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1", b"3.1"], [(0, 2)])


@pytest.mark.parametrize("policy", ["block", "skip"])
@pytest.mark.parametrize("seed", range(3))
def test_evicted_duplicates_are_known_when_refetched(policy: str, seed: int) -> None:
    def bad(msg: Message, now: float) -> BaseException | None:
        if msg.value != b"0.1" or now >= 20:
            return None
        return Transient("not now", retry_after=15) if policy == "skip" else Poison("no")

    app = make(bad, on_failure=policy, retry=Retry(attempts=10), idempotency=Idempotency(count=300))
    ids = [b"%d" % (number - 100 if number % 3 == 2 and number >= 100 else number) for number in range(600)]
    action: list[Fault] = [Release(at=25, key=b"a")] if policy == "block" else []
    crash: list[Fault] = [Crash(at=22)] if seed == 1 else []
    result = run(app, lane(*ids, every=0.01), [*action, *crash], seed=seed, holes=0.1)
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(value.split(b".")[0] for value in values(result))) == list(dict.fromkeys(ids))
    assert len(result.duplicates) == 600 - len(set(ids)) > 100


# After a restart.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at", [0.012, 0.05, 0.31, 0.35, 0.5, 0.8])
@pytest.mark.parametrize("kind", [Crash, Drain])
def test_the_window_is_rebuilt_from_the_log(kind: type[Crash | Drain], at: float, seed: int) -> None:
    ids = [b"%d" % (number // 2 if number % 2 else number) for number in range(40)]
    app = make(idempotency=Idempotency(count=21))
    faults = [kind(at=at), Crash(at=at + 0.1)]
    result = run(app, lane(*ids, every=0.02), faults, seed=seed, latency=(0.001, 0.1))
    result.verdict.raise_if_bad()
    first = dict.fromkeys(ids)
    assert list(dict.fromkeys(values(result))) == [b"%b.1" % event_id for event_id in first]
    assert len(result.duplicates) == len(ids) - len(first)


def test_a_duplicate_that_comes_long_after_a_restart_is_known() -> None:
    sends = [(b"a", b"1", 0.0), (b"a", b"2", 0.0), (b"a", b"1", 100.0), (b"a", b"3", 100.0)]
    result = run(make(), sends, [Drain(at=10), Crash(at=20), Drain(at=30)])
    result.verdict.raise_if_bad()
    assert (values(result), result.duplicates) == ([b"1.1", b"2.1", b"3.1"], [(0, 2)])


def test_duplicate_is_done_after_its_originals_result_is_durable() -> None:
    """The crash loses a result that was not acknowledged: its message runs again, and the duplicate still does not."""
    pause = Pause(at=0.0, for_=100.0)
    result = run(make(), lane(b"1", b"1", b"2"), [pause, Crash(at=50)])
    result.verdict.raise_if_bad()
    assert result.verdict.counts.attempts == 4
    assert list(dict.fromkeys(values(result))) == [b"1.1", b"2.1"]


# The engine alone.


class Sink:
    """Keeps what it gets, and acknowledges on request."""

    def __init__(self) -> None:
        self.given: list[Delivery] = []

    def result(self, delivery: Delivery, value: bytes) -> None:
        self.given.append(delivery)

    def all_results(self, delivery: Delivery, values: Any) -> None:
        raise AssertionError("an app with stages has one result")

    def note(self, *given: Any) -> None:
        asyncio.get_running_loop().call_soon(given[-1], None)

    def letter(self, *given: Any) -> None:
        asyncio.get_running_loop().call_soon(given[-1], None)


class Unreadable(MemoryRecord):
    """A header's name is not UTF-8."""

    def headers(self) -> Headers | None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def with_engine(
    app: App,
    scenario: Callable[[Engine, Sink, list[Delivery]], Awaitable[None]],
    **options: Any,
) -> None:
    async def main() -> None:
        done: list[Delivery] = []
        async with open_pipeline(app.spec) as steps:
            sink = Sink()
            engine = Engine(
                app.spec, steps, sink, on_done=done.extend, wall=asyncio.get_running_loop().time, **options
            )
            await scenario(engine, sink, done)

    run_virtual(main())


def records(*ids: bytes, key: bytes = b"a") -> list[MemoryRecord]:
    log = MemoryLog()
    return [
        log.append("in", key=key, value=b"%d" % n, headers=header(event_id)) for n, event_id in enumerate(ids)
    ]


def test_duplicate_has_its_outcome_and_is_done_in_lane_order() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        engine.accept(records(b"1", b"1", b"2"))
        await asyncio.sleep(1)
        assert [delivery.offset for delivery in sink.given] == [0, 2]
        assert (done, engine.outcomes[Outcome.DUPLICATE], engine.held) == ([], 0, 3)
        for delivery in sink.given:
            delivery(None, None)
        engine.settle()
        assert [(d.offset, d.outcome, d.attempts) for d in done] == [
            (0, Outcome.OK, 1),
            (1, Outcome.DUPLICATE, 0),
            (2, Outcome.OK, 1),
        ]
        statistics = engine.statistics()
        assert (statistics.outcomes, statistics.held) == ({Outcome.OK: 2, Outcome.DUPLICATE: 1}, 0)
        assert engine.duplicates.waiting == {}
        assert await engine.drain(1.0)

    assert Outcome.DUPLICATE.value == "duplicate"
    with_engine(make(), scenario)


def test_drain_leaves_unreached_duplicates_to_the_next_epoch() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        engine.accept(records(b"1", b"1"))
        await asyncio.sleep(0.005)
        assert await engine.drain(1.0)
        assert [delivery.offset for delivery in done] == [0]
        assert engine.held == 1

    with_engine(make(sink=None), scenario)


def test_messages_done_earlier_are_known_and_do_not_run() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        *before, again, new = records(b"1", b"2", b"1", b"3")
        engine.note_done_before(before)
        assert engine.held == 0
        engine.accept([again, new])
        await engine.finish()
        assert [(d.offset, d.outcome) for d in done] == [(2, Outcome.DUPLICATE), (3, Outcome.OK)]
        await engine.drain(1.0)

    with_engine(make(sink=None), scenario)


@pytest.mark.parametrize("idempotency", [Idempotency(), None])
def test_unreadable_headers_fail_only_their_message(idempotency: Idempotency | None) -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        unreadable = [
            Unreadable(topic="in", partition=0, offset=offset, key=b"a", value=b"v") for offset in range(3)
        ]
        engine.note_done_before(unreadable[:1])
        engine.accept(unreadable[1:])
        await engine.finish()
        assert [d.outcome for d in done] == [Outcome.OK, Outcome.OK]
        await engine.drain(1.0)

    with_engine(make(sink=None, idempotency=idempotency), scenario)


def test_the_copy_of_a_message_that_is_gone_from_the_log_runs() -> None:
    """A stuck lane evicted a message, and retention has deleted it: then only the copy is left."""

    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        sent = records(b"stuck", *(b"%d" % number for number in range(100)), b"99", b"98", b"97", b"99")
        engine.accept(sent[:-2])
        await asyncio.sleep(1)
        assert engine.stopped_lanes.release(b"a", 0, 0) is None
        await asyncio.sleep(5)
        ((ticket, _, offsets),) = asked
        assert {98, 99, 100, 101, 102} <= set(offsets)
        back = set(offsets) - {98, 100}  # events 97 and 99
        engine.returned(ticket, [record for record in sent if record.offset() in back], 2)
        await engine.finish()
        engine.accept(sent[-2:])
        await engine.finish()
        assert [d.offset for d in done if d.outcome is Outcome.OK] == [*range(98), 99, 101, 103]
        assert [d.offset for d in done if d.outcome is Outcome.DUPLICATE] == [102, 104]
        assert (engine.held, engine.duplicates.waiting) == (0, {})
        await engine.drain(1.0)

    asked: list[tuple[int, int, Sequence[int]]] = []
    app = make(
        lambda msg, now: Poison("no") if msg.offset == 0 and now < 1 else None, on_failure="block", sink=None
    )
    with_engine(app, scenario, fetch=lambda *given: asked.append(given))


def test_refetched_messages_of_another_key_fail_the_task() -> None:
    """The topic was recreated while only the offsets of a stuck lane's messages were kept."""

    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        engine.accept(records(b"stuck", *(b"%d" % number for number in range(100))))
        await asyncio.sleep(1)
        assert engine.stopped_lanes.release(b"a", 0, 0) is None
        await asyncio.sleep(5)
        ((ticket, _, offsets),) = asked
        others = records(*(b"%d" % number for number in range(101)), key=b"b")
        engine.returned(ticket, [record for record in others if record.offset() in offsets], 0)
        with pytest.raises(
            SourceChangedError, match=r"expected a message of lane b'a' .* found one of lane b'b'"
        ):
            await engine.finish()
        assert not {delivery.offset for delivery in done}.intersection(offsets)
        await engine.abort()

    asked: list[tuple[int, int, Sequence[int]]] = []
    app = make(
        lambda msg, now: Poison("no") if msg.offset == 0 and now < 1 else None, on_failure="block", sink=None
    )
    with_engine(app, scenario, fetch=lambda *given: asked.append(given))


def test_redriven_letter_runs_while_its_duplicate_waits() -> None:
    """It died, a crash forgot that, and the window is newer than its letter."""

    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        redriver = Redriver(engine)
        engine.stopped_lanes.begin_redrive(b"a")
        sent = records(b"1", b"1")
        engine.accept(sent)
        redriving = asyncio.create_task(
            redriver.run([RedriveItem(letter=0, record=sent[1], redrives=0)], lambda _lanes: None)
        )
        await asyncio.sleep(1)
        letter = done[-1]
        assert letter.redriven
        redriver.done(letter)
        await redriving
        engine.stopped_lanes.end_redrive(b"a")
        await engine.finish()
        assert [(d.offset, d.outcome) for d in done] == [
            (0, Outcome.OK),
            (1, Outcome.OK),
            (1, Outcome.DUPLICATE),
        ]
        await engine.drain(1.0)

    with_engine(make(sink=None), scenario)


def test_lane_of_duplicates_does_not_block_the_loop() -> None:
    async def scenario(engine: Engine, sink: Sink, done: list[Delivery]) -> None:
        first, *rest = records(*[b"1"] * 5000)
        engine.accept([first])
        await engine.finish()
        engine.accept(rest)
        counts = [0]
        while engine.held:
            await asyncio.sleep(0)
            counts.append(engine.outcomes[Outcome.DUPLICATE])
        assert engine.outcomes[Outcome.DUPLICATE] == 4999
        assert max(after - before for before, after in pairwise(counts)) <= 2 * RUN_MESSAGES_MAX
        await engine.drain(1.0)

    with_engine(make(sink=None), scenario)
