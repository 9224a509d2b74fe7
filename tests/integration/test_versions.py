"""Versions of entities through real Kafka: real tasks, one after another, without Spark."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Outcome, VersionOrdering
from keylane.engine.version_store import VersionStore
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.policies.versions import VersionMark
from keylane.state.admin import AdminClient, new_command
from keylane.state.labels import Labels
from keylane.state.topic import VERSION, StateTopic
from keylane.worker import session as worker_session
from support import products
from support.products import product
from support.tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.testing import Sent, Verdict
    from support.topics import Log


def message(key: bytes, version: int) -> dict[str, Any]:
    return {"key": key, "value": b"%d" % version, "headers": [("event-version", b"%d" % version)]}


def versions_of(sent: list[Sent], messages: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Messages of a key come back in the order in which they were sent."""
    left: dict[bytes, list[int]] = {}
    for one in messages:
        left.setdefault(one["key"], []).append(int(one["value"]))
    return {
        (one.partition, one.offset): left[one.key or b""].pop(0) for one in sorted(sent, key=lambda s: s[1:])
    }


def states(log: Log, name: str) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for row in log.read(f"{name}.out"):
        found.setdefault(row.key or b"", []).append(int(row.value or b""))
    return found


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_six_updates_in_any_order_end_in_the_newest_state(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    orders = list(itertools.permutations(range(1, 7)))
    assert len(orders) == 720
    by_round = [[message(b"p%d" % n, order[turn]) for n, order in enumerate(orders)] for turn in range(6)]
    first = [one for turn in by_round[:3] for one in turn]
    second = [one for turn in by_round[3:] for one in turn]

    sent = log.send(f"{name}.in", first)
    runner = Runner(log, name, tmp_path, product(name, tmp_path, delivery=delivery))
    runner.run(seconds=3)  # the epoch ends, and what is held is not waited for
    held = 3 * 720 - len(runner.became)
    assert held > 500, "what is early is not done"
    assert log.lag(name, f"{name}.in") > 0
    worker_session._sessions.clear()  # another process continues

    sent += log.send(f"{name}.in", second)
    runner.app = product(name, tmp_path, delivery=delivery, owner="next")
    runner.run(run="r2")
    verdict = judge(
        sent,
        versions=versions_of(sent, first + second),
        stale={place for place, outcome in runner.became.items() if outcome == Outcome.STALE},
    )
    assert verdict.repeats == 0
    found = states(log, name)
    assert len(found) == 720
    assert all(applied == [1, 2, 3, 4, 5, 6] for applied in found.values()), "each once, and in order"
    assert not log.lag(name, f"{name}.in")
    assert set(runner.outcomes) == {Outcome.OK}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_dead_task_forgets_and_repeats_no_version(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    messages = [message(b"p%d" % n, version) for version in (2, 1, 4, 3, 6, 5) for n in range(400)]
    sent = log.send(f"{name}.in", messages)
    arguments = [log.bootstrap, name, str(tmp_path), delivery, "1500"]
    died = subprocess.run(
        [sys.executable, products.__file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert died.returncode == 9, died.stderr

    more = [message(b"p%d" % n, version) for n in range(400) for version in (3, 6)]  # repeated: stale
    sent += log.send(f"{name}.in", more)
    runner = Runner(log, name, tmp_path, product(name, tmp_path, delivery=delivery, owner="next"))
    # Not from the group: the dead task's offsets are in doubt until it is fenced, and are not readable before.
    runner.run(run="r2", starts={0: 0, 1: 0, 2: 0})
    verdict = judge(
        sent,
        versions=versions_of(sent, messages + more),
        stale={place for place, outcome in runner.became.items() if outcome == Outcome.STALE},
        allow_repeats=1,
    )
    assert verdict.counts.owners == 2
    found = states(log, name)
    assert len(found) == 400
    assert all(list(dict.fromkeys(applied)) == [1, 2, 3, 4, 5, 6] for applied in found.values())
    if delivery == "exactly_once":
        assert [applied for applied in found.values() if len(applied) > 6] == [], "every version once"
    assert not log.lag(name, f"{name}.in")


@pytest.mark.parametrize("first", [1, None])
def test_a_group_that_was_moved_back_takes_the_versions_along(
    log: Log, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int | None
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [message(b"a", version) for version in (1, 2, 3, 4)])
    runner = Runner(
        log, name, tmp_path, product(name, tmp_path, versions=VersionOrdering(first=first, wait=3.0))
    )
    assert len(runner.run()) == 4
    runner.move(2)
    worker_session._sessions.clear()
    caplog.set_level(logging.INFO)
    assert len(runner.run(run="r2")) == 2
    assert states(log, name) == {b"a": [1, 2, 3, 4, 3, 4]}, "they run again, and are not stale"
    assert "entities are set back partition=0 count=1" in caplog.text
    log.send(f"{name}.in", [message(b"a", version) for version in (2, 4, 5)])
    runner.run(run="r2")
    assert states(log, name)[b"a"] == [1, 2, 3, 4, 3, 4, 5]


def test_operator_says_which_version_is_next(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [message(b"a", version) for version in (1, 2, 7, 3)])
    runner = Runner(log, name, tmp_path, product(name, tmp_path, versions=VersionOrdering(wait=600.0)))
    runner.run(seconds=2)
    assert states(log, name) == {b"a": [1, 2, 3]}
    with AdminClient(log.settings, name, versions=True) as operator:
        assert operator.marks(b"a")[0].facts()["next"] == 4
        order = new_command("reset", partition=0, key=b"a", to=6)
        operator.give([order])
        runner.run(seconds=3)
        assert operator.wait([order], timeout=5).answers[order.id].ok
        assert operator.marks(b"a")[0].facts()["next"] == 8
    assert states(log, name) == {b"a": [1, 2, 3, 7]}, "what waited is next"
    log.send(f"{name}.in", [message(b"a", version) for version in (4, 8)])
    worker_session._sessions.clear()
    runner.run(run="r2")
    assert states(log, name) == {b"a": [1, 2, 3, 7, 8]}, "what is below it is stale"


def test_versions_move_with_their_key_to_added_partitions(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    keys = [b"p%d" % n for n in range(20)]
    log.send(f"{name}.in", [message(key, version) for version in (1, 2, 3) for key in keys])
    runner = Runner(log, name, tmp_path, product(name, tmp_path, versions=VersionOrdering(wait=3.0)))
    runner.run()
    for topic in ("in", "dlq", "state"):  # as the planner does, when the old partitions are worked off
        log.cluster.ensure(f"{name}.{topic}", 3, {})
    worker_session._sessions.clear()
    for version in (4, 5):  # the second time each task reads its own partition of the state topic only
        log.send(f"{name}.in", [message(key, v) for v in (2, version) for key in keys])
        runner.run_plan(
            Assignment(((AssignedRange(0),), (AssignedRange(1), AssignedRange(2)))), run=f"r{version}"
        )
        worker_session._sessions.clear()
    assert states(log, name) == {key: [1, 2, 3, 4, 5] for key in keys}
    assert runner.outcomes.count(Outcome.STALE) == 40
    assert log.read(f"{name}.dlq") == []


def test_versions_follow_their_partition_between_tasks(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    runner = Runner(log, name, tmp_path, product(name, tmp_path))
    for turn in range(5):
        low = turn * 2
        messages = [message(b"p%d" % n, v) for v in (low + 2, low + 1, low) for n in range(50) if v]
        log.send(f"{name}.in", messages)
        if turn == 3:
            worker_session._sessions.clear()
        runner.run(run="r1" if turn < 4 else "r2")
    found = states(log, name)
    assert len(found) == 50
    assert all(applied == list(range(1, 11)) for applied in found.values())
    assert runner.outcomes.count(Outcome.STALE) == 4 * 50


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_million_entities_restore_in_bounded_time_and_memory(
    log: Log, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    log.send(f"{name}.in", [message(b"p%d" % n, 1) for n in range(100)])
    runner = Runner(log, name, tmp_path, product(name, tmp_path))
    runner.run()
    labels = Labels(log.cluster.identity(f"{name}.in", f"{name}.dlq"))
    about: Any = labels.of(VERSION)
    producer = log.settings.producer(**{"queue.buffering.max.messages": 2_000_000})
    for n in range(1_000_000):
        producer.produce(
            f"{name}.state", b"7 7 0 0 7:0 - -", b"version/customer-%012d" % n, n % 2, headers=about
        )
        if n % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0
    worker_session._sessions.clear()
    before = _resident()
    began = time.monotonic()
    state = StateTopic(
        log.settings, name, f"{name}.state", [0, 1], "r", versions=VersionStore(), labels=labels
    )
    state.restore()
    took = time.monotonic() - began
    state.close()
    store = state.versions
    assert store is not None
    assert store.get((1, b"customer-%012d" % 999_999)) == VersionMark(7, 7, 0, 0, b"7:0")
    grew = _resident() - before
    began = time.monotonic()
    for n in range(0, 1_000_000, 50):
        store.get((n % 2, b"customer-%012d" % n))
    each = (time.monotonic() - began) / 20_000
    with capsys.disabled():
        sys.stdout.write(f"\nrestored in {took:.1f} s, {grew / 1e6:.0f} MB, {each * 1e6:.1f} us a look\n")
    assert took < 30
    assert grew < 150e6


def _resident() -> int:
    """Bytes of memory that this process uses; 0 where the system does not say."""
    where = Path("/proc/self/statm")
    return int(where.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if where.exists() else 0
