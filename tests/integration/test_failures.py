"""Messages that fail, through real Kafka and real Spark: the policies, attempts, the breaker and the flood guard.

The same promises in virtual time, with every fault: ``unit/engine/test_failure_policies.py``.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from keylane import App, Breaker, CircuitState, FailureGuardError, Message, Poison, Retry, Transient
from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient
from keylane.testing import HistoryWriter, Verdict, check_results, read_history
from keylane.worker.session import WorkerSession
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan
from support.topics import Log, ids, kill, python_workers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.policies.failure_policy import OnFailure
    from keylane.state.answers import CommandAnswer
    from keylane.state.commands import Command
    from keylane.testing import Sent

SOON = Retry(attempts=4, wait_initial=0.02, wait_max=0.1)
ACTS_WITHIN = 2.0
"""Seconds from an operator's command to the lane that moves."""


def letters(log: Log, name: str) -> list[DeadLetter]:
    """The app's dead letters, each partition's in its order."""
    found = [each for each in read_dead_letters(log.settings, f"{name}.dlq") if isinstance(each, DeadLetter)]
    return sorted(found, key=lambda letter: (letter.partition, letter.offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """2,000 messages of 50 keys. Three lanes are poisoned: two early, so that it shows before the restart, one late."""

    messages: list[dict[str, Any]]
    poisoned: dict[bytes, int]
    """Per key the number of the message that fails until the cause is fixed."""

    @classmethod
    def of(cls, seed: int) -> Load:
        rng = random.Random(seed)
        messages: list[dict[str, Any]] = [
            {
                "key": b"k%d" % rng.randrange(50),
                "value": b"%d" % number,
                "headers": [("event-id", b"e%d" % number), ("odd", bytes([number % 256]))],
            }
            for number in range(2000)
        ]
        lanes: defaultdict[bytes, list[int]] = defaultdict(list)
        for number, message in enumerate(messages):
            lanes[message["key"]].append(number)
        first, second, late = rng.sample(sorted(lanes), 3)
        places = {first: rng.randrange(8), second: rng.randrange(8), late: rng.randrange(-8, 0)}
        return cls(messages=messages, poisoned={key: lanes[key][place] for key, place in places.items()})


class Shop:
    """An app under one policy, its load, and what is done to it. ``positions`` are those of the poisoned messages."""

    def __init__(
        self, log: Log, spark: SparkSession, name: str, folder: Path, policy: OnFailure, seed: int
    ) -> None:
        self.log = log
        self.spark = spark
        self.name = name
        self.load = Load.of(seed)
        self.fixed = folder / "fixed"
        self.history = folder / "history"
        log.create(f"{name}.in", f"{name}.out")
        self.sent = log.send(f"{name}.in", self.load.messages)
        self.app = self._app(
            policy, set(self.load.poisoned.values()), self.fixed, self.history, folder / "spool"
        )
        offsets = {row.value: (row.partition, row.offset) for row in log.read(f"{name}.in")}
        self.positions = {key: offsets[b"%d" % n] for key, n in self.load.poisoned.items()}

    def _app(self, policy: OnFailure, bad: set[int], fixed: Path, history: Path, spool: Path) -> App:
        app = App(
            self.name,
            source=f"{self.name}.in",
            sink=f"{self.name}.out",
            on_failure=policy,
            retry=SOON,
            observer=HistoryWriter(history),
            spool=spool,
        )

        def is_bad(number: int) -> bool:
            return number in bad and not fixed.exists()

        @app.stage
        async def work(msg: Message) -> bytes:
            await asyncio.sleep(0.04)
            number = int(msg.value)
            if is_bad(number):
                raise Poison(f"order {number} makes no sense")
            if number % 20 == 7 and msg.attempt < 3:
                raise Transient("not yet")
            return bytes(msg.value)

        return app

    def start(self) -> None:
        self.query = self.app.start(self.spark, bootstrap=self.log.bootstrap)

    def stop(self) -> None:
        self.query.stop()
        assert self.query.exception() is None

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def so() -> object:
            assert self.query.isActive, self.query.exception()
            return condition()

        wait_until(so, 30, what)

    def until_stopped(self, operator: AdminClient, stop: LaneStatus, keys: int) -> None:
        """This many lanes have stopped in this way, each at its poisoned message."""

        def stopped() -> dict[bytes | None, tuple[int, int]]:
            return {one.key: (one.partition, one.offset) for one in operator.lanes() if one.stop is stop}

        self.wait(lambda: len(stopped()) >= keys, f"{keys} lanes are {stop}")
        assert stopped().items() <= self.positions.items()

    def until_some_are_through(self) -> None:
        self.wait(lambda: self.log.count(f"{self.name}.out") >= 600, "600 results")
        assert self.log.count(f"{self.name}.out") < 1900, (
            "it was nearly finished: a restart now proves little"
        )

    def behind(self, key: bytes) -> list[int]:
        """The numbers of the key's messages from the poisoned one on."""
        first = self.load.poisoned[key]
        return [n for n, message in enumerate(self.load.messages) if message["key"] == key and n >= first]

    def until_the_others_are_through(self) -> None:
        """Everything has its result except messages of poisoned lanes."""
        stuck = {b"%d" % number for key in self.load.poisoned for number in self.behind(key)}
        rest = {b"%d" % number for number in range(2000)} - stuck
        out = f"{self.name}.out"
        self.wait(lambda: self.log.count(out) >= len(rest), f"{len(rest)} results")
        self.wait(lambda: {row.value for row in self.log.read(out)} == rest, "the others are through")

    def released(self, operator: AdminClient, order: Command) -> None:
        """The release of a lane was carried out: its message ran once before, and again soon after the order."""
        assert order.key is not None
        assert acted(operator, order).at < order.at + ACTS_WITHIN
        wait_until(lambda: len(self.starts(order.key or b"")) > 1, ACTS_WITHIN, "the message runs again")
        before, again = self.starts(order.key)
        assert before < order.at <= again < order.at + ACTS_WITHIN

    def until_all_is_done(self) -> None:
        self.wait(lambda: self.log.lag(self.name, f"{self.name}.in") == 0, "everything is done")

    def starts(self, key: bytes) -> list[float]:
        """When the key's poisoned message was started: unix times."""
        return [
            event.at
            for event in read_history(self.history)
            if event.outcome is None and (event.partition, event.offset) == self.positions[key]
        ]

    def as_sent(self, letter: DeadLetter) -> bool:
        """Whether the letter is its message, byte for byte."""
        assert letter.value is not None
        message = self.load.messages[int(letter.value)]
        return (letter.key, list(letter.headers)) == (message["key"], message["headers"])

    def results(self, *, without: Collection[int] = (), twice: bool = False) -> None:
        """Every message has its result, in the order of its key."""
        rows = [row for row in self.log.read(f"{self.name}.in") if int(row.value or b"") not in without]
        found = check_results(ids(rows), ids(self.log.read(f"{self.name}.out")), allow_duplicates=twice)
        found.raise_if_bad()


def acted(operator: AdminClient, order: Command) -> CommandAnswer:
    """The answer to a command that was carried out."""
    answer = operator.answer(order, 10)
    assert answer is not None, "nobody answered"
    assert answer.ok, answer.result
    return answer


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_skip_over_a_restart_makes_dead_letters(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, spark, name, tmp_path, "skip", seed=1)
    shop.start()
    shop.until_some_are_through()
    shop.stop()
    again = shop.app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert again.awaitTermination(60)

    assert judge(shop.sent).repeats == 0
    shop.results(without=set(shop.load.poisoned.values()))
    dead = letters(log, name)
    assert {(letter.key, int(letter.value or b"")) for letter in dead} == set(shop.load.poisoned.items())
    assert all(shop.as_sent(letter) for letter in dead)
    assert [letter.kind for letter in dead] == [DeadLetterKind.DEAD] * 3
    assert log.lag(name, f"{name}.in") == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_block_over_a_restart_stops_lanes_until_released(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, spark, name, tmp_path, "block", seed=2)
    shop.start()
    with AdminClient(log.settings, name) as operator:
        shop.until_stopped(operator, LaneStatus.BLOCKED, 2)
        shop.until_some_are_through()
        shop.stop()
        shop.start()
        shop.until_the_others_are_through()
        shop.until_stopped(operator, LaneStatus.BLOCKED, 3)
        shop.fixed.touch()
        for key, (partition, offset) in shop.positions.items():
            shop.released(operator, operator.command("release", partition=partition, key=key, offset=offset))
        shop.until_all_is_done()
        shop.wait(lambda: operator.lanes() == [], "no lane is stopped")
    shop.stop()

    assert judge(shop.sent).repeats == 0
    shop.results()
    assert letters(log, name) == []


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_block_and_dlq_over_a_killed_worker_archives_once(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, spark, name, tmp_path, "block_and_dlq", seed=3)
    shop.start()
    with AdminClient(log.settings, name) as operator:
        shop.until_stopped(operator, LaneStatus.BLOCKED, 2)
        shop.until_some_are_through()
        killed = python_workers()
        for worker in killed:
            kill(worker)
        shop.until_the_others_are_through()
        shop.until_stopped(operator, LaneStatus.BLOCKED, 3)
        shop.fixed.touch()
        *released, skipped = shop.positions
        for key in released:
            shop.released(
                operator,
                operator.command(
                    "release", partition=shop.positions[key][0], key=key, offset=shop.positions[key][1]
                ),
            )
        acted(
            operator,
            operator.command(
                "skip", partition=shop.positions[skipped][0], key=skipped, offset=shop.positions[skipped][1]
            ),
        )
        shop.until_all_is_done()
        shop.wait(lambda: operator.lanes() == [], "no lane is stopped")
    shop.stop()

    verdict = judge(shop.sent, finished=[shop.positions[skipped]], allow_repeats=1)
    assert verdict.counts.owners == 4, f"{killed} were killed: two tasks, and their successors"
    shop.results(without={shop.load.poisoned[skipped]}, twice=True)
    found = letters(log, name)
    assert all(shop.as_sent(letter) for letter in found)
    assert Counter((letter.kind, letter.key) for letter in found) == {
        **{(DeadLetterKind.ARCHIVED, key): 1 for key in shop.positions},
        (DeadLetterKind.DEAD, skipped): 1,
    }


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_park_over_a_restart_redrives_in_order(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, spark, name, tmp_path, "park", seed=4)
    shop.start()
    with AdminClient(log.settings, name) as operator:
        shop.until_stopped(operator, LaneStatus.PARKED, 2)
        shop.until_some_are_through()
        shop.stop()
        shop.start()
        shop.until_all_is_done()  # parked messages are done; the partition continues
        shop.until_stopped(operator, LaneStatus.PARKED, 3)
        parked = letters(log, name)
        assert {letter.kind for letter in parked} == {DeadLetterKind.PARKED}
        assert all(shop.as_sent(letter) for letter in parked)
        for key in shop.positions:
            assert [int(letter.value or b"") for letter in parked if letter.key == key] == shop.behind(key)
        assert len(parked) == sum(len(shop.behind(key)) for key in shop.positions)
        shop.fixed.touch()
        orders = {
            key: operator.command("redrive", partition=partition, key=key)
            for key, (partition, _) in shop.positions.items()
        }
        for key, order in orders.items():
            answer = acted(operator, order)
            assert answer.result == f"{len(shop.behind(key))} through, 0 dead again, 0 still parked"
        shop.wait(lambda: operator.lanes() == [], "no lane is parked")
    shop.stop()

    assert judge(shop.sent).repeats == 0
    shop.results()
    assert len(letters(log, name)) == len(parked), "a redrive leaves the letters where they are"


@pytest.mark.timeout(60)
def test_attempts_survive_epochs_shorter_than_the_backoff(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        retry=Retry(attempts=3, wait_initial=4, wait_max=4),
        drain_timeout=0.5,
        observer=HistoryWriter(tmp_path / "history"),
    )
    seen = tmp_path / "seen"

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"17":
            note(seen, str(msg.attempt))
            raise Transient("not now", retry_after=4)  # else the wait is drawn, and may be short
        return bytes(msg.value)

    sent = log.send(
        f"{name}.in",
        [
            {"key": b"k%d" % (n % 5), "value": b"%d" % n, "headers": [("event-id", b"%d" % n)]}
            for n in range(50)
        ],
    )
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=2)
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 30, "all is done")
    query.stop()
    assert query.exception() is None
    assert int(query.lastProgress["batchId"]) >= 3, "it was done within three epochs"  # type: ignore[index]

    assert lines(seen) == ["1", "2", "3"]
    rows = log.read(f"{name}.in")
    (place,) = [(row.partition, row.offset) for row in rows if row.value == b"17"]
    events = [e for e in read_history(tmp_path / "history") if (e.partition, e.offset) == place]
    assert [(event.attempt, event.outcome) for event in events if event.outcome] == [
        (1, "retry"),
        (2, "retry"),
        (3, "dead"),
    ]
    starts = [event.at for event in events if event.outcome is None]
    assert all(wait >= 3.9 for wait in (starts[1] - starts[0], starts[2] - starts[1])), "a wait was cut short"
    (letter,) = letters(log, name)
    assert (letter.value, letter.attempts, letter.kind) == (b"17", 3, DeadLetterKind.DEAD)
    assert judge(sent).repeats == 0
    rows = [row for row in rows if row.value != b"17"]
    check_results(ids(rows), ids(log.read(f"{name}.out"))).raise_if_bad()


