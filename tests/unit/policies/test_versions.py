"""Messages that run in the order of their versions, in virtual time: every sentence of docs/guarantees.md on them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from typing import TYPE_CHECKING, Any, Literal

import pytest

from keylane import App, Field, Message, Outcome, Poison, Retry, SettingsError, Transient, VersionOrdering
from keylane.testing import Crash, Drain, Fault, Harness, Redrive, Release, Reset, RunResult, Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "keylane")


def make(
    versions: VersionOrdering | None = None,
    bad: Callable[[Message, float], BaseException | None] = lambda _msg, _now: None,
    **options: Any,
) -> App:
    """One stage of 10 ms that hands its message on, unless ``bad`` has an error for it at this time."""
    app = App(
        "app",
        source="in",
        versions=versions or VersionOrdering(),
        **{"sink": "out", "retry": SOON, "commit_interval": 0.2, **options},
    )

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.01)
        error = bad(msg, asyncio.get_running_loop().time())
        if error is not None:
            raise error
        return b"%d" % (msg.version or 0) if msg.version is not None else b"-"

    return app


def run(
    app: App, *lanes: Sequence[int | None], faults: Sequence[Fault] = (), step: float = 0.05, **options: Any
) -> RunResult:
    """Lane a gets messages with the first list's versions, b those of the second …, one every 50 ms."""
    harness = Harness(app, faults=faults, **options)
    for lane, versions in enumerate(lanes):
        for number, version in enumerate(versions):
            headers = [] if version is None else [("event-version", b"%d" % version)]
            key = b"abcdefgh"[lane : lane + 1]
            harness.send(key=key, value=b"%d" % number, headers=headers, at=number * step)
    return harness.run()


def values(result: RunResult, key: bytes = b"a") -> list[int]:
    return [int(written.value) for written in result.results if written.key == key]


def starts(result: RunResult, key: bytes = b"a") -> list[float]:
    return [event.at for event in result.history.events if event.key == key and event.outcome is None]


def fails(version: int, until: float = float("inf")) -> Callable[[Message, float], BaseException | None]:
    return lambda msg, now: Poison("no") if msg.version == version and now < until else None


# Order.


def test_versions_in_order_run_without_waiting() -> None:
    result = run(make(), [1, 2, 3], [1, 2])
    result.verdict.raise_if_bad()
    assert (values(result), values(result, b"b"), result.stale) == ([1, 2, 3], [1, 2], [])


@pytest.mark.parametrize(
    "faults", [(), (Crash(at=0.12),), (Drain(at=0.12),), (Drain(at=0.07), Crash(at=0.2))]
)
def test_every_order_of_four_versions_runs_in_their_order(faults: Sequence[Fault]) -> None:
    harness = Harness(make(), faults=faults, latency=(0.001, 0.1))
    for number, versions in enumerate(itertools.permutations([1, 2, 3, 4])):
        for place, version in enumerate(versions):
            headers = [("event-version", b"%d" % version)]
            harness.send(key=b"k%d" % number, value=b"", headers=headers, at=place * 0.05)
    result = harness.run()
    result.verdict.raise_if_bad()
    for number in range(24):
        ran = values(result, b"k%d" % number)
        assert sorted(set(ran)) == [1, 2, 3, 4]
        assert list(dict.fromkeys(ran)) == [1, 2, 3, 4]
        assert ran == [1, 2, 3, 4] or any(isinstance(fault, Crash) for fault in faults)
    assert result.stale == []
    assert result.dead == []


def test_a_version_that_has_passed_is_stale_and_does_not_run() -> None:
    result = run(make(), [1, 2, 1, 2, 3, 3, 4])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4]
    assert [offset for _, offset in result.stale] == [2, 3, 5]
    assert Outcome.STALE.value == "stale"


def test_stale_may_be_a_failure() -> None:
    result = run(make(VersionOrdering(on_stale="fail")), [1, 2, 1, 3])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]
    assert [(dead.stage, dead.message) for dead in result.dead] == [
        ("(version)", "version 1 is stale: version 2 has passed")
    ]


def test_versions_early_message_delays_no_other_lane() -> None:
    result = run(make(), [1, 3, 2], [1, 2, 3], step=5.0)
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]
    assert starts(result) == pytest.approx([0, 10, 10.01], abs=0.001)
    assert starts(result, b"b") == pytest.approx([0, 5, 10], abs=0.001)


