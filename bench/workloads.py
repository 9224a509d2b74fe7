"""Everything that can be measured beside the peers, by name, in the order of the report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench import chat, cost, drain, offered, stuck

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.field import Field
    from bench.results import ResultSheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the command line may change; None leaves a workload's own."""

    n: int | None = None
    rate: float | None = None
    seconds: float | None = None
    rates: tuple[float, ...] | None = None
    keys: tuple[int, ...] | None = None
    backlogs: tuple[int, ...] | None = None
    fail: int = 10
    rotate: bool = False
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One of them. ``headline`` are the figures that go into the summary, each with its title."""

    name: str
    what: str
    measure: Callable[[Field, Sizes], ResultSheet]
    headline: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    """Of Keylane alone."""


def _drain(name: str, settings: drain.Settings) -> Callable[[Field, Sizes], ResultSheet]:
    def measure(ground: Field, sizes: Sizes) -> ResultSheet:
        n = sizes.n or (settings.n // 10 if sizes.quick else settings.n)
        return drain.measure(ground, name, replace(settings, n=n))

    return measure


def _offered(ground: Field, sizes: Sizes) -> ResultSheet:
    settings = offered.Settings(rates=sizes.rates or (5_000.0, 14_000.0), seconds=_seconds(sizes, 20.0))
    return offered.measure(ground, "offered", settings, ground.lineup.offered())


def _curve(ground: Field, sizes: Sizes) -> ResultSheet:
    full = (500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 40_000.0, 60_000.0, 80_000.0, 100_000.0)
    rates = sizes.rates or ((500.0, 5_000.0, 20_000.0) if sizes.quick else full)
    settings = offered.Settings(rates=rates, seconds=_seconds(sizes, 10.0))
    return offered.measure(ground, "curve", settings, ground.lineup.curve())


def _chat(ground: Field, sizes: Sizes) -> ResultSheet:
    settings = chat.Settings(
        rate=sizes.rate or 2_000.0, seconds=_seconds(sizes, 30.0), fail=sizes.fail, rotate=sizes.rotate
    )
    return chat.measure(ground, "chat", settings)


def _stuck(ground: Field, sizes: Sizes) -> ResultSheet:
    settings = stuck.Settings(rate=sizes.rate or 2_000.0, seconds=_seconds(sizes, 30.0))
    return stuck.measure(ground, "stuck", settings)


def _keys(ground: Field, sizes: Sizes) -> ResultSheet:
    settings = cost.Keys()
    if sizes.quick:
        settings = cost.Keys(keys=(10, 1_000, 100_000), n=100_000)
    return cost.by_keys(ground, "keys", replace(settings, keys=sizes.keys or settings.keys))


def _backlog(ground: Field, sizes: Sizes) -> ResultSheet:
    settings = cost.Backlog(seconds=_seconds(sizes, 15.0))
    if sizes.quick:
        settings = replace(settings, sizes=(50_000, 200_000))
    return cost.by_backlog(ground, "backlog", replace(settings, sizes=sizes.backlogs or settings.sizes))


def _seconds(sizes: Sizes, usual: float) -> float:
    return sizes.seconds or (5.0 if sizes.quick else usual)


ALL = (
    Workload(
        name="drain",
        what="a full topic, 1,000 keys, no-op handler",
        measure=_drain("drain", drain.Settings()),
        headline=(("per_second", "drain, /s"),),
    ),
    Workload(
        name="drain-zipf",
        what="the same with keys drawn by Zipf",
        measure=_drain("drain-zipf", drain.Settings(zipf=1.1)),
        headline=(("per_second", "Zipf keys, /s"),),
    ),
    Workload(
        name="drain-5ms",
        what="a full topic, 1,000 keys, a stage of 5 ms",
        measure=_drain("drain-5ms", drain.Settings(stage_ms=5)),
        headline=(("per_second", "5 ms stage, 1,000 keys, /s"),),
    ),
    Workload(
        name="drain-5ms-20k",
        what="the same with 20,000 keys",
        measure=_drain("drain-5ms-20k", drain.Settings(stage_ms=5, keys=20_000)),
        headline=(("per_second", "5 ms stage, 20,000 keys, /s"),),
    ),
    Workload(
        name="offered",
        what="5,000 and 14,000 messages per second, no-op handler",
        measure=_offered,
        headline=(("p50", "p50 ms"), ("p99", "p99 ms")),
    ),
    Workload(name="curve", what="a load that grows until the peer does not keep up", measure=_curve),
    Workload(
        name="chat",
        what="four stages of 100 ms together, 10% fail at first, 2,000 messages per second",
        measure=_chat,
        headline=(("p50", "chat p50 ms"), ("p99", "chat p99 ms")),
    ),
    Workload(
        name="stuck", what="a steady load with and without a key that is stuck", measure=_stuck, alone=True
    ),
    Workload(name="keys", what="cost of a message from 10 to 1,000,000 keys", measure=_keys, alone=True),
    Workload(
        name="backlog",
        what="cost of a message from an empty topic to a backlog",
        measure=_backlog,
        alone=True,
    ),
)
NAMES = tuple(one.name for one in ALL)
