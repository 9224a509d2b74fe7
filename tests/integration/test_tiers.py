"""Where dead letters go while their topic takes none: to a spool, and from there to the topic; else nowhere at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from keylane import App, Message, Poison
from keylane.broker import Broker
from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind
from keylane.dlq.spool import Spool
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient
from keylane.testing import HistoryWriter, Verdict, check_results
from support.topics import Log, Row, ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.testing import Sent

SHIPPED_WITHIN = 10.0
"""Seconds from a topic that takes letters again to an empty spool."""


def tiered_app(name: str, folder: Path, spool: Path) -> App:
    """Messages with the header ``bad`` are."""
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        spool=spool,
        version="7.1",
        observer=HistoryWriter(folder / "history"),
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.header("bad"):
            raise Poison("no good")
        return bytes(msg.value or b"-")

    return app


_ODD: list[dict[str, bytes | None]] = [
    {},
    {"value": None},
    {"value": b"\x00\xff" * 500},
    {"key": b"\xfe\x00"},
    {"key": b""},
    {"key": None},
]


def messages(first: int, count: int) -> list[dict[str, Any]]:
    """Of eight keys; every fifth is bad, each of those odd in another way."""
    load: list[dict[str, Any]] = []
    for n in range(first, first + count):
        message: dict[str, Any] = {
            "key": b"k%d" % (n % 8),
            "value": b"%d" % n,
            "headers": [("event-id", b"%d" % n)],
        }
        if n % 5 == 0:
            message["headers"] += [("bad", b"1"), ("twice", b"\xff\x00"), ("twice", None), ("twice", b"")]
            message |= _ODD[n // 5 % len(_ODD)]
        load.append(message)
    return load


def bad(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.header("bad")]


def assert_buried(rows: list[Row], letters: list[DeadLetter], name: str) -> None:
    """Each of these messages is among the letters once, byte for byte, with the failure's context."""
    found = {(letter.source_partition, letter.source_offset): letter for letter in letters}
    assert len(found) == len(letters), "a letter is there twice"
    assert found.keys() == {(row.partition, row.offset) for row in rows}
    for row in rows:
        letter = found[row.partition, row.offset]
        assert (letter.key, letter.value, list(letter.headers)) == (row.key, row.value, row.headers)
        assert (letter.timestamp, letter.topic, letter.kind) == (
            row.timestamp,
            f"{name}.in",
            DeadLetterKind.DEAD,
        )
        assert (letter.stage, letter.error, letter.message) == ("work", "keylane.errors.Poison", "no good")
        assert (letter.app, letter.app_version, letter.attempts) == (name, "7.1", 1)
        assert letter.traceback is not None


def in_topic(log: Log, name: str) -> list[DeadLetter]:
    return [each for each in read_dead_letters(log.settings, f"{name}.dlq") if isinstance(each, DeadLetter)]


