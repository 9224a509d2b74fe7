from __future__ import annotations

import asyncio
import doctest
import time
from typing import TYPE_CHECKING, Any

import pytest

import keylane.testing.clock
import keylane.testing.harness
import keylane.testing.log
from keylane import App, Message, Poison, Retry, SettingsError, Transient, VersionOrdering
from keylane.testing import (
    CheckFailed,
    Crash,
    Drain,
    EventKind,
    Fault,
    Flaw,
    Harness,
    Pause,
    Recreate,
    Recut,
    Redrive,
    RunResult,
    StuckError,
    check,
    check_results,
)
from keylane.testing.durable import DurableState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


def echo(delay: float = 1.0, **settings: Any) -> App:
    """An app that takes its time and returns its input."""
    app = App("echo", source="in", **{"sink": "out", **settings})

    @app.stage
    async def wait(msg: Message) -> Any:
        await asyncio.sleep(delay)
        return msg.value

    return app


def send(run: Harness, keys: int, each: int) -> None:
    for number in range(each):
        for key in range(keys):
            run.send(key=b"k%d" % key, value=b"%d" % number)


def values(result: RunResult, key: bytes) -> list[int]:
    return [int(written.value) for written in result.results if written.key == key]


@pytest.mark.parametrize("module", [keylane.testing.harness, keylane.testing.clock, keylane.testing.log])
def test_examples_in_the_docstrings_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_results_have_key_headers_and_an_event_id() -> None:
    run = Harness(echo(), partitions=3)
    run.send(key=b"a", value=b"1", headers=[("x", b"y"), ("x", None)])
    run.send(key=b"a", value=b"2", headers=[("event-id", b"e-2")])
    result = run.run()
    first, second = result.results
    assert (first.key, first.value, first.offset) == (b"a", b"1", 0)
    assert first.headers == [("x", b"y"), ("x", None), ("event-id", f"echo/in/{first.partition}/0".encode())]
    assert second.headers == [("event-id", b"echo/e-2")]
    assert second.offset == 1
    assert [record.value() for record in run.log.records("out")] == [b"1", b"2"]
    result.verdict.raise_if_bad()


def test_run_takes_virtual_time_and_no_real_time() -> None:
    run = Harness(echo(delay=600), latency=0.5)
    send(run, keys=3, each=4)
    began = time.monotonic()
    result = run.run()
    assert result.elapsed == pytest.approx(4 * 600 + 0.5, abs=0.01)
    assert time.monotonic() - began < 5


def test_messages_arrive_at_their_time_in_any_order_of_calls() -> None:
    run = Harness(echo(delay=0.0))
    run.send(key=b"a", value=b"late", at=20.0)
    run.send(key=b"a", value=b"early", at=10.0)
    run.send(key=b"a", value=b"early too", at=10.0)
    result = run.run()
    assert [written.value for written in result.results] == [b"early", b"early too", b"late"]
    starts = [event.at for event in result.history if event.kind is EventKind.START]
    assert starts == pytest.approx([10.0, 10.0, 20.0])


def test_message_has_the_timestamp_of_its_arrival() -> None:
    app = App("app", source="in", sink="out")

    @app.stage
    async def stamp(msg: Message) -> int | None:
        return msg.timestamp

    run = Harness(app)
    run.send(key=b"a", value=b"", at=1.5)
    assert run.run().results[0].value == b"1500"


def test_run_depends_only_on_the_seed() -> None:
    def go(seed: int) -> RunResult:
        app = App("app", source="in", sink="out")

        @app.stage
        async def shaky(msg: Message) -> Any:
            await asyncio.sleep(0.3)
            if msg.attempt < 3:
                raise Transient("again")
            return msg.value

        run = Harness(app, seed=seed, latency=(0.0, 2.0), holes=0.3, faults=[Crash(at=1.5), Drain(at=3.0)])
        send(run, keys=4, each=5)
        return run.run()

    assert go(1) == go(1)
    assert go(1).history != go(2).history


