"""Results and letters that the broker rejects, and clients that still hold some when their task ends; no Spark."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Ledger, Message, Poison, Publisher
from keylane.demo.seed import SeedLoad, Target, send
from keylane.kafka.cluster import Cluster
from keylane.state.admin import AdminClient, new_command
from support.tasks import Runner, note_plan
from support.topics import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from support.topics import Log, Row

pytestmark = pytest.mark.timeout(120)

BOTH = pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])


def copying(name: str, **settings: Any) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out", **settings)

    @app.stage
    async def work(msg: Message) -> bytes:
        return b"small" if msg.value == b"headers" else bytes(msg.value)

    return app


def noise(number: int, size: int) -> bytes:
    """A value that no compression makes smaller, and that begins with its number."""
    return b"%05d:" % number + os.urandom(size)


def by_key(rows: list[Row]) -> dict[bytes | None, list[bytes | None]]:
    found: dict[bytes | None, list[bytes | None]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row.value)
    return found


@pytest.fixture
def unknown_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the settings of topics may not be read: what they take is known from the broker's answers alone."""
    monkeypatch.setattr(Cluster, "rules", lambda *_: {})


@BOTH
def test_results_fit_a_sink_with_a_small_limit(log: Log, name: str, tmp_path: Path, delivery: str) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, max_message_bytes="100000")
    sent = [{"key": b"k%d" % (n % 50), "value": noise(n, 1000)} for n in range(1500)]
    log.send(f"{name}.in", sent)
    Runner(log, name, tmp_path, copying(name, delivery=delivery)).run()
    assert by_key(log.read(f"{name}.out")) == {
        b"k%d" % k: [each["value"] for each in sent[k::50]] for k in range(50)
    }


def test_a_publisher_fits_a_topic_with_a_small_limit(log: Log, name: str) -> None:
    log.create(name, partitions=1, max_message_bytes="100000")
    with Publisher(name, bootstrap=log.bootstrap) as publisher:
        for number in range(1000):
            publisher.send(noise(number, 1000), key=f"k{number % 50}")
    assert log.count(name) == 1000


def test_commands_fit_a_state_topic_with_a_small_limit(log: Log, name: str) -> None:
    app = copying(name)
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.cluster.prepare(app.spec)
    log.alter(app.spec.state, max_message_bytes="20000")
    note_plan(log, app)
    commands = [new_command("redrive", partition=0, key=os.urandom(100)) for _ in range(1000)]
    with AdminClient(log.settings, name) as operator:
        operator.give(commands)
        ids = {each.id for each in commands}
        wait_until(
            lambda: {each.id for each in operator.open_commands()} == ids, 20, "all commands are there"
        )


def test_a_seed_fits_a_topic_with_a_small_limit(log: Log, name: str) -> None:
    log.create(name, partitions=1, max_message_bytes="5000")
    send(SeedLoad(messages=20_000, keys=50, value_size=100), Target(topic=name, bootstrap=log.bootstrap))
    assert log.count(name) == 20_000


@BOTH
def test_a_result_with_large_headers_fails_alone(log: Log, name: str, tmp_path: Path, delivery: str) -> None:
    log.create(f"{name}.in", partitions=1, max_message_bytes="3000000")
    log.create(f"{name}.out", partitions=1)
    large = [("trace", os.urandom(1_500_000))]
    log.send(
        f"{name}.in",
        [
            {"key": b"k", "value": b"a"},
            {"key": b"k", "value": b"headers", "headers": large},
            {"key": b"k", "value": b"b"},
            {"key": b"other", "value": b"c"},
        ],
    )
    Runner(log, name, tmp_path, copying(name, delivery=delivery)).run()
    assert by_key(log.read(f"{name}.out")) == {b"k": [b"a", b"b"], b"other": [b"c"]}
    assert [row.value for row in log.read(f"{name}.dlq")] == [b"headers"]


@BOTH
def test_a_result_with_a_time_the_sink_rejects_fails(
    log: Log, name: str, tmp_path: Path, delivery: str
) -> None:
    log.create(f"{name}.in", partitions=1, message_timestamp_after_max_ms=str(1 << 60))
    log.create(f"{name}.out", partitions=1)
    day = int(time.time() * 1000) + 86_400_000
    log.send(
        f"{name}.in",
        [
            {"key": b"k", "value": b"1"},
            {"key": b"k", "value": b"2", "timestamp": day},
            {"key": b"k", "value": b"3"},
        ],
    )
    Runner(log, name, tmp_path, copying(name, delivery=delivery)).run()
    assert by_key(log.read(f"{name}.out")) == {b"k": [b"1", b"3"]}
    assert [row.value for row in log.read(f"{name}.dlq")] == [b"2"]


