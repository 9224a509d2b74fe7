from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import Retry, SettingsError

SECONDS = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def retries(draw: st.DrawFn) -> Retry:
    low, high = sorted([draw(SECONDS), draw(SECONDS)])
    return Retry(attempts=draw(st.integers(1, 2000)), wait_initial=low, wait_max=high)


@given(retries(), st.integers(1, 3000), st.floats(0, 1, exclude_max=True))
def test_retry_wait_is_between_zero_and_the_cap(retry: Retry, failures: int, drawn: float) -> None:
    wait = retry.wait(failures, lambda: drawn)
    if failures >= retry.attempts:
        assert wait is None
    else:
        assert wait is not None
        assert 0 <= wait <= retry.ceiling(failures) <= retry.wait_max


@given(retries(), st.integers(1, 3000))
def test_the_ceiling_doubles_until_the_cap_and_never_falls(retry: Retry, failures: int) -> None:
    here, next_one = retry.ceiling(failures), retry.ceiling(failures + 1)
    assert here <= next_one <= retry.wait_max
    assert math.isclose(next_one, min(2 * here, retry.wait_max))


def test_retry_default_caps_double_from_100_ms_to_2_s() -> None:
    retry = Retry()
    assert [retry.ceiling(n) for n in range(1, 8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert [retry.wait(n, lambda: 0.5) for n in range(1, 6)] == [0.05, 0.1, 0.2, 0.4, None]


def test_jitter_is_full_and_even() -> None:
    rng = random.Random(3)
    retry = Retry(wait_initial=1.0, wait_max=1.0)
    waits = [retry.wait(1, rng.random) or 0.0 for _ in range(20_000)]
    assert abs(mean(waits) - 0.5) < 0.01
    for tenth in range(10):
        share = sum(tenth <= 10 * wait < tenth + 1 for wait in waits) / len(waits)
        assert abs(share - 0.1) < 0.01


def test_one_attempt_means_no_retry() -> None:
    assert Retry(attempts=1).wait(1, random.random) is None


@pytest.mark.parametrize("attempts", [0, -1, 2.5, math.inf, math.nan, "3", None, True])
def test_attempts_that_make_no_sense_are_refused(attempts: Any) -> None:
    with pytest.raises(SettingsError, match=r"Retry\(attempts=.*at least 1"):
        Retry(attempts=attempts)


@pytest.mark.parametrize(
    ("initial", "most"),
    [(0, 1), (-1, 1), (2, 1), (math.nan, 1), (0.1, math.nan), (0.1, math.inf), ("1", 2), (0.1, None)],
)
def test_waits_that_make_no_sense_are_refused(initial: Any, most: Any) -> None:
    with pytest.raises(SettingsError, match="0 < wait_initial <= wait_max"):
        Retry(wait_initial=initial, wait_max=most)


@given(retries(), st.integers(1, 3000), st.floats(0, 1e7), st.floats(1e-6, 1e6))
def test_retry_honours_an_asked_wait_up_to_its_maximum(
    retry: Retry, failures: int, asked: float, most: float
) -> None:
    def undrawn() -> float:
        raise AssertionError("an asked wait is not drawn")

    retry = replace(retry, wait_asked_max=most)
    wait = retry.wait(failures, undrawn, asked=asked)
    assert wait == (None if failures >= retry.attempts else min(asked, most))


def test_the_default_lets_an_error_ask_for_a_minute() -> None:
    assert [Retry().wait(1, random.random, asked=asked) for asked in (0, 5, 60, 3600.0)] == [0, 5, 60, 60]


@given(retries(), st.integers(1, 3000), st.floats(0, 1, exclude_max=True), SECONDS, st.floats(0, 1e6))
def test_no_retry_begins_after_the_total(
    retry: Retry, failures: int, drawn: float, total: float, elapsed: float
) -> None:
    unbounded = retry.wait(failures, lambda: drawn)
    wait = replace(retry, total=total).wait(failures, lambda: drawn, elapsed=elapsed)
    if unbounded is None or elapsed + unbounded > total:
        assert wait is None
    else:
        assert wait == unbounded


def test_a_total_cuts_an_asked_wait_off_too() -> None:
    retry = Retry(total=10.0)
    assert retry.wait(1, random.random, elapsed=4.0, asked=6.0) == 6.0
    assert retry.wait(1, random.random, elapsed=4.1, asked=6.0) is None


def test_without_a_total_time_does_not_end_the_retries() -> None:
    assert Retry().wait(1, lambda: 0.5, elapsed=1e9) == 0.05


@pytest.mark.parametrize("total", [0, -1, math.nan, math.inf, "10"])
def test_totals_that_make_no_sense_are_refused(total: Any) -> None:
    with pytest.raises(SettingsError, match=r"Retry\(total=.*more than 0, or None"):
        Retry(total=total)


@pytest.mark.parametrize("most", [0, -1, math.nan, math.inf, "10", None])
def test_longest_asked_waits_that_make_no_sense_are_refused(most: Any) -> None:
    with pytest.raises(SettingsError, match=r"Retry\(wait_asked_max=.*more than 0"):
        Retry(wait_asked_max=most)