def test_dead_letter_has_the_cause_of_the_failure() -> None:
    app = App("app", source="in", sink="out")

    @app.stage
    async def fine(msg: Message) -> Any:
        return msg.value

    @app.stage
    async def strict(msg: Message) -> Any:
        raise Poison(f"not {msg.value!r}")

    run = Harness(app)
    run.send(key=b"a", value=b"1", headers=[("x", b"y")])
    run.send(key=b"a", value=b"2")
    result = run.run()
    assert result.results == []
    dead = result.dead[0]
    assert (dead.key, dead.value, dead.headers, dead.offset) == (b"a", b"1", [("x", b"y")], 0)
    assert (dead.stage, dead.error, dead.message) == ("strict", "keylane.errors.Poison", "not b'1'")
    assert dead.attempts == 1
    assert "raise Poison" in dead.traceback
    result.verdict.raise_if_bad()


def test_observer_of_the_app_is_called() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def started(self, message: Message, attempt: int) -> None:
            self.seen.append(f"{message.offset} {attempt}")

        def ended(self, message: Message, attempt: int, outcome: str) -> None:
            self.seen.append(f"{message.offset} {attempt} {outcome}")

    watcher = Watcher()
    app = echo(observer=watcher)
    run = Harness(app, partitions=1)
    send(run, keys=1, each=2)
    run.run()
    assert watcher.seen == ["0 1", "0 1 ok", "1 1", "1 1 ok"]
    assert app.spec.observer is watcher


def test_acknowledgements_are_in_order_in_a_partition() -> None:
    run = Harness(echo(delay=0.0), partitions=4, latency=(0.0, 10.0), seed=3)
    send(run, keys=16, each=5)
    result = run.run()
    for partition in range(4):
        offsets = [written.offset for written in result.results if written.partition == partition]
        assert offsets == list(range(len(offsets)))
    numbers = [int(written.value) for written in result.results]
    assert numbers != sorted(numbers)
    result.verdict.raise_if_bad()


def test_pause_of_the_sink_delays_only_acknowledgements() -> None:
    run = Harness(echo(delay=1.0), faults=[Pause(at=0.5, for_=100.0)])
    send(run, keys=1, each=3)
    result = run.run()
    last_end = max(event.at for event in result.history if event.kind is EventKind.END)
    assert last_end == pytest.approx(3.0)
    assert result.elapsed == pytest.approx(100.5, abs=0.01)


def test_full_partition_waits_for_a_finished_message() -> None:
    run = Harness(echo(delay=1.0, max_buffered=2), partitions=1, latency=5.0)
    send(run, keys=6, each=1)
    result = run.run()
    starts = [event.at for event in result.history if event.kind is EventKind.START]
    assert starts == pytest.approx([0, 0, 6, 6, 12, 12], abs=0.01)


def crashing(faults: list[Fault], seed: int = 0, **settings: Any) -> RunResult:
    run = Harness(
        echo(commit_interval=2.0, **settings), seed=seed, latency=(0.0, 0.5), holes=0.2, faults=faults
    )
    send(run, keys=5, each=8)
    result = run.run()
    result.verdict.raise_if_bad()
    inputs = [(record.key(), record.value()) for record in run.log.records("in")]
    outputs = [(record.key(), record.value()) for record in run.log.records("out")]
    check_results(inputs, outputs, allow_duplicates=True).raise_if_bad()
    return result


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0, 2.001, 4.2, 7.99, 8.3])
def test_crash_loses_nothing_and_repeats_only_uncommitted(at: float) -> None:
    result = crashing([Crash(at=at)])
    assert result.epochs == 2
    # At most what ran since the last commit, and the commits are 2 seconds apart: 5 lanes, 1 message a second.
    assert result.verdict.repeats <= 5 * 3


def test_repeated_crashes_lose_nothing() -> None:
    result = crashing([Crash(at=0.7 * n) for n in range(1, 12)])
    assert result.epochs == 12


