"""What every workload needs: a broker, the load generator, the peers, and names that nobody used before."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from bench.errors import BenchError
from bench.lineup import Contestant, Job, Lineup
from bench.process import Process, cpu_of
from bench.tool import Load, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PARTITIONS = 8
_FIRST = Load(rate=500, seconds=4, keys=1000, patience=120)
_SETTLE = 20.0
_BASE = 10_000_000
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

    def process(self, contestant: Contestant, job: Job) -> Process:
        """The peer at its job, not started yet."""
        return Process(contestant.command(job), self.logs / f"{job.group}.log")

    def warm_up(self, job: Job, process: Process, load: Load) -> int:
        """A small load until all of it is out: the peer runs. Then 20 seconds of the real one, which do not count.

        Peers on a JVM compile themselves for that long on two cores; all peers get the same.

        Returns how many messages it was. Raises BenchError when they did not all come out.
        """
        sent = 0
        for warm in (
            _FIRST,
            replace(load, seconds=min(load.seconds, _SETTLE), base=next_base(), window=0, stuck=0),
        ):
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


def turns(things: Sequence[T], number: int) -> list[T]:
    """The things in another order every round, so that none is always first."""
    shift = number % max(1, len(things))
    return [*things[shift:], *things[:shift]]


def next_base() -> int:
    """Event ids, and with them keys, that no load before had."""
    return next(_numbers) * _BASE
