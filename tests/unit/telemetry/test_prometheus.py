from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from keylane.errors import BrokerError, SettingsError
from keylane.histogram import BOUNDS, Histogram
from keylane.kafka.partition_reader import PartitionReader
from keylane.kafka.settings import KafkaSettings
from keylane.outcome import Outcome
from keylane.telemetry import prometheus as module
from keylane.telemetry.lag import PartitionLag
from keylane.telemetry.prometheus import Exporter
from keylane.telemetry.reader import TelemetryLog
from keylane.telemetry.snapshot import HotFigures, decode
from support.metric_page import metric_values
from support.snapshots import histogram, snapshot

if TYPE_CHECKING:
    from keylane.telemetry.snapshot import Snapshot

ROOT = Path(__file__).parents[3]


def exporter() -> Exporter:
    """Telemetry of an app, without a cluster to ask."""
    made = Exporter(KafkaSettings("127.0.0.1:1"), "chat", "chat.in")
    now = time.time()
    hot = (HotFigures(key="k", partition=0, share=0.4, waiting=77),)
    made._metrics.add_snapshots(
        [
            snapshot(began=now, at=now, breakers={"pay": "open"}, latency=histogram(0.004, 0.2), hot=hot),
            snapshot(
                life="b", task=1, began=now, at=now, done=5, dead=0, duplicate=0, breakers={"pay": "closed"}
            ),
        ],
        unreadable=1,
    )
    made._metrics.set_offsets(
        {
            0: PartitionLag(begin=2, end=20, committed=5),
            1: PartitionLag(begin=3, end=9, committed=None),
        }
    )
    return made


def test_scrape_shows_the_telemetry_of_all_tasks() -> None:
    found = metric_values(exporter().text())
    assert found['keylane_messages_total{app="chat",outcome="ok"}'] == 7 + 5
    assert found['keylane_messages_total{app="chat",outcome="duplicate"}'] == 2
    assert found['keylane_retries_total{app="chat"}'] == 8
    assert found['keylane_lanes{app="chat",state="blocked"}'] == 2
    assert found['keylane_tasks{app="chat"}'] == 2
    assert found['keylane_breaker_state{app="chat",stage="pay"}'] == 3
    assert found['keylane_partition_lag{app="chat",partition="0",topic="chat.in"}'] == 15
    assert found['keylane_partition_lag{app="chat",partition="1",topic="chat.in"}'] == 6
    assert found['keylane_held_messages{app="chat",shard="1/1",task="1"}'] == 7
    assert found['keylane_hottest_key_waiting{app="chat"}'] == 77
    assert found['keylane_latency_seconds_count{app="chat"}'] == 2
    assert found['keylane_latency_seconds_bucket{app="chat",le="+Inf"}'] == 2
    assert found[f'keylane_latency_seconds_bucket{{app="chat",le="{BOUNDS[8]:.6g}"}}'] == 1
    assert found['keylane_broker_up{app="chat"}'] == 1


def test_app_without_telemetry_has_zeros() -> None:
    made = Exporter(KafkaSettings("127.0.0.1:1"), "chat", "chat.in")
    found = metric_values(made.text())
    assert found['keylane_tasks{app="chat"}'] == found['keylane_broker_up{app="chat"}'] == 0
    assert found['keylane_messages_total{app="chat",outcome="ok"}'] == 0


def test_label_values_are_escaped() -> None:
    made = exporter()
    now = time.time()
    made._metrics.add_snapshots([snapshot(began=now, at=now, breakers={'a"b\\c\nd': "open"})], unreadable=0)
    assert 'keylane_breaker_state{app="chat",stage="a\\"b\\\\c\\nd"} 3.0' in made.text()


def test_histogram_buckets_are_cumulative() -> None:
    made = Exporter(KafkaSettings("127.0.0.1:1"), "chat", "chat.in")
    now = time.time()
    latency = Histogram([1] * (len(BOUNDS) + 1), 3.0)
    made._metrics.add_snapshots([snapshot(began=now, at=now, latency=latency)], unreadable=0)
    values = [value for name, value in metric_values(made.text()).items() if "keylane_latency" in name]
    assert values == [*range(1, len(BOUNDS) + 2), len(BOUNDS) + 1, 3.0]


def test_metrics_are_served_over_http() -> None:
    made = exporter()
    port = made.serve(0, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "keylane_tasks" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/else", timeout=5)
        refused.value.close()
        with pytest.raises(SettingsError, match=f"cannot serve metrics at 127.0.0.1:{port}"):
            exporter().serve(port, "127.0.0.1")
    finally:
        made.close()


def test_metrics_are_served_to_this_machine_only() -> None:
    made = exporter()
    port = made.serve(0)
    try:
        served = Path("/proc/net/tcp").read_text(encoding="ascii")
        assert f"0100007F:{port:04X}" in served
        assert f"00000000:{port:04X}" not in served
    finally:
        made.close()


def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.5)
    before = threading.active_count()
    made = exporter()
    port = made.serve(0)
    try:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        idle[0].sendall(b"GET /metrics")  # and never the rest
        deadline = time.monotonic() + 10
        for one in idle:
            one.settimeout(max(0.1, deadline - time.monotonic()))
            assert one.recv(1) == b"", "the server closes it"
            assert threading.active_count() - before <= 2 * module.CONNECTIONS_MAX + 1
            one.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.status == 200
    finally:
        made.close()