def test_a_drain_repeats_nothing() -> None:
    result = crashing([Drain(at=1.5), Drain(at=3.2), Drain(at=3.3)])
    assert result.epochs == 4
    assert result.verdict.repeats == 0
    assert len(result.results) == 40
    assert result.verdict.counts.owners == 4


def test_drain_waits_for_letters_on_their_way() -> None:
    """As a worker does: else the letter came when its message had run again, and a redrive ran it a third time."""
    app = App("app", source="in", sink="out", on_failure="park", drain_timeout=0.05)

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"1" and asyncio.get_running_loop().time() < 0.5:
            raise Poison("the cause is not removed yet")
        return bytes(msg.value)

    faults: list[Fault] = [Redrive(at=0.9, key=b"a"), Drain(at=1.0), Redrive(at=10, key=b"a")]
    run = Harness(app, partitions=1, faults=faults, letters=0.5)
    for value, at in ((b"1", 0.0), (b"2", 0.8), (b"3", 1.2)):
        run.send(key=b"a", value=value, at=at)
    result = run.run()
    result.verdict.raise_if_bad()
    assert [written.value for written in result.results] == [b"1", b"2", b"3"]


def test_slow_drain_leaves_messages_to_the_next_epoch() -> None:
    run = Harness(echo(delay=10.0, drain_timeout=3.0), faults=[Drain(at=5.0)])
    send(run, keys=1, each=2)
    result = run.run()
    # Cancelled at second 8, started again, 10 seconds each.
    assert result.elapsed == pytest.approx(28.0, abs=0.01)
    assert values(result, b"k0") == [0, 1]
    result.verdict.raise_if_bad()


def test_crash_may_leave_unacknowledged_results() -> None:
    """Acknowledgements take longer than the crash lets them: results written all the same come twice."""
    counts = set()
    for seed in range(6):
        run = Harness(echo(delay=0.1), seed=seed, latency=60.0, faults=[Crash(at=2.05)])
        send(run, keys=1, each=10)
        result = run.run()
        result.verdict.raise_if_bad()
        found = values(result, b"k0")
        before = len(found) - 10
        assert found == [*range(before), *range(10)], "the oldest of what was handed over, and then all"
        counts.add(before)
    assert len(counts) > 2


def test_faults_after_the_end_do_nothing() -> None:
    run = Harness(echo(), faults=[Crash(at=1000.0)])
    send(run, keys=1, each=2)
    result = run.run()
    assert result.epochs == 1
    assert result.elapsed == pytest.approx(2.001, abs=0.01)


def test_second_run_processes_only_new_messages() -> None:
    run = Harness(echo())
    send(run, keys=1, each=2)
    first = run.run()
    send(run, keys=1, each=3)
    second = run.run()
    assert values(first, b"k0") == [0, 1]
    assert values(second, b"k0") == [0, 1, 0, 1, 2]
    assert second.elapsed == pytest.approx(first.elapsed + 3.001, abs=0.01)
    second.verdict.raise_if_bad()


def test_run_without_messages_ends_at_once() -> None:
    result = Harness(echo()).run()
    assert (result.results, result.dead, len(result.history)) == ([], [], 0)
    assert not result.verdict.ok, "and proves nothing"


def test_a_single_message_proves_nothing_about_order() -> None:
    run = Harness(echo())
    run.send(key=b"a", value=b"1")
    assert set(run.run().verdict.tally) == {Flaw.THIN}


def test_an_app_that_cannot_run_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no stages"):
        Harness(App("app", source="in"))


def test_error_names_a_stage_that_waits_forever() -> None:
    app = App("app", source="in")

    @app.stage
    async def hang(msg: Message) -> None:
        await asyncio.Event().wait()

    run = Harness(app)
    run.send(key=b"a", value=b"1")
    with pytest.raises(StuckError, match=r"nothing can continue.*hang \(test_harness.py:\d+\)"):
        run.run()