@BOTH
@pytest.mark.usefixtures("unknown_rules")
def test_one_rejected_result_fails_no_other(log: Log, name: str, tmp_path: Path, delivery: str) -> None:
    """Batches of 1 MB are rejected as a whole; in them two messages are rejected for themselves."""
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, max_message_bytes="20000")
    sent = [
        {"key": b"k%d" % (n % 5), "value": noise(n, 30_000 if n in (60, 90) else 500)} for n in range(200)
    ]
    log.send(f"{name}.in", sent)
    runner = Runner(log, name, tmp_path, copying(name, delivery=delivery))
    runner.run(sink_limit=10_000_000)
    rejected = {sent[60]["value"], sent[90]["value"]}
    assert {row.value for row in log.read(f"{name}.dlq")} == rejected
    assert by_key(log.read(f"{name}.out")) == {
        b"k%d" % k: [each["value"] for each in sent[k::5] if each["value"] not in rejected] for k in range(5)
    }
    assert log.lag(name, f"{name}.in") == 0


@BOTH
@pytest.mark.usefixtures("unknown_rules")
def test_nothing_passes_a_rejected_result_of_its_lane(
    log: Log, name: str, tmp_path: Path, delivery: str
) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, max_message_bytes="20000")
    sent = [{"key": b"k%d" % (n % 2), "value": noise(n, 30_000 if n == 40 else 500)} for n in range(100)]
    log.send(f"{name}.in", sent)
    runner = Runner(log, name, tmp_path, copying(name, delivery=delivery, on_failure="block"))
    runner.run(sink_limit=10_000_000)
    values = [each["value"] for each in sent]
    assert by_key(log.read(f"{name}.out")) == {b"k0": values[:40:2], b"k1": values[1::2]}


@pytest.mark.parametrize("limit", ["", "10000"], ids=["as created", "small"])
def test_a_large_key_fits_the_ledger_or_is_left_out(log: Log, name: str, tmp_path: Path, limit: str) -> None:
    """Its record has the message's key. A ledger that somebody else created may take less than the source."""
    log.create(f"{name}.in", partitions=1, max_message_bytes="3000000")
    if limit:
        log.create(f"{name}.ledger", partitions=1, max_message_bytes=limit)
    app = App(name, source=f"{name}.in", ledger=Ledger())

    @app.stage
    async def work(msg: Message) -> None:
        """Only the ledger is looked at."""

    log.send(f"{name}.in", [{"key": key, "value": b"v"} for key in (b"a", os.urandom(1_500_000), b"b")])
    Runner(log, name, tmp_path, app).run()
    assert log.lag(name, f"{name}.in") == 0
    assert [len(row.key or b"") for row in log.read(f"{name}.ledger")] == (
        [1, 1] if limit else [1, 1_500_000, 1]
    )


def test_a_keyless_result_for_a_compacted_sink_fails(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, cleanup_policy="compact")
    sent = [{"key": None if n == 30 else b"k", "value": b"%d" % n} for n in range(60)]
    log.send(f"{name}.in", sent)
    Runner(log, name, tmp_path, copying(name)).run()
    assert by_key(log.read(f"{name}.out")) == {b"k": [b"%d" % n for n in range(60) if n != 30]}
    assert [row.value for row in log.read(f"{name}.dlq")] == [b"30"]


def test_no_result_is_written_after_its_task_has_ended(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, copying(name, drain_timeout=1.0))
    with ThreadPoolExecutor(1) as pool:
        log.send(f"{name}.in", [{"key": b"k", "value": b"%d" % n} for n in range(3)])
        running = pool.submit(runner.run, seconds=6)
        wait_until(lambda: log.count(f"{name}.out") == 3, 20, "the first three are written")
        log.delete(f"{name}.out")
        log.send(f"{name}.in", [{"key": b"k", "value": b"%d" % n} for n in range(3, 6)])
        running.result(60)
    log.create(f"{name}.out", partitions=1)
    time.sleep(4)  # the client would find the new topic within a second
    assert log.count(f"{name}.out") == 0
    runner.run()
    assert by_key(log.read(f"{name}.out")) == {b"k": [b"3", b"4", b"5"]}


def test_a_letter_answered_late_does_no_harm(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    app = App(name, source=f"{name}.in", on_failure="park", drain_timeout=1.0)

    @app.stage
    async def work(_msg: Message) -> None:
        raise Poison("bad")

    runner = Runner(log, name, tmp_path, app)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, seconds=5)
        wait_until(lambda: f"{name}.dlq" in log.cluster.topics(), 20, "it begins")
        time.sleep(1.5)
        log.delete(f"{name}.dlq")
        log.send(f"{name}.in", [{"key": b"bad", "value": b"1"}])
        running.result(60)
    runner.run(seconds=5)  # makes the topic again
    wait_until(lambda: log.count(f"{name}.dlq") == 1, 10, "the letter is there")
    runner.run(seconds=3)
