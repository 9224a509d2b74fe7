"""Telemetry of running tasks, and that the work does not depend on it."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane import App, Message
from keylane.cli.main import app as command
from keylane.outcome import Outcome
from keylane.telemetry.prometheus import Exporter
from keylane.telemetry.snapshot import decode
from keylane.worker import telemetry_sender as telemetry
from support.listening import make
from support.metric_page import metric_values
from support.tasks import Runner
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.testing import Verdict
    from support.topics import Log


def fill(log: Log, source: str, number: int = 600) -> list[Any]:
    values = {5: b"bad", 50: b"once"}
    return log.send(
        source, [{"key": b"k%d" % (n % 20), "value": values.get(n, b"%d" % n)} for n in range(number)]
    )


def test_task_writes_a_record_in_every_interval(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", partitions=2)
    sent = fill(log, f"{name}.in")
    runner = Runner(log, name, tmp_path, app=make(name, tmp_path))
    exporter = Exporter(log.settings, name, runner.source)
    exporter.start()
    began = time.time()
    try:
        runner.run()
        judge(sent)
        expected = {f'keylane_messages_total{{app="{name}",outcome="ok"}}': 599.0}
        for partition in (0, 1):  # read from the broker every two seconds
            place = f'app="{name}",partition="{partition}",topic="{runner.source}"'
            expected[f"keylane_partition_lag{{{place}}}"] = 0.0
        wait_until(
            lambda: expected.items() <= metric_values(exporter.text()).items(), 10, "all messages done"
        )
        port = exporter.serve(0, "127.0.0.1")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            page = metric_values(answer.read().decode())
    finally:
        exporter.close()

    rows = [decode(row.value) for row in log.read(f"{name}.telemetry")]
    assert {row.life for row in rows} == {rows[0].life}
    assert [row.final for row in rows] == [False] * (len(rows) - 1) + [True]
    assert len(rows) >= 2
    assert [row.done for row in rows] == sorted(row.done for row in rows)
    last = rows[-1]
    assert (last.done, last.retries, last.held, last.dropped) == (600, 1, 0, 0)
    assert +last.outcomes == {Outcome.OK: 599, Outcome.DEAD: 1}
    assert (last.app, last.source, last.run, last.epoch, last.task) == (name, runner.source, "r1", 1, 0)
    ends = log.cluster.ends(runner.source, [0, 1])
    assert {p: (at.watermark, at.position, at.lag) for p, at in last.partitions.items()} == {
        p: (end, end, 0) for p, end in ends.items()
    }
    assert last.processing.count == pytest.approx(600, rel=0.2)  # a sample, when many come at once
    assert last.latency.count == last.processing.count
    assert 0.004 < last.processing.sum / last.processing.count < 2
    assert 0 < last.latency.sum / last.latency.count < time.time() - began + 10
    assert last.breakers == {"work": "closed"}
    busy = [row for row in rows if row.lanes.running]
    assert busy
    assert all(0 < row.held <= row.capacity for row in busy)
    assert any(row.partitions[0].end == ends[0] > row.partitions[0].watermark for row in busy)
    assert sum(key.share for key in rows[-2].hot) > 0.5  # twenty keys, all of them above one in a hundred

    assert page[f'keylane_messages_total{{app="{name}",outcome="dead"}}'] == 1
    assert page[f'keylane_retries_total{{app="{name}"}}'] == 1
    assert page[f'keylane_latency_seconds_count{{app="{name}"}}'] == last.latency.count
    once = CliRunner().invoke(command, ["metrics", name, "--once", "--bootstrap", log.bootstrap])
    assert once.exit_code == 0, once.output
    place = f'app="{name}",partition="0",topic="{runner.source}"'
    assert metric_values(once.stdout)[f"keylane_partition_end_offset{{{place}}}"] == ends[0]


def test_refused_telemetry_does_not_disturb_the_work(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.telemetry", partitions=1, max_message_bytes="10")
    sent = fill(log, f"{name}.in")
    runner = Runner(log, name, tmp_path, app=make(name, tmp_path))
    with caplog.at_level(logging.WARNING, "keylane"):
        assert len(runner.run()) == 600
        assert runner.run() == []  # the session is used again: it is not logged again
    judge(sent)
    assert runner.committed()[0] == 600
    assert log.count(f"{name}.telemetry") == 0
    assert len(re.findall("dropping telemetry", caplog.text)) == 1


def test_telemetry_error_does_not_disturb_the_work(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_writer: object, *, final: bool = False) -> None:
        raise RuntimeError(f"broken, final={final}")

    monkeypatch.setattr(telemetry.TelemetryWriter, "snapshot", broken)
    log.create(f"{name}.in", partitions=1)
    sent = fill(log, f"{name}.in", 300)
    runner = Runner(log, name, tmp_path, app=make(name, tmp_path))
    assert len(runner.run()) == 300
    judge(sent)
    assert "telemetry stops" in caplog.text


def test_an_app_without_telemetry_has_no_topic_for_it(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    app = App(name, source=f"{name}.in", telemetry=False)

    @app.stage
    async def work(_msg: Message) -> None: ...

    Runner(log, name, tmp_path, app=app).run()
    assert f"{name}.telemetry" not in log.cluster.topics()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_spark_progress_and_listener_show_an_epoch(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", partitions=2)
    sent = fill(log, f"{name}.in")
    script = Path(__file__).parents[1] / "listening.py"
    said = subprocess.run(
        [sys.executable, script, log.bootstrap, name, tmp_path],
        stdout=subprocess.PIPE,
        timeout=150,
        check=True,
    )
    found = json.loads(said.stdout.splitlines()[-1])
    judge(sent)
    (first,) = (figures for figures in found["told"] if figures["processed"])
    assert {each: first[each] for each in ("app", "processed", "dead", "retries", "lag")} == {
        "app": name, "processed": 600, "dead": 1, "retries": 1, "lag": 0,
    }  # fmt: skip
    assert first["told"] == first["tasks"]
    assert found["observed"] == {
        "rows": 600, "ok": 599, "dead": 1, "parked": 0, "duplicate": 0, "retried": 1,
    }  # fmt: skip
    assert found["latest"]["lag"] == 600
    assert sum(found["latest"]["ends"].values()) == 600
