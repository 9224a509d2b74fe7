"""Outcome rows: which finished messages Spark gets."""

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
    ("wanted", "rows"),
    [
        ("all", [OK, RETRIED, DEAD, PARKED_BEHIND, DUPLICATE]),
        ("failed", [RETRIED, DEAD, PARKED_BEHIND]),
        ("none", []),
    ],
)
def test_rows_are_those_that_the_app_wants(wanted: str, rows: list[Any]) -> None:
    made = OutcomeRows(wanted)
    made.add([OK, RETRIED, DEAD, PARKED_BEHIND, DUPLICATE])
    made.hand_over()
    made.end()
    assert [one for batch in made.batches() for one in batch] == rows