def test_stage_that_polls_forever_is_stopped_at_the_limit() -> None:
    app = App("app", source="in")

    @app.stage
    async def poll(msg: Message) -> None:
        while True:  # noqa: ASYNC110 - a stage like this is what it is about
            await asyncio.sleep(60)

    run = Harness(app, limit=3600)
    run.send(key=b"a", value=b"1", at=1000.0)
    with pytest.raises(StuckError, match="the limit of 4600 seconds has passed"):
        run.run()


def test_plain_stages_run_in_threads_and_take_no_virtual_time() -> None:
    app = App("app", source="in", sink="out")

    @app.stage
    def slow(msg: Message) -> Any:
        time.sleep(0.002)
        return msg.value

    run = Harness(app, faults=[Crash(at=0.0005)], latency=0.001)
    send(run, keys=4, each=5)
    result = run.run()
    assert result.elapsed < 0.1
    assert {values(result, b"k%d" % key)[-5:] == [0, 1, 2, 3, 4] for key in range(4)} == {True}
    result.verdict.raise_if_bad()


@pytest.mark.parametrize("policy", ["skip", "block", "block_and_dlq", "park"])
def test_verdict_of_a_correct_app_is_ok_under_every_policy(policy: Any) -> None:
    app = App("shop", source="in", sink="out", on_failure=policy)

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"bad":
            raise Poison("bad")
        return bytes(msg.value)

    run = Harness(app)
    for n in range(20):
        run.send("bad" if n == 7 else str(n), key=f"k{n % 5}")
    result = run.run()
    result.verdict.raise_if_bad()
    assert len(result.waiting) == (0 if policy == "skip" else 3)
    assert result.verdict.lost == ()


@pytest.mark.parametrize(("order", "waiting"), [("partition", None), ("global", 13)])
def test_messages_behind_a_blocked_lane_wait(order: Any, waiting: int | None) -> None:
    app = App("shop", source="in", on_failure="block", order=order)

    @app.stage
    async def work(msg: Message) -> None:
        if msg.value == b"bad":
            raise Poison("bad")

    run = Harness(app)
    for n in range(20):
        run.send("bad" if n == 7 else str(n), key=f"k{n % 5}", at=n)
    result = run.run()
    result.verdict.raise_if_bad()
    assert result.waiting
    assert waiting is None or len(result.waiting) == waiting


def test_waiting_excuses_only_the_named_messages() -> None:
    app = App("shop", source="in", on_failure="park")

    @app.stage
    async def work(msg: Message) -> None:
        if msg.value == b"bad":
            raise Poison("bad")

    run = Harness(app, partitions=1)
    for n in range(6):
        run.send("bad" if n == 3 else str(n), key="k")
    result = run.run()
    sent = {(0, offset): b"k" for offset in range(7)}
    verdict = check(result.history, sent=sent, waiting=result.waiting)
    assert [(one.partition, one.offset) for one in verdict.lost] == [(0, 6)]


def test_send_accepts_the_values_of_a_publisher() -> None:
    app = App("shop", source="in", sink="out", decode="json")

    @app.stage
    async def work(msg: Message) -> list[Any]:
        return [msg.value["id"], (dict(msg.headers)["h"] or b"").decode()]

    run = Harness(app)
    run.send({"id": 1}, key="anna", headers={"h": "x"})
    run.send(key=b"anna", value=b'{"id":2}', headers=[("h", b"y")])
    result = run.run()
    assert [(one.key, one.value) for one in result.results] == [(b"anna", b'[1,"x"]'), (b"anna", b'[2,"y"]')]


