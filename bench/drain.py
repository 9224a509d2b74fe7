"""How fast a full topic is worked off: no-op handlers, results acknowledged in an output topic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.field import Spread, turns
from bench.progress import rate, read_progress, value_at

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

LONGEST = 300.0
_SHORT = 1.0
"""Seconds below which four samples of processor time a second say nothing."""
_TOPIC = "drain.in"
_AGAINST = ("java", "aiokafka", "raw", "go")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the workload."""

    n: int = 300_000
    keys: int = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer, one round. Processor time is of all its processes in the measured span; None when that is too short."""

    per_second: float
    seconds: float
    cores: float | None
    cpu_per_million: float | None
    problems: list[str]


@dataclass(slots=True, kw_only=True)
class Row:
    """One peer, all rounds."""

    label: str
    peer: str
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def per_second(self) -> Spread | None:
        """None when no round gave a rate."""
        return Spread.of([run.per_second for run in self.runs]) if self.runs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All peers."""

    settings: Settings
    rows: list[Row]

    @property
    def problems(self) -> list[str]:
        """Of all rows."""
        return [f"drain, {row.label}: {problem}" for row in self.rows for problem in row.problems]

    @property
    def ratios(self) -> dict[str, float]:
        """Keylane's median by that of each other."""
        medians = {row.peer: row.per_second.median for row in self.rows if row.per_second}
        ours = medians.get("keylane")
        return {f"keylane/{peer}": ours / medians[peer] for peer in _AGAINST if ours and peer in medians}


def measure(ground: Field, settings: Settings) -> Report:
    """All rounds. The input is loaded once; every run has a group and an output topic of its own."""
    contestants = ground.lineup.drain()
    rows = {one.label: Row(label=one.label, peer=one.peer) for one in contestants}
    ground.tool.create(_TOPIC)
    ground.say(f"drain: loading {settings.n:,} messages of {settings.keys:,} keys")
    ground.tool.preload(_TOPIC, settings.n, settings.keys)
    for number in range(ground.rounds):
        for one in turns(contestants, number):
            row, where = rows[one.label], f"drain, round {number + 1}/{ground.rounds}, {one.label}"
            try:
                run = _run(ground, one, settings)
            except BenchError as error:
                row.problems.append(f"round {number + 1}: {error}")
                ground.say(f"{where}: FAILED: {error}")
                continue
            row.runs.append(run)
            row.problems += [f"round {number + 1}: {problem}" for problem in run.problems]
            ground.say(", ".join([f"{where}: {run.per_second:,.0f}/s", *run.problems]))
    return Report(settings=settings, rows=list(rows.values()))


def _run(ground: Field, one: Contestant, settings: Settings) -> Run:
    job = replace(ground.job(one, "drain", topic=_TOPIC), n=settings.n)
    with ground.topics(job, source=False):
        with ground.process(one, job) as process:
            process.wait(LONGEST)
        found = rate(read_progress(process.log))
        if found is None:
            raise BenchError(
                f"it was done too quickly to be measured, or did nothing; {process.last_words()}"
            )
        seconds = found.end - found.begin
        cpu = None
        if process.cpu and seconds >= _SHORT:
            cpu = value_at(process.cpu, found.end) - value_at(process.cpu, found.begin)
        problems = ground.tool.check(job.out, settings.n).problems
        committed = ground.tool.committed(job.group, job.topic)
        if committed != settings.n:
            problems.append(f"committed {committed:,} of {settings.n:,}")
        return Run(
            per_second=found.per_second,
            seconds=seconds,
            cores=None if cpu is None else cpu / seconds,
            cpu_per_million=None if cpu is None else cpu / (found.per_second * seconds) * 1e6,
            problems=problems,
        )