def test_early_message_waits_while_the_one_before_is_retried() -> None:
    app = make(bad=lambda msg, now: Transient("x") if msg.version == 2 and msg.attempt < 3 else None)
    result = run(app, [1, 3, 2, 4])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4]
    assert result.verdict.counts.retried == 1


def test_versions_message_without_one_runs_in_its_turn() -> None:
    app = make(VersionOrdering(lambda msg: msg.header("event-version")))
    result = run(app, [1, None, 3, None, 2])
    assert [written.value for written in result.results] == [b"1", b"-", b"-", b"2", b"3"]
    result.verdict.raise_if_bad()


def test_keyless_messages_have_no_versions() -> None:
    harness = Harness(make())
    for version in (5, 1, 5):
        harness.send(key=None, value=b"", headers=[("event-version", b"%d" % version)])
    assert len(harness.run().results) == 3


# Where it is.


@pytest.mark.parametrize("decode", [None, "json"])
def test_the_version_may_be_a_field(decode: Any) -> None:
    harness = Harness(make(VersionOrdering(Field("meta.version")), decode=decode))
    for version in (2, 1, 3):
        harness.send(key=b"a", value=b'{"meta": {"version": %d}}' % version)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "no version: header 'event-version' is missing"),
        (b"two", "expected the version to be a whole number of at least 0, got 'two'"),
        (b"-1", "expected the version to be a whole number of at least 0, got '-1'"),
        (b"1.5", "expected the version to be a whole number of at least 0, got '1.5'"),
        (b"99999999999999999999", "expected the version to be a whole number"),
        (b"", "expected the version to be a whole number of at least 0, got ''"),
        (b"\xff", "expected the version to be a whole number"),
    ],
)
def test_a_version_that_makes_no_sense_is_poison(header: bytes | None, complaint: str) -> None:
    harness = Harness(make())
    harness.send(key=b"a", value=b"", headers=[] if header is None else [("event-version", header)])
    harness.send(key=b"a", value=b"", headers=[("event-version", b"1")])
    result = harness.run()
    (dead,) = result.dead
    assert complaint in dead.message
    assert (dead.stage, values(result)) == ("(version)", [1])


def test_a_field_that_is_missing_is_poison() -> None:
    for value, complaint in ((b"{}", "field 'v' is missing"), (b"{", "not JSON"), (None, "is missing")):
        harness = Harness(make(VersionOrdering(Field("v"))))
        harness.send(key=b"a", value=value)
        (dead,) = harness.run().dead
        assert complaint in dead.message


# Gaps.


def test_versions_wait_over_ends_in_the_failure_policy() -> None:
    result = run(make(VersionOrdering(wait=2.0)), [1, 3, 4, 2], step=1.0)
    assert values(result) == [1, 4]
    assert [(dead.stage, dead.message) for dead in result.dead] == [
        ("(version)", "version 3 came, and version 2 did not within 2 s, or 100 others came"),
        ("(version)", "version 2 came too late: it was given up before it came, and version 5 is next"),
    ]
    assert result.stale == [], "what never ran is not passed over without a word"
    result.verdict.raise_if_bad()


def test_a_wait_in_vain_may_end_in_processing() -> None:
    result = run(make(VersionOrdering(wait=2.0, on_timeout="process")), [1, 3, 4, 2], step=1.0)
    result.verdict.raise_if_bad()
    assert (values(result), result.dead) == ([1, 3, 4], [])
    assert starts(result)[1] == pytest.approx(3.0, abs=0.01)


def test_a_gap_may_be_processed_or_fail_at_once() -> None:
    result = run(make(VersionOrdering(on_gap="process")), [1, 3, 2, 4])
    result.verdict.raise_if_bad()
    assert (values(result), [offset for _, offset in result.stale]) == ([1, 3, 4], [2])
    result = run(make(VersionOrdering(on_gap="fail")), [1, 3, 4, 5])
    assert values(result) == [1, 4, 5]
    assert [dead.message for dead in result.dead] == ["version 3 came, and version 2 did not"]


def test_versions_lower_ones_run_before_longer_waiting_ones() -> None:
    """5 has waited enough when 3 has only begun to: 3 goes first all the same."""
    result = run(make(VersionOrdering(wait=10.0, on_timeout="process")), [1, 5, None, 3], step=3.0)
    assert values(result) == [1, 3, 5]
    assert starts(result)[-1] == pytest.approx(13.01, abs=0.02)


