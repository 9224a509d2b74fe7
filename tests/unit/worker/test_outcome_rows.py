"""Outcome rows: which finished messages a Spark task gets, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keylane.outcome import Outcome
from keylane.worker.outcome_rows import OutcomeRows


def delivery(outcome: Outcome, attempts: int = 1, error: Exception | None = None) -> Any:
    return SimpleNamespace(outcome=outcome, attempts=attempts, error=error)


OK = delivery(Outcome.OK)
RETRIED = delivery(Outcome.OK, attempts=2)
DEAD = delivery(Outcome.DEAD, error=ValueError("no"))
PARKED_BEHIND = delivery(Outcome.PARKED, attempts=0)
DUPLICATE = delivery(Outcome.DUPLICATE, attempts=0)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("all", [OK, RETRIED, DEAD, PARKED_BEHIND, DUPLICATE]),
        ("failed", [RETRIED, DEAD, PARKED_BEHIND]),
        ("none", []),
    ],
)
def test_rows_are_those_that_the_app_wants(wanted: str, found: list[Any]) -> None:
    made = OutcomeRows(wanted)
    reader = made.open()
    made.add([OK, RETRIED, DEAD, PARKED_BEHIND, DUPLICATE])
    made.end()
    assert [one for batch in reader for one in batch] == found


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
