from __future__ import annotations

import pytest

from simulate import planner, sizes, telemetry
from simulate.__main__ import main


def test_planner_rows_name_time_balance_and_moves() -> None:
    rows = planner.measure(10, 20)
    assert rows[0]["plan"] == "first"
    assert all(isinstance(row["ms"], float) for row in rows)
    assert all(float(str(row["busiest"])) <= 2 for row in rows if row["busiest"] != "")
    more = next(row for row in rows if str(row["plan"]).endswith("tasks more"))
    assert 0 <= float(str(more["moved %"])) <= 100


def test_sizes_show_what_grows_with_partitions_and_tasks() -> None:
    small = {row["what"]: float(str(row["KB"])) for row in sizes.measure(10, 10)}
    large = {row["what"]: float(str(row["KB"])) for row in sizes.measure(100, 100)}
    plans, whole = "all tasks' plans, pickled", "  with the whole plan in each"
    assert large[plans] < 15 * small[plans]
    assert large[whole] - large[plans] > 30 * (small[whole] - small[plans])


def test_telemetry_is_added_up_right(capsys: pytest.CaptureFixture[str]) -> None:
    rows = telemetry.measure(1500, 2, seconds=2)
    assert [row["what"] for row in rows] == [
        "encode, in a task",
        "decode, in a reader",
        "add up, in a reader",
    ]
    assert "wrong total" not in capsys.readouterr().out


def test_command_line_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planner", "--partitions", "5", "--tasks", "10"]) == 0
    assert "| first, loads known" in capsys.readouterr().out


def test_command_line_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(what in told for what in ("planner", "sizes", "commits", "restore", "telemetry", "jobs"))
