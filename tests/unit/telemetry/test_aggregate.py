from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.telemetry import aggregate
from keylane.telemetry.aggregate import Totals
from support.snapshots import snapshot

if TYPE_CHECKING:
    import pytest


def test_totals_of_thousands_of_tasks_count_each_message_once() -> None:
    totals = Totals(0.0)
    tasks = 3000
    for second in (1, 2, 3):
        at = 100.0 + second
        totals.take(snapshot(task=n, life=f"{n}", at=at, done=10 * second) for n in range(tasks))
    assert totals.counters["done"] == 30 * tasks
    assert len(totals.running(104.0)) == tasks


def test_totals_forget_tasks_that_have_ended() -> None:
    totals = Totals(0.0)
    for epoch in range(20):
        ended = (snapshot(life=f"{epoch}/{n}", at=100.0 + 300 * epoch) for n in range(500))
        totals.take(ended)
    assert len(totals._lives) <= 1024 + 500


def test_totals_are_bounded_whatever_the_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_TASK_EPOCHS_REMEMBERED_MAX", 2000)
    totals = Totals(0.0)
    totals.take(snapshot(life=f"{n}", at=1e9) for n in range(5000))
    assert len(totals._lives) == 2000
