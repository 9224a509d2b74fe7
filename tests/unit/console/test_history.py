"""The history behind the console's charts."""

from __future__ import annotations

from keylane.console.history import AppHistory, quantile
from keylane.telemetry.snapshot import PartitionFigures
from support.snapshots import histogram, snapshot


def figures(end: int, watermark: int = 0) -> dict[int, PartitionFigures]:
    made = PartitionFigures(
        watermark=watermark, position=end, end=end, held=0, away=0, paused=False, moved=0.0
    )
    return {0: made}


def test_history_counts_differences_between_records() -> None:
    history = AppHistory(0.0)
    history.take(
        [
            snapshot(
                at=1000.0, began=999.0, done=10, retries=1, dead=0, duplicate=0, partitions=figures(100)
            ),
            snapshot(
                at=1002.0, began=999.0, done=30, retries=5, dead=0, duplicate=0, partitions=figures(140, 20)
            ),
        ]
    )
    found = history.series("5m", 1003.0)
    last, before = found["out"][-1], found["out"][-2]
    assert (before, last) == (5.0, 10.0)
    assert found["in"][-1] == 20.0
    assert found["retries"][-1] == 2.0
    assert found["outcomes"]["ok"][-2:] == [10, 20]
    assert found["lag"]["0"][-2:] == [100, 120]
    assert found["out"][0] is None  # no record: no figure


def test_record_received_again_counts_once() -> None:
    history = AppHistory(0.0)
    one = snapshot(at=1000.0, began=999.0, done=10)
    history.take([one])
    history.take([one])
    assert sum(value or 0 for value in history.series("5m", 1001.0)["out"]) * 2 == 10


def test_task_from_before_the_history_counts_from_its_first_record() -> None:
    history = AppHistory(500.0)
    history.take([snapshot(at=1000.0, began=100.0, done=10_000)])
    assert all(not value for value in history.series("5m", 1001.0)["out"])
    history.take([snapshot(at=1001.0, began=100.0, done=10_007)])
    assert sum(value or 0 for value in history.series("5m", 1001.0)["out"]) * 2 == 7


def test_latency_is_of_the_messages_of_its_step() -> None:
    history = AppHistory(0.0)
    history.take([snapshot(at=1000.0, began=999.0, latency=histogram(0.01, 0.01))])
    history.take([snapshot(at=1002.0, began=999.0, latency=histogram(0.01, 0.01, 3.0, 3.0))])
    found = history.series("5m", 1003.0)["latency"]
    assert found["p50"][-2] < 0.02
    assert found["p50"][-1] > 2
    assert quantile(history.recent(1003.0), 0.99) == found["p50"][-1]


def test_epochs_restarts_and_takeovers_are_marked() -> None:
    history = AppHistory(0.0)
    history.take([snapshot(at=1000.0, run="a", epoch=1, life="1", owner="x")])
    history.take([snapshot(at=1001.0, run="a", epoch=2, life="2", owner="x")])
    history.take([snapshot(at=1002.0, run="a", epoch=2, life="3", owner="y")])
    history.take([snapshot(at=1003.0, run="b", epoch=0, life="4", owner="z")])
    assert [mark.kind for mark in history.marks] == ["epoch", "takeover", "restart"]


def test_history_stays_bounded() -> None:
    history = AppHistory(0.0)
    for number in range(2000):
        at = 1000.0 + number * 60
        history.take([snapshot(at=at, began=at, life=str(number), epoch=number)])
    assert len(history._steps["24h"]) <= 86_400 // 300 + 1
    assert len(history._steps["5m"]) <= 151
    assert len(history.marks) <= 400
