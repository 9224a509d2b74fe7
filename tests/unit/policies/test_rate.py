from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import Rate, SettingsError
from keylane.policies.rate import CATCH_UP_SECONDS, EARLY_SECONDS, KeyRates, RateLimit


def starts_of(limit: RateLimit, times: list[float]) -> list[float]:
    return [at for at in times if limit.admit(at)]


@settings(deadline=None, max_examples=200)
@given(
    st.floats(0.1, 2000),
    st.floats(0.1, 60),
    st.lists(st.floats(0, 0.5), min_size=1, max_size=400),
    st.floats(0.01, 1),
)
def test_rate_is_never_exceeded_in_any_time(
    count: float, per: float, gaps: list[float], share: float
) -> None:
    starts: list[float] = []
    limit, now = RateLimit(Rate(count, per=per), share), 0.0
    for gap in gaps:
        now += gap
        while limit.admit(now) and len(starts) < 5000:
            starts.append(now)
    pace = count / per * share
    for first in range(0, len(starts), 7):
        for last in range(first, len(starts), 11):
            most = (
                (starts[last] - starts[first]) * pace
                + max(1.0, (CATCH_UP_SECONDS + EARLY_SECONDS) * pace)
                + 1e-6
            )
            assert last - first + 1 <= most + 1


def test_calls_start_evenly_when_there_is_always_one() -> None:
    limit, now, starts = RateLimit(Rate(500)), 0.0, []
    while now < 20:
        now += limit.wait(now) + 1e-9
        if limit.admit(now):
            starts.append(now)
    for begin in range(1, 10):
        assert 0.99 * 5000 <= sum(begin <= at < begin + 10 for at in starts) <= 1.01 * 5000


def test_late_wake_ups_do_not_lower_the_rate() -> None:
    rng, limit, now, done = random.Random(1), RateLimit(Rate(200)), 0.0, 0
    while now < 60:
        now += rng.random() * 0.08
        while limit.admit(now):
            done += 1
    assert 0.98 * 200 * 60 <= done <= 1.02 * 200 * 60


def test_room_and_wait_agree_with_admit() -> None:
    limit = RateLimit(Rate(100))
    for now in (0.0, 0.013, 0.2, 5.0):
        room = limit.room(now)
        assert [limit.admit(now) for _ in range(room + 1)] == [True] * room + [False]
        wait = limit.wait(now)
        assert not limit.admit(now + wait - EARLY_SECONDS - 1e-6)
        assert limit.room(now + wait) == 1


def test_share_of_nothing_admits_no_call_until_it_changes() -> None:
    limit = RateLimit(Rate(100), 0.0)
    assert (limit.admit(0.0), limit.room(1e9), limit.wait(1e9)) == (False, 0, float("inf"))
    limit.set_share(0.5, 10.0)
    assert 0 < limit.room(10.2) <= 6


def test_share_that_changes_counts_from_then_on() -> None:
    limit, now, starts = RateLimit(Rate(100), 1.0), 0.0, list[float]()
    for share, end in ((1.0, 2.0), (0.1, 4.0), (0.0, 6.0), (0.5, 8.0)):
        limit.set_share(share, now)
        while now < end:
            now += 0.001
            if limit.admit(now):
                starts.append(now)
    counts = [sum(begin + 0.01 <= at < begin + 1.99 for at in starts) for begin in (0, 2, 4, 6)]
    assert 190 <= counts[0] <= 210
    assert 17 <= counts[1] <= 24
    assert counts[2] == 0
    assert 90 <= counts[3] <= 108


def test_each_key_has_its_own_pace_and_is_forgotten() -> None:
    keys = KeyRates(Rate(2))
    for number in range(25_000):
        keys.started(b"%d" % number, number * 0.001)
    assert len(keys) < 15_000
    keys.started(b"k", 100.0)
    assert keys.due(b"k") == 100.5
    keys.started(b"k", 100.52)
    assert keys.due(b"k") == pytest.approx(101.0), "a call that was a little late delays no other"
    keys.started(b"k", 105.0)
    assert keys.due(b"k") == 105.5


@pytest.mark.parametrize(
    ("count", "per"), [(0, 1), (-1, 1), ("5", 1), (True, 1), (5, 0), (5, float("inf")), (5, None)]
)
def test_rate_that_cannot_work_is_refused(count: Any, per: Any) -> None:
    with pytest.raises(SettingsError, match="must be a number above 0"):
        Rate(count, per=per)
