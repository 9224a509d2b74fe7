"""The tasks of an epoch take its plans: each plan is taken once, and again only by the same worker."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.spark.sticky_assignment import choose

if TYPE_CHECKING:
    from pathlib import Path


def test_workers_that_change_places_change_plans(tmp_path: Path) -> None:
    assert [choose(tmp_path, "r", 1, task, 2, []) for task in (0, 1)] == [0, 1]
    assert [choose(tmp_path, "r", 2, task, 2, [1 - task]) for task in (1, 0)] == [0, 1]


def test_sticky_assignment_repeats_the_plan_of_a_retried_task(tmp_path: Path) -> None:
    assert choose(tmp_path, "r", 1, 0, 2, [1]) == 1
    assert choose(tmp_path, "r", 1, 0, 2, [0]) == 1
    assert choose(tmp_path, "r", 1, 1, 2, [1]) == 0
    assert choose(tmp_path, "r", 1, 1, 2, []) == 0


def test_of_two_that_want_a_plan_the_first_has_it(tmp_path: Path) -> None:
    assert choose(tmp_path, "r", 1, 2, 3, [0]) == 0
    assert choose(tmp_path, "r", 1, 1, 3, [0]) == 1
    assert choose(tmp_path, "r", 1, 0, 3, [0]) == 2


def test_runs_and_epochs_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    assert choose(tmp_path, "r", 1, 0, 2, [1]) == 1
    assert choose(tmp_path, "s", 1, 0, 2, []) == 0
    assert choose(tmp_path, "r", 2, 0, 2, []) == 0
    assert choose(tmp_path, "r", 1, 1, 2, [0]) == 1  # of an epoch that is over: its own, as before
    assert choose(tmp_path, "r", 2, 0, 2, [1]) == 0


def test_sticky_assignment_survives_a_kill_while_writing(tmp_path: Path) -> None:
    assert choose(tmp_path, "r", 1, 0, 2, [1]) == 1
    (tmp_path / "keylane-r.new").write_text('{"planned"')
    assert choose(tmp_path, "r", 1, 1, 2, [1]) == 0


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.tuples(st.integers(0, n - 1), st.lists(st.integers(0, n - 1), max_size=2)), max_size=20
            ),
        )
    )
)
def test_in_whatever_order_they_come_each_has_one_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[int, list[tuple[int, list[int]]]]
) -> None:
    plans, calls = found
    folder = tmp_path_factory.mktemp("places")
    had: dict[int, int] = {}
    for task, wanted in [*calls, *((task, []) for task in range(plans))]:
        plan = choose(folder, "r", 7.5, task, plans, wanted)
        assert had.setdefault(task, plan) == plan
    assert sorted(had.values()) == list(range(plans))


@pytest.mark.parametrize("seed", range(5))
def test_all_at_the_same_time(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    wishes = [[rng.randrange(8)] for _ in range(8)]
    for planned in range(20):
        got: list[int] = []

        def take(task: int, planned: int = planned, got: list[int] = got) -> None:
            got.append(choose(tmp_path, "r", planned, task, 8, wishes[task]))

        tasks = [threading.Thread(target=take, args=[task]) for task in rng.sample(range(8), 8)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()
        assert sorted(got) == list(range(8))
