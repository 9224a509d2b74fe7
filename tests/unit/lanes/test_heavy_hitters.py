from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.lanes.heavy_hitters import HeavyHitters

NAMES = st.sampled_from("aaaaaaaabbbbccdefghijklmnopqrstuvwxyz")
STEPS = st.lists(
    st.one_of(st.none(), st.tuples(st.lists(NAMES, max_size=30), st.integers(1, 8))), max_size=60
)


@given(STEPS, st.integers(1, 6))
def test_heavy_hitters_counts_are_nearly_exact(
    steps: list[tuple[list[str], int] | None], places: int
) -> None:
    summary: HeavyHitters[str] = HeavyHitters(places)
    naive: dict[str, float] = {}
    for step in steps:
        if step is None:
            summary.fade()
            naive = {name: count / 2 for name, count in naive.items()}
            continue
        names, weight = step
        summary.add(names, weight)
        for name in names:
            naive[name] = naive.get(name, 0) + weight
    assert summary.total == sum(naive.values())
    assert summary.shaved <= summary.total / (places + 1)
    for name, count in naive.items():
        assert count - summary.shaved <= summary.count(name) <= count
    assert len(summary) <= 2 * places
    often = {name for name, count in naive.items() if count > summary.total / (places + 1)}
    assert often <= {name for name, _ in summary.top(0.0)}


def test_heavy_hitters_finds_the_hottest_keys_and_shares() -> None:
    rng = Random(1)
    weights = [rank**-1.2 for rank in range(1, 10_001)]
    summary: HeavyHitters[int] = HeavyHitters()
    keys = rng.choices(range(10_000), weights, k=100_000)
    for at in range(0, len(keys), 32):
        summary.add(keys[at : at + 32], 8)
    naive = Counter(keys)
    top = summary.top(0.01)
    assert [name for name, _ in top[:5]] == [name for name, _ in naive.most_common(5)]
    for name, share in top:
        assert share == pytest.approx(naive[name] / len(keys), abs=1 / 256)
    assert len(summary) <= 512


def test_former_hot_keys_fade() -> None:
    summary: HeavyHitters[str] = HeavyHitters(4)
    summary.add(["old"] * 100)
    for _ in range(5):
        summary.fade()
        summary.add(["new"] * 100)
    (first, share), (second, little) = summary.top(0.0)
    assert (first, second) == ("new", "old")
    assert share > 0.95
    assert little < 0.05


def test_a_summary_of_nothing_has_nothing_on_top() -> None:
    summary: HeavyHitters[str] = HeavyHitters()
    assert summary.top(0.0) == []
    summary.fade()
    assert summary.top(0.5) == []