def test_resource_may_be_replaced_by_a_fake() -> None:
    app = App("shop", source="in", sink="out")

    @app.resource
    def db() -> Any:
        raise AssertionError("the real one must not be opened")

    @app.resource
    def table(db: Any) -> Any:
        return db["prices"]

    @app.stage
    async def work(msg: Message, table: Any) -> str:
        return str(table[msg.key])

    run = Harness(app, resources={"db": {"prices": {b"a": 7}}})
    run.send("x", key="a")
    assert [one.value for one in run.run().results] == [b"7"]
    with pytest.raises(SettingsError, match="has no resource 'cache'; it has 'db', 'table'"):
        Harness(app, resources={"cache": 1})


# The source is deleted and created again.


def moody(broken: Mapping[bytes, float] | None = None, **settings: Any) -> App:
    """An app that takes a tenth of a second for a message. It cannot process these values before these seconds."""
    app = App("moody", source="in", sink="out", **settings)

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(0.1)
        if asyncio.get_running_loop().time() < (broken or {}).get(msg.value, 0.0):
            raise Poison("broken")
        return bytes(msg.value)

    return app


def two_topics(
    app: App, old: str, new: str, *faults: Fault, event_ids: str = ""
) -> tuple[Harness, RunResult]:
    """Messages of one key and partition, one a letter: ``old`` ones at second 0, ``new`` ones at 11 in a new topic."""
    run = Harness(app, partitions=1, faults=[Recreate(at=10.0), *faults])
    for number, value in enumerate(old + new):
        headers = {"event-id": event_ids[number]} if event_ids else {}
        run.send(key=b"k", value=value, headers=headers, at=0.0 if number < len(old) else 11.0)
    result = run.run()
    return run, result


def letters_of(result: RunResult) -> str:
    return b"".join(written.value for written in result.results).decode()


@pytest.mark.parametrize("faults", [[], [Recut(at=0.15, tasks=2)], [Drain(at=0.15), Drain(at=11.15)]])
def test_new_source_is_read_from_offset_0(faults: list[Fault]) -> None:
    run, result = two_topics(moody(), "abc", "de", *faults)
    result.verdict.raise_if_bad()
    assert letters_of(result) == "abcde"
    assert [(record.offset(), record.value()) for record in run.log.records("in")] == [(0, b"d"), (1, b"e")]
    assert list(run.messages()) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert (result.gone, result.verdict.repeats) == ([], 0)
    assert result.epochs == 2 + len(faults)


def test_results_of_a_new_source_have_ids_of_their_own() -> None:
    _, result = two_topics(moody(), "abc", "de")
    assert len({dict(written.headers)["event-id"] for written in result.results}) == 5


def test_unfinished_messages_go_with_their_source() -> None:
    _, result = two_topics(echo(delay=2.2), "abcdef", "gh")
    result.verdict.raise_if_bad()
    assert letters_of(result) == "abcdgh"
    assert result.gone == [(0, 4), (0, 5)]
    assert result.elapsed == pytest.approx(11 + 2 * 2.2, abs=0.01)


def test_every_new_source_has_the_same_partitions() -> None:
    run = Harness(moody(), partitions=2, faults=[Recreate(at=10.0), Recreate(at=20.0)])
    for at in (0.0, 11.0, 21.0):
        for number in range(20):
            run.send(key=b"k%d" % (number % 10), value=b"", at=at)
    result = run.run()
    result.verdict.raise_if_bad()
    assert {partition for partition, _ in run.messages()} == {0, 1, 2, 3, 4, 5}
    assert len(result.results) == 60


def test_source_is_created_again_in_a_later_run() -> None:
    run = Harness(moody(), partitions=1, faults=[Recreate(at=10.0)])
    run.send(key=b"k", value=b"a")
    assert letters_of(run.run()) == "a"
    run.send(key=b"k", value=b"b", at=10.0)
    run.send(key=b"k", value=b"c", at=10.0)
    result = run.run()
    result.verdict.raise_if_bad()
    assert letters_of(result) == "abc"
    assert list(run.messages()) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("policy", ["block", "block_and_dlq", "park"])
