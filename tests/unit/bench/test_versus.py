"""Comparing two checkouts: the sums of several calls, and folders that cannot be measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench.errors import BenchError
from bench.lineup import Job
from bench.versus import HERE, OTHER, Checkout, Rounds, add, compared, main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    for name in ("bench/keylane_peer.py", ".venv/bin/python"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def test_rounds_of_several_calls_are_compared_by_their_medians() -> None:
    rounds: Rounds = {}
    add(rounds, "drain", {OTHER: {"per_second": [100.0, 120.0]}, HERE: {"per_second": [90.0]}})
    add(
        rounds,
        "drain",
        {OTHER: {"per_second": [110.0]}, HERE: {"per_second": [99.0, 130.0], "backlog": [1.0]}},
    )
    assert "backlog" not in rounds["drain"], "only figures that can be compared"
    row = compared(rounds).splitlines()[-1]
    assert row == "| drain, messages per second | 110 (100 to 120) | 99 (90 to 130) | -10.0% | 3, 3 |"


def test_checkout_runs_its_own_sources_with_its_own_python(other: Path) -> None:
    job = Job(brokers="b:1", topic="t", out="o", group="g")
    command = Checkout(folder=other).contestant(OTHER, "master=local[1]").command(job)
    assert command[:3] == ["env", f"PYTHONPATH={other}/src:{other}", f"{other}/.venv/bin/python"]
    assert command[-1] == "master=local[1]"


def test_folder_without_an_environment_is_refused(other: Path) -> None:
    Checkout(folder=other).check()
    (other / ".venv/bin/python").unlink()
    with pytest.raises(BenchError, match="run 'make dev-env' in it"):
        Checkout(folder=other).check()


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--only", "drain,nothing"], "there is no 'nothing'"), ([], "is missing; run")]
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_file_of_rounds_that_is_damaged_is_named(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rounds.json").write_text(json.dumps({"drain": [1]}))
    assert main([str(other), "--keep", str(tmp_path / "rounds.json")]) == 2
    assert "rounds.json does not hold rounds of earlier calls" in capsys.readouterr().err
