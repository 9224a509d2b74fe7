"""The planner's part of Spark's offset about partitions that were added, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keylane.spark.source import GrownSource, LaneReader


def test_a_grown_source_survives_its_encoding() -> None:
    grown = GrownSource(8, {0: 5, 1: 10**12, 2: 0, 3: 7})
    assert GrownSource.decode({"epoch": 3, **grown.encode()}, range(4)) == grown


def test_an_offset_about_other_partitions_says_nothing() -> None:
    grown = GrownSource(8, {0: 5, 1: 6})
    assert GrownSource.decode(grown.encode(), range(4)) is None
    assert GrownSource.decode({"epoch": 3}, range(4)) is None


def reader(**plan: Any) -> Any:
    given = {"keep_alive": 10.0, "moves_ranges": True} | plan
    return LaneReader(SimpleNamespace(**given, tasks=2))  # type: ignore[arg-type]


def test_added_partitions_need_no_drain() -> None:
    assert not reader()._needs_drain(SimpleNamespace(lanes={}), 4, 8)


@pytest.mark.parametrize(
    ("plan", "lanes", "there"),
    [
        ({"keep_alive": 0.0}, {}, 8),
        ({"moves_ranges": False}, {}, 8),
        ({}, {(0, b"lane/k"): None}, 8),
        ({}, {}, 6),
    ],
    ids=["lanes end with the task", "ranges do not move", "a stopped lane", "no multiple"],
)
def test_added_partitions_need_a_drain(plan: dict[str, Any], lanes: dict[Any, Any], there: int) -> None:
    assert reader(**plan)._needs_drain(SimpleNamespace(lanes=lanes), 4, there)
