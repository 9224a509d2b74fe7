"""Apps in a chain, joined by topics: what holds from the first to the last, and what travels along."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Outcome, Retry, Transient
from keylane.broker import Broker
from keylane.testing import HistoryWriter, Sent, check, check_results, read_history
from support.tasks import Runner
from support.topics import Log, Running, wait_until

if TYPE_CHECKING:
    from support.topics import Row

EXAMPLES = Path(__file__).parents[2] / "examples"
APPS_COUNT = 4
MESSAGES, KEYS = 1_000, 50
TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-%016x-01"


def topic(name: str, hop: int) -> str:
    return f"{name}.{hop}"


def link(name: str, hop: int, folder: Path, **settings: Any) -> App:
    """One of the apps; each fails at first for other messages."""
    app = App(
        f"{name}-{hop}",
        source=topic(name, hop),
        sink=topic(name, hop + 1),
        retry=Retry(wait_initial=0.005, wait_max=0.01),
        observer=HistoryWriter(folder / f"history-{hop}"),
        **settings,
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        if int(msg.value) % 20 == hop and msg.attempt == 1:
            raise Transient("not yet")
        assert msg.trace == {"traceparent": (TRACE % int(msg.value)).decode(), "tracestate": "a=1,b=2"}
        assert msg.origin_time == 1_700_000_000_000 + int(msg.value)
        return bytes(msg.value)

    return app


def load() -> list[dict[str, Any]]:
    return [
        {
            "key": b"k%d" % (n * 7 % KEYS),
            "value": b"%d" % n,
            "headers": [("traceparent", TRACE % n), ("tracestate", b"a=1"), ("tracestate", b"b=2")],
            "timestamp": 1_700_000_000_000 + n,
        }
        for n in range(MESSAGES)
    ]


def places(rows: list[Row]) -> list[Sent]:
    return [Sent(row.key, row.partition, row.offset) for row in rows]


@pytest.mark.parametrize("delivery", ["at_least_once", pytest.param("exactly_once", marks=pytest.mark.slow)])
def test_chain_keeps_order_ids_traces_and_origin_times(
    log: Log, name: str, tmp_path: Path, delivery: str
) -> None:
    for hop in range(APPS_COUNT + 1):  # the third of them gives records its own time
        stamps = {"message_timestamp_type": "LogAppendTime"} if hop == 2 else {}
        log.create(topic(name, hop), partitions=3, retention_ms="-1", **stamps)
    log.send(topic(name, 0), load())
    for hop in range(APPS_COUNT):
        runner = Runner(
            log,
            f"{name}-{hop}",
            tmp_path,
            link(name, hop, tmp_path, delivery=delivery, origin_time=None if hop < 3 else True),
            source=topic(name, hop),
        )
        runner.run()
        assert runner.outcomes == [Outcome.OK] * MESSAGES
        verdict = check(read_history(tmp_path / f"history-{hop}"), sent=places(log.read(topic(name, hop))))
        verdict.raise_if_bad()
        assert verdict.counts.retried == MESSAGES // 20

    rows, origin = log.read(topic(name, APPS_COUNT)), log.read(topic(name, 0))
    apps = "/".join(f"{name}-{hop}" for hop in reversed(range(APPS_COUNT)))
    source = f"{log.cluster.identity(topic(name, 0)).source.id}/{topic(name, 0)}"
    first = {row.value: f"{apps}/{source}/{row.partition}/{row.offset}".encode() for row in origin}
    given = [(row.key, first[row.value]) for row in origin]
    check_results(given, [(row.key, row.header("event-id")) for row in rows]).raise_if_bad()
    for row in rows:
        number = int(row.value or b"")
        names = [header for header, _ in row.headers]
        assert sorted(names) == ["event-id", "origin-time", "traceparent", "tracestate", "tracestate"]
        assert row.header("event-id") == first[row.value], "its first position, and the apps it came through"
        assert row.header("traceparent") == TRACE % number
        assert row.header("origin-time") == b"%d" % (1_700_000_000_000 + number)
    middle = log.read(topic(name, 1))
    assert all(row.header("origin-time") is None for row in middle), "the timestamp says it"
    assert {row.timestamp for row in middle} == {1_700_000_000_000 + n for n in range(MESSAGES)}


def test_results_repeated_after_a_crash_run_once_in_the_next_app(log: Log, name: str, tmp_path: Path) -> None:
    for hop in range(3):
        log.create(topic(name, hop), partitions=1, retention_ms="-1")
    log.send(topic(name, 0), load())
    one = Runner(log, f"{name}-0", tmp_path, link(name, 0, tmp_path), source=topic(name, 0))
    two = Runner(log, f"{name}-1", tmp_path, link(name, 1, tmp_path), source=topic(name, 1))
    one.run()
    two.run()
    one.move(400)  # as if it had crashed before its last commit
    one.run("r2")
    assert log.count(topic(name, 1)) == MESSAGES + 600
    two.run("r2")
    assert two.outcomes.count(Outcome.DUPLICATE) == 600
    given, came = ([(row.key, row.value) for row in log.read(topic(name, hop))] for hop in (0, 2))
    check_results(given, came).raise_if_bad()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_runs_by_one_command(broker: Broker) -> None:
    told = subprocess.run(
        [sys.executable, "chain.py", "--messages", "400", "--rate", "400"],
        cwd=EXAMPLES,
        env={**os.environ, "KEYLANE_BOOTSTRAP": broker.bootstrap},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "400 of 400 orders through four apps, each customer's in order: yes" in told.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_runs_as_four_processes(tmp_path: Path) -> None:
    """With a broker of its own: its topics have the same names as in the other test."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        chain: Any = importlib.import_module("chain")
    finally:
        sys.path.remove(str(EXAMPLES))
    with Broker() as broker, ExitStack() as stack:
        log = Log(broker.bootstrap)
        for one in chain.TOPICS:
            log.create(one, partitions=chain.PARTITIONS)
        apps = [
            stack.enter_context(
                Running(
                    EXAMPLES,
                    f"chain:{app}",
                    *("--bootstrap", broker.bootstrap, "--master", "local[1]"),
                    KEYLANE_STATE=str(tmp_path / app),
                )
            )
            for app in ("check", "price", "charge", "ship")
        ]
        sent = chain.publish(broker.bootstrap, 500, 500)
        wait_until(lambda: log.count(chain.TOPICS[-1]) >= 500, 120, "all orders are shipped")
        assert chain.judge(sent, chain.read(broker.bootstrap, 500)) == []
        for app in apps:
            app.send(15)
        for app in apps:
            code, _ = app.ends(60)
            assert code == 0
