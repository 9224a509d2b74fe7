"""What a task makes of the progress it finds: a real broker and real tasks, one after another, without Spark."""

from __future__ import annotations

import base64
import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

from keylane import App
from keylane.broker import Broker
from keylane.kafka.fetcher import FetchedBatch, Fetcher
from keylane.kafka.transactional_client import TransactionalClient
from keylane.offsets.metadata import stamp
from keylane.worker import progress as progress_tracker
from keylane.worker import session as worker_session
from support.adjust import adjust
from support.state_log import identity
from support.tasks import Runner
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Verdict


@pytest.fixture
def runner(log: Log, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Runner:
    caplog.set_level(logging.INFO)
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(100))
    runner = Runner(log, name, tmp_path)
    assert len(runner.run()) == 100
    assert runner.committed()[0] == 100
    log.send(f"{name}.in", messages(20))
    caplog.clear()
    return runner


def messages(count: int) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % (i % 7), "value": b"%d" % i} for i in range(count)]


def count_commits(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The offsets in each transaction that commits some."""
    committed: list[list[int]] = []
    commit = TransactionalClient.commit

    def counted(self: TransactionalClient, offsets: list[TopicPartition]) -> dict[int, int]:
        found = commit(self, offsets)
        if offsets:
            committed.append([at.offset for at in offsets])
        return found

    monkeypatch.setattr(TransactionalClient, "commit", counted)
    return committed


def test_offset_of_idle_partition_is_committed_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_tracker, "OFFSET_REFRESH_SECONDS", 1.5)
    runner.run()
    committed = count_commits(monkeypatch)
    runner.run(seconds=5)
    assert committed
    assert committed == [[120]] * len(committed)
    assert 2 <= len(committed) <= 4, "once in a while, not with every commit"


def test_idle_partitions_are_not_committed_all_the_time(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run()
    committed = count_commits(monkeypatch)
    runner.run(seconds=3)
    assert committed == [], "the last epoch committed it in this worker"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_offset_outlives_the_brokers_retention(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_tracker, "OFFSET_REFRESH_SECONDS", 15.0)
    settings = {"offsets.retention.minutes": 1, "offsets.retention.check.interval.ms": 1000}
    with Broker(settings=settings) as broker:
        log = Log(broker.bootstrap)
        log.create(f"{name}.in", partitions=2)
        log.send(f"{name}.in", [one | {"partition": 0} for one in messages(5)])
        runner = Runner(log, name, tmp_path)
        runner.run()
        runner.run(seconds=80)
        assert runner.committed()[0] == 5


def offsets(places: list[tuple[int, int]]) -> list[int]:
    return sorted(offset for _, offset in places)


def test_a_group_that_was_moved_back_runs_again_with_a_warning(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.move(50)
    assert offsets(runner.run()) == list(range(50, 120))
    assert "the committed offset was changed outside Keylane" in caplog.text
    assert runner.committed()[0] == 120


def test_a_group_that_was_moved_forward_skips_with_a_warning(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.move(110)
    assert offsets(runner.run()) == list(range(110, 120))
    assert "the committed offset was changed outside Keylane" in caplog.text
    assert "offset=110" in caplog.text


def test_deleted_group_continues_from_sparks_offsets(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.forget()
    assert offsets(runner.run(run="r2", starts={0: 90})) == list(range(90, 120))
    assert "the group has no committed offsets yet" in caplog.text
    assert "@90" in caplog.text
    assert runner.committed()[0] == 120, "and the group is there again"


def test_a_group_that_nothing_happened_to_gives_no_warning(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    assert offsets(runner.run()) == list(range(100, 120))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("kl2:" + base64.b64encode(b"from the future").decode(), "a newer version"),
        ("flink-17", "another program"),
        ("kl1:" + base64.b64encode(b"\x00\x01garbage").decode() + " own", "damaged"),
        ("kl1:@ own", "damaged"),  # it refers to progress in the state topic, where there is none
        ("kl1:-", "damaged"),
        ("kl1:- other-cluster/id", "was copied here"),
    ],
)
def test_metadata_that_cannot_be_used_skips_nothing(
    runner: Runner, log: Log, caplog: pytest.LogCaptureFixture, metadata: str, said: str
) -> None:
    text, _, about = metadata.partition(" ")
    runner.move(60, stamp(text, log.cluster.identity(runner.source).source) if about == "own" else metadata)
    assert offsets(runner.run()) == list(range(60, 120))
    assert said in caplog.text


def test_recreated_topic_is_read_from_its_beginning(
    runner: Runner, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    log.delete(runner.source)
    log.create(runner.source, partitions=1)
    log.send(runner.source, messages(30))
    adjust(runner.app, observer=None)  # the history knows the old topic's offsets
    worker_session._sessions.clear()  # as after a restart
    assert offsets(runner.run(starts={0: 100})) == list(range(30))
    assert "the log is shorter than the progress" in caplog.text
    assert runner.committed()[0] == 30


def test_messages_whose_retention_is_over_are_named(
    runner: Runner, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    worker_session._sessions.clear()  # as after a restart
    admin = log.cluster._admin
    for future in admin.delete_records([TopicPartition(runner.source, 0, 110)]).values():
        future.result(10)
    assert offsets(runner.run()) == list(range(110, 120))
    assert "messages were lost: retention deleted them before they were done" in caplog.text
    assert "first_lost=100" in caplog.text
    assert runner.committed()[0] == 120


@pytest.mark.parametrize("left", [9, 0])
def test_messages_lost_to_retention_are_named(
    log: Log, name: str, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """In the middle of an epoch, when the log's beginning is not requested."""
    log.create(name, partitions=1)
    log.send(name, messages(30))
    for future in log.cluster._admin.delete_records([TopicPartition(name, 0, 30 - left)]).values():
        future.result(10)
    got: list[int] = []
    ends: list[int] = []
    failed: list[BaseException] = []

    def deliver(batch: FetchedBatch) -> None:
        got.extend(record.offset() for record in batch.records.get(0, ()))
        ends.extend(batch.ends.values())

    place = worker_session.WorkerSession(log.settings, App(name, source=name).spec, 1, identity())
    reader = Fetcher(place.consumer, name, {0: 10}, capacity=100, deliver=deliver, fail=failed.append)
    reader.start()
    try:
        deadline = time.monotonic() + 20
        while len(got) < left or (not left and not ends):
            assert time.monotonic() < deadline, "it goes on where the log begins"
            assert not failed
            time.sleep(0.01)
    finally:
        reader.close()
        place.close()
    assert got == list(range(30 - left, 30))
    assert left or ends == [30], "a log of which nothing is left is passed"
    assert (
        f"were read, it must be longer than the lag partition={name}/0 from=10 log_begins_at={30 - left}"
        in caplog.text
    )


def test_log_shorter_than_the_position_ends_the_task(log: Log, name: str) -> None:
    log.create(name, partitions=1)
    log.send(name, messages(30))
    failed: list[BaseException] = []
    place = worker_session.WorkerSession(log.settings, App(name, source=name).spec, 1, identity())
    reader = Fetcher(
        place.consumer, name, {0: 40}, capacity=100, deliver=lambda _batch: None, fail=failed.append
    )
    reader.start()
    try:
        deadline = time.monotonic() + 20
        while not failed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        reader.close()
        place.close()
    assert "the log ends at 30 and has been read up to 40" in str(failed[0])


def test_app_with_a_new_source_reads_the_new_source(log: Log, name: str, tmp_path: Path) -> None:
    """In the same worker, at the same offsets: what the worker keeps must not lead to the old topic."""
    other = f"{name}.other"
    log.create(f"{name}.in", other, partitions=1)
    log.send(f"{name}.in", messages(10))
    assert len(Runner(log, name, tmp_path / "old").run(seconds=2)) == 10
    log.send(f"{name}.in", messages(10))
    log.send(other, [{"key": b"k", "value": b"!"}] * 20)
    runner = Runner(log, name, tmp_path / "new", source=other)
    runner.run(starts={0: 10}, seconds=2)
    assert runner.outcomes == ["dead"] * 10


@pytest.mark.parametrize("restarted", [False, True])
def test_event_sent_twice_runs_once(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], restarted: bool
) -> None:
    log.create(f"{name}.in", partitions=1)
    events = [
        {"key": b"k%d" % (i % 7), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(60)
    ]
    sent = log.send(f"{name}.in", events[:40])
    runner = Runner(log, name, tmp_path)
    assert len(runner.run()) == 40
    if restarted:
        worker_session._sessions.clear()
    again = log.send(f"{name}.in", events[30:60])  # ten of them a second time
    runner.run()
    copies = {
        (one.partition, one.offset): (first.partition, first.offset)
        for one, first in zip(again, sent[30:], strict=False)
    }
    judge(sent + again, duplicates=copies)
    assert runner.outcomes.count("duplicate") == 10
    assert runner.committed()[0] == 70


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_million_done_above_stuck_ones_never_run_again(
    log: Log, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many stuck ones, too far apart, for the metadata of an offset: the way over the state topic."""
    caplog.set_level(logging.CRITICAL, "keylane.engine")
    caplog.set_level(logging.INFO, "keylane.task")
    log.create(f"{name}.in", partitions=1)
    stuck = set(random.Random(7).sample(range(1_000_000), 8_000)) | {0}
    load = (
        {"key": b"s%d" % i, "value": b"!"} if i in stuck else {"key": b"k%d" % (i % 5000), "value": b""}
        for i in range(1_000_000 + len(stuck))
    )
    log.send(f"{name}.in", load)
    runner = Runner(log, name, tmp_path, on_failure="block", failure_guard=None)
    adjust(runner.app, observer=None)
    done = runner.run()
    assert len(done) == 1_000_000
    offset, metadata = runner.committed()
    assert (offset, (metadata or "").split(" ")[0]) == (0, "kl1:@")
    worker_session._sessions.clear()  # as after a crash
    began = time.monotonic()
    assert runner.run(run="r2") == [], "something ran again"
    took = time.monotonic() - began
    assert took < 20, "restoring, and reading over a million messages that are done"
    last = log.send(f"{name}.in", [{"key": b"new", "value": b"%d" % i} for i in range(3)])
    assert offsets(runner.run(run="r2")) == [one.offset for one in last]
    restored = [float(found[1]) for found in re.finditer(r"restored in ([\d.]+) s", caplog.text)]
    assert len(restored) == 3
    assert max(restored) < 5, restored
