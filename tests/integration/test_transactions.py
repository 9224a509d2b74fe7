"""Transactions that are aborted: nothing of them is left, and their messages run again in order. Without Spark."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from keylane.errors import AbortedError
from keylane.kafka.transactions import Transactions
from keylane.testing import Verdict, check_results
from support import ids, wait_until
from tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support import Log


def events(count: int, *, poison: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    return [
        {
            "key": b"k%d" % (i % 7),
            "value": b"%d%s" % (i, b"!" if i in poison else b""),
            "headers": [("event-id", b"e%d" % i)],
        }
        for i in range(count)
    ]


def fine(log: Log, topic: str) -> list[Any]:
    return [row for row in log.read(topic) if not (row.value or b"").endswith(b"!")]


def test_a_letter_that_its_topic_refuses_goes_to_the_spool_and_nothing_is_there_twice(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    log.create(f"{name}.dlq", partitions=2, max_message_bytes="300")  # smaller than any letter
    sent = log.send(f"{name}.in", events(200, poison=(50, 120)))
    runner = Runner(
        log, name, tmp_path, sink=f"{name}.out", delivery="exactly_once", spool=tmp_path / "spool"
    )
    assert len(runner.run()) == 200
    assert "its messages run again, in order" in caplog.text, (
        "no transaction was aborted: this proves nothing"
    )
    judge(sent, allow_repeats=5)
    check_results(ids(fine(log, f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    assert not log.read(f"{name}.dlq")
    log.alter(f"{name}.dlq", max_message_bytes="1000000")
    log.send(f"{name}.in", events(1))
    runner.run()

    def shipped() -> bool:
        runner.run()  # one that ends while it ships gives up, and the next ships again: so a letter may come twice
        return {row.header("event-id") for row in log.read(f"{name}.dlq")} == {b"e120", b"e50"}

    wait_until(shipped, 20, "the spool was shipped")


def test_a_result_that_the_sink_refuses_for_ever_ends_the_task_and_leaves_nothing(
    log: Log, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, max_message_bytes="200")
    log.send(f"{name}.in", [*events(20), {"key": b"k1", "value": b"x" * 5000}])
    runner = Runner(log, name, tmp_path, sink=f"{name}.out", delivery="exactly_once", commit_interval=5.0)
    with pytest.raises(AbortedError, match="was not taken"):
        runner.run(sink_limit=1_000_000)
    assert not log.read(f"{name}.out"), "all of it was in one transaction"
    assert runner.positions() == {0: 0}


@pytest.mark.parametrize("seed", range(4))
def test_commits_that_get_lost_now_and_then_leave_every_result_once(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    """Every so often a transaction is aborted instead of committed."""
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    sent = log.send(f"{name}.in", events(4_000, poison=tuple(range(99, 4_000, 300))))
    count = 0
    lock = threading.Lock()
    insist = Transactions._insist

    def unlucky(self: Transactions, call: Callable[[], None], deadline: float, *, again: bool) -> None:
        nonlocal count
        with lock:
            count += 1
            lost = count % 9 == 5 + seed % 3
        if lost:
            self.abort()
            self.over = AbortedError("lost on purpose")
            raise self.over
        insist(self, call, deadline, again=again)

    monkeypatch.setattr(Transactions, "_insist", unlucky)
    runner = Runner(
        log,
        name,
        tmp_path,
        sink=f"{name}.out",
        delivery="exactly_once",
        commit_interval=0.02,
        capacity=200 + 100 * seed,
        spool=tmp_path / "spool",
    )
    done: set[tuple[int, int]] = set()
    for _ in range(30):
        try:
            done.update(runner.run())
        except AbortedError:
            continue
        if len(done) == len(sent):
            break
    assert "lost on purpose" in caplog.text
    judge(sent, allow_repeats=100)
    check_results(ids(fine(log, f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    letters = [row.header("event-id") for row in log.read(f"{name}.dlq")]
    assert len(letters) == len(set(letters)) == 14
