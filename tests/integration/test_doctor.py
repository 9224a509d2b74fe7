"""Doctor against a real broker: it finds planted faults and changes nothing."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer
from typer.testing import CliRunner

from keylane.cli.main import app as cli
from keylane.doctor.facts import AppFacts
from keylane.doctor.probe_host import bounds, probe_host, probe_spark
from keylane.doctor.probe_kafka import probe_cluster
from keylane.kafka.settings import KafkaSettings
from support.tasks import Runner

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from pyspark.sql import SparkSession

    from support.topics import Log


def examine(log: Log, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        cli, ["doctor", *arguments, "--bootstrap", log.bootstrap, "--no-spark", "--json"]
    )
    assert result.exit_code in (0, 1), result.output + str(result.exception)
    said: dict[str, Any] = json.loads(result.stdout)
    assert said["sound"] is (result.exit_code == 0)
    return said


def bad(said: dict[str, Any]) -> list[str]:
    return [one["found"] for one in said["findings"] if one["level"] in ("fault", "warning")]


def test_sound_app_gets_no_warning_and_is_unchanged(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=2)
    log.send(f"{name}.in", [{"key": b"k%d" % i, "value": b"%d" % i} for i in range(20)])
    runner = Runner(log, name, tmp_path)
    runner.run()
    log.alter(f"{name}.dlq", retention_ms="-1")
    before, topics = runner.committed(), set(log.cluster.topics())
    said = examine(log, name, "--source", f"{name}.in")
    assert bad(said) == []
    found = {one["check"]: one["found"] for one in said["findings"]}
    assert found["lag"].startswith("0 messages")
    assert "rights" in found
    assert "no message" in found["clocks"]
    assert (runner.committed(), set(log.cluster.topics())) == (before, topics)


def test_new_app_on_an_open_broker_lacks_no_permission(log: Log, name: str) -> None:
    log.create(f"{name}.in", partitions=1)
    said = examine(log, name, "--source", f"{name}.in")
    found = {one["check"]: one for one in said["findings"]}
    assert found["group"]["found"] == f"group {name!r} does not exist yet: the app's first commit creates it"
    assert found["rights"]["found"].endswith("nothing is restricted")
    assert not [one for one in said["findings"] if "allow" in (one.get("remedy") or "")]


def test_planted_broker_faults_are_found(log: Log, name: str) -> None:
    log.create(f"{name}.in", partitions=2, cleanup_policy="compact", retention_ms="60000")
    log.create(f"{name}.state", partitions=2, cleanup_policy="delete")
    old, ahead = int((time.time() - 45) * 1000), int((time.time() + 600) * 1000)
    log.send(f"{name}.in", [{"key": b"a", "value": b"1", "timestamp": old}])
    log.send(f"{name}.in", [{"key": b"a", "value": b"2", "timestamp": ahead}])
    member: Any = Consumer(
        {
            "bootstrap.servers": log.bootstrap,
            "group.id": name,
            "client.id": "billing",
            "auto.offset.reset": "earliest",
        }
    )
    member.subscribe([f"{name}.in"])
    try:
        deadline = time.monotonic() + 20
        while member.poll(0.1) is None and time.monotonic() < deadline:
            pass  # until it is a member
        said = examine(log, name, "--source", f"{name}.in")
    finally:
        member.close()
    assert said["sound"] is False
    text = "\n".join(bad(said))
    for wanted in (
        "is compacted",
        "is deleted in time",
        "billing at",
        "in the future",
        "s old, and the source keeps",
    ):
        assert wanted in text


def test_silent_broker_and_missing_source_are_faults(
    log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any("does not exist" in text for text in bad(examine(log, name, "--source", f"{name}.nothing")))
    monkeypatch.setattr("keylane.kafka.cluster.REQUEST_SECONDS", 1.0)
    nobody = probe_cluster(KafkaSettings("127.0.0.1:1"), AppFacts(name=name, source="x"))
    assert "no Kafka broker answered" in nobody.fault


def test_workers_report_their_python_and_packages(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)  # the session is shared by all tests
    host, java = probe_host(bounds())
    found = probe_spark("local[2]", list(host.packages))
    assert (found.fault, found.slots, java.fault) == ("", 2, "")
    assert {(one.python, tuple(sorted(one.packages.items()))) for one in found.workers} == {
        (host.python, tuple(sorted(host.packages.items())))
    }
    assert all(one.asked[0] - 1 <= one.clock <= one.asked[1] + 1 for one in found.workers)
    none = probe_spark("local[2]", [], timeout=0.0)
    assert "no task ran within" in none.fault