def note(path: Path, line: str) -> None:
    """Append a line, at once and whole: other processes may do the same."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_open_breaker_admits_only_probes_and_keeps_order(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))
    down = tmp_path / "down"
    told = tmp_path / "told"  # a file per process: calls and states, in the order in which they happened
    told.mkdir()

    def call() -> bool:
        refused = down.exists()
        note(told / str(os.getpid()), "refused" if refused else "answered")
        return refused

    @app.on_breaker
    def changed(stage: str, state: CircuitState) -> None:
        note(told / str(os.getpid()), f"{state.value} {time.time()}")

    probes = 3

    @app.stage(breaker=Breaker(open_for=1, probes=probes, minimum=20), timeout=2.0)
    async def downstream(msg: Message) -> bytes:
        refused = call()
        await asyncio.sleep(0.005)
        if refused:
            raise ConnectionError("refused")
        return bytes(msg.value)

    sent: list[Sent] = []
    query = app.start(spark, bootstrap=broker.bootstrap)

    def offer() -> None:
        began = time.monotonic()
        for second in range(90):  # tenths: 20 messages in each
            sent.extend(log.send(f"{name}.in", some(20 * second)))
            time.sleep(max(0.0, began + (second + 1) / 10 - time.monotonic()))

    def some(first: int) -> list[dict[str, Any]]:
        return [
            {"key": b"k%d" % (n * 7919 % 100), "value": b"%d" % n, "headers": [("event-id", b"%d" % n)]}
            for n in range(first, first + 20)
        ]

    sent.extend(log.send(f"{name}.in", some(-20)))
    wait_until(lambda: log.count(f"{name}.out") == 20, 30, "it runs")
    offering = threading.Thread(target=offer)
    offering.start()
    time.sleep(1.5)
    down.touch()
    time.sleep(5)
    down.unlink()
    recovered = time.time()
    offering.join()
    wait_until(lambda: log.lag(name, f"{name}.in") == 0, 20, "all is done")
    query.stop()
    assert query.exception() is None

    tasks = list(told.iterdir())
    assert len(tasks) == 2
    refused = 0
    for task in tasks:
        state, calls = "closed", 0
        for line in lines(task):
            if " " in line:
                state, calls = line.split()[0], 0
                continue
            calls += 1
            refused += line == "refused"
            assert state != "open", "a call while it was open"
            assert state != "half_open" or calls <= probes, "more than the probes"
        assert (state, "open" in task.read_text()) == ("closed", True)
    # Those that opened it, with what was in flight then; afterwards three probes a second.
    assert refused <= 2 * (60 + 5 * probes)
    assert log.count(f"{name}.dlq") == 0
    assert judge(sent).repeats == 0
    rows = log.read(f"{name}.in")
    check_results(ids(rows), ids(log.read(f"{name}.out"))).raise_if_bad()
    came = {(row.partition, row.offset): row.timestamp / 1000 for row in rows}
    late = [
        event.at
        for event in read_history(tmp_path / "history")
        if event.outcome == "ok" and event.at - came[event.partition, event.offset] > 0.5
    ]
    print(  # noqa: T201 - a figure for the guarantees
        f"breaker: {refused} calls were refused in 5 s of outage at 200/s; "
        f"full speed again {max(late) - recovered:.2f} s after it"
    )
    assert max(late) - recovered < 4, "the backlog was not worked off at once"


@pytest.mark.timeout(60)
def test_failing_every_message_stops_the_query(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    load = [
        {"key": b"k%d" % (n % 500), "value": b"%d" % n, "headers": [("event-id", b"%d" % n)]}
        for n in range(2000)
    ]
    sent = log.send(f"{name}.in", load)
    fixed = tmp_path / "fixed"
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))

    def has_the_bug() -> bool:
        return not fixed.exists()

    @app.stage
    async def work(msg: Message) -> bytes:
        if has_the_bug():
            raise KeyError("amuont")
        return bytes(msg.value)

    query = app.start(spark, bootstrap=broker.bootstrap)
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(40)
    why = str(query.exception())
    assert f"app '{name}' stopped: the last 50 messages" in why
    assert "KeyError: 'amuont'. Fix the cause and start the app again" in why
    assert f"'keylane dlq redrive {name} --all' runs the dead letters again" in why
    dead = letters(log, name)
    print(f"failure guard: {len(dead)} dead letters of 2,000 messages")  # noqa: T201 - a figure for the guarantees
    assert 0 < len(dead) <= 2 * 50
    assert len({letter.source for letter in dead}) == len(dead), (
        "Spark's second try of a task wrote them again"
    )

    fixed.touch()
    again = app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert again.awaitTermination(40)
    results = {row.value for row in log.read(f"{name}.out")}
    assert {row["value"] for row in load} == results | {letter.value for letter in dead}
    assert len(letters(log, name)) == len(dead)
    judge(
        sent, finished=[(letter.source_partition, letter.source_offset) for letter in dead], allow_repeats=1
    )


def test_failure_guard_ends_the_app_after_its_letters_are_safe(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All letters are durable when the app reports its end: the task must not end before them."""
    log.create(f"{name}.in", partitions=1)
    sent = log.send(f"{name}.in", [{"key": b"k%d" % (n % 150), "value": b"%d" % n} for n in range(400)])
    slowly = log.settings.producer(**{"linger.ms": 500})
    make = WorkerSession._create_producer
    monkeypatch.setattr(
        WorkerSession,
        "_create_producer",
        lambda worker_session, use: slowly if use == "letters" else make(worker_session, use),
    )
    broken = True
    app = App(name, source=f"{name}.in", observer=HistoryWriter(tmp_path / "history"))

    @app.stage
    async def work(_msg: Message) -> None:
        if broken:
            raise KeyError("amuont")

    def run(epoch: int) -> None:
        plan = TaskPlan(
            run=f"run-{epoch}",
            epoch=epoch,
            task=0,
            settings=log.settings,
            identity=log.cluster.identity(app.source, app.dlq),
            starts={0: 0},
            until=log.cluster.ends(app.source, [0]),
            seconds=40,
            sink_limit=log.cluster.prepare(app.spec).sink_limit,
            partitions=1,
        )
        for _ in Task(app.spec, plan).outcomes():
            pass

    with pytest.raises(FailureGuardError, match="the last 50 messages"):
        run(1)
    assert [letter.source_offset for letter in letters(log, name)] == list(range(49))
    assert log.lag(name, app.source) == 400 - 49

    broken = False
    run(2)
    assert log.lag(name, app.source) == 0
    assert len(letters(log, name)) == 49
    judge(sent, finished=[(0, offset) for offset in range(49)])