def test_a_lane_holds_a_bounded_number_of_messages() -> None:
    result = run(make(VersionOrdering(max_waiting=5, on_timeout="process", wait=1000.0)), [1, *range(10, 16)])
    assert values(result) == list(dict.fromkeys([1, *range(10, 16)]))
    assert result.elapsed < 2


def test_versions_entity_begins_with_its_first_version() -> None:
    assert values(run(make(), [2, 1, 3])) == [1, 2, 3]
    assert values(run(make(VersionOrdering(first=None)), [7, 6, 8])) == [7, 8]
    assert values(run(make(VersionOrdering(first=0)), [1, 0, 2])) == [0, 1, 2]
    assert values(run(make(), [0, 1, 2])) == [0, 1, 2], "a producer that counts from 0 loses nothing"
    (dead,) = run(make(VersionOrdering(wait=1.0)), [7]).dead
    assert "say VersionOrdering(first=None)" in dead.message


# What survives.


def test_versions_wait_continues_in_the_next_epoch() -> None:
    epochs = [Drain(at=at) for at in (1.0, 2.0, 3.0, 4.0, 5.0)]
    result = run(make(VersionOrdering(wait=4.5)), [1, 3], faults=epochs)
    (dead,) = result.dead
    assert dead.message.startswith("version 3 came, and version 2 did not within 4.5 s")
    assert result.elapsed == pytest.approx(0.05 + 4.5, abs=0.05), "neither cut short nor begun anew"
    assert result.epochs >= 5


def test_versions_survive_a_crash_with_their_progress() -> None:
    harness = Harness(make(), faults=[Crash(at=5.0), Drain(at=7.0)])
    for at, version in ((0.0, 1), (0.1, 2), (6.0, 1), (6.1, 2), (6.2, 3), (8.0, 3), (8.1, 4)):
        harness.send(key=b"a", value=b"", headers=[("event-version", b"%d" % version)], at=at)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4]
    assert len(result.stale) == 3


def test_a_crash_before_the_commit_repeats_and_forgets_nothing() -> None:
    """3 ran and its result is there, but neither its progress nor its version is: it runs again, in order."""
    app = make(commit_interval=50.0)
    result = run(app, [1, 3, 2, 4], [1, 2, 3, 4, *range(5, 40)], faults=[Crash(at=0.5)])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4, 1, 2, 3, 4]


def test_waiting_message_waits_again_after_a_crash() -> None:
    result = run(make(), [1, 3, 2], step=5.0, faults=[Crash(at=7.0)])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]


# With the failure policies.


def test_versions_letter_of_an_overtaken_version_is_stale() -> None:
    app = make(bad=fails(2, until=5))
    result = run(app, [1, 2, 3], faults=[Redrive(at=10, key=b"a")])
    assert values(result) == [1, 3]
    assert [offset for _, offset in result.stale] == [1]


def test_a_letter_of_the_newest_version_runs_when_it_is_redriven() -> None:
    app = make(bad=fails(3, until=5))
    result = run(app, [1, 2, 3], faults=[Redrive(at=10, key=b"a")])
    assert values(result) == [1, 2, 3]


@pytest.mark.parametrize("faults", [(), (Crash(at=2),), (Drain(at=2),)])
def test_blocked_lane_keeps_early_messages_until_released(faults: Sequence[Fault]) -> None:
    app = make(VersionOrdering(wait=3.0), bad=fails(2, until=8), on_failure="block")
    result = run(app, [1, 3, 2, 4], faults=[*faults, Release(at=20, key=b"a")])
    result.verdict.raise_if_bad()
    assert (values(result), result.dead) == ([1, 2, 3, 4], [])


def test_versions_lane_blocked_by_a_gap_continues_in_order() -> None:
    app = make(VersionOrdering(wait=1.0), on_failure="block")
    harness = Harness(app, faults=[Release(at=20, key=b"a")])
    for at, version in ((0.0, 1), (0.1, 3), (10.0, 2), (10.1, 4)):
        harness.send(key=b"a", value=b"", headers=[("event-version", b"%d" % version)], at=at)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4]
    assert starts(result)[-3] >= 20, "nothing moved before"


def test_a_version_that_an_operator_skips_has_passed() -> None:
    app = make(bad=fails(2), on_failure="block")
    result = run(app, [1, 3, 2, 4], faults=[Skip(at=20, key=b"a")])
    assert values(result) == [1, 3, 4]


