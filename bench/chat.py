"""How long a chat message takes: four stages that wait, some of them failing at first, at a steady rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.field import Spread, next_base, turns
from bench.tool import Latency, Load

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

_REST = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the workload. ``fail`` is the percentage of messages whose first attempt fails."""

    rate: float = 2_000.0
    seconds: float = 30.0
    keys: int = 2_000
    stages: tuple[int, ...] = (5, 20, 65, 10)
    fail: int = 10
    rotate: bool = False
    """Keys take turns: no message has to wait for another of its key, unless that one is retried for a whole turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer, one round; milliseconds. ``clean`` is of the messages that do not fail themselves."""

    all: Latency
    clean: Latency
    backlog: int
    drain_seconds: float
    late_ms: float
    cores: float
    broker_cores: float
    problems: list[str]


@dataclass(slots=True, kw_only=True)
class Row:
    """One peer, all rounds."""

    label: str
    peer: str
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def spread(self, of: str, figure: str) -> Spread:
        """Of a percentile of ``all`` or ``clean``. Raises BenchError when no round gave one."""
        return Spread.of([float(getattr(getattr(run, of), figure)) for run in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All peers."""

    settings: Settings
    rows: list[Row]

    @property
    def problems(self) -> list[str]:
        """Of all rows."""
        return [f"chat, {row.label}: {problem}" for row in self.rows for problem in row.problems]

    @property
    def own_ms(self) -> int:
        """What the stages of a message that does not fail take by themselves."""
        return sum(self.settings.stages)


def measure(ground: Field, settings: Settings) -> Report:
    """All rounds."""
    contestants = ground.lineup.chat()
    rows = {one.label: Row(label=one.label, peer=one.peer) for one in contestants}
    for number in range(ground.rounds):
        for one in turns(contestants, number):
            row, where = rows[one.label], f"chat, round {number + 1}/{ground.rounds}, {one.label}"
            try:
                run = _run(ground, one, settings)
            except BenchError as error:
                row.problems.append(f"round {number + 1}: {error}")
                ground.say(f"{where}: FAILED: {error}")
                continue
            row.runs.append(run)
            row.problems += [f"round {number + 1}: {problem}" for problem in run.problems]
            ground.say(
                ", ".join([f"{where}: p50 {run.all.p50:,.0f} ms, p99 {run.all.p99:,.0f} ms", *run.problems])
            )
    return Report(settings=settings, rows=list(rows.values()))


def _run(ground: Field, one: Contestant, settings: Settings) -> Run:
    job = replace(ground.job(one, "chat"), stages=settings.stages, fail=settings.fail)
    load = Load(
        rate=settings.rate,
        seconds=settings.seconds,
        keys=settings.keys,
        fail=settings.fail,
        rotate=settings.rotate,
        base=next_base(),
    )
    with ground.topics(job, source=True):
        with ground.process(one, job) as process:
            warm = ground.warm_up(job, process, load)
            time.sleep(_REST)
            began, cpu, broker = time.monotonic(), process.cpu_seconds(), ground.broker_cpu()
            result = ground.tool.load(job.topic, job.out, load, process.must_run)
            seconds = time.monotonic() - began
            cores, broker_cores = (
                (process.cpu_seconds() - cpu) / seconds,
                (ground.broker_cpu() - broker) / seconds,
            )
            process.stop()
        problems = ground.tool.check(job.out, warm + result.order.sent).problems
    assert result.clean is not None
    return Run(
        all=result.all,
        clean=result.clean,
        backlog=result.backlog,
        drain_seconds=result.drain_seconds,
        late_ms=result.late_ms,
        cores=cores,
        broker_cores=broker_cores,
        problems=problems,
    )
