"""Doctor findings: every planted fault is found, and a sound setup has none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from keylane.cli.main import app as cli
from keylane.dlq.spool import folder_of
from keylane.doctor.facts import (
    AppFacts,
    ClusterFacts,
    GroupFacts,
    GroupPosition,
    HostFacts,
    JavaFacts,
    SparkFacts,
    TopicFacts,
)
from keylane.doctor.finding import Finding, Level
from keylane.doctor.judge import fits, judge_cluster, judge_host, judge_slots, judge_spark, judge_spool
from keylane.doctor.judge_kafka import judge_progress, judge_rights, judge_topics
from keylane.errors import SettingsError
from keylane.lanes.ordering import GLOBAL
from keylane.rights import Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

NOW = 1_000_000_000.0
DAY = 86_400
APP = AppFacts(name="shop", source="orders", sinks=("receipts",))
DRIVER = HostFacts(
    name="here", python="3.11.7", packages={"keylane": "0.1.0", "pyspark": "4.3.0", "blake3": "1.0"}
)
SETTINGS = {
    "cleanup.policy": "delete",
    "retention.ms": str(30 * DAY * 1000),
    "max.message.bytes": "1000000",
    "min.insync.replicas": "2",
}
ALLOWED = dict.fromkeys(APP.rights, True)
GOOD = TopicFacts(partitions=8, replicas=3, settings=SETTINGS)
DLQ = replace(GOOD, settings={**SETTINGS, "max.message.bytes": "1065536"})
STATE = replace(GOOD, settings={**SETTINGS, "cleanup.policy": "compact"})
TOPICS = {"orders": GOOD, "receipts": GOOD, "shop.dlq": DLQ, "shop.state": STATE}
CLUSTER = ClusterFacts(
    bootstrap="b:9092",
    brokers=3,
    seconds=0.1,
    topics=TOPICS,
    secured=True,
    allowed=ALLOWED,
    group=GroupFacts(state="EMPTY"),
    offsets_kept=7 * DAY,
    positions=(
        GroupPosition(partition=0, beginning=0, end=10, committed=5, waiting_since=NOW - 60, newest=NOW - 1),
    ),
    now=NOW,
)
SPARK = SparkFacts(master="spark://m:7077", slots=8, workers=(replace(DRIVER, name="w1"),))


def bad(findings: Iterable[Finding]) -> list[Finding]:
    found = [one for one in findings if one.level in (Level.WARNING, Level.FAULT)]
    assert all(one.remedy for one in found), "a fault or warning has no remedy"
    return found


def with_topic(name: str, **changes: object) -> ClusterFacts:
    return replace(CLUSTER, topics={**TOPICS, name: replace(TOPICS[name], **changes)})  # type: ignore[arg-type]


def with_settings(name: str, **changes: str) -> ClusterFacts:
    settings: Mapping[str, str] = TOPICS[name].settings or {}
    return with_topic(name, settings={**settings, **{key.replace("_", "."): v for key, v in changes.items()}})


def test_sound_setup_has_only_ok_findings() -> None:
    java = JavaFacts(version="17.0.1", path="/usr/bin/java")
    findings = [
        *judge_host(DRIVER, java, {"pyspark": ">=4.2,<5", "blake3": ">=1.0"}),
        *judge_spark(SPARK, DRIVER),
        *judge_cluster(CLUSTER),
        *judge_topics(APP, CLUSTER),
        *judge_progress(APP, CLUSTER),
        *judge_rights(APP, CLUSTER),
        *judge_slots(APP, SPARK, CLUSTER),
    ]
    assert bad(findings) == []
    assert {one.level for one in findings} == {Level.OK}
    checks = {one.check for one in findings}
    assert checks >= {
        "python",
        "java",
        "packages",
        "spark",
        "workers",
        "broker",
        "source",
        "sink",
        "dead letters",
    }
    assert checks >= {"state", "group", "lag", "clocks", "rights", "slots"}


@pytest.mark.parametrize(
    ("host", "java", "said"),
    [
        (replace(DRIVER, python="3.10.2"), JavaFacts(version="17"), "Python 3.10.2"),
        (DRIVER, JavaFacts(fault="no Java found"), "no Java found"),
        (
            replace(DRIVER, packages={"pyspark": "4.1.0"}),
            JavaFacts(version="17"),
            "pyspark is 4.1.0; pyspark>=4.2,<5",
        ),
        (replace(DRIVER, packages={"pyspark": "5.0"}), JavaFacts(version="17"), "pyspark is 5.0"),
        (replace(DRIVER, packages={}), JavaFacts(version="17"), "pyspark is not installed"),
    ],
)
def test_machine_fault_is_found(host: HostFacts, java: JavaFacts, said: str) -> None:
    (found,) = bad(judge_host(host, java, {"pyspark": ">=4.2,<5"}))
    assert found.level is Level.FAULT
    assert said in found.found


@pytest.mark.parametrize(
    ("spark", "level", "said"),
    [
        (replace(SPARK, fault="connection refused"), Level.FAULT, "connection refused"),
        (replace(SPARK, speculation=True), Level.FAULT, "twice at the same time"),
        (replace(SPARK, max_failures=1), Level.WARNING, "failed once"),
    ],
)
def test_spark_fault_is_found(spark: SparkFacts, level: Level, said: str) -> None:
    (found,) = bad(judge_spark(spark, DRIVER))
    assert found.level is level
    assert said in found.found


@pytest.mark.parametrize(
    ("worker", "level", "said"),
    [
        ({"python": "3.12.1"}, Level.FAULT, "w1 has Python 3.12.1, the driver 3.11.7"),
        ({"packages": {"pyspark": "4.3.0", "blake3": "1.0"}}, Level.FAULT, "w1 has no keylane"),
        (
            {"packages": {**DRIVER.packages, "keylane": "0.0.9"}},
            Level.FAULT,
            "keylane 0.0.9, the driver 0.1.0",
        ),
        ({"packages": {**DRIVER.packages, "blake3": "0.9"}}, Level.WARNING, "blake3 0.9, the driver 1.0"),
        ({"clock": NOW + 60, "asked": (NOW, NOW + 2)}, Level.WARNING, "58 s ahead"),
        ({"clock": NOW - 60, "asked": (NOW, NOW + 2)}, Level.WARNING, "60 s behind"),
    ],
)
def test_worker_fault_is_reported_once_per_machine(
    worker: dict[str, object], level: Level, said: str
) -> None:
    host = replace(DRIVER, name="w1", **worker)  # type: ignore[arg-type]
    (found,) = bad(judge_spark(replace(SPARK, workers=(host, host)), DRIVER))
    assert found.level is level
    assert said in found.found


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (ClusterFacts(bootstrap="b:9092", fault="no Kafka broker answered"), "no Kafka broker answered"),
        (replace(CLUSTER, seconds=7.0), "7.0 s"),
    ],
)
def test_broker_fault_is_found(cluster: ClusterFacts, said: str) -> None:
    (found,) = bad(judge_cluster(cluster))
    assert said in found.found


@pytest.mark.parametrize(
    ("cluster", "level", "said"),
    [
        (
            replace(CLUSTER, topics={k: v for k, v in TOPICS.items() if k != "orders"}),
            Level.FAULT,
            "'orders' does not",
        ),
        (
            replace(CLUSTER, topics={k: v for k, v in TOPICS.items() if k != "receipts"}),
            Level.FAULT,
            "'receipts' does",
        ),
        (with_topic("orders", leaderless=2), Level.FAULT, "2 partitions of topic 'orders' have no leader"),
        (with_topic("orders", behind=1), Level.WARNING, "not in sync"),
        (with_topic("orders", replicas=1, settings={}), Level.WARNING, "one replica on 3 brokers"),
        (with_settings("receipts", min_insync_replicas="1"), Level.WARNING, "min.insync.replicas=1"),
        (with_settings("receipts", min_insync_replicas="4"), Level.FAULT, "nothing can be written"),
        (with_settings("orders", cleanup_policy="compact,delete"), Level.WARNING, "'orders' is compacted"),
        (
            with_settings("receipts", max_message_bytes="1000"),
            Level.WARNING,
            "accepts messages of 1,000 bytes",
        ),
        (
            with_settings("shop.dlq", max_message_bytes="1000000"),
            Level.WARNING,
            "'shop.dlq' accepts messages of",
        ),
        (with_settings("shop.dlq", retention_ms=str(DAY * 1000)), Level.WARNING, "24 hours only"),
        (with_settings("shop.dlq", cleanup_policy="compact"), Level.FAULT, "only the last is kept"),
        (with_topic("shop.dlq", partitions=4), Level.WARNING, "4 partitions, the source 8"),
        (with_settings("shop.state", cleanup_policy="delete"), Level.FAULT, "is deleted in time"),
    ],
)
def test_topic_fault_is_found(cluster: ClusterFacts, level: Level, said: str) -> None:
    (found,) = bad(judge_topics(APP, cluster))
    assert found.level is level
    assert said in found.found


def test_unreadable_topic_settings_are_unknown() -> None:
    findings = [
        one for one in judge_topics(APP, with_topic("orders", settings=None)) if one.level is Level.UNKNOWN
    ]
    assert "'orders' could not be read" in findings[0].found


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        (
            {"committed": 2, "beginning": 5, "end": 9},
            Level.FAULT,
            "3 messages were deleted before they were done",
        ),
        ({"committed": 20}, Level.FAULT, "the committed offset is 20 and the log ends at 10"),
        (
            {"waiting_since": NOW - 20 * DAY},
            Level.WARNING,
            "20 days old, and the source keeps messages for 30 days",
        ),
        ({"waiting_since": NOW - 29 * DAY}, Level.FAULT, "29 days old"),
        ({"newest": NOW + 120}, Level.WARNING, "120 s in the future"),
    ],
)
def test_progress_fault_is_found(changes: dict[str, float], level: Level, said: str) -> None:
    position = replace(CLUSTER.positions[0], **changes)  # type: ignore[arg-type]
    (found,) = bad(judge_progress(APP, replace(CLUSTER, positions=(position,))))
    assert found.level is level
    assert said in found.found


def test_group_with_foreign_members_is_a_fault() -> None:
    group = GroupFacts(state="STABLE", members=("billing at 10.0.0.7",))
    (found,) = bad(judge_progress(APP, replace(CLUSTER, group=group)))
    assert "billing at 10.0.0.7" in found.found


@pytest.mark.parametrize("state", ["absent", "ConsumerGroupState.DEAD"])
def test_group_that_does_not_exist_is_ok(state: str) -> None:
    found = list(judge_progress(APP, replace(CLUSTER, group=GroupFacts(state=state))))
    assert "group 'shop' does not exist yet: the app's first commit creates it" in [
        one.found for one in found if one.level is Level.OK
    ]


def test_group_without_answer_needs_no_permission() -> None:
    found = list(judge_progress(APP, replace(CLUSTER, group=GroupFacts(unread="NOT_COORDINATOR"))))
    (said,) = (one for one in found if one.check == "group")
    assert (said.level, said.remedy) == (
        Level.UNKNOWN,
        "run the doctor again; the broker may still be starting",
    )


def test_malformed_state_records_are_a_warning() -> None:
    (found,) = bad(judge_topics(APP, replace(CLUSTER, malformed={"lane": 2, "run": 1})))
    assert found.level is Level.WARNING
    assert "has 3 malformed records, ignored: lane 2, run 1" in found.found


def test_doctor_reports_a_running_owner_and_a_hidden_group() -> None:
    cluster = replace(CLUSTER, owners=("host:12",), group=GroupFacts(unread="not authorized"))
    found = {one.level: one.found for one in judge_progress(APP, cluster)}
    assert "host:12" in found[Level.NOTE]
    assert "not authorized" in found[Level.UNKNOWN]


def without(name: str, *operations: Operation) -> ClusterFacts:
    """The cluster in which the app's user may not do this."""
    denied = {r: False for r in APP.rights if r.name == name and r.operation in operations}
    assert len(denied) == len(operations)
    return replace(CLUSTER, allowed={**ALLOWED, **denied})


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (without("orders", Operation.READ), "no Read on topic 'orders'"),
        (without("orders", Operation.DESCRIBE_CONFIGS), "no DescribeConfigs on topic 'orders'"),
        (without("receipts", Operation.WRITE), "no Write on topic 'receipts'"),
        (without("shop.state", Operation.READ, Operation.WRITE), "no Read and Write on topic 'shop.state'"),
        (without("shop.state", Operation.CREATE), "no Create on topic 'shop.state'"),
        (without("shop", Operation.READ), "no Read on group 'shop'"),
        (without("shop.", Operation.WRITE), "no Write on transactional ids that begin with 'shop.'"),
    ],
)
def test_missing_right_is_a_fault(cluster: ClusterFacts, said: str) -> None:
    (found,) = bad(judge_rights(APP, cluster))
    assert found.level is Level.FAULT
    assert said in found.found
    assert found.remedy.startswith(f"allow this user {said.removeprefix('no ').partition(' on ')[0]} on it: ")