@pytest.mark.parametrize("crash", [None, 10.0, 10.005, 10.02, 10.05, 12.0])
def test_a_parked_lane_is_redriven_in_the_order_of_versions(crash: float | None) -> None:
    app = make(VersionOrdering(wait=1.0), bad=fails(2, until=8), on_failure="park")
    faults: list[Fault] = [Redrive(at=10, key=b"a")]
    if crash is not None:
        faults.append(Crash(at=crash))
    result = run(app, [1, 3, 2, 5, 4, 6], faults=faults)
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(values(result))) == [1, 2, 3, 4, 5, 6]
    assert {dead.kind for dead in result.dead} == {"parked"}


def test_versions_lane_parked_by_a_gap_comes_back() -> None:
    app = make(VersionOrdering(wait=1.0), on_failure="park")
    harness = Harness(app, faults=[Redrive(at=20, key=b"a")])
    for at, version in ((0.0, 1), (0.1, 3), (0.2, 4), (10.0, 2), (10.1, 5)):
        harness.send(key=b"a", value=b"", headers=[("event-version", b"%d" % version)], at=at)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4, 5]


def test_a_letter_and_its_repeated_message_wait_apart() -> None:
    """A crash repeats the message of a letter; it is done while the letter runs that waited for its version."""
    app = App(
        "app", source="in", sink="out", retry=SOON, commit_interval=0.2, versions=VersionOrdering(wait=0.3)
    )

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(2.0 if msg.version == 3 else 0.01)
        return b"%d" % (msg.version or 0)

    faults: list[Fault] = [Crash(at=0.9), Redrive(at=0.9, key=b"a")]
    harness = Harness(app, partitions=1, latency=1.0, letters=0.01, faults=faults)
    for at, version in ((0.0, 1), (0.05, 3), (0.5, 2), (10.0, 5), (10.1, 4)):
        harness.send(key=b"a", value=b"", headers=[("event-version", b"%d" % version)], at=at)
    result = harness.run()
    assert [dead.offset for dead in result.dead] == [1, 2]
    assert list(dict.fromkeys(values(result))) == [1, 2, 3, 4, 5]


# Memory.


def test_waiting_messages_do_not_fill_a_task() -> None:
    """Two thousand messages wait, eight fit into memory: what they wait for is read all the same."""
    harness = Harness(make(max_buffered=8), partitions=1)
    for number in range(500):
        for version in (5, 4, 3, 2):
            harness.send(key=b"k%d" % number, value=b"", headers=[("event-version", b"%d" % version)])
    for number in range(500):
        harness.send(key=b"k%d" % number, value=b"", headers=[("event-version", b"1")], at=1.0)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert all(values(result, b"k%d" % number) == [1, 2, 3, 4, 5] for number in range(500))


# Any schedule.


