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
from keylane.kafka import seat
from keylane.kafka.fetcher import Batch, Fetcher
from tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Verdict
    from support import Log


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


def offsets(places: list[tuple[int, int]]) -> list[int]:
    return sorted(offset for _, offset in places)


def test_a_group_that_was_moved_back_runs_again_with_a_warning(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.move(50)
    assert offsets(runner.run()) == list(range(50, 120))
    assert "somebody has moved its group" in caplog.text
    assert runner.committed()[0] == 120


def test_a_group_that_was_moved_forward_skips_with_a_warning(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.move(110)
    assert offsets(runner.run()) == list(range(110, 120))
    assert "offset 110 was not committed by this app" in caplog.text


def test_a_group_that_was_deleted_goes_on_from_what_spark_knows(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.forget()
    assert offsets(runner.run(run="r2", starts={0: 90})) == list(range(90, 120))
    assert "the group has no offset for it; it is read from 90 on" in caplog.text
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
        ("kl1:" + base64.b64encode(b"\x00\x01garbage").decode(), "damaged"),
        ("kl1:@", "damaged"),  # it says that its progress lies in the state topic, where there is none
    ],
)
def test_metadata_that_cannot_be_used_skips_nothing(
    runner: Runner, caplog: pytest.LogCaptureFixture, metadata: str, said: str
) -> None:
    runner.move(60, metadata)
    assert offsets(runner.run()) == list(range(60, 120))
    assert said in caplog.text


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(
    runner: Runner, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    log.delete(runner.source)
    log.create(runner.source, partitions=1)
    log.send(runner.source, messages(30))
    runner.app.observer = None  # the history knows the old topic's offsets
    seat._seats.clear()  # as after a restart
    assert offsets(runner.run(starts={0: 100})) == list(range(30))
    assert "the topic was made anew" in caplog.text
    assert runner.committed()[0] == 30


def test_messages_whose_retention_is_over_are_named(
    runner: Runner, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    seat._seats.clear()  # as after a restart
    admin = log.cluster._admin
    for future in admin.delete_records([TopicPartition(runner.source, 0, 110)]).values():
        future.result(10)
    assert offsets(runner.run()) == list(range(110, 120))
    assert "messages from 100 on were not done: their retention is over" in caplog.text
    assert runner.committed()[0] == 120


@pytest.mark.parametrize("left", [9, 0])
def test_messages_that_retention_takes_from_under_a_reader_are_named(
    log: Log, name: str, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """In the middle of an epoch, when nobody asks where the log begins."""
    log.create(name, partitions=1)
    log.send(name, messages(30))
    for future in log.cluster._admin.delete_records([TopicPartition(name, 0, 30 - left)]).values():
        future.result(10)
    got: list[int] = []
    ends: list[int] = []
    failed: list[BaseException] = []

    def deliver(batch: Batch) -> None:
        got.extend(record.offset() for record in batch.records.get(0, ()))
        ends.extend(batch.ends.values())

    place = seat.Seat(log.settings, App(name, source=name), 1)
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
    assert f"{name}/0: the log begins at {30 - left} and messages from 10 on were not read" in caplog.text


def test_a_log_that_ends_before_what_was_read_ends_the_task(log: Log, name: str) -> None:
    log.create(name, partitions=1)
    log.send(name, messages(30))
    failed: list[BaseException] = []
    place = seat.Seat(log.settings, App(name, source=name), 1)
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


def test_an_app_of_the_same_name_that_reads_another_topic_reads_that_one(
    log: Log, name: str, tmp_path: Path
) -> None:
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
def test_what_a_producer_sends_twice_runs_once(
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
        seat._seats.clear()
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
    runner = Runner(log, name, tmp_path, on_failure="block", flood=None)
    runner.app.observer = None
    done = runner.run()
    assert len(done) == 1_000_000
    offset, metadata = runner.committed()
    assert (offset, metadata) == (0, "kl1:@")
    seat._seats.clear()  # as after a crash
    began = time.monotonic()
    assert runner.run(run="r2") == [], "something ran again"
    took = time.monotonic() - began
    assert took < 20, "restoring, and reading over a million messages that are done"
    last = log.send(f"{name}.in", [{"key": b"new", "value": b"%d" % i} for i in range(3)])
    assert offsets(runner.run(run="r2")) == [one.offset for one in last]
    restored = [float(found[1]) for found in re.finditer(r"restored in ([\d.]+) s", caplog.text)]
    assert len(restored) == 3
    assert max(restored) < 5, restored