class Flaky:
    """Telemetry that fails in unexpected ways, and then has a record."""

    failures: ClassVar[list[Exception]] = []
    unreadable = 0

    def __init__(self, *_: object) -> None:
        pass

    def read(self, _wait: float) -> list[Snapshot]:
        if self.failures:
            raise self.failures.pop()
        now = time.time()
        return [snapshot(began=now, at=now)]

    def close(self) -> None:
        pass


def test_the_exporter_survives_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.telemetry.prometheus.TelemetryLog", Flaky)
    monkeypatch.setattr(Flaky, "failures", [TypeError("None"), RecursionError(), BrokerError("away")])
    made = Exporter(KafkaSettings("127.0.0.1:1"), "chat", "chat.in")
    monkeypatch.setattr(made, "_meter", lambda: SimpleNamespace(partitions=dict))
    monkeypatch.setattr(made._closing, "wait", lambda _seconds: time.sleep(0.01))
    made.start()
    deadline = time.monotonic() + 5
    while not metric_values(made.text())['keylane_tasks{app="chat"}'] and time.monotonic() < deadline:
        time.sleep(0.01)
    made.close()
    assert metric_values(made.text())['keylane_tasks{app="chat"}'] == 1


def test_exporter_shows_the_age_of_its_values() -> None:
    made = exporter()
    assert metric_values(made.text())['keylane_exporter_age_seconds{app="chat"}'] < 5
    made._metrics._updated_at -= 100
    assert metric_values(made.text())['keylane_exporter_age_seconds{app="chat"}'] > 99


def test_telemetry_of_other_apps_or_the_future_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    given = [
        snapshot(at=now).encode(),
        snapshot(app="other", at=now).encode(),
        snapshot(at=now + 10 * 86_400).encode(),
        b"{",
        None,
    ]
    records: list[Any] = [
        SimpleNamespace(
            error=lambda: None, partition=lambda: 0, offset=lambda: 1, value=lambda value=value: value
        )
        for value in given
    ]
    monkeypatch.setattr(KafkaSettings, "admin", lambda _settings: None)
    log = TelemetryLog(KafkaSettings("127.0.0.1:1"), "chat")
    consumer: Any = SimpleNamespace(poll=lambda _wait: records[0], consume=lambda *_: records[1:])
    log._reader = PartitionReader(consumer, "chat.telemetry")
    assert [one.at for one in log._decoded(0)] == [now]
    assert log.unreadable == 4


# -- what is in ops/ ---------------------------------------------------------------------------------------------


def served() -> set[str]:
    return {place.partition("{")[0] for place in metric_values(exporter().text())}


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bkeylane_[a-z_]+", expression))


def test_every_metric_of_the_dashboard_is_served() -> None:
    board = json.loads((ROOT / "ops/grafana/keylane.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        assert named(expression), expression
        assert named(expression) <= served(), expression
        assert expression.count("(") == expression.count(")")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "app"}


def test_every_metric_that_is_served_is_on_the_dashboard() -> None:
    board = (ROOT / "ops/grafana/keylane.json").read_text()
    hidden = {name for name in served() if re.sub("_(sum|count)$", "_bucket", name) not in board}
    assert hidden <= {"keylane_hottest_key_waiting"}


def test_alerts_use_served_metrics_and_name_a_command() -> None:
    text = (ROOT / "ops/prometheus/alerts.yml").read_text()
    alerts = re.split(r"\n      - alert: ", text)[1:]
    assert len(alerts) == text.count("alert:") >= 8
    commands = {"lag", "lanes list", "dlq list"}
    for alert in alerts:
        name = alert.partition("\n")[0]
        expression = re.search(r"\n        expr: (?:>-)?(.*?)\n        [a-z]+:", alert, re.DOTALL)
        assert expression, name
        assert named(expression[1]), name
        assert named(expression[1]) <= served(), name
        assert expression[1].count("(") == expression[1].count(")")
        command = re.search(r'command: "keylane (.*) \{\{ \$labels.app \}\}"', alert)
        assert command, name
        assert command[1] in commands
        assert "summary: " in alert


def test_telemetry_page_names_every_metric_and_field() -> None:
    page = (ROOT / "docs/telemetry.md").read_text()
    for name in served():
        assert re.sub("_(sum|count|bucket)$", "", name) in page, name
    for name in json.loads(snapshot().encode()):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("outcome", Outcome)
def test_outcome_is_counted_from_record_to_scrape(outcome: Outcome) -> None:
    made = Exporter(KafkaSettings("127.0.0.1:1"), "chat", "chat.in")
    now = time.time()
    record = snapshot(began=now, at=now, done=3, outcomes=Counter({outcome: 3})).encode()
    made._metrics.add_snapshots([decode(record)], unreadable=0)
    found = {name: value for name, value in metric_values(made.text()).items() if "_messages_total" in name}
    assert found.pop(f'keylane_messages_total{{app="chat",outcome="{outcome.value}"}}') == 3
    assert set(found.values()) == {0}
    assert f"`{outcome.value}`" in (ROOT / "docs/telemetry.md").read_text()
