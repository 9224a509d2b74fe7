"""What a key that cannot go on costs the others: the same steady load with and without one, in Keylane."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.field import Spread, next_base
from bench.tool import Latency, Load, LoadResult

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

ALLOWED = 0.10
"""How much the others may change."""
_LONGEST = 10.0
_REST = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the workload. ``stuck_rate`` is how many messages of the stuck key arrive per second."""

    rate: float = 2_000.0
    seconds: float = 30.0
    keys: int = 1_000
    stage_ms: int = 5
    stuck_rate: float = 20.0

    @property
    def window(self) -> float:
        """Seconds that the key is stuck, in the middle of the load."""
        return min(_LONGEST, self.seconds / 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load: the other keys' results, all of them and those due in the window, and the stuck key's."""

    all: Latency
    window: Latency
    window_per_second: float
    stuck: Latency | None


@dataclass(slots=True, kw_only=True)
class Report:
    """Both kinds of load, all rounds."""

    settings: Settings
    free: list[Run] = field(default_factory=list)
    held: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def changes(self) -> dict[str, float]:
        """How much worse the other keys' figures are with a stuck key: 0.02 is 2% worse. Below 0 they are better."""
        if not self.free or not self.held:
            return {}
        throughput = [
            Spread.of([run.window_per_second for run in runs]).median for runs in (self.free, self.held)
        ]
        p99 = [Spread.of([run.window.p99 for run in runs]).median for runs in (self.free, self.held)]
        return {"throughput": 1 - throughput[1] / throughput[0], "p99": p99[1] / p99[0] - 1}

    @property
    def kept(self) -> bool:
        """Whether no figure is worse by 10% or more."""
        return bool(self.changes) and all(change < ALLOWED for change in self.changes.values())


def measure(ground: Field, settings: Settings) -> Report:
    """All rounds: one app each, with two free loads and two held ones."""
    report = Report(settings=settings)
    for one in ground.lineup.stuck():
        for number in range(ground.rounds):
            try:
                _round(ground, one, report, number)
            except BenchError as error:
                report.problems.append(f"stuck, round {number + 1}: {error}")
                ground.say(f"stuck, round {number + 1}/{ground.rounds}: FAILED: {error}")
    return report


def _round(ground: Field, one: Contestant, report: Report, number: int) -> None:
    settings = report.settings
    job = replace(ground.job(one, "stuck"), stages=(settings.stage_ms,), stuck=True)
    with ground.topics(job, source=True):
        with ground.process(one, job) as process:
            sent = ground.warm_up(job, process, _load(settings, held=False))
            first = number % 2 == 1
            for held in (first, not first, not first, first):  # what drifts, drifts for both kinds alike
                time.sleep(_REST)
                result = ground.tool.load(job.topic, job.out, _load(settings, held=held), process.must_run)
                run = _judge(result, report, number)
                (report.held if held else report.free).append(run)
                sent += result.order.sent + (result.stuck_order.sent if result.stuck_order else 0)
                kind = "with a stuck key" if held else "without"
                ground.say(
                    f"stuck, round {number + 1}/{ground.rounds}, {kind}: the others "
                    f"{run.window_per_second:,.0f}/s, p99 {run.window.p99:.1f} ms"
                )
            process.stop()
        problems = ground.tool.check(job.out, sent).problems
    report.problems += [f"stuck, round {number + 1}: {problem}" for problem in problems]


def _load(settings: Settings, *, held: bool) -> Load:
    return Load(
        rate=settings.rate,
        seconds=settings.seconds,
        keys=settings.keys,
        window=settings.window,
        stuck=settings.stuck_rate if held else 0.0,
        base=next_base(),
    )


def _judge(result: LoadResult, report: Report, number: int) -> Run:
    if result.stuck_early:
        report.problems.append(
            f"stuck, round {number + 1}: the key was not stuck, {result.stuck_early} results came"
        )
    assert result.window is not None
    return Run(
        all=result.all, window=result.window, window_per_second=result.window_per_second, stuck=result.stuck
    )
