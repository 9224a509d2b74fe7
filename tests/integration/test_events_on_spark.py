"""Handlers by event type and versions of entities, on Spark itself: planner, parcel, workers, outcome rows."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Retry, Transient, VersionOrdering
from keylane.testing import HistoryWriter
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.spark.query import LaneQuery
    from keylane.testing import Sent, Verdict
    from support.topics import Log

TYPES = {1: "Created", 2: "Changed", 3: "Changed", 4: "Seen", 5: "Changed", 6: "Closed"}
PRODUCTS = 60


@dataclass
class Change:
    version: int
    price: int


def catalogue(name: str, folder: Path) -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        unhandled="ignore",
        versions=VersionOrdering(wait=60.0),
        retry=Retry(wait_initial=0.01, wait_max=0.02),
        observer=HistoryWriter(folder / "history"),
    )

    @app.on("Created", "Closed")
    async def store(msg: Message) -> str:
        await asyncio.sleep(0.001)
        return f"{msg.type} {msg.version}"

    @app.on("Changed")
    async def price(event: Change, msg: Message) -> str:
        if event.version == 3 and msg.attempt == 1:
            raise Transient("busy")
        return f"price {event.version}"

    @app.on("Changed")
    def index(event: Change) -> str:
        return f"index {event.version}"

    return app


def message(product: int, version: int) -> dict[str, Any]:
    headers = [("event-type", TYPES[version].encode()), ("event-version", b"%d" % version)]
    value = json.dumps({"version": version, "price": product})
    return {"key": b"p%d" % product, "value": value, "headers": headers}


def results(log: Log, name: str) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for row in log.read(f"{name}.out"):
        found.setdefault(row.key or b"", []).append((row.value or b"").decode())
    return found


@pytest.mark.timeout(120)
def test_handlers_and_versions_survive_a_restart_on_spark(
    spark: SparkSession, broker: Broker, log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)

    def start(**more: Any) -> LaneQuery:
        return catalogue(name, tmp_path).start(
            spark,
            bootstrap=broker.bootstrap,
            format="parquet",
            path=str(tmp_path / "outcomes"),
            checkpoint_location=str(tmp_path / "checkpoint"),
            **more,
        )

    orders = list(itertools.islice(itertools.permutations(range(1, 7)), 0, 720, 720 // PRODUCTS))
    assert len(orders) == PRODUCTS
    by_turn = [[message(n, order[turn]) for n, order in enumerate(orders)] for turn in range(6)]
    first = [one for turn in by_turn[:3] for one in turn]
    ready = [0 for _ in orders]  # versions of each that can run with what came first
    for number, order in enumerate(orders):
        while ready[number] + 1 in order[:3]:
            ready[number] += 1
    per_version = {1: 1, 2: 2, 3: 2, 4: 0, 5: 2, 6: 1}  # results
    expected = sum(per_version[version] for most in ready for version in range(1, most + 1))
    assert 0 < sum(ready) < len(first), "some can run, some are early"

    sent = log.send(f"{name}.in", first)
    query = start()
    wait_until(lambda: log.count(f"{name}.out") >= expected or not query.isActive, 60, "what can run has run")
    query.stop()
    assert query.exception() is None
    assert query.drained
    assert log.count(f"{name}.out") == expected, "what is early has not run"

    again = [message(n, 2) for n in range(PRODUCTS)]  # stale when it comes, or the first of its version
    second = [one for turn in by_turn[3:] for one in turn] + again
    sent += log.send(f"{name}.in", second)
    query = start(available_now=True)
    assert query.awaitTermination(60)
    assert query.exception() is None

    rows = spark.read.parquet(str(tmp_path / "outcomes")).select("partition", "offset", "outcome").collect()
    became = {(row.partition, row.offset): row.outcome for row in rows}
    assert len(became) == len(rows) == len(sent) == 7 * PRODUCTS
    verdict = judge(
        sent,
        versions=versions_of(sent, first + second),
        stale={place for place, outcome in became.items() if outcome == "stale"},
    )
    assert verdict.repeats == 0
    assert verdict.counts.retried == PRODUCTS
    outcomes = [row.outcome for row in rows]
    assert (outcomes.count("ok"), outcomes.count("ignored"), outcomes.count("stale")) == (300, 60, 60)
    one = ["Created 1", "price 2", "index 2", "price 3", "index 3", "price 5", "index 5", "Closed 6"]
    found = results(log, name)
    assert len(found) == PRODUCTS
    assert all(written == one for written in found.values()), "each once, in the order of the versions"
    assert not log.lag(name, f"{name}.in")


def versions_of(sent: list[Sent], messages: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Messages of a key are in the log in the order in which they were sent."""
    left: dict[bytes, list[int]] = {}
    for one in messages:
        left.setdefault(one["key"], []).append(int(dict(one["headers"])["event-version"]))
    return {
        (one.partition, one.offset): left[one.key or b""].pop(0) for one in sorted(sent, key=lambda s: s[1:])
    }
