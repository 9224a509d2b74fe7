"""More tasks than partitions, and partitions that are added while messages flow, through real Kafka and real Spark."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane import App, Message, Retry, Transient
from keylane.cli.main import app as cli
from keylane.testing import HistoryWriter, check_results, read_history
from support.topics import Log, ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Sent, Verdict


def app_of(name: str, history: Path) -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        retry=Retry(wait_initial=0.05),
        observer=HistoryWriter(history),
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(0.005)
        if msg.attempt == 1 and int(msg.value) % 20 == 3:
            raise Transient("not yet")
        return bytes(msg.value)

    return app


def load(numbers: range) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (n * n % 97), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}
        for n in numbers
    ]


@pytest.mark.timeout(90)
def test_one_partition_is_shared_by_two_tasks(
    log: Log, broker: Broker, spark: SparkSession, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    sent = log.send(f"{name}.in", load(range(4000)))
    query = app_of(name, tmp_path / "history").start(spark, bootstrap=broker.bootstrap)
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 60, "all is done")
    query.stop()
    assert query.exception() is None
    verdict = judge(sent)
    assert verdict.repeats == 0
    told = CliRunner().invoke(cli, ["plan", name, "--bootstrap", broker.bootstrap, "--json"])
    assert [
        [(r["partition"], r["first"], r["last"]) for r in task] for task in json.loads(told.stdout)["tasks"]
    ] == [
        [(0, 0, 32767)],
        [(0, 32768, 65535)],
    ]
    told = CliRunner().invoke(cli, ["plan", name, "--bootstrap", broker.bootstrap, "--tasks", "1"])
    assert "task 0: partition 0\n" in told.stdout
    by_owner: defaultdict[str, set[bytes | None]] = defaultdict(set)
    for event in read_history(tmp_path / "history").events:
        by_owner[event.owner].add(event.key)
    (one, keys), (other, more) = by_owner.items()
    assert one != other
    assert not keys & more, "a key was run by both"
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()


@pytest.mark.timeout(120)
def test_keys_that_move_to_new_partitions_keep_their_order(
    log: Log, broker: Broker, spark: SparkSession, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=4)
    sent: list[Sent] = []
    query = app_of(name, tmp_path / "history").start(spark, bootstrap=broker.bootstrap, epoch=300)

    def offer(writer: Log, numbers: range) -> None:
        for at in range(numbers.start, numbers.stop, 200):
            sent.extend(writer.send(f"{name}.in", load(range(at, at + 200))))
            time.sleep(0.05)

    offer(log, range(6000))
    log.create(
        f"{name}.in", partitions=8
    )  # a multiple: no key moves between partitions that are read already
    # A writer that knows the new partitions, as all of them must before they write on.
    offering = threading.Thread(target=offer, args=(Log(broker.bootstrap), range(6000, 12_000)))
    offering.start()
    offering.join()
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 60, "all is done")
    query.stop()
    assert query.exception() is None
    assert judge(sent).repeats == 0
    first: dict[tuple[bytes | None, int], int] = {}
    last: dict[tuple[bytes | None, int], int] = {}
    for event in read_history(tmp_path / "history").events:
        place = event.key, event.partition
        first.setdefault(place, event.seq)
        last[place] = event.seq
    moved = 0
    for (key, partition), began in first.items():
        for (other, before), ended in last.items():
            if key == other and before < 4 <= partition:
                moved += 1
                assert ended < began, f"{key!r} ran in partition {partition} before it was done in {before}"
    assert moved > 10
    check_results(sorted(ids(log.read(f"{name}.in"))), sorted(ids(log.read(f"{name}.out")))).raise_if_bad()