@pytest.mark.parametrize("seed", range(int(os.environ.get("KEYLANE_SEEDS", "30"))))
def test_versions_keep_their_order_in_any_schedule(seed: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(["skip", "block", "block_and_dlq", "park"])
    keys, each = rng.choice([3, 20]), rng.choice([10, 40])
    then: Literal["fail", "process"] = rng.choice(["fail", "process"])
    sick = rng.choice([0.0, 0.03]) if then == "fail" else 0.0

    def bad(msg: Message, now: float) -> BaseException | None:
        chance = random.Random(f"{seed} {msg.key!r} {msg.version}").random()
        if now < 20 and chance < sick:
            return Poison("not fixed yet")
        return Transient("again") if msg.attempt == 1 and 0.3 < chance < 0.4 else None

    app = make(
        VersionOrdering(
            wait=rng.choice([0.3, 2.0, 100.0]),
            on_timeout=then,
            max_waiting=rng.choice([2, 100]) if policy == "skip" else 100,
        ),
        bad=bad,
        on_failure=policy,
        # A lane that is blocked holds its message: a task full of such lanes reads nothing more.
        max_buffered=rng.choice([4, 64, 65_536]) if policy in ("skip", "park") else 4096,
        drain_timeout=rng.choice([0.2, 30.0]),
        commit_interval=rng.choice([0.05, 1.0]),
        failure_guard=None,
    )
    faults: list[Fault] = []
    for _ in range(rng.randrange(4)):
        at = rng.random() * 30
        # What ran across a gap, and was not committed, may find the gap filled when it runs again.
        faults.append(Crash(at=at) if rng.random() < 0.5 and then == "fail" else Drain(at=at))
    names = [b"k%d" % number for number in range(keys)]
    for key in names:
        for at in (
            40,
            300,
            600,
            900,
        ):  # a message that waited too long stops its lane again; each round gets further
            faults += [Release(at=at, key=key), Redrive(at=at + 1, key=key)]
    harness = Harness(
        app, seed=seed, partitions=rng.randrange(1, 4), faults=faults, latency=(0.001, 0.03), holes=0.1
    )
    sent: list[tuple[float, bytes, int]] = []
    for key in names:
        order = list(range(1, each + 1))
        for _ in range(rng.choice([0, 3, each])):
            place = rng.randrange(each - 1)
            order[place], order[place + 1] = order[place + 1], order[place]
        order += rng.sample(order, 2)  # and some again
        sent += [(number * 0.4 * rng.uniform(0.9, 1.1), key, version) for number, version in enumerate(order)]
    for at, key, version in sent:
        headers = [("event-version", b"%d" % version)]
        harness.send(key=key, value=b"%d" % version, headers=headers, at=at)
    result = harness.run()
    letters = {(dead.partition, dead.offset) for dead in result.dead if dead.kind == "dead"}
    for key in names:
        ran = values(result, key)
        once = list(dict.fromkeys(ran))
        if not letters:
            assert once == sorted(once), key
        assert ran[-1] >= each or letters, "the newest state in the end"
    if not letters:
        result.verdict.raise_if_bad()


# Settings.


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"version_from": ""}, "expected a header's name or a function"),
        ({"version_from": 5}, "expected a header's name or a function"),
        ({"on_stale": "drop"}, "VersionOrdering(on_stale='drop'): expected 'skip' or 'fail'"),
        ({"on_gap": "skip"}, "expected 'wait' or 'process' or 'fail'"),
        ({"on_timeout": "wait"}, "expected 'fail' or 'process'"),
        ({"wait": 0}, "expected seconds, more than 0"),
        ({"wait": float("inf")}, "expected seconds"),
        ({"max_waiting": 0}, "at least 1"),
        ({"max_waiting": 1.5}, "a whole number"),
        ({"first": -1}, "expected a version of at least 0, or None"),
        ({"first": True}, "expected a version"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        VersionOrdering(**settings)
    assert complaint in str(caught.value)


def test_versions_are_refused_with_commit_epoch() -> None:
    with pytest.raises(SettingsError, match="versions must be a VersionOrdering"):
        App("a", source="in", versions="v")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"commit='epoch' does not work with versions="):
        App("a", source="in", versions=VersionOrdering(), commit="epoch")


# A rewind.


def feed(harness: Harness, versions: Sequence[int], key: bytes = b"a", at: float = 0.0) -> None:
    """Messages with these versions, one every 50 ms."""
    for number, version in enumerate(versions):
        headers = [("event-version", b"%d" % version)]
        harness.send(key=key, value=b"%d" % version, headers=headers, at=at + number * 0.05)


@pytest.mark.parametrize("first", [1, None])
@pytest.mark.parametrize("offset", range(5))
def test_a_rewind_runs_versions_again(first: int | None, offset: int) -> None:
    harness = Harness(make(VersionOrdering(first=first, wait=2.0)), partitions=1)
    feed(harness, [1, 2, 3, 4])
    harness.run()
    harness.rewind(0, offset)
    feed(harness, [4, 5], at=10.0)
    result = harness.run()
    assert values(result) == [1, 2, 3, 4, *range(offset + 1, 6)]
    assert result.dead == []


@pytest.mark.parametrize("count", [9, 10, 11, 30])
def test_a_rewind_of_any_length_runs_every_version_again(count: int) -> None:
    for offset in range(0, count, 3):
        harness = Harness(make(VersionOrdering(wait=2.0)), partitions=1)
        feed(harness, range(1, count + 1))
        harness.run()
        harness.rewind(0, offset)
        result = harness.run()
        assert values(result) == [*range(1, count + 1), *range(offset + 1, count + 1)]
        assert result.dead == []


