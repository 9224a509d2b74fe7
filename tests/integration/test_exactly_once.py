"""``delivery="exactly_once"``, and two runs of one app, through real Kafka and real Spark."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry, Transient
from keylane.testing import HistoryWriter, Verdict, check_results
from support.topics import Log, at_work, ids, kill, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker


def payments(name: str, folder: Path, *, sleep: float = 0.0, **settings: Any) -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        retry=Retry(wait_initial=0.02, wait_max=0.1),
        observer=HistoryWriter(folder / "history"),
        **settings,
    )

    @app.stage
    async def pay(msg: Message) -> bytes:
        if sleep:
            await asyncio.sleep(sleep)
        number = int(msg.value)
        if number % 100 == 42:
            raise Poison("no such account")
        if number % 20 == 7 and msg.attempt == 1:
            raise Transient("not yet")
        return bytes(msg.value)

    return app


def load(count: int, keys: int) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (i * 7919 % keys), "value": b"%d" % i, "headers": [("event-id", b"e%d" % i)]}
        for i in range(count)
    ]


@pytest.mark.timeout(120)
def test_killed_workers_leave_results_and_letters_once(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = payments(name, tmp_path, delivery="exactly_once")
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=4)
    sent: list[Any] = []
    messages = load(30_000, 307)

    def offer() -> None:
        # Not in bursts: between two of them everything is committed, and a kill hits nothing.
        for at in range(0, len(messages), 100):
            sent.extend(log.send(f"{name}.in", messages[at : at + 100]))
            time.sleep(0.02)

    offering = threading.Thread(target=offer)
    offering.start()
    for number, enough in enumerate((4_000, 12_000, 20_000)):
        wait_until(lambda enough=enough: log.count(f"{name}.out") > enough, 60, "results come")  # type: ignore[misc]
        kill(at_work(tmp_path / "history", number))
    offering.join()
    wait_until(lambda: not log.lag(name, f"{name}.in"), 40, "everything is done")
    query.stop()
    assert query.exception() is None

    verdict = judge(sent, allow_repeats=3)
    assert verdict.repeats > 0, "nothing ran again: the kills hit nothing"
    source = log.read(f"{name}.in")
    dead = [row for row in source if int(row.value or b"") % 100 == 42]
    fine = [row for row in source if int(row.value or b"") % 100 != 42]
    check_results(ids(fine), ids(log.read(f"{name}.out"))).raise_if_bad()
    letters = sorted(row.header("event-id") or b"" for row in log.read(f"{name}.dlq"))
    assert letters == sorted(row.header("event-id") or b"" for row in dead)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_second_run_takes_over_and_the_first_one_ends(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    sent: list[Any] = []
    messages = load(12_000, 211)

    def offer() -> None:
        for at in range(0, len(messages), 400):
            sent.extend(log.send(f"{name}.in", messages[at : at + 400]))
            time.sleep(0.2)

    # A task each: both fit into Spark's two slots at the same time.
    first = payments(name, tmp_path, sleep=0.01).start(
        spark, bootstrap=broker.bootstrap, tasks=1, query_name=f"{name}-1"
    )
    offering = threading.Thread(target=offer)
    offering.start()
    wait_until(lambda: log.count(f"{name}.out") > 1000, 30, "the first one works")
    second = payments(name, tmp_path, sleep=0.01).start(
        spark, bootstrap=broker.bootstrap, tasks=1, query_name=f"{name}-2"
    )
    wait_until(lambda: not first.isActive, 30, "the first one has ended")
    assert "TakenOverError" in str(first.exception())
    assert f"app '{name}' was taken over by another run" in str(first.exception())
    offering.join()
    wait_until(lambda: not log.lag(name, f"{name}.in"), 40, "the second one did the rest")
    second.stop()
    assert second.exception() is None

    assert judge(sent).repeats == 0, "the first one had time to leave"
    fine = [row for row in log.read(f"{name}.in") if int(row.value or b"") % 100 != 42]
    check_results(ids(fine), ids(log.read(f"{name}.out"))).raise_if_bad()
