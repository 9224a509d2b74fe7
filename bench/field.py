"""What every workload needs: a broker, the load generator, the peers, and unused topic names."""

from __future__ import annotations

import contextlib
import itertools
import time
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import TopicPartition

from bench.errors import BenchError
from bench.lineup import Contestant, Job, Lineup
from bench.process import Process, cpu_of
from bench.tool import Load, Tool
from keylane.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.cassandra import Cassandra
    from bench.results import Column, ResultSheet

PARTITIONS = 8
_FIRST = Load(rate=500, seconds=4, keys=1000, patience=120)
_SETTLE_SECONDS = 20.0
_BURST_MESSAGES = 2_000
_BASE_STEP = 10_000_000
_numbers = itertools.count(1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of the same figure in every round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises BenchError for none."""
        if not values:
            raise BenchError("no round gave a figure")
        return cls(median=median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where a run takes place. One broker for all of it."""

    brokers: str
    broker_pid: int
    tool: Tool
    lineup: Lineup
    rounds: int
    logs: Path
    say: Callable[[str], None]
    machine: dict[str, str]
    store: Cassandra | None = None
    """What prosody needs; it sleeps while others run."""

    def sheet(self, name: str, title: str, settings: dict[str, Any], columns: list[Column]) -> ResultSheet:
        """A new one of this run, still empty."""
        from bench.results import ResultSheet  # noqa: PLC0415 - it knows Spread, which is here

        machine = self.machine | {"measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
        return ResultSheet(
            name=name,
            title=title,
            settings=settings,
            columns=columns,
            rounds=self.rounds,
            machine=machine,
            left_out=self.lineup.left_out,
        )

    def forget(self, topic: str) -> None:
        """Remove a topic; the broker ends soon anyway."""
        with contextlib.suppress(BenchError):
            self.tool.delete(topic)

    def job(self, contestant: Contestant, what: str, topic: str = "") -> Job:
        """A new group and output topic; a new input topic too, unless one is given."""
        name = f"{what}-{next(_numbers)}-{contestant.peer}"
        return Job(brokers=self.brokers, topic=topic or f"{name}.in", out=f"{name}.out", group=name)

    @contextmanager
    def topics(self, job: Job, *, source: bool) -> Iterator[None]:
        """The job's topics, its own input only if ``source``. They go at the end, with those that the peer made."""
        mine = [job.topic, job.out] if source else [job.out]
        self.tool.create(*mine)
        try:
            yield
        finally:
            with contextlib.suppress(BenchError):  # the broker ends soon anyway
                self.tool.delete(*mine, f"{job.topic}.dlq", f"{job.group}.dlq", f"{job.group}.state")

    @contextmanager
    def process(self, contestant: Contestant, job: Job) -> Iterator[Process]:
        """The peer at its job."""
        awake: AbstractContextManager[None] = contextlib.nullcontext()
        if contestant.peer == "prosody" and self.store is not None:
            awake = self.store.awake()
        with awake, Process(contestant.command(job), self.logs / f"{job.group}.log") as process:
            yield process

    def warm_broker(self, seconds: float) -> None:
        """Write and read until Java has compiled what a broker does most: a new one takes three times as long for it.

        Otherwise the first contestant would be measured on a slower broker than the others. A third of the time a
        steady load, then as much as goes through the client that the Python peers use.
        """
        topic = f"warm-{next(_numbers)}"
        self.tool.create(topic)
        load = replace(_FIRST, rate=8_000, seconds=seconds / 3, base=next_base())
        self.tool.load(topic, topic, load, lambda: None)  # its own results
        churn(KafkaSettings(self.brokers), topic, seconds * 2 / 3)
        self.forget(topic)

    def warm_up(self, job: Job, process: Process, load: Load, *, real: bool = True) -> int:
        """A small load until all of it is out: the peer runs. Then 20 seconds of the real one, which do not count.

        Peers on a JVM compile themselves for that long on two cores; all peers get the same, but for those that would
        only pile it up (``real`` is false).

        Returns how many messages it was. Raises BenchError when they did not all come out.
        """
        sent = 0
        loads = [replace(_FIRST, base=next_base(), json=load.json)]
        if real:
            seconds = min(load.seconds, _SETTLE_SECONDS)
            loads.append(replace(load, seconds=seconds, base=next_base(), window=0, stuck=0))
        for warm in loads:
            result = self.tool.load(job.topic, job.out, warm, process.must_run)
            if result.order.problems:
                raise BenchError(f"warm-up: {', '.join(result.order.problems)}; {process.last_words()}")
            sent += result.order.sent
        return sent

    def broker_cpu(self) -> float:
        """Seconds of processor time the broker has used; 0 where that cannot be seen."""
        try:
            return cpu_of(self.broker_pid)
        except OSError:
            return 0.0


def churn(settings: KafkaSettings, topic: str, seconds: float) -> None:
    """Write to a topic in bursts, as a drain does, and read it meanwhile."""
    producer, consumer = settings.producer(**{"linger.ms": 1}), settings.consumer("bench-warm")
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    value, until, number = b"x" * 200, time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for _ in range(_BURST_MESSAGES):
            number += 1
            headers: Any = {"event-id": b"%d" % number}
            producer.produce(topic, value, b"key-%d" % (number % 1000), headers=headers)
        producer.flush(_SETTLE_SECONDS)
        consumer.consume(2 * _BURST_MESSAGES, 0.02)
    consumer.close()


def turns(things: Sequence[T], number: int) -> list[T]:
    """The things in another order every round, so that none is always first."""
    shift = number % max(1, len(things))
    return [*things[shift:], *things[:shift]]


def next_base() -> int:
    """Event ids, and with them keys, that no load before had."""
    return next(_numbers) * _BASE_STEP