@pytest.mark.parametrize("seed", range(40))
def test_a_rewind_keeps_the_order_of_versions(seed: int) -> None:
    """Of a log in any order, with repeats, what ran behind the offset runs again, and nothing else does."""
    rng = random.Random(seed)
    order = list(range(1, 9))
    for _ in range(rng.choice([0, 3, 20])):
        place = rng.randrange(7)
        order[place], order[place + 1] = order[place + 1], order[place]
    log = order + rng.sample(order, 2)
    offset = rng.randrange(len(log))
    harness = Harness(make(VersionOrdering(wait=2.0)), seed=seed, partitions=1, faults=[Drain(at=6.0)])
    feed(harness, log)
    harness.run()
    harness.rewind(0, offset)
    feed(harness, [9], at=20.0)
    result = harness.run()
    again = [version for place, version in enumerate(order) if place >= offset]
    assert values(result) == [*range(1, 9), *sorted(again), 9]
    assert result.dead == []


# Partitions that are added.


@pytest.mark.parametrize("first", [1, None])
@pytest.mark.parametrize("partitions", [2, 3, 5])
def test_versions_move_with_their_key(first: int | None, partitions: int) -> None:
    harness = Harness(make(VersionOrdering(first=first, wait=2.0)), partitions=1)
    keys = [b"k%d" % number for number in range(12)]
    for key in keys:
        feed(harness, [1, 2, 3], key)
    harness.run()
    harness.add_partitions(partitions)
    for key in keys:
        feed(harness, [2, 5, 4], key, at=10.0)
    result = harness.run()
    assert all(values(result, key) == [1, 2, 3, 4, 5] for key in keys)
    assert (result.dead, len(result.stale)) == ([], len(keys))


@pytest.mark.parametrize("newer", [False, True])
def test_a_letter_of_a_key_that_moved_is_judged_where_it_is(newer: bool) -> None:
    """It ran again only if nothing newer was applied, in whatever partition that was."""
    app = make(VersionOrdering(wait=2.0), bad=fails(3, until=5))
    for key in (b"k%d" % number for number in range(6)):
        harness = Harness(app, partitions=1, faults=[Redrive(at=20.0, key=key)])
        feed(harness, [1, 2, 3], key)
        harness._actions, later = type(harness._actions)(), harness._actions
        harness.run()
        harness._actions = later
        harness.add_partitions(3)
        feed(harness, [4] if newer else [], key, at=10.0)
        feed(harness, [1], b"other", at=30.0)
        result = harness.run()
        assert values(result, key) == ([1, 2, 4] if newer else [1, 2, 3])


# Versions that cannot be right.


def test_a_huge_version_changes_nothing_for_its_entity() -> None:
    result = run(make(), [1, 2**63 - 1, 2, 3, 4, 5])
    assert (values(result), result.stale) == ([1, 2, 3, 4, 5], [])
    (dead,) = result.dead
    assert dead.message.startswith(
        f"version {2**63 - 1} is too far ahead: version 2 is next, and at most max_gap=1000 versions may be missing"
    )
    assert result.elapsed < 1, "nobody waits for what is missing"


@pytest.mark.parametrize("on_gap", ["wait", "process", "fail"])
def test_a_gap_is_bounded_whatever_a_gap_means(on_gap: Any) -> None:
    result = run(make(VersionOrdering(on_gap=on_gap, wait=1.0, max_gap=5)), [1, 8, 2, 3])
    assert (values(result), len(result.dead)) == ([1, 2, 3], 1)
    result = run(make(VersionOrdering(on_gap=on_gap, wait=1.0, max_gap=5)), [1, 7, 8])
    assert values(result) == ([1, 7, 8] if on_gap == "process" else [1, 8])


def test_versions_lane_blocked_by_a_huge_one_can_be_skipped() -> None:
    app = make(on_failure="block")
    result = run(app, [1, 2**62, 2, 3], faults=[Skip(at=5.0, key=b"a")])
    assert values(result) == [1, 2, 3]


def test_late_version_after_giving_up_has_a_letter() -> None:
    result = run(make(VersionOrdering(wait=1.0)), [1, 5, 2, 3, 4, 3, 6], step=3.0)
    assert values(result) == [1, 6]
    assert [int(dead.value or b"") for dead in result.dead] == [1, 2, 3, 4], "places in the list"
    assert [offset for _, offset in result.stale] == [5], "it repeats one that has a letter"


# What an operator says.


