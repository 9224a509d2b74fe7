"""The cost of a stuck key for the others: the same steady load with and without one, in Keylane."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.field import next_base
from bench.results import Column, ResultLine, ResultSheet
from bench.tool import Load

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

GROWTH_SHARE_MAX = 0.10
"""How much the others may change."""
_RUN_SECONDS_MAX = 10.0
_REST_SECONDS = 2.0


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
        return min(_RUN_SECONDS_MAX, self.seconds / 3)


_FREE, _HELD = "no key is stuck", "one more key is stuck"
_COLUMNS = [
    Column(figure="per_second", title="the others' results per second"),
    Column(figure="p50", title="p50 ms", form=".1f"),
    Column(figure="p99", title="p99 ms", form=".1f"),
    Column(figure="all_p99", title="p99 ms of the whole load", form=".1f"),
]


def measure(ground: Field, name: str, settings: Settings) -> ResultSheet:
    """All rounds: one app each, with two free loads and two held ones."""
    title = (
        f"Stuck: {settings.keys:,} keys, {settings.rate:,.0f}/s for {settings.seconds:g} s, a stage of "
        f"{settings.stage_ms} ms; a key fails for {settings.window:g} s"
    )
    sheet = ground.sheet(name, title, asdict(settings), _COLUMNS)
    free, held = sheet.line(_FREE, "keylane"), sheet.line(_HELD, "keylane")
    for one in ground.lineup.alone():
        for number in range(ground.rounds):
            try:
                _round(ground, one, settings, sheet, number)
            except BenchError as error:
                sheet.problems.append(f"round {number + 1}: {error}")
                ground.say(f"{name}, round {number + 1}/{ground.rounds}: FAILED: {error}")
    changes = _changes(free, held)
    if changes:
        shown = ", ".join(f"{name} {change:+.1%}" for name, change in changes.items())
        kept = all(change < GROWTH_SHARE_MAX for change in changes.values())
        sheet.remarks.append(
            f"Worse with a stuck key (median): {shown}; below {GROWTH_SHARE_MAX:.0%} is kept: "
            f"{'yes' if kept else '**NO**'}. Two loads of each kind a round."
        )
        if not kept:
            sheet.problems.append(f"the other keys are worse by more than allowed: {shown}")
    return sheet


def _changes(free: ResultLine, held: ResultLine) -> dict[str, float]:
    """How much worse the other keys' figures are with a stuck key: 0.02 is 2% worse. Below 0 they are better."""
    found = {}
    for name, figure in (("throughput", "per_second"), ("p99", "p99")):
        one, other = free.spread(figure), held.spread(figure)
        if one is None or other is None:
            return {}
        ratio = other.median / one.median
        found[name] = 1 - ratio if figure == "per_second" else ratio - 1
    return found


def _round(ground: Field, one: Contestant, settings: Settings, sheet: ResultSheet, number: int) -> None:
    job = replace(ground.job(one, "stuck"), stages=(settings.stage_ms,), stuck=True)
    with ground.topics(job, source=True):
        with ground.process(one, job) as process:
            sent = ground.warm_up(job, process, _load(settings, held=False))
            first = number % 2 == 1
            for held in (first, not first, not first, first):  # what drifts, drifts for both kinds alike
                time.sleep(_REST_SECONDS)
                result = ground.tool.load(job.topic, job.out, _load(settings, held=held), process.must_run)
                line = sheet.line(_HELD if held else _FREE, one.peer)
                assert result.window is not None
                line.add(
                    per_second=result.window_per_second,
                    p50=result.window.p50,
                    p99=result.window.p99,
                    all_p99=result.all.p99,
                    stuck_p50=result.stuck.p50 if result.stuck else None,
                )
                if result.stuck_early:
                    line.problems.append(
                        f"round {number + 1}: the key was not stuck, {result.stuck_early} results came"
                    )
                sent += result.order.sent + (result.stuck_order.sent if result.stuck_order else 0)
                ground.say(
                    f"stuck, round {number + 1}/{ground.rounds}, {line.label}: the others "
                    f"{result.window_per_second:,.0f}/s, p99 {result.window.p99:.1f} ms"
                )
            process.stop()
        problems = ground.tool.check(job.out, sent).problems
    sheet.problems += [f"round {number + 1}: {problem}" for problem in problems]


def _load(settings: Settings, *, held: bool) -> Load:
    return Load(
        rate=settings.rate,
        seconds=settings.seconds,
        keys=settings.keys,
        window=settings.window,
        stuck=settings.stuck_rate if held else 0.0,
        base=next_base(),
    )