def test_stopped_lane_of_a_deleted_source_is_free(policy: Any) -> None:
    _, result = two_topics(moody({b"a": 99.0}, on_failure=policy), "ab", "cd")
    result.verdict.raise_if_bad()
    assert letters_of(result) == "cd"
    parked = [(0, 0), (0, 1)] if policy == "park" else []
    assert (result.waiting, result.gone) == (parked, [] if parked else [(0, 0), (0, 1)])


@pytest.mark.parametrize("policy", ["skip", "park"])
def test_letters_of_a_deleted_source_stay(policy: Any) -> None:
    """No redrive of their key includes them, and they do not hide the new messages at their offsets."""
    app = moody({b"a": 9.0, b"b": 9.0, b"c": 9.0}, on_failure=policy)
    _, result = two_topics(app, "abc", "defg", Redrive(at=10.5, key=b"k"), Redrive(at=20.0, key=b"k"))
    result.verdict.raise_if_bad()
    assert letters_of(result) == "defg"
    assert [(dead.partition, dead.offset) for dead in result.dead] == [(0, 0), (0, 1), (0, 2)]
    assert result.waiting == ([(0, 0), (0, 1), (0, 2)] if policy == "park" else [])


@pytest.mark.parametrize("policy", ["skip", "park"])
def test_redriven_letter_is_known_by_its_source(policy: Any) -> None:
    """One was redriven before; the letter of the new message at its offset is redriven all the same."""
    redrives = [Redrive(at=5.0, key=b"k"), Redrive(at=20.0, key=b"k")]
    app = moody({b"a": 4.0, b"c": 14.0}, on_failure=policy)
    _, result = two_topics(app, "ab", "cd", *redrives)
    result.verdict.raise_if_bad()
    assert letters_of(result) == {"skip": "badc", "park": "abcd"}[policy]
    assert (result.waiting, result.gone) == ([], [])


def test_event_of_a_deleted_source_is_no_duplicate() -> None:
    _, result = two_topics(moody(), "abc", "def", event_ids="123113")
    result.verdict.raise_if_bad()
    assert letters_of(result) == "abcdf"
    assert result.duplicates == [(1, 1)]


def test_attempts_at_a_deleted_source_do_not_count() -> None:
    """Its attempts are recorded: another message was committed since."""
    app = App("tired", source="in", sink="out", retry=Retry(attempts=3))
    seen: list[tuple[bytes, int]] = []

    @app.stage
    async def work(msg: Message) -> None:
        seen.append((msg.value, msg.attempt))
        if msg.key == b"k" and msg.attempt < 3:
            raise Transient("again", retry_after=6.0)

    run = Harness(app, partitions=1, faults=[Crash(at=9.0), Recreate(at=10.0)])
    for key, value, at in ((b"k", b"a", 0.0), (b"j", b"b", 7.0), (b"k", b"c", 11.0), (b"k", b"d", 11.0)):
        run.send(key=key, value=value, at=at)
    result = run.run()
    result.verdict.raise_if_bad()
    assert seen == [
        (b"a", 1),
        (b"a", 2),
        (b"b", 1),
        *((value, n) for value in (b"c", b"d") for n in (1, 2, 3)),
    ]
    assert result.gone == [(0, 0)]


def test_versions_of_a_deleted_source_do_not_count() -> None:
    app = moody(versions=VersionOrdering(lambda msg: int(msg.value)))
    _, result = two_topics(app, "123", "12")
    result.verdict.raise_if_bad()
    assert letters_of(result) == "12312"
    assert result.stale == []


def test_lost_message_of_a_new_source_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the old progress applies to the new topic."""
    monkeypatch.setattr(DurableState, "of_new_source", lambda self: self)
    _, result = two_topics(moody(), "abc", "defg")
    with pytest.raises(CheckFailed, match="3 lost"):
        result.verdict.raise_if_bad()
    assert [(one.partition, one.offset) for one in result.verdict.lost] == [(1, 0), (1, 1), (1, 2)]
