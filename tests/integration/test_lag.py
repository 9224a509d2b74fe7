"""`keylane lag` on a real broker: for a stuck app, for a working one, and for a group that belongs to no app."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition
from typer.testing import CliRunner

from keylane import App, Message, Poison, Telemetry
from keylane.cli.main import app as command
from keylane.state.topic import order_stop
from keylane.telemetry import lag_monitor as lag_monitor_module
from keylane.testing import HistoryWriter
from support.tasks import Runner
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from keylane.testing import Verdict
    from support.topics import Log


def lag(log: Log, *arguments: str, code: int) -> dict[str, Any]:
    done = CliRunner().invoke(
        command, ["lag", *arguments, "--json", "--bootstrap", log.bootstrap, "--over", "0.5"]
    )
    assert done.exit_code == code, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_lag_names_the_blocked_lane_of_a_stuck_app(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{name}.in"
    log.create(source, partitions=2)
    app = App(
        name,
        source=source,
        on_failure="block",
        observer=HistoryWriter(tmp_path / "history"),
        telemetry=Telemetry(interval=0.2),
        commit_interval=0.1,
    )

    @app.stage
    async def work(msg: Message) -> None:
        if msg.value == b"bad":
            raise Poison("bad")

    sent = log.send(
        source, [{"key": b"k%d" % (n % 8), "value": b"bad" if n == 20 else b"x"} for n in range(100)]
    )
    (stands,) = (one for one in sent if one.key == b"k4" and one.offset == _offset(log, source, b"bad"))
    runner = Runner(log, name, tmp_path, app=app)
    running = threading.Thread(target=runner.run, kwargs={"seconds": 30.0})
    running.start()
    try:
        left = log.cluster.ends(source, [0, 1])[stands.partition] - stands.offset
        wait_until(lambda: log.lag(name, source) == left, 20, "all is done but what stands behind it")
        found = lag(log, name, "--topic", source, code=3)
        (partition,) = (one for one in found["partitions"] if one["state"] == "stuck")
        assert partition["partition"] == stands.partition
        assert partition["oldest"]["offset"] == partition["committed"] == stands.offset
        assert partition["oldest"]["key"] == "k4"
        assert partition["why"][0].startswith(f"lane k4 blocked at offset {stands.offset} since ")
        assert found["tasks"] == 1
        (other,) = (one for one in found["partitions"] if one["state"] != "stuck")
        assert (other["state"], other["lag"]) == ("idle", 0)
    finally:
        order_stop(log.settings, app.spec.state, 2, "r1")
        running.join()
    monkeypatch.setattr(lag_monitor_module, "EPOCH_GAP_SECONDS", 0.0)
    found = lag(log, name, code=3)  # which topic it reads is in its telemetry
    assert found["topic"] == source
    assert found["why"][0].startswith("no task of the app is running")
    assert found["why"][1].startswith(f"lane k4 blocked at offset {stands.offset} since ")

    skip = ["lanes", "skip", name, "k4", "--wait", "0", "--bootstrap", log.bootstrap]
    assert CliRunner().invoke(command, skip).exit_code == 0
    runner.run("r2")
    judge(sent, finished=[(stands.partition, stands.offset)])
    found = lag(log, name, code=0)
    assert (found["state"], found["lag"]) == ("idle", 0)


def _offset(log: Log, source: str, value: bytes) -> int:
    (row,) = (row for row in log.read(source) if row.value == value)
    return row.offset


def test_lag_of_any_group_can_be_watched(log: Log, name: str) -> None:
    log.create(name, partitions=1)
    old = int((time.time() - 3600) * 1000)
    log.send(name, [{"key": b"k%d" % n, "value": b"x", "timestamp": old} for n in range(10)])
    consumer = Consumer({"bootstrap.servers": log.bootstrap, "group.id": f"{name}-group"})

    def commit(offset: int) -> None:
        consumer.commit(offsets=[TopicPartition(name, 0, offset)], asynchronous=False)

    try:
        commit(3)
        found = lag(log, "--group", f"{name}-group", "--topic", name, code=3)
        assert (found["lag"], found["state"]) == (7, "not running")
        assert found["why"] == ["the group has no consumer"]
        assert found["partitions"][0]["oldest"]["key"] == "k3"
        assert 3590 < found["partitions"][0]["oldest"]["age_seconds"] < 3700
        commit(10)
    finally:
        consumer.close()
    found = lag(log, "--group", f"{name}-group", "--topic", name, code=0)
    assert (found["lag"], found["state"], found["why"]) == (0, "idle", [])


def test_slow_app_with_global_order_is_not_stuck(log: Log, name: str, tmp_path: Path) -> None:
    """One message at a time over three partitions: in every measurement two of them do not move."""
    source = f"{name}.in"
    log.create(source, partitions=3)
    app = App(name, source=source, order="global", on_failure="block", telemetry=Telemetry(interval=0.2))

    @app.stage
    async def work(_msg: Message) -> None:
        await asyncio.sleep(0.7)

    old = int((time.time() - 3600) * 1000)
    log.send(source, [{"key": b"k%d" % n, "value": b"x", "timestamp": old} for n in range(300)])
    running = threading.Thread(target=Runner(log, name, tmp_path, app=app).run, kwargs={"seconds": 20.0})
    running.start()
    try:
        wait_until(lambda: log.lag(name, source) <= 299, 20, "it works")
        for _ in range(2):
            found = lag(log, name, "--topic", source, code=0)
            assert (found["state"], found["tasks"]) == ("catching up", 1)
            assert not any("key" in why for one in found["partitions"] for why in one["why"]), found
    finally:
        order_stop(log.settings, app.spec.state, 3, "r1")
        running.join()


def test_parked_lane_is_in_the_lag_of_an_idle_app(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    runner = Runner(log, name, tmp_path, on_failure="park")
    log.send(f"{name}.in", [{"key": b"k", "value": b"%d%s" % (n, b"!" * (n == 3))} for n in range(6)])
    runner.run()
    found = lag(log, name, "--topic", f"{name}.in", code=0)
    assert (found["state"], found["lag"]) == ("idle", 0)
    assert (found["lanes"], found["dead_letters"]) == ({"blocked": 0, "parked": 1}, 3)


def test_app_that_never_ran_is_reported(log: Log, name: str) -> None:
    done = CliRunner().invoke(command, ["lag", name, "--bootstrap", log.bootstrap])
    assert done.exit_code == 1  # main() makes it 2, with a sentence
    assert f"app {name!r} never ran" in str(done.exception)