def test_every_missing_right_is_found() -> None:
    found = bad(judge_rights(APP, replace(CLUSTER, allowed=dict.fromkeys(APP.rights, False))))
    assert {one.level for one in found} == {Level.FAULT, Level.WARNING}
    for right in APP.rights:
        assert any(right.operation in one.found and one.found.endswith(repr(right.name)) for one in found), (
            right
        )


def test_missing_optional_right_is_a_warning() -> None:
    (found,) = bad(judge_rights(APP, without("shop.telemetry", Operation.WRITE)))
    assert found.level is Level.WARNING
    assert "the app runs without it" in found.remedy


def test_hidden_rights_are_unknown() -> None:
    (found,) = (one for one in judge_rights(APP, replace(CLUSTER, allowed={})) if one.level is Level.UNKNOWN)
    assert "Write on transactional ids that begin with 'shop.'" in found.found
    assert "Read on topic 'orders'" in found.found
    assert "Create on topic 'shop.state'" not in found.found, "it exists"
    assert bad(judge_rights(APP, replace(CLUSTER, secured=False))) == []


def test_unused_slots_are_found() -> None:
    (found,) = bad(judge_slots(replace(APP, tasks=20), SPARK, CLUSTER))
    assert "asks for 20 tasks, and Spark has 8 slots" in found.found
    (only,) = judge_slots(replace(APP, order=GLOBAL), SPARK, CLUSTER)
    assert only.level is Level.NOTE
    assert "uses 1" in only.found


