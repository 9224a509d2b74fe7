"""How fast a full topic is worked off, with results acknowledged in an output topic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Self

from bench.errors import BenchError
from bench.field import turns
from bench.progress import rate, read_progress, value_at
from bench.results import Column, ResultSheet

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

RUN_SECONDS_MAX = 300.0
_SHORT_RUN_SECONDS = 1.0
"""Seconds below which four samples of processor time a second say nothing."""
COLUMNS = [
    Column(figure="per_second", title="messages per second"),
    Column(figure="cpu_per_million", title="CPU seconds per million", form=".1f", spread=False),
    Column(figure="cores", title="cores", form=".2f", spread=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the workload."""

    n: int = 300_000
    keys: int = 1_000
    stage_ms: int = 0
    """What the handler waits for each message."""
    zipf: float = 0.0
    """Keys are drawn by Zipf with this exponent; 0: evenly."""

    @property
    def handler(self) -> str:
        """In words."""
        return f"a stage of {self.stage_ms} ms" if self.stage_ms else "no-op handler"

    @property
    def drawn(self) -> str:
        """In words."""
        return f" drawn by Zipf (s = {self.zipf:g})" if self.zipf else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer, one round. Processor time is of all its processes in the measured span; None when that is too short."""

    per_second: float
    cores: float | None
    cpu_per_million: float | None
    peak_mib: float | None
    problems: list[str]


def measure(ground: Field, name: str, settings: Settings) -> ResultSheet:
    """All rounds. Every input is loaded once; every run has a group and an output topic of its own."""
    contestants = ground.lineup.waiting() if settings.stage_ms else ground.lineup.drain()
    if settings.zipf:
        contestants = ground.lineup.skewed()
    title = f"Drain: {settings.n:,} messages, {settings.keys:,} keys{settings.drawn}, {settings.handler}"
    sheet = ground.sheet(name, title, asdict(settings), COLUMNS)
    with Inputs(ground, name) as inputs:
        for number in range(ground.rounds):
            for one in turns(contestants, number):
                line, where = (
                    sheet.line(one.label, one.peer),
                    f"{name}, round {number + 1}/{ground.rounds}, {one.label}",
                )
                try:
                    found = run(ground, one, settings, inputs)
                except BenchError as error:
                    line.problems.append(f"round {number + 1}: {error}")
                    ground.say(f"{where}: FAILED: {error}")
                    continue
                line.add(
                    per_second=found.per_second, cores=found.cores, cpu_per_million=found.cpu_per_million
                )
                line.problems += [f"round {number + 1}: {problem}" for problem in found.problems]
                if one.most and one.most < settings.n:
                    line.notes.append(f"in order, complete; {one.most:,} messages")
                ground.say(", ".join([f"{where}: {found.per_second:,.0f}/s", *found.problems]))
    return sheet


class Inputs:
    """Full topics, loaded when they are first asked for, removed at the end. A context manager."""

    def __init__(self, ground: Field, name: str) -> None:
        self._ground, self._name = ground, name
        self._made: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for topic in self._made:
            self._ground.forget(topic)

    def topic(self, settings: Settings, n: int, *, json: bool) -> str:
        """With ``n`` messages in it."""
        kind = f"{n}-{settings.keys}-{settings.zipf:g}{'-json' if json else ''}"
        topic = f"{self._name}-{kind}.in"
        if topic not in self._made:
            self._ground.say(f"{self._name}: loading {n:,} messages of {settings.keys:,} keys")
            self._ground.tool.create(topic)
            self._made.add(topic)
            self._ground.tool.preload(topic, n, settings.keys, zipf=settings.zipf, json=json)
        return topic


def run(ground: Field, one: Contestant, settings: Settings, inputs: Inputs) -> Run:
    """One peer drains one topic; what it wrote is read back. Raises BenchError when there is no rate."""
    n = min(settings.n, one.most or settings.n)
    job = replace(ground.job(one, "drain", topic=inputs.topic(settings, n, json=one.json)), n=n)
    if settings.stage_ms:
        job = replace(job, stages=(settings.stage_ms,))
    with ground.topics(job, source=False):
        with ground.process(one, job) as process:
            process.wait(RUN_SECONDS_MAX)
        found = rate(read_progress(process.log))
        if found is None:
            raise BenchError(
                f"it was done too quickly to be measured, or did nothing; {process.last_words()}"
            )
        seconds = found.end - found.begin
        cpu = None
        if process.cpu and seconds >= _SHORT_RUN_SECONDS:
            cpu = value_at(process.cpu, found.end) - value_at(process.cpu, found.begin)
        problems = ground.tool.check(job.out, n).problems
        if one.commits and (committed := ground.tool.committed(job.group, job.topic)) != n:
            problems.append(f"committed {committed:,} of {n:,}")
        return Run(
            per_second=found.per_second,
            cores=None if cpu is None else cpu / seconds,
            cpu_per_million=None if cpu is None else cpu / (found.per_second * seconds) * 1e6,
            peak_mib=process.peak / 2**20 if process.peak else None,
            problems=problems,
        )
