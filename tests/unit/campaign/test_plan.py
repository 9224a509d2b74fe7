"""A seed of the campaign decides everything, and names its fault."""

from __future__ import annotations

import pytest

from campaign.__main__ import _parser, _seeds
from campaign.plan import SEED_STEP, Kind, Plan
from campaign.workload import is_poison, messages


@pytest.mark.parametrize("kind", Kind)
def test_a_seed_names_its_fault_by_its_last_two_digits(kind: Kind) -> None:
    for number in range(20):
        plan = Plan.of(number * SEED_STEP + kind.ending)
        assert plan.label == kind.label
        assert plan == Plan.of(plan.seed)
    assert Kind.named(kind.label) is kind


def test_any_other_seed_is_two_different_faults() -> None:
    plans = [Plan.of(number * SEED_STEP + 99) for number in range(100)]
    assert all(len({shot.kind for shot in plan.shots}) == 2 for plan in plans)
    assert {shot.kind for plan in plans for shot in plan.shots} == set(Kind) - {Kind.NONE}


def test_the_same_seed_is_the_same_load() -> None:
    load = list(messages(7, 2000, 60))
    assert load == list(messages(7, 2000, 60))
    assert load != list(messages(8, 2000, 60))
    assert 0 < sum(is_poison(7, number) for _, number in load) < 40


def test_epochs_are_short_where_a_fault_waits_for_their_end() -> None:
    for kind in Kind:
        plan = Plan.of(kind.ending)
        assert plan.epoch <= 3 or not kind.at_edge


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ("--seed 7", [7]),
        ("--seeds 3 --fault worker", [1, 101, 201]),
        ("--seeds 2 --fault worker --fault broker", [1, 4, 101, 104]),
        ("--pairs 2", [99, 199]),
        ("--pairs 2 --first 5", [599, 699]),
        ("", [kind.ending for kind in Kind]),
        ("--seeds 1 --pairs 1", [*(kind.ending for kind in Kind), 99]),
    ],
)
def test_requested_faults_are_run(given: str, seeds: list[int]) -> None:
    assert _seeds(_parser().parse_args(given.split())) == seeds
