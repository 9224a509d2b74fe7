"""What one message costs Keylane, from a few keys to a million, and from an empty topic to a long backlog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import drain, offered
from bench.errors import BenchError
from bench.field import next_base, turns
from bench.results import Column, ResultSheet
from bench.tool import Load

if TYPE_CHECKING:
    from bench.field import Field
    from bench.lineup import Contestant

_COLUMNS = [
    Column(figure="per_second", title="messages per second"),
    Column(figure="us_per_message", title="CPU, µs per message", form=".1f"),
    Column(figure="peak_mib", title="peak memory, MiB, with Spark's JVM"),
]
_NO_BACKLOG = "none: live at {rate:,.0f}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A drain at several numbers of keys. ``n`` messages, or one per key where there are more keys."""

    keys: tuple[int, ...] = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
    n: int = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Drains of several lengths, beside a live load without a backlog."""

    sizes: tuple[int, ...] = (100_000, 1_000_000)
    keys: int = 1_000
    rate: float = 14_000.0
    seconds: float = 15.0


def by_keys(ground: Field, name: str, settings: Keys) -> ResultSheet:
    """All rounds."""
    title = f"Cost by the number of keys: {settings.n:,} messages or one per key, no-op handler"
    sheet = ground.sheet(name, title, {"keys": list(settings.keys), "n": settings.n}, _COLUMNS)
    sizes = [drain.Settings(n=max(settings.n, keys), keys=keys) for keys in settings.keys]
    _drains(ground, sheet, {f"{size.keys:,} keys": size for size in sizes})
    return sheet


def by_backlog(ground: Field, name: str, settings: Backlog) -> ResultSheet:
    """All rounds. The live load's processor time is that of the whole app while it lasts, idle moments included."""
    title = f"Cost by the length of the backlog: {settings.keys:,} keys, no-op handler"
    given = {"sizes": list(settings.sizes), "keys": settings.keys, "rate": settings.rate}
    sheet = ground.sheet(name, title, given, _COLUMNS)
    for one in ground.lineup.alone():
        for number in range(ground.rounds):
            try:
                _live(ground, one, settings, sheet)
            except BenchError as error:
                sheet.problems.append(f"live, round {number + 1}: {error}")
                ground.say(f"{name}, live, round {number + 1}: FAILED: {error}")
    sizes = [drain.Settings(n=n, keys=settings.keys) for n in settings.sizes]
    _drains(ground, sheet, {f"{size.n:,} messages": size for size in sizes})
    return sheet


def _drains(ground: Field, sheet: ResultSheet, sizes: dict[str, drain.Settings]) -> None:
    with drain.Inputs(ground, sheet.name) as inputs:
        for number in range(ground.rounds):
            for label in turns(list(sizes), number):
                size = sizes[label]
                for one in ground.lineup.alone():
                    line = sheet.line(label, one.peer, at=size.n if sheet.name == "backlog" else size.keys)
                    try:
                        found = drain.run(ground, one, size, inputs)
                    except BenchError as error:
                        line.problems.append(f"round {number + 1}: {error}")
                        ground.say(f"{sheet.name}, {label}, round {number + 1}: FAILED: {error}")
                        continue
                    line.add(
                        per_second=found.per_second,
                        us_per_message=found.cpu_per_million,
                        peak_mib=found.peak_mib,
                    )
                    line.problems += [f"round {number + 1}: {problem}" for problem in found.problems]
                    ground.say(
                        f"{sheet.name}, round {number + 1}/{ground.rounds}, {label}: {found.per_second:,.0f}/s"
                    )
    sheet.lines.sort(key=lambda line: line.at or 0)


def _live(ground: Field, one: Contestant, settings: Backlog, sheet: ResultSheet) -> None:
    job = ground.job(one, sheet.name)
    load = Load(rate=settings.rate, seconds=settings.seconds, keys=settings.keys, base=next_base())
    line = sheet.line(_NO_BACKLOG.format(rate=settings.rate), one.peer, at=0)
    with ground.topics(job, source=True), ground.process(one, job) as process:
        ground.warm_up(job, process, load)
        cpu = process.cpu_seconds()
        found = offered.offer(ground, one, job, process, load)
        spent = process.cpu_seconds() - cpu
        line.add(
            per_second=settings.rate,
            us_per_message=spent / found.result.order.sent * 1e6,
            peak_mib=sum(held.memory for _, held in process.footprints()) / 2**20,
        )
        line.problems += found.result.order.problems
    ground.say(f"{sheet.name}, {line.label}: {spent / found.result.order.sent * 1e6:.1f} us per message")