@pytest.mark.parametrize(
    ("version", "bound", "fit"),
    [("4.2", ">=4.2,<5", True), ("4.2.0rc1", ">=4.2", True), ("5.0.0", "<5", False), ("18", ">=18.1", False)],
)
def test_versions_are_compared_as_numbers(version: str, bound: str, fit: bool) -> None:
    assert fits(version, bound) is fit


def test_doctor_without_an_app_checks_this_machine_only() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--no-spark", "--json"], env={"KEYLANE_BOOTSTRAP": ""})
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["sound"] is True
    assert {"python", "java", "packages", "broker", "spark"} == {one["check"] for one in said["findings"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shop"], "no broker address"),
        (["--source", "orders"], "needs an app's name"),
        (["shop:app", "--source", "orders"], "Leave it out"),
    ],
)
def test_wrong_usage_names_the_remedy(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--no-spark", *arguments], env={"KEYLANE_BOOTSTRAP": ""})
    assert isinstance(result.exception, SettingsError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("minutes", "level", "said"),
    [
        (60, Level.FAULT, "an idle partition"),
        (600, Level.WARNING, "loses its progress"),
        (10_080, Level.OK, "are kept for 7 days"),
    ],
)
def test_offset_retention_is_judged(minutes: int, level: Level, said: str) -> None:
    cluster = replace(CLUSTER, offsets_kept=60.0 * minutes)
    (found,) = [one for one in judge_progress(APP, cluster) if one.check == "offsets"]
    assert found.level is level
    assert said in found.found


def test_hidden_offset_retention_has_no_finding() -> None:
    findings = judge_progress(APP, replace(CLUSTER, offsets_kept=None))
    assert all(one.check != "offsets" for one in findings)


def test_spooled_letters_of_other_clusters_are_a_warning(tmp_path: Path) -> None:
    own, other = (folder_of(tmp_path, "shop", cluster) for cluster in ("mine", "theirs"))
    (found,) = bad(judge_spool([other], own))
    assert str(other) in found.found
    assert str(own) in found.remedy
    assert bad(judge_spool([], own)) == []
