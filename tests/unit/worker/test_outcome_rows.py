"""Rows on their way to Spark tasks that attach and detach."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.worker.outcome_rows import OutcomeRows


def rows(*numbers: int) -> Any:
    """Stands for finished messages."""
    return list(numbers)


def test_each_row_goes_to_one_task() -> None:
    outcome = OutcomeRows("all")
    first: Any = outcome.open()
    outcome.add(rows(1))
    outcome.end()
    outcome.add(rows(2))
    outcome.hand_over()
    outcome.add(rows(3))
    second: Any = outcome.open()
    outcome.hand_over()
    outcome.add(rows(4))
    outcome.end()
    assert list(first) == [[1]]
    assert list(second) == [[2], [3], [4]]


def test_an_error_follows_the_rows_before_it() -> None:
    outcome = OutcomeRows("all")
    reader: Any = outcome.open()
    outcome.add(rows(1))
    outcome.end(ZeroDivisionError())
    assert next(reader) == [1]
    with pytest.raises(ZeroDivisionError):
        next(reader)


def test_rows_without_a_task_crowd_the_worker() -> None:
    outcome = OutcomeRows("all")
    for number in range(20):
        outcome.add(rows(number))
        outcome.hand_over()
    assert outcome.crowded
    reader: Any = outcome.open()
    assert outcome.crowded
    for _ in range(10):
        next(reader)
    assert not outcome.crowded


def test_rows_are_left_out_if_not_wanted() -> None:
    outcome = OutcomeRows("none")
    reader: Any = outcome.open()
    outcome.add(rows(1))
    outcome.end()
    assert list(reader) == []
