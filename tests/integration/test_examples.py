"""The examples, run small: each checks itself, and is judged by what it prints."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane.broker import Broker

ROOT = Path(__file__).parents[2]
QUICK = ("chat", "payments", "http_sink", "order_items")
OTHERS = ("orders", "versions", "backfill")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "example", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_example_shows_its_claims(
    example: str,
    spark: SparkSession,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module(example)
    assert module.main(messages=300, bootstrap=broker.bootstrap, spark=spark)
    told = capsys.readouterr().out
    assert "  yes  " in told
    assert "NO" not in told


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("example", [*QUICK, *OTHERS])
def test_an_example_runs_by_its_command(example: str) -> None:
    """From the project's root, with a broker and a Spark of its own."""
    command = [sys.executable, f"examples/{example}.py"]
    told = subprocess.run(
        [*command, "--messages", "600"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "  yes  " in told.stdout
    helped = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"python examples/{example}.py" in helped
    assert "--messages" in helped


def test_every_example_is_in_the_readme_and_is_run_here() -> None:
    told = (ROOT / "examples" / "README.md").read_text()
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"playground"}
    assert {name for name in files if f"examples/{name}.py" not in told} == set()
    assert {*QUICK, *OTHERS} <= files
