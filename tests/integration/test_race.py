"""The race on a broker and a Spark of its own, judged by what each order promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_race_keeps_orders_and_keyed_lanes_win() -> None:
    command = [sys.executable, "-m", "keylane", "race", "--messages", "200", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    lanes = {lane["order"]: lane for lane in said["lanes"]}
    assert said["sound"] is True
    assert {lane["done"] for lane in lanes.values()} == {200}
    assert lanes["global"]["at_once"] == 1
    assert [one["n"] for one in lanes["global"]["trace"]] == list(range(60))
    assert lanes["none"]["overtaken_in_key"] > 0
    assert lanes["key"]["at_once"] <= said["keys"]
    assert lanes["key"]["per_second"] > 2 * lanes["global"]["per_second"]
