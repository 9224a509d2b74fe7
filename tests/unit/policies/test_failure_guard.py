from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import SettingsError
from keylane.policies.failure_guard import FailureGuard, FailureRate

if TYPE_CHECKING:
    from collections.abc import Hashable

SMALL = FailureGuard(ratio=0.5, minimum=10, consecutive=4)
LANES = st.sampled_from([b"a", b"a", b"a", b"b", b"c", None])
"""One lane is in the majority now and then; None is a message without a key."""


def naive(guard: FailureGuard, failures: list[tuple[Hashable, int]]) -> bool:
    """Whether to stop after the last of these failures, looked up in all of them."""

    def shared(stretch: list[tuple[Hashable, int]]) -> bool:
        lanes = Counter(lane for lane, _ in stretch if lane is not None)
        return max(lanes.values(), default=0) <= len(stretch) / 2

    row = failures[-guard.consecutive :]
    if len(row) == guard.consecutive and row[0][1] == row[-1][1] and shared(row):
        return True
    stretch = failures[-guard.minimum :]
    successes = stretch[-1][1] - stretch[0][1]
    return (
        len(stretch) == guard.minimum
        and guard.minimum / (guard.minimum + successes) >= guard.ratio
        and shared(stretch)
    )


@given(
    st.builds(
        FailureGuard,
        ratio=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        minimum=st.integers(2, 9),
        consecutive=st.integers(2, 9),
    ),
    st.lists(st.tuples(LANES, st.sampled_from([0, 0, 0, 1, 5])), max_size=40),
)
def test_guard_equals_the_whole_history(guard: FailureGuard, history: list[tuple[bytes | None, int]]) -> None:
    watch = FailureRate(guard)
    failures: list[tuple[Hashable, int]] = []
    passed, stop = 0, False
    for lane, successes in history:
        passed += successes
        failures.append((lane, passed))
        stop = stop or naive(guard, failures)
        reason = watch.failed(lane, passed)
        assert (reason is not None) == stop
        assert reason == watch.tripped


@given(st.lists(st.tuples(LANES, st.integers(0, 3)), max_size=200))
def test_the_watch_remembers_the_last_failures_and_nothing_else(
    history: list[tuple[bytes | None, int]],
) -> None:
    watch = FailureRate(FailureGuard(ratio=1.0, minimum=7, consecutive=5))
    passed = 0
    for number, (lane, successes) in enumerate(history):
        passed += successes + 1
        watch.failed((lane, number % 20) if lane else lane, passed)
        for stretch in (watch._row, watch._share):
            assert len(stretch._failures) <= stretch.size
            assert sum(stretch._counts.values()) + stretch._keyless == len(stretch._failures)
            assert all(stretch._counts.values())
    assert watch.tripped is None


def test_as_many_failures_in_a_row_as_set_stop_the_app() -> None:
    watch = FailureRate(SMALL)
    assert [watch.failed(n, 1000) is None for n in range(4)] == [True, True, True, False]


def test_one_success_resets_the_row() -> None:
    watch = FailureRate(SMALL)
    for number in range(3):
        assert watch.failed(number, 1000) is None
    for number in range(3):
        assert watch.failed(number, 1001) is None
    assert watch.failed("d", 1001) is not None


def test_failure_guard_stops_at_a_large_share_of_failures() -> None:
    watch = FailureRate(SMALL)
    reasons = [watch.failed(number, 1000 + number) for number in range(10)]
    assert reasons[:-1] == [None] * 9
    assert reasons[-1] == (
        "10 of the last 19 messages, from 10 lanes, failed for good (FailureGuard(ratio=0.5, minimum=10))"
    )


def test_the_share_counts_from_the_first_of_the_failures() -> None:
    watch = FailureRate(SMALL)
    passed = 0
    for number in range(1000):
        # Every third message: a share of 1/3, however good the hour before was.
        passed += 2
        assert watch.failed(number, passed) is None
    assert not all(watch.failed(number, passed + number) is None for number in range(10))


def test_failure_guard_tolerates_a_few_bad_messages() -> None:
    watch = FailureRate(FailureGuard())
    assert all(watch.failed(number, 10 * number) is None for number in range(10_000))


def test_one_bad_key_is_not_an_outage() -> None:
    watch = FailureRate(SMALL)
    assert all(watch.failed(b"bad", 0) is None for _ in range(1000))


def test_a_lane_may_have_half_of_the_failures_and_not_more() -> None:
    watch = FailureRate(SMALL)
    assert [watch.failed(lane, 0) for lane in "aaab"] == [None] * 4
    assert watch.failed("c", 0) is not None, "of the last four, two are of one lane"


def test_messages_without_a_key_have_a_lane_of_their_own() -> None:
    watch = FailureRate(SMALL)
    reason = [watch.failed(None, 7) for _ in range(4)][-1]
    assert reason is not None
    assert "from 4 lanes" in reason


def test_once_tripped_it_stays_tripped() -> None:
    watch = FailureRate(SMALL)
    for number in range(4):
        watch.failed(number, 0)
    reason = watch.tripped
    assert reason is not None
    assert watch.failed(b"another", 10**6) == watch.tripped == reason
    for number in range(20):
        assert watch.failed(number % 3, 10**6) == reason, "not a new sentence of three lanes"


def test_failure_guard_error_names_count_and_setting() -> None:
    watch = FailureRate(FailureGuard())
    for number in range(50):
        watch.failed(number % 20, 3)
    assert watch.tripped == (
        "the last 50 messages, from 20 lanes, failed for good without a success "
        "(FailureGuard(consecutive=50))"
    )


@pytest.mark.parametrize("ratio", [0, -0.5, 1.1, math.nan, math.inf, "0.5", None])
def test_ratios_that_make_no_sense_are_refused(ratio: Any) -> None:
    with pytest.raises(SettingsError, match=r"FailureGuard\(ratio=.*more than 0 and at most 1"):
        FailureGuard(ratio=ratio)


@pytest.mark.parametrize("name", ["minimum", "consecutive"])
@pytest.mark.parametrize("count", [1, 0, -1, 2.5, math.nan, "3", None, True])
def test_counts_that_make_no_sense_are_refused(name: str, count: Any) -> None:
    with pytest.raises(SettingsError, match=rf"FailureGuard\({name}=.*at least 2"):
        FailureGuard(**{name: count})
