"""How long a chat message takes: four stages that wait, some of them failing at first, at a steady rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.field import next_base, turns
from bench.offered import note, offer
from bench.results import Column, ResultSheet
from bench.tool import Load

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant


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

    @property
    def own_ms(self) -> int:
        """What the stages of a message that does not fail take by themselves."""
        return sum(self.stages)


def measure(ground: Field, name: str, settings: Settings) -> ResultSheet:
    """All rounds."""
    stages = " + ".join(map(str, settings.stages))
    title = (
        f"Chat: stages of {stages} ms, {settings.keys:,} keys, {settings.rate:,.0f}/s for {settings.seconds:g} s, "
        f"{settings.fail}% fail at first{', keys in turns' if settings.rotate else ''}"
    )
    columns = [Column(figure=p, title=f"{p} ms") for p in ("p50", "p95", "p99", "max")]
    columns += [
        Column(figure="clean_p99_over", title=f"clean p99 less {settings.own_ms} ms"),
        Column(figure="backlog", title="left at the end", spread=False),
        Column(figure="cores", title="cores", form=".2f", spread=False),
    ]
    sheet = ground.sheet(name, title, asdict(settings) | {"stages": list(settings.stages)}, columns)
    contestants = ground.lineup.chat()
    for number in range(ground.rounds):
        for one in turns(contestants, number):
            try:
                _round(ground, one, settings, sheet, number)
            except BenchError as error:
                sheet.line(one.label, one.peer).problems.append(f"round {number + 1}: {error}")
                ground.say(f"{name}, round {number + 1}/{ground.rounds}, {one.label}: FAILED: {error}")
    return sheet


def _round(ground: Field, one: Contestant, settings: Settings, sheet: ResultSheet, number: int) -> None:
    job = replace(ground.job(one, sheet.name), stages=settings.stages, fail=settings.fail)
    load = Load(
        rate=settings.rate,
        seconds=settings.seconds,
        keys=settings.keys,
        fail=settings.fail,
        rotate=settings.rotate,
        json=one.json,
        base=next_base(),
    )
    line = sheet.line(one.label, one.peer)
    with ground.topics(job, source=True):
        with ground.process(one, job) as process:
            warm = ground.warm_up(job, process, load, real=not one.slow)
            found = offer(ground, one, job, process, load)
            process.stop(grace=5 if found.behind and one.slow else 60)
        note(line, found, number, one)
        assert found.result.clean is not None
        line.add(clean_p99_over=found.result.clean.p99 - settings.own_ms)
        if not found.behind:
            sent = warm + found.result.order.sent
            line.problems += [f"round {number + 1}: {p}" for p in ground.tool.check(job.out, sent).problems]
    result = found.result.all
    ground.say(
        f"{sheet.name}, round {number + 1}/{ground.rounds}, {one.label}: p50 {result.p50:,.0f} ms, "
        f"p99 {result.p99:,.0f} ms{', does not keep up' if found.behind else ''}"
    )