def survive(
    log: Log,
    spark: SparkSession,
    name: str,
    folder: Path,
    *,
    break_topic: Callable[[], None],
    repair: Callable[[], None],
) -> tuple[list[Sent], list[Row], list[DeadLetter]]:
    """An app whose dead-letter topic breaks and is repaired. Returns messages, outcome rows and letters."""
    log.create(f"{name}.in", f"{name}.out")
    query = tiered_app(name, folder, folder / "spool").start(spark, bootstrap=log.bootstrap)
    sent = log.send(f"{name}.in", messages(0, 5))
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 30, "it runs")
    assert log.count(f"{name}.dlq") == 1
    before = log.count(f"{name}.in")
    spool = Spool(folder / "spool", name, log.cluster.identity(f"{name}.in").source.cluster)
    assert spool.waiting() == 0

    break_topic()
    began = time.monotonic()
    sent += log.send(f"{name}.in", messages(5, 75))
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 30, "everything is done, the lanes went on")
    spooled = time.monotonic() - began
    assert spool.waiting() == 15
    assert list(spool.folder.glob("*.spool"))

    repair()
    began = time.monotonic()
    wait_until(lambda: spool.waiting() == 0, SHIPPED_WITHIN, "the spool is empty")
    shipped = time.monotonic() - began
    assert list(spool.folder.iterdir()) == []
    query.stop()
    assert query.exception() is None
    print(f"{name}: all done {spooled:.1f} s after they came, shipped after {shipped:.1f} s")  # noqa: T201 - figures
    rows = log.read(f"{name}.in")
    assert len(rows) == before + 75
    good = [row for row in rows if not row.header("bad")]
    check_results(ids(good), ids(log.read(f"{name}.out"))).raise_if_bad()
    return sent, bad(rows), in_topic(log, name)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_letters_spool_while_their_topic_is_missing(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    assert "auto.create.topics.enable=false" in (broker.nodes[0].folder / "server.properties").read_text()
    dlq = f"{name}.dlq"
    sent, rows, letters = survive(
        log, spark, name, tmp_path, break_topic=lambda: log.delete(dlq), repair=lambda: log.create(dlq)
    )
    assert judge(sent).repeats == 0
    assert_buried(
        [row for row in rows if row.header("event-id") != b"0"], letters, name
    )  # that one went with it


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_letters_spool_while_their_topic_refuses_them(
    log: Log, spark: SparkSession, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    dlq = f"{name}.dlq"
    sent, rows, letters = survive(
        log,
        spark,
        name,
        tmp_path,
        break_topic=lambda: log.alter(dlq, max_message_bytes="100"),
        repair=lambda: log.alter(dlq, max_message_bytes="1000000"),
    )
    assert judge(sent).repeats == 0
    assert_buried(rows, letters, name)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_letters_spool_without_permission_to_write(
    spark: SparkSession, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    settings: dict[str, str | bool] = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": True,
    }
    with Broker(settings=settings) as broker:
        log = Log(broker.bootstrap)
        admin = log.settings.admin()

        def rule(permission: AclPermissionType, operation: AclOperation) -> dict[str, Any]:
            return {
                "restype": ResourceType.TOPIC,
                "name": f"{name}.dlq",
                "resource_pattern_type": ResourcePatternType.LITERAL,
                "principal": "User:ANONYMOUS",
                "host": "*",
                "operation": operation,
                "permission_type": permission,
            }

        denied = rule(AclPermissionType.DENY, AclOperation.WRITE)
        # A topic with a rule is closed to everyone that no rule lets in.
        allowed = rule(AclPermissionType.ALLOW, AclOperation.ALL)

        def forbid() -> None:
            for future in admin.create_acls([AclBinding(**allowed), AclBinding(**denied)]).values():
                future.result(10)

        def allow() -> None:
            for future in admin.delete_acls([AclBindingFilter(**denied)]).values():
                future.result(10)

        sent, rows, letters = survive(log, spark, name, tmp_path, break_topic=forbid, repair=allow)
    assert judge(sent).repeats == 0
    assert_buried(rows, letters, name)


@pytest.mark.timeout(90)
def test_lane_stops_when_topic_and_spool_refuse_its_letter(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    (tmp_path / "file").touch()
    query = tiered_app(name, tmp_path, tmp_path / "file" / "spool").start(spark, bootstrap=broker.bootstrap)
    log.alter(f"{name}.dlq", max_message_bytes="100")
    load = [
        {
            "key": b"k%d" % (n % 8),
            "value": b"%d" % n,
            "headers": [("event-id", b"%d" % n), *([("bad", b"1")] if n in (17, 26) else [])],
        }
        for n in range(80)
    ]
    sent = log.send(f"{name}.in", load)
    rows = log.read(f"{name}.in")
    dead = {row.key: row for row in bad(rows)}
    stuck = {row.value for key in dead for row in rows if row.key == key and row.offset >= dead[key].offset}

    def results() -> set[bytes | None]:
        return {row.value for row in log.read(f"{name}.out")}

    with AdminClient(log.settings, name) as operator:
        wait_until(lambda: len(operator.lanes()) == 2, 30, "two lanes are stopped")
        wait_until(lambda: results() == {row.value for row in rows} - stuck, 10, "the other lanes go on")
        for record in operator.lanes():
            assert record.stop is LaneStatus.BLOCKED
            assert record.why.startswith("its dead letter could not be written: ")
            assert "Message size too large" in record.why
            assert str(tmp_path / "file" / "spool") in record.why
            assert record.letter.message == "no good"
            assert (record.partition, record.offset) == (dead[record.key].partition, dead[record.key].offset)
        time.sleep(2 * 1.0)  # two commits
        committed = log.cluster.committed(name, f"{name}.in", range(4))
        for row in dead.values():
            assert committed.get(row.partition, (0, None))[0] <= row.offset, "it counted as done"
        assert log.count(f"{name}.dlq") == 0

        log.alter(f"{name}.dlq", max_message_bytes="1000000")
        for row in dead.values():
            order = operator.command("release", partition=row.partition, key=row.key, offset=row.offset)
            answer = operator.answer(order, 10)
            assert answer is not None
            assert answer.ok
        wait_until(lambda: log.lag(name, f"{name}.in") == 0, 20, "everything is done")
    query.stop()
    assert query.exception() is None
    assert judge(sent).repeats == 0
    good = [row for row in rows if not row.header("bad")]
    check_results(ids(good), ids(log.read(f"{name}.out"))).raise_if_bad()
    letters = in_topic(log, name)
    assert {letter.value for letter in letters} == {b"17", b"26"}
    assert len(letters) == 2
