"""The benchmarks' own sums: figures of many days in one report, and the command that finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from bench import ideal, report
from bench.cli import main
from bench.endurance import Sample, _left, drift, heap_mib, judge
from bench.errors import BenchError
from bench.progress import rate
from bench.results import Column, ResultSheet
from keylane.cli.bench import find_checkout
from keylane.cli.main import app
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

DAY_ONE, DAY_TWO = "2026-01-01 10:00 UTC", "2026-01-02 10:00 UTC"


def sheet(name: str = "drain", measured: str = DAY_ONE, **settings: int) -> ResultSheet:
    return ResultSheet(
        name=name,
        title="Drain",
        settings={"n": 10, **settings},
        columns=[Column(figure="per_second", title="messages per second")],
        rounds=3,
        machine={"measured": measured, "cores": "2"},
        left_out={},
    )


def test_figure_is_the_median_with_its_extremes() -> None:
    made = sheet()
    for value in (30.0, 10.0, 20.0):
        made.line("keylane", "keylane").add(per_second=value, cores=None)
    assert "| keylane | 20 (10 to 30) | in order, complete |" in made.markdown()


def test_partial_run_keeps_unmeasured_lines(tmp_path: Path) -> None:
    first = sheet()
    first.line("keylane", "keylane").add(per_second=1)
    first.line("go", "go").add(per_second=2)
    first.write(tmp_path)
    second = sheet(measured=DAY_TWO)
    second.line("keylane", "keylane").add(per_second=5)
    second.write(tmp_path)
    (merged,) = report.read_all(tmp_path)
    assert [(line.label, line.figures["per_second"]) for line in merged.lines] == [
        ("keylane", [5]),
        ("go", [2]),
    ]
    assert f"| go *(measured {DAY_ONE})* | 2 |" in merged.markdown()


def test_lines_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    first = sheet()
    first.line("go", "go").add(per_second=2)
    first.write(tmp_path)
    second = sheet(n=20)
    second.line("keylane", "keylane").add(per_second=5)
    second.write(tmp_path)
    assert [line.label for line in report.read_all(tmp_path)[0].lines] == ["keylane"]


def test_violations_are_reported_with_their_position() -> None:
    made = sheet()
    made.line("keylane", "keylane").problems.append("round 1: 3 lost")
    assert made.all_problems == ["drain, keylane: round 1: 3 lost"]
    assert "**FAILED: round 1: 3 lost**" in made.markdown()


def test_report_has_a_summary_and_a_picture(tmp_path: Path) -> None:
    drain, offered, curve = sheet(), sheet("offered"), sheet("curve")
    drain.line("keylane", "keylane").add(per_second=100_000)
    drain.line("Spark <micro-batch>", "spark").add(per_second=40_000)
    for made, rates in ((offered, (5_000.0, 14_000.0)), (curve, (500.0, 5_000.0))):
        for at in rates:
            made.line(f"keylane, {at:,.0f}/s", "keylane", at=at).add(p50=10.0, p99=at / 100)
    behind = offered.line("prosody, 5,000/s", "prosody", at=5_000.0)
    behind.add(p50=9_000.0, p99=9_900.0)
    behind.notes.append("does not keep up: 5 of 9 came in time; in order")
    for made in (drain, offered, curve):
        made.write(tmp_path)
    docs = tmp_path / "docs.md"
    docs.write_text("a\n<!-- begin results -->old<!-- end results -->\nb\n")
    report.update_docs(tmp_path, docs)
    text = docs.read_text()
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert "old" not in text
    assert "| keylane | 100,000 | 10.0 | 50.0 | 10.0 | 140 |" in text
    assert "| prosody | — | does not keep up |" in text
    picture = ET.fromstring((tmp_path / report.PICTURE).read_text())  # noqa: S314 - our own
    said = "".join(picture.itertext())
    assert "Latency by rate" in said
    assert "Spark <micro-batch>" in said
    assert json.loads((tmp_path / "report.json").read_text())["sheets"][0]["name"] == "drain"


def test_invalid_results_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "drain.json").write_text("{}")
    with pytest.raises(BenchError, match=r"drain\.json is not a sheet"):
        report.read_all(tmp_path)


def test_the_rate_leaves_out_the_first_fifth() -> None:
    found = rate([(0.0, 0.0), (10.0, 20.0), (11.0, 100.0)])
    assert found is not None
    assert found.per_second == pytest.approx(80)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "rabbit"], "there is no 'rabbit'"),
        (["--only", "marathon"], "there is no 'marathon'"),
        (["drain", "--n", "0"], "--n 0"),
        (["keys", "--keys", "few"], "--keys few"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_bench_command_finds_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__main__.py").touch()
    (tmp_path / "src" / "keylane").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    elsewhere = Path("/opt/site-packages/keylane/__init__.py")
    assert find_checkout(tmp_path / "docs", elsewhere) == tmp_path
    assert find_checkout(Path("/"), tmp_path / "src" / "keylane" / "__init__.py") == tmp_path
    monkeypatch.chdir("/")
    monkeypatch.setattr("keylane.__file__", str(elsewhere))
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert isinstance(result.exception, SettingsError)
    assert "clone the repository" in str(result.exception)


def test_growth_of_five_percent_is_found() -> None:
    def samples(workers: Callable[[float], float]) -> list[Sample]:
        return [
            Sample(
                at=at, workers_mib=workers(at), jvm_mib=500 if at > 200 else 100,
                heap_mib=60 if at > 600 else 0, threads=50, files=70, lanes=int(at % 60), processes=4,
            )
            for at in range(0, 1200, 10)
        ]  # fmt: skip

    steady = judge(samples(lambda at: 1000 + (at % 20)), 1200)
    assert steady["jvm_mib"][2] == 0  # it grew while it warmed up
    assert list(steady["heap_mib"]) == [60, 60, 0]  # the first collection came late
    assert abs(steady["workers_mib"][2]) < 0.05
    assert judge(samples(lambda at: 1000 + at / 4), 1200)["workers_mib"][2] >= 0.05
    with pytest.raises(BenchError, match="too few samples"):
        drift([1.0, 2.0])


def test_a_lane_that_is_left_when_nothing_is_to_do_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.endurance._REST_SECONDS", 0.5)
    (tmp_path / "lanes-1").write_text("0")
    assert _left(tmp_path) == 0
    (tmp_path / "lanes-2").write_text("3")
    assert _left(tmp_path) == 3


def test_heap_is_measured_after_a_full_collection(tmp_path: Path) -> None:
    log = tmp_path / "collections.log"
    assert heap_mib(log) == 0
    log.write_text(
        "[1.2s][info][gc] GC(0) Pause Young (Normal) (G1 Evacuation Pause) 180M->45M(384M) 3.2ms\n"
        "[61.2s][info][gc] GC(1) Pause Full (G1 Periodic Collection) 90M->41M(150M) 93.1ms\n"
        "[62.2s][info][gc] GC(2) Pause Young (Normal) (G1 Evacuation Pause) 80M->55M(150M) 3.2ms\n"
    )
    assert heap_mib(log) == 41


def test_retry_of_one_stage_is_a_fifth_of_the_p99(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ideal.main([])
    assert "keylane / a peer: 0.82" in capsys.readouterr().out
    clean = ideal.latencies(resumes=True, n=10)  # too few for any key to come twice
    assert clean[0] == 100
    assert clean[-1] < 100 + 65 + 100
