"""Audit of ledgers: planted flaws are found with their timelines, and a clean ledger has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Ledger, SettingsError
from keylane.audit.audit import REPEAT_REASONS, audit, read_ledger
from keylane.cli.verify import _audit, _facts
from keylane.testing import Flaw
from support.adjust import adjust
from support.ledgers import PLANTED, Ledgers
from support.tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.audit.audit import Audit
    from keylane.testing import Sent, Verdict
    from support.topics import Log

FLAWS = ("overlap", "overtaken", "lost", "double", "back", "repeat")


def _tuned(spark: SparkSession, settings: dict[str, str]) -> Iterator[SparkSession]:
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield spark
    finally:
        for name in settings:
            spark.conf.unset(name)


@pytest.fixture
def few(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark settings for little data: compiling a query would take longer than running it."""
    quick = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    yield from _tuned(spark, quick)


@pytest.fixture
def many(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark settings of ``keylane verify``."""
    yield from _tuned(spark, {"spark.sql.shuffle.partitions": "16"})


def judge(ledgers: Ledgers, *flaws: str) -> Audit:
    return audit(ledgers.spark, ledgers.planted(*flaws), source=ledgers.source(), until=ledgers.until())


def clean_and_planted(ledgers: Ledgers) -> None:
    clean = judge(ledgers)
    assert clean.ok, clean.violations
    assert (clean.messages, clean.checked, clean.gone) == (ledgers.messages, ledgers.messages, 0)
    assert clean.attempts == ledgers.messages + clean.retried
    assert (clean.keys, clean.owners, clean.affinity, dict(clean.repeats)) == (ledgers.keys, 2, 1.0, {})

    found = judge(ledgers, *FLAWS)
    assert not found.ok
    assert found.tally == {Flaw.OVERLAP: 1, Flaw.ORDER: 2, Flaw.LOST: 1, Flaw.REPEAT: 1}
    assert found.repeats == {REPEAT_REASONS["other task"]: 1}
    assert found.affinity == pytest.approx(1 - 3 / ledgers.keys), (
        "each of three keys had a message that another owner ran"
    )
    shown = {(v.flaw, v.key): v for v in found.violations}
    at = PLANTED * ledgers.keys // 8  # the first planted offset; keys are a few offsets apart
    for flaw, number, place in (
        (Flaw.OVERLAP, 20, PLANTED),
        (Flaw.ORDER, 30, PLANTED + 1),
        (Flaw.LOST, 40, PLANTED),
        (Flaw.REPEAT, 50, PLANTED),
        (Flaw.ORDER, 60, PLANTED),
    ):
        violation = shown[flaw, b"key-%d" % number]
        assert violation.offset == place * ledgers.keys // 8 + number // 8
        assert len(violation.timeline) > 8
        assert f"{violation.partition}@{violation.offset - ledgers.keys // 8}" in str(violation)
    assert at > 0
    overtaken = shown[Flaw.ORDER, b"key-30"]
    assert f"while offset {at + 30 // 8} was not finished" in overtaken.detail
    assert str(overtaken).count("> ") == 1, "the counterexample is marked in its timeline"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planted_flaws_are_found_and_a_clean_ledger_has_none(few: SparkSession) -> None:
    clean_and_planted(Ledgers(few, 8_000, 160))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_planted_flaws_are_found_among_a_million_messages(many: SparkSession) -> None:
    clean_and_planted(Ledgers(many, 1_000_000, 20_000))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_attempts_are_judged_in_minutes(many: SparkSession, tmp_path: Path) -> None:
    ledgers = Ledgers(many, 9_100_000, 200_000)
    ledgers.planted("overlap", "lost").write.parquet(str(tmp_path / "ledger"))
    ledgers.source().write.parquet(str(tmp_path / "source"))
    ledger, source = many.read.parquet(str(tmp_path / "ledger")), many.read.parquet(str(tmp_path / "source"))
    began = time.monotonic()
    found = audit(many, ledger, source=source, until=ledgers.until())
    seconds = time.monotonic() - began
    print(f"{found.attempts:,} attempts judged in {seconds:.0f} s")  # noqa: T201
    assert found.attempts > 10_000_000
    assert found.tally == {Flaw.OVERLAP: 1, Flaw.LOST: 1}
    assert seconds < 180


@pytest.mark.slow
def test_empty_and_malformed_ledgers_are_refused(few: SparkSession) -> None:
    ledgers = Ledgers(few, 800, 8)
    with pytest.raises(SettingsError, match="the ledger is empty"):
        audit(few, ledgers.planted().where("false"))
    broken = ledgers.planted().selectExpr("* EXCEPT (started)", "cast(NULL AS bigint) AS started")
    with pytest.raises(SettingsError, match="records of the ledger are malformed"):
        audit(few, broken)


def test_malformed_ledger_records_are_counted(few: SparkSession) -> None:
    ledgers = Ledgers(few, 800, 8)
    bad = [
        b"", b"{", b"[" * 100_000, b"null", b"\xff", b'{"p": 0}',
        dumped(s=-(2**63)), dumped(e=2**63 - 1), dumped(m=-1), dumped(w=None), dumped(a=None),
    ]  # fmt: skip
    rows = few.createDataFrame([(b"k", value) for value in bad], "key BINARY, value BINARY")
    columns = ledgers.planted().columns
    ledger = ledgers.planted().unionByName(read_ledger(rows).select(*columns))
    found = audit(few, ledger, source=ledgers.source(), until=ledgers.until())
    assert found.ok
    assert found.unreadable == len(bad)


def dumped(**changed: Any) -> bytes:
    """A record of a ledger, changed."""
    record = {"t": "in", "p": 0, "o": 1, "a": 1, "w": "w", "l": "1.1", "s": 1, "e": 2, "r": "ok"}
    return json.dumps(record | changed).encode()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_app_writes_a_ledger_that_proves_its_work(
    delivery: str, few: SparkSession, log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    runner = Runner(log, name, tmp_path, sink=f"{name}.out", delivery=delivery, ledger=Ledger())
    log.create(runner.source, f"{name}.out")
    messages: list[dict[str, Any]] = [
        {"key": b"k%d" % (i % 20), "value": b"%d%s" % (i, b"!" if i % 50 == 9 else b"")} for i in range(600)
    ]
    messages += [{"key": None, "value": b"nobody's"}] * 10
    sent = log.send(runner.source, messages[:300])
    runner.run()
    sent += log.send(runner.source, messages[300:])
    once, twice = log.send(
        runner.source, [{"key": b"k1", "value": b"x", "headers": [("event-id", b"e")]}] * 2
    )
    sent += [once, twice]
    runner.run()
    assert len(runner.outcomes) == len(sent)
    duplicate = {(twice.partition, twice.offset): (once.partition, once.offset)}
    judge(sent, duplicates=duplicate)
    found = _audit(few, log.settings, name, None, 0.0)
    assert found.ok, found.violations
    assert (found.messages, found.checked, found.unfinished) == (612, 612, 0)
    assert (found.attempts, found.keys, dict(found.repeats), found.affinity) == (611, 20, {}, 1.0)
    assert _facts(name, found, 1.0)["sound"] is True
    since = _audit(few, log.settings, name, int((time.time() + 100) * 1000) - 200_000, 0.0)
    assert since.checked == 612


@pytest.mark.timeout(120)
def test_ledger_of_a_former_source_is_left_out(
    few: SparkSession, log: Log, name: str, tmp_path: Path
) -> None:
    """It had messages at the same positions."""
    runner = Runner(log, name, tmp_path, ledger=Ledger())
    for run, count in (("r1", 30), ("r2", 20)):
        log.create(runner.source, partitions=1)
        log.send(runner.source, [{"key": b"k%d" % (i % 3), "value": b"%d" % i} for i in range(count)])
        runner.run(run)
        adjust(runner.app, observer=None)  # the history knows the old topic's offsets
        if run == "r1":
            log.delete(runner.source)
    found = _audit(few, log.settings, name, None, 0.0)
    assert found.ok, found.violations
    assert (found.messages, found.checked, dict(found.repeats)) == (20, 20, {})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_share_of_keys_is_recorded_completely(
    few: SparkSession, log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    runner = Runner(log, name, tmp_path, ledger=Ledger(share=0.3))
    log.create(runner.source)
    sent = log.send(runner.source, [{"key": b"k%d" % (i % 200), "value": b"%d" % i} for i in range(1_000)])
    runner.run()
    judge(sent)
    found = _audit(few, log.settings, name, None, 0.0)
    assert found.ok, found.violations
    assert 20 < found.keys < 100
    assert found.checked == found.messages == 5 * found.keys
    assert found.share == 0.3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_moved_group_is_counted_as_repeats(
    few: SparkSession, log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    runner = Runner(log, name, tmp_path, ledger=Ledger())
    log.create(runner.source, partitions=1)
    sent = log.send(runner.source, [{"key": b"k%d" % (i % 5), "value": b"%d" % i} for i in range(50)])
    runner.run()
    runner.move(20)
    history: Any = runner.app.spec.observer
    history.began_again()  # another owner, in the same process
    runner.run(run="r2")
    judge(sent, allow_repeats=1)
    found = _audit(few, log.settings, name, None, 0.0)
    assert found.tally == {}
    assert sum(found.repeats.values()) == 30


def record(source: str, sent: Sent, **more: Any) -> dict[str, Any]:
    """A ledger record that Keylane did not write."""
    value = {
        "t": source,
        "p": sent.partition,
        "o": sent.offset,
        "a": 1,
        "w": "x",
        "l": "x",
        "r": "ok",
        **more,
    }
    return {"key": sent.key, "value": json.dumps(value)}


@pytest.mark.timeout(120)
def test_only_planted_flaws_are_found_in_an_apps_ledger(
    few: SparkSession, log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    runner = Runner(log, name, tmp_path, ledger=Ledger())
    log.create(runner.source)
    sent = log.send(runner.source, [{"key": b"k%d" % (i % 20), "value": b"%d" % i} for i in range(400)])
    runner.run()
    judge(sent)
    # An attempt that never ended, and a task that finished the same message twice.
    overlapped = min((other for other in sent if other.key == b"k7"), key=lambda other: other.offset)
    doubled = next(other for other in sent if other.key == b"k8")
    early = {"s": 1, "e": 2_000_000_000_000_000}
    twice = [{"l": "y", "s": at, "e": at + 1} for at in (2_100_000_000_000_000, 2_100_000_000_000_002)]
    log.send(f"{name}.ledger", [record(runner.source, overlapped, r="retry", **early)])
    log.send(f"{name}.ledger", [record(runner.source, doubled, **each) for each in twice])
    found = _audit(few, log.settings, name, None, 0.0)
    assert set(found.tally) == {Flaw.OVERLAP, Flaw.REPEAT}
    assert found.tally[Flaw.REPEAT] == 1
    assert {(v.flaw, v.key) for v in found.violations} == {
        (Flaw.OVERLAP, overlapped.key),
        (Flaw.REPEAT, doubled.key),
    }
    assert found.repeats == {REPEAT_REASONS["other task"]: 1}
    assert (found.messages, found.checked, found.gone, found.unfinished) == (400, 400, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_verify_command_prints_and_exits_by_its_findings(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    runner = Runner(log, name, tmp_path, ledger=Ledger())
    log.create(runner.source)
    sent = log.send(runner.source, [{"key": b"k%d" % (i % 5), "value": b"%d" % i} for i in range(50)])
    runner.run()
    judge(sent)

    def verify(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keylane", "verify", *more]
        environment = {**os.environ, "KEYLANE_BOOTSTRAP": log.bootstrap}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=90, check=False
        )

    done = verify(name, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["sound"], facts["messages"], facts["checked_for_loss"]) == (True, 50, 50)
    log.send(f"{name}.ledger", [record(runner.source, sent[0], s=1, e=2_000_000_000_000_000)])
    done = verify(name)
    assert done.returncode == 1, done.stderr
    assert "NOT SOUND" in done.stdout
    assert "overlap in the lane of key" in done.stdout
    missing = verify("nobody")
    assert missing.returncode == 2
    assert "the ledger of app 'nobody', topic 'nobody.ledger' does not exist" in missing.stderr
    assert "The app writes it with App(…, ledger=Ledger())" in missing.stderr
