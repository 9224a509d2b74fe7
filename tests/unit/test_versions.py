"""Messages that run in the order of their versions, in virtual time: every sentence of docs/guarantees.md on them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from typing import TYPE_CHECKING, Any, Literal

import pytest

from keylane import App, Field, Message, Outcome, Poison, Retry, SettingsError, Transient, Versioned
from keylane.testing import Crash, Drain, Fault, Harness, Redrive, Release, RunResult, Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "keylane")


def make(
    versions: Versioned | None = None,
    bad: Callable[[Message, float], BaseException | None] = lambda _msg, _now: None,
    **options: Any,
) -> App:
    """One stage of 10 ms that hands its message on, unless ``bad`` has an error for it at this time."""
    app = App(
        "app",
        source="in",
        versions=versions or Versioned(),
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


def test_versions_in_order_run_as_ever() -> None:
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
    result = run(make(Versioned(on_stale="fail")), [1, 2, 1, 3])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]
    assert [(dead.stage, dead.message) for dead in result.dead] == [
        ("(version)", "version 1 is stale: version 2 has passed")
    ]


def test_a_message_that_is_early_waits_and_holds_back_no_other_lane() -> None:
    result = run(make(), [1, 3, 2], [1, 2, 3], step=5.0)
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]
    assert starts(result) == pytest.approx([0, 10, 10.01], abs=0.001)
    assert starts(result, b"b") == pytest.approx([0, 5, 10], abs=0.001)


def test_what_is_early_waits_while_the_one_before_it_is_retried() -> None:
    app = make(bad=lambda msg, now: Transient("x") if msg.version == 2 and msg.attempt < 3 else None)
    result = run(app, [1, 3, 2, 4])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4]
    assert result.verdict.counts.retried == 1


def test_messages_without_a_version_run_in_their_turn_when_the_app_says_so() -> None:
    app = make(Versioned(lambda msg: msg.header("event-version")))
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
    harness = Harness(make(Versioned(Field("meta.version")), decode=decode))
    for version in (2, 1, 3):
        harness.send(key=b"a", value=b'{"meta": {"version": %d}}' % version)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "no version: header 'event-version' is missing"),
        (b"two", "the version 'two' is no whole number from 0 on"),
        (b"-1", "the version '-1' is no whole number"),
        (b"1.5", "the version '1.5' is no whole number"),
        (b"99999999999999999999", "is no whole number"),
        (b"", "the version '' is no whole number"),
        (b"\xff", "is no whole number"),
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
    for value, complaint in ((b"{}", "field 'v' is missing"), (b"{", "no JSON"), (None, "is missing")):
        harness = Harness(make(Versioned(Field("v"))))
        harness.send(key=b"a", value=value)
        (dead,) = harness.run().dead
        assert complaint in dead.message


# Gaps.


def test_a_wait_in_vain_ends_in_the_failure_policy_and_the_lane_goes_on_from_there() -> None:
    result = run(make(Versioned(wait=2.0)), [1, 3, 4, 2], step=1.0)
    assert values(result) == [1, 4]
    assert [(dead.stage, dead.message) for dead in result.dead] == [
        ("(version)", "version 3 came, and version 2 did not within 2 s, or 100 others came")
    ]
    assert [offset for _, offset in result.stale] == [3], "it was given up; it must not undo what is newer"
    result.verdict.raise_if_bad()


def test_a_wait_in_vain_may_end_in_processing() -> None:
    result = run(make(Versioned(wait=2.0, then="process")), [1, 3, 4, 2], step=1.0)
    result.verdict.raise_if_bad()
    assert (values(result), result.dead) == ([1, 3, 4], [])
    assert starts(result)[1] == pytest.approx(3.0, abs=0.01)


def test_a_gap_may_be_processed_or_fail_at_once() -> None:
    result = run(make(Versioned(on_gap="process")), [1, 3, 2, 4])
    result.verdict.raise_if_bad()
    assert (values(result), [offset for _, offset in result.stale]) == ([1, 3, 4], [2])
    result = run(make(Versioned(on_gap="fail")), [1, 3, 4, 5])
    assert values(result) == [1, 4, 5]
    assert [dead.message for dead in result.dead] == ["version 3 came, and version 2 did not"]


def test_those_that_waited_longest_do_not_go_before_lower_versions() -> None:
    """5 has waited enough when 3 has only begun to: 3 goes first all the same."""
    result = run(make(Versioned(wait=10.0, then="process")), [1, 5, None, 3], step=3.0)
    assert values(result) == [1, 3, 5]
    assert starts(result)[-1] == pytest.approx(13.01, abs=0.02)


def test_a_lane_holds_a_bounded_number_of_messages() -> None:
    result = run(make(Versioned(hold=5, then="process", wait=1000.0)), [1, *range(10, 16)])
    assert values(result) == list(dict.fromkeys([1, *range(10, 16)]))
    assert result.elapsed < 2


def test_an_entity_begins_with_its_first_version_unless_the_app_does_not_know_it() -> None:
    assert values(run(make(), [2, 1, 3])) == [1, 2, 3]
    assert values(run(make(Versioned(first=None)), [7, 6, 8])) == [7, 8]
    assert values(run(make(Versioned(first=0)), [1, 0, 2])) == [0, 1, 2]
    assert values(run(make(), [0, 1, 2])) == [0, 1, 2], "a producer that counts from 0 loses nothing"
    (dead,) = run(make(Versioned(wait=1.0)), [7]).dead
    assert "say Versioned(first=None)" in dead.message


# What survives.


def test_an_epoch_that_ends_does_not_wait_for_what_is_held_and_the_wait_goes_on_in_the_next() -> None:
    epochs = [Drain(at=at) for at in (1.0, 2.0, 3.0, 4.0, 5.0)]
    result = run(make(Versioned(wait=4.5)), [1, 3], faults=epochs)
    (dead,) = result.dead
    assert dead.message.startswith("version 3 came, and version 2 did not within 4.5 s")
    assert result.elapsed == pytest.approx(0.05 + 4.5, abs=0.05), "neither cut short nor begun anew"
    assert result.epochs >= 5


def test_versions_survive_a_crash_with_the_progress_that_they_belong_to() -> None:
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


def test_a_held_message_is_not_done_and_is_held_again_after_a_crash() -> None:
    result = run(make(), [1, 3, 2], step=5.0, faults=[Crash(at=7.0)])
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3]


# With the failure policies.


def test_a_dead_version_has_passed_and_its_letter_is_stale_once_newer_ones_ran() -> None:
    app = make(bad=fails(2, until=5))
    result = run(app, [1, 2, 3], faults=[Redrive(at=10, key=b"a")])
    assert values(result) == [1, 3]
    assert [offset for _, offset in result.stale] == [1]


def test_a_letter_of_the_newest_version_runs_when_it_is_redriven() -> None:
    app = make(bad=fails(3, until=5))
    result = run(app, [1, 2, 3], faults=[Redrive(at=10, key=b"a")])
    assert values(result) == [1, 2, 3]


@pytest.mark.parametrize("faults", [(), (Crash(at=2),), (Drain(at=2),)])
def test_a_blocked_lane_keeps_what_is_early_until_it_is_released(faults: Sequence[Fault]) -> None:
    app = make(Versioned(wait=3.0), bad=fails(2, until=8), on_failure="block")
    result = run(app, [1, 3, 2, 4], faults=[*faults, Release(at=20, key=b"a")])
    result.verdict.raise_if_bad()
    assert (values(result), result.dead) == ([1, 2, 3, 4], [])


def test_a_lane_that_is_blocked_by_a_gap_goes_on_in_order_when_it_is_released() -> None:
    app = make(Versioned(wait=1.0), on_failure="block")
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
    app = make(Versioned(wait=1.0), bad=fails(2, until=8), on_failure="park")
    faults: list[Fault] = [Redrive(at=10, key=b"a")]
    if crash is not None:
        faults.append(Crash(at=crash))
    result = run(app, [1, 3, 2, 5, 4, 6], faults=faults)
    result.verdict.raise_if_bad()
    assert list(dict.fromkeys(values(result))) == [1, 2, 3, 4, 5, 6]
    assert {dead.kind for dead in result.dead} == {"parked"}


def test_a_lane_parked_by_a_gap_comes_back_when_the_missing_one_is_there() -> None:
    app = make(Versioned(wait=1.0), on_failure="park")
    harness = Harness(app, faults=[Redrive(at=20, key=b"a")])
    for at, version in ((0.0, 1), (0.1, 3), (0.2, 4), (10.0, 2), (10.1, 5)):
        harness.send(key=b"a", value=b"", headers=[("event-version", b"%d" % version)], at=at)
    result = harness.run()
    result.verdict.raise_if_bad()
    assert values(result) == [1, 2, 3, 4, 5]


# Memory.


def test_what_is_held_does_not_fill_a_task_up() -> None:
    """Two thousand messages wait, eight fit into memory: what they wait for is read all the same."""
    harness = Harness(make(capacity=8), partitions=1)
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
def test_any_schedule_of_versions_failures_and_crashes_keeps_the_order_of_versions(seed: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(["skip", "block", "block_and_dlq", "park"])
    keys, each = rng.choice([3, 20]), rng.choice([10, 40])
    then: Literal["fail", "process"] = rng.choice(["fail", "process"])
    sick = rng.choice([0.0, 0.03]) if then == "fail" else 0.0

    def bad(msg: Message, now: float) -> BaseException | None:
        chance = random.Random(f"{seed} {msg.key!r} {msg.version}").random()
        if now < 20 and chance < sick:
            return Poison("not yet mended")
        return Transient("again") if msg.attempt == 1 and 0.3 < chance < 0.4 else None

    app = make(
        Versioned(
            wait=rng.choice([0.3, 2.0, 100.0]),
            then=then,
            hold=rng.choice([2, 100]) if policy == "skip" else 100,
        ),
        bad=bad,
        on_failure=policy,
        # A lane that is blocked holds its message: a task full of such lanes reads nothing more.
        capacity=rng.choice([4, 64, 65_536]) if policy in ("skip", "park") else 4096,
        drain_timeout=rng.choice([0.2, 30.0]),
        commit_interval=rng.choice([0.05, 1.0]),
        flood=None,
    )
    faults: list[Fault] = []
    for _ in range(rng.randrange(4)):
        at = rng.random() * 30
        # What ran across a gap, and was not committed, may find the gap filled when it runs again.
        faults.append(Crash(at=at) if rng.random() < 0.5 and then == "fail" else Drain(at=at))
    names = [b"k%d" % number for number in range(keys)]
    for key in names:
        for at in (40, 300, 600, 900):  # what waited in vain stops its lane again; every round comes further
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
        order += rng.sample(order, 2)  # and some once more
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
        ({"read": ""}, "needs a header's name or a function"),
        ({"read": 5}, "needs a header's name or a function"),
        ({"on_stale": "drop"}, "Versioned(on_stale='drop'): it is 'skip' or 'fail'"),
        ({"on_gap": "skip"}, "it is 'wait' or 'process' or 'fail'"),
        ({"then": "wait"}, "it is 'fail' or 'process'"),
        ({"wait": 0}, "needs seconds, more than 0"),
        ({"wait": float("inf")}, "needs seconds"),
        ({"hold": 0}, "at least 1"),
        ({"hold": 1.5}, "a whole number"),
        ({"first": -1}, "needs a version, from 0 on, or None"),
        ({"first": True}, "needs a version"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Versioned(**settings)
    assert complaint in str(caught.value)


def test_versions_are_a_versioned_and_do_not_go_with_epochs_as_commits() -> None:
    with pytest.raises(SettingsError, match="versions='v' is no Versioned"):
        App("a", source="in", versions="v")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"commit='epoch' does not go with versions="):
        App("a", source="in", versions=Versioned(), commit="epoch")
