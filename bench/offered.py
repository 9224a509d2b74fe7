"""How long a message takes at a steady rate, with no-op handlers, at one rate after another.

A peer that does not keep up with a rate is not asked for a higher one.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError
from bench.field import next_base, turns
from bench.results import Column, ResultLine, ResultSheet
from bench.tool import Load, LoadResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.field import Field
    from bench.lineup import Contestant
    from bench.process import Process

_REST_SECONDS = 2.0
_BEHIND_SECONDS = 1.0
"""Seconds of load that may be missing when its last message was sent: more, and the peer does not keep up."""
_IMPATIENT_SECONDS = 10.0
COLUMNS = [
    Column(figure="p50", title="p50 ms", form=",.1f"),
    Column(figure="p99", title="p99 ms", form=",.1f"),
    Column(figure="max", title="max ms"),
    Column(figure="backlog", title="left at the end", spread=False),
    Column(figure="cores", title="cores", form=".2f", spread=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the workload."""

    rates: tuple[float, ...]
    seconds: float = 15.0
    keys: int = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one load."""

    result: LoadResult
    cores: float
    broker_cores: float
    behind: bool


def measure(ground: Field, name: str, settings: Settings, contestants: Sequence[Contestant]) -> ResultSheet:
    """All rounds; in each a peer is started once and gets one rate after another."""
    shown = ", ".join(f"{rate:,.0f}" for rate in settings.rates)
    title = (
        f"Offered: {shown} messages/s for {settings.seconds:g} s each, {settings.keys:,} keys, no-op handler"
    )
    sheet = ground.sheet(name, title, _plain(settings), COLUMNS)
    for number in range(ground.rounds):
        for one in turns(contestants, number):
            try:
                _round(ground, one, settings, sheet, number)
            except BenchError as error:
                problem = f"round {number + 1}: {error}"
                sheet.line(one.label, one.peer).problems.append(problem)
                ground.say(f"{name}, {one.label}, {problem}")
    return sheet


def _round(ground: Field, one: Contestant, settings: Settings, sheet: ResultSheet, number: int) -> None:
    job = ground.job(one, sheet.name)
    first = Load(rate=settings.rates[0], seconds=settings.seconds, keys=settings.keys, json=one.json)
    with ground.topics(job, source=True), ground.process(one, job) as process:
        sent = ground.warm_up(job, process, first, real=not one.slow)
        fell = False
        for rate in settings.rates:
            line = sheet.line(f"{one.label}, {rate:,.0f}/s", one.peer, at=rate)
            found = offer(ground, one, job, process, replace(first, rate=rate, base=next_base()))
            sent += found.result.order.sent
            note(line, found, number, one)
            ground.say(
                f"{sheet.name}, round {number + 1}/{ground.rounds}, {line.label}: p50 {found.result.all.p50:,.1f} ms, "
                f"p99 {found.result.all.p99:,.1f} ms{', does not keep up' if found.behind else ''}"
            )
            if found.behind:
                fell = True
                break
        process.stop(grace=5 if fell and one.slow else 60)
        if not fell:
            problems = ground.tool.check(job.out, sent).problems
            sheet.line(f"{one.label}, {settings.rates[-1]:,.0f}/s", one.peer).problems += problems


def offer(ground: Field, one: Contestant, job: Any, process: Process, load: Load) -> Answer:
    """One load, after a moment of rest."""
    time.sleep(_REST_SECONDS)
    if one.slow:
        load = replace(load, patience=_IMPATIENT_SECONDS)
    began, cpu, broker = time.monotonic(), process.cpu_seconds(), ground.broker_cpu()
    result = ground.tool.load(job.topic, job.out, load, process.must_run)
    seconds = time.monotonic() - began
    return Answer(
        result=result,
        cores=(process.cpu_seconds() - cpu) / seconds,
        broker_cores=(ground.broker_cpu() - broker) / seconds,
        behind=result.backlog > _BEHIND_SECONDS * load.rate or result.order.got < result.order.sent,
    )


def note(line: ResultLine, found: Answer, number: int, one: Contestant) -> None:
    """Put a load's figures and faults into its line."""
    result = found.result
    line.add(
        p50=result.all.p50,
        p95=result.all.p95,
        p99=result.all.p99,
        max=result.all.max,
        backlog=result.backlog,
        cores=found.cores,
        broker_cores=found.broker_cores,
        late_ms=result.late_ms,
    )
    if result.clean is not None:
        line.add(clean_p99=result.clean.p99)
    problems = result.order.problems
    missing = result.order.sent - result.order.got
    if missing and one.slow and not result.order.violations and not result.order.duplicates:
        problems = []  # it was stopped with the rest still to do
    if found.behind:
        came = f"{result.order.got:,} of {result.order.sent:,} came in time" if missing else "all came later"
        line.notes.append(f"does not keep up: {came}; in order")
    line.problems += [f"round {number + 1}: {problem}" for problem in problems]


def _plain(settings: Settings) -> dict[str, Any]:
    return asdict(settings) | {"rates": list(settings.rates)}
