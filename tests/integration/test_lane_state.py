"""Lane state through real Kafka: real tasks without Spark, and workers that are killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane import App, Message, State, Timers
from keylane.cli.main import app as cli
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.slots import Slots
from keylane.testing import HistoryWriter
from keylane.worker import lane_values
from keylane.worker import session as worker_session
from support import counting
from support.counting import counting as make
from support.counting import counts_in_sink, folded, stored
from support.tasks import Runner
from support.topics import Log, at_work, kill, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Verdict

DELIVERIES = ["at_least_once", "exactly_once"]


def load(count: int, keys: int, begin: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (i * 7919 % keys), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(begin, begin + count)
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_values, "cache_folder", lambda: tmp_path / "cache")


def new_process() -> None:
    """What follows has no session of what was before: files and topics are all there is."""
    for session in worker_session._sessions.values():
        session.close()
    worker_session._sessions.clear()


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_state_continues_where_the_last_task_ended(
    log: Log, name: str, tmp_path: Path, delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    log.send(f"{name}.in", load(600, 40))
    runner = Runner(log, name, tmp_path, make(name, tmp_path, delivery=delivery))
    runner.run()
    log.send(f"{name}.in", load(600, 40, begin=600))
    runner.run()  # with the same session
    new_process()
    log.send(f"{name}.in", load(600, 40, begin=1200))
    runner.run(run="r2")
    assert stored(log, name) == folded(log.read(f"{name}.in"))
    assert all(
        counts == list(range(1, len(counts) + 1))
        for counts in counts_in_sink(log.read(f"{name}.out")).values()
    )


def test_state_is_restored_by_difference_and_without_its_file(
    log: Log, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    read: list[int] = []
    take = lane_values._Restore.take

    def counted(self: Any, *record: Any) -> None:
        read.append(1)
        take(self, *record)

    monkeypatch.setattr(lane_values._Restore, "take", counted)
    runner = Runner(log, name, tmp_path, make(name, tmp_path))
    log.send(f"{name}.in", load(500, 100))
    runner.run()
    new_process()
    log.send(f"{name}.in", load(50, 100, begin=500))
    runner.run(run="r2")
    assert not read, "the file has everything up to its offset"
    new_process()
    for file in (tmp_path / "cache").rglob("*.sqlite*"):
        file.unlink()
    log.send(f"{name}.in", load(50, 100, begin=550))
    runner.run(run="r3")
    assert len(read) >= 100
    assert stored(log, name) == folded(log.read(f"{name}.in"))


def test_command_line_shows_states_and_timers(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    app = reminding(name, tmp_path)
    log.send(f"{name}.in", [{"key": b"anna", "value": b"7"}, {"key": b"ben", "value": b"8"}])
    Runner(log, name, tmp_path, app).run()

    def told(*command: str) -> str:
        result = CliRunner().invoke(cli, ["state", *command, "--bootstrap", log.bootstrap])
        assert result.exit_code == 0, result.output
        return result.output

    assert told("get", name, "anna").startswith("last  7\ntimer remind  due 20")
    found = json.loads(told("get", name, "ben", "--json"))
    assert (found["states"], [timer["name"] for timer in found["timers"]]) == ({"last": 8}, ["remind"])
    assert sorted(told("list", name, "--state", "last").splitlines()) == ["anna  last  7", "ben  last  8"]
    assert len(told("list", name, "--timers", "--limit", "1").splitlines()) == 2
    assert "remembers nothing for key carl" in str(
        CliRunner().invoke(cli, ["state", "get", name, "carl", "--bootstrap", log.bootstrap]).exception
    )


def test_damaged_file_is_built_again(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, make(name, tmp_path))
    log.send(f"{name}.in", load(300, 50))
    runner.run()
    new_process()
    (file,) = (tmp_path / "cache").rglob("*.sqlite")
    file.write_bytes(b"not a database" * 1000)
    log.send(f"{name}.in", load(300, 50, begin=300))
    runner.run(run="r2")
    assert stored(log, name) == folded(log.read(f"{name}.in"))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_dead_task_leaves_state_and_progress_that_agree(
    log: Log, name: str, tmp_path: Path, delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    log.send(f"{name}.in", load(4000, 150))
    for calls in (900, 1300):
        died = subprocess.run(
            [sys.executable, counting.__file__, log.bootstrap, name, str(tmp_path), delivery, str(calls)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KEYLANE_CACHE": str(tmp_path / "cache")},
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert died.returncode == 9, died.stderr
    runner = Runner(log, name, tmp_path, make(name, tmp_path, delivery=delivery))
    runner.run(run="r2", starts={0: 0, 1: 0, 2: 0})
    assert stored(log, name) == folded(log.read(f"{name}.in"))
    for key, counts in counts_in_sink(log.read(f"{name}.out")).items():
        once = counts if delivery == "exactly_once" else sorted(set(counts))
        assert once == list(range(1, max(counts) + 1)), key


def test_state_follows_ranges_of_a_shared_partition(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, make(name, tmp_path))
    half = [Slots(0, 32767), Slots(32768, 65535)]
    plans = [
        Assignment(tuple((AssignedRange(0, slots),) for slots in half)),
        Assignment(((AssignedRange(0),),)),
        Assignment(((AssignedRange(0, Slots(0, 9999)),), (AssignedRange(0, Slots(10000, 65535)),))),
    ]
    for number, plan in enumerate(plans):
        log.send(f"{name}.in", load(400, 60, begin=400 * number))
        runner.run_plan(plan, run=f"r{number}")
        if number == 1:
            new_process()
    assert stored(log, name) == folded(log.read(f"{name}.in"))


def test_state_follows_its_keys_to_new_partitions(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    runner = Runner(log, name, tmp_path, make(name, tmp_path))
    log.send(f"{name}.in", load(800, 80))
    runner.run()
    new_process()
    log.create(f"{name}.in", f"{name}.dlq", f"{name}.lane-state", f"{name}.state", partitions=4)
    log._producer = None  # it does not know the new partitions
    log.send(f"{name}.in", load(800, 80, begin=800))
    runner.run(run="r2", starts=dict.fromkeys(range(4), 0) | runner.positions())
    counts = {key: list(range(1, 1 + state.count)) for key, state in folded_by_number(log, name).items()}
    in_order = {key: sorted(found) for key, found in counts_in_sink(log.read(f"{name}.out")).items()}
    assert in_order == counts, "every key goes on counting"


def folded_by_number(log: Log, name: str) -> dict[bytes, counting.Count]:
    rows = sorted(log.read(f"{name}.in"), key=lambda row: int(row.value or b""))
    found: dict[bytes, counting.Count] = {}
    for row in rows:
        if int(row.value or b"") % 100 != 42:
            found[row.key or b""] = found.get(row.key or b"", counting.Count()).add(int(row.value or b""))
    return found


def test_recreated_source_begins_without_state(
    log: Log, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, make(name, tmp_path))
    log.send(f"{name}.in", load(100, 10))
    runner.run()
    new_process()
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    caplog.set_level(logging.INFO)
    log.send(f"{name}.in", load(100, 10, begin=1000))
    runner.run(run="r2", starts={0: 0})
    assert stored(log, name) == folded(log.read(f"{name}.in"))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_killed_workers_leave_the_fold_of_each_keys_messages(
    log: Log,
    spark: SparkSession,
    broker: Broker,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    delivery: str,
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = make(name, tmp_path, delivery=delivery)
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=4)
    sent: list[Any] = []
    messages = load(20_000, 307)

    def offer() -> None:
        for at in range(0, len(messages), 100):
            sent.extend(log.send(f"{name}.in", messages[at : at + 100]))
            time.sleep(0.02)

    offering = threading.Thread(target=offer)
    offering.start()
    for number, enough in enumerate((2_000, 7_000, 12_000)):
        wait_until(lambda enough=enough: log.count(f"{name}.out") > enough, 60, "results come")  # type: ignore[misc]
        kill(at_work(tmp_path / "history", number))
    offering.join()
    wait_until(lambda: not log.lag(name, f"{name}.in"), 40, "everything is done")
    query.stop()
    assert query.exception() is None
    verdict = judge(sent, allow_repeats=3)
    assert verdict.repeats > 0, "nothing ran again: the kills hit nothing"
    assert stored(log, name) == folded(log.read(f"{name}.in"))
    if delivery == "exactly_once":
        for key, counts in counts_in_sink(log.read(f"{name}.out")).items():
            assert counts == list(range(1, len(counts) + 1)), f"counts of {key!r} have gaps or repeats"


def reminding(name: str, folder: Path, **settings: Any) -> App:
    """Reminds of the last number of each key after a while."""
    app = App(
        name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(folder / "history"), **settings
    )

    @app.stage
    async def note(msg: Message, last: State[int], timers: Timers) -> None:
        last.value = int(msg.value)
        timers.set("remind", after=3.0, value=last.value)

    @app.on_timer("remind")
    async def remind(msg: Message, last: State[int]) -> str:
        assert last.value == msg.value
        last.delete()
        return f"{msg.value}"

    return app


def values_left(log: Log, name: str) -> list[bytes | None]:
    """Keys of the lane state that have a value."""
    newest = {row.key: row.value for row in log.read(f"{name}.lane-state")}
    return [key for key, value in newest.items() if value is not None]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_timers_fire_although_workers_are_killed(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    query = reminding(name, tmp_path, delivery=delivery).start(spark, bootstrap=broker.bootstrap, epoch=4)
    messages = load(3_000, 500)
    for at in range(0, len(messages), 300):
        log.send(f"{name}.in", messages[at : at + 300])
        time.sleep(0.2)
    wait_until(lambda: log.count(f"{name}.out") > 20, 60, "timers fire")
    kill(at_work(tmp_path / "history", 0))
    last = {message["key"]: message["value"] for message in messages}
    wait_until(lambda: {row.key for row in log.read(f"{name}.out")} == set(last), 60, "all timers have fired")
    # With at_least_once a killed worker's timers fire again: wait until they are done, too.
    wait_until(lambda: not values_left(log, name), 60, "nothing is left")
    query.stop()
    assert query.exception() is None
    reminders = [(row.key, row.value) for row in log.read(f"{name}.out")]
    assert set(reminders) == set(last.items())
    if delivery == "exactly_once":
        assert len(reminders) == len(last), "each once"
    assert not values_left(log, name)
