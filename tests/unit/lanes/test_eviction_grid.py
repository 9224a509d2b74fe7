"""Uneven keys in virtual time: a part of the grid that ``python -m bench.skew --grid`` goes through."""

from __future__ import annotations

import pytest

from bench.skew_model import Case, optimum, run

CASES = [
    Case(zipf=2.5, keys=50, stage=0.01, capacity=65_536, messages=40_000),
    Case(zipf=1.0, keys=50, stage=0.01, capacity=16_384),
    Case(zipf=1.0, keys=50, stage=0.1, capacity=200, messages=5_000),
    Case(zipf=1.5, keys=500, stage=0.001, capacity=200, messages=10_000),
    Case(zipf=3.0, keys=5, stage=0.001, capacity=2_048, messages=10_000),
    Case(zipf=2.0, keys=5_000, stage=0.01, capacity=200, messages=10_000),
    Case(zipf=0.5, keys=5_000, stage=0.1, capacity=2_048, messages=10_000),
    Case(zipf=1.0, keys=500, stage=0.1, capacity=200, messages=10_000, live=20.0),
    Case(zipf=2.5, keys=50, stage=0.01, capacity=2_048, messages=10_000, live=10.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cold_keys_are_done_about_as_soon_as_can_be(case: Case) -> None:
    outcome = run(case)
    assert outcome.cold > 0
    assert outcome.sound, outcome


@pytest.mark.parametrize("capacity", [10, 30, 100, 200, 700, 1_500, 5_000])
def test_refetched_messages_stay_within_capacity(capacity: int) -> None:
    outcome = run(Case(zipf=1.5, keys=50, stage=0.01, capacity=capacity, messages=4_000))
    assert outcome.most <= capacity


@pytest.mark.parametrize(
    ("keys", "capacity"), [(20, 1_000), (100, 16_384), (1_000, 200), (1_000, 1_000), (1_000, 65_536)]
)
def test_lanes_equally_far_behind_are_read_once(keys: int, capacity: int) -> None:
    outcome = run(Case(zipf=0.0, keys=keys, stage=0.02, capacity=capacity, messages=10_000))
    assert outcome.read < 1.1


def test_the_optimum_is_that_of_lanes_that_are_serial() -> None:
    case = Case(zipf=0.0, keys=1, stage=1.0, capacity=100)
    assert optimum(case, [1, 1, 2]) == pytest.approx([1.0, 2.0, 1.0], abs=0.001)


def test_the_optimum_waits_where_heads_take_all_room() -> None:
    case = Case(zipf=0.0, keys=1, stage=1.0, capacity=4)
    assert optimum(case, [1, 2, 1, 3]) == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=0.001)