def test_a_reset_says_which_version_is_next() -> None:
    harness = Harness(
        make(VersionOrdering(wait=1.0, max_gap=None)), partitions=1, faults=[Reset(at=10.0, key=b"a", to=3)]
    )
    feed(harness, [1, 2, 3, 2**62])
    feed(harness, [4, 5], at=20.0)
    result = harness.run()
    assert (values(result), len(result.dead)) == ([1, 2, 3, 4, 5], 1)


@pytest.mark.parametrize("first", [1, None])
def test_reset_without_a_version_starts_over(first: int | None) -> None:
    harness = Harness(
        make(VersionOrdering(wait=1.0, first=first)),
        partitions=1,
        faults=[Reset(at=10.0, key=b"a"), Crash(at=12.0)],
    )
    feed(harness, [1, 2, 3])
    feed(harness, [1, 2], at=20.0)
    assert values(harness.run()) == [1, 2, 3, 1, 2]


def test_reset_releases_waiting_messages() -> None:
    harness = Harness(
        make(VersionOrdering(wait=1000.0)), partitions=1, faults=[Reset(at=10.0, key=b"a", to=3)]
    )
    feed(harness, [1, 5, 4])
    result = harness.run()
    assert (values(result), result.dead) == ([1, 4, 5], [])
    assert starts(result)[1] == pytest.approx(10.0, abs=0.1)


def test_versions_reset_counts_for_results_in_flight() -> None:
    harness = Harness(
        make(), partitions=1, latency=5.0, faults=[Reset(at=2.0, key=b"a", to=1), Drain(at=30.0)]
    )
    feed(harness, [1, 2, 3])
    feed(harness, [2, 3, 4], at=20.0)
    assert values(harness.run()) == [1, 2, 3, 2, 3, 4]


# Everything at once.


@pytest.mark.parametrize("seed", range(int(os.environ.get("KEYLANE_SEEDS", "40"))))
def test_no_version_is_lost_without_a_trace(seed: int) -> None:
    """Gaps, repeats, huge versions, restarts, rewinds and new partitions: all ran, or have a letter."""
    rng = random.Random(seed)
    gaps: list[Literal["wait", "process", "fail"]] = ["wait", "wait", "process", "fail"]
    first, on_gap = rng.choice([1, None]), rng.choice(gaps)
    rule = VersionOrdering(
        first=first, on_gap=on_gap, wait=rng.choice([0.3, 3.0]), max_gap=50, max_waiting=rng.choice([2, 100])
    )
    app = make(rule, commit_interval=rng.choice([0.05, 1.0]), failure_guard=None)
    keys = [b"k%d" % number for number in range(5)]
    faults: list[Fault] = []
    for _ in range(rng.randrange(5)):
        at = rng.uniform(0, 60)
        faults.append(Crash(at=at) if rng.random() < 0.5 else Drain(at=at))
    harness = Harness(app, seed=seed, partitions=rng.randrange(1, 3), faults=faults, latency=(0.001, 0.3))
    sent: dict[bytes, set[int]] = {key: set() for key in keys}
    following = dict.fromkeys(keys, 1)
    for part in range(3):
        for key in keys:
            versions = list(range(following[key], following[key] + 6))
            following[key] += 6
            for _ in range(rng.choice([0, 4])):
                place = rng.randrange(5)
                versions[place], versions[place + 1] = versions[place + 1], versions[place]
            if rng.random() < 0.3:
                versions.append(versions.pop(rng.randrange(3)))  # late, maybe too late
            if rng.random() < 0.3:
                versions.insert(rng.randrange(6), rng.choice([2**63 - 1, 10_000]))
            if rng.random() < 0.3:
                versions.append(rng.choice(versions))
            sent[key].update(versions)
            feed(harness, versions, key, at=part * 20.0)
        result = harness.run()
        if rng.random() < 0.5:
            harness.add_partitions(harness.log.partitions + 1)
        elif rng.random() < 0.5:
            partition = rng.randrange(harness.log.partitions)
            harness.rewind(partition, rng.randrange(harness.log.end("in", partition) + 1))
    result = harness.run()
    for key in keys:
        ran = set(values(result, key))
        letters = {int(dead.value or b"") for dead in result.dead if dead.key == key}
        untraced = sent[key] - ran - letters
        if (
            on_gap == "process" or first is None
        ):  # a version that came across a gap, or first, replaces those below
            assert all(version < max(ran) for version in untraced)
        else:
            assert untraced == set()
        assert not ran & {2**63 - 1, 10_000} or first is None
