"""What a few hot keys cost all others: ``python -m bench.skew [--rate 2000] [--zipf-s 1.2] [--rounds 3]``.

Two loads take turns on one app with a single stage that waits, both from a process of their own (``keylane seed``) that
sends when a message is due, whether the app keeps up or not:

=========== ==========================================================================================================
``uniform`` every key is as likely as every other
``zipf``    key number *n* is 1/n^s times as likely as the first. The rate is such that the first keys get more than a
            lane can process: they fall behind for as long as the load lasts, whatever the engine
=========== ==========================================================================================================

Compared are the *cold* lanes: keys with less than 1% of the messages. Latency counts from when a message was due to
when the broker wrote its result. The app's capacity is small, so that the backlog of the hot lanes is larger than all
the room there is, within seconds; with the usual capacity that takes minutes. Every result is checked: each message
once, in the order of its key. The next load begins when all results of the last one are there.

Other work on the machine shows in the p99 of a whole load, in either kind. The table therefore also has the median of
the p99 of every single second, which tells a constant difference from a few bad moments. It decides nothing.

``--grid`` measures nothing: it goes through many distributions, stages and capacities in virtual time
(:mod:`bench.skew_model`), and ``--update-docs`` puts its table into docs/benchmarks.md.

Exit code 0: the p99 of the cold lanes is within 20% of the uniform load's (medians over the rounds), the hottest key
was named in the app's log, and every result was sound. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from bench import skew_model
from bench.errors import BenchError
from bench.field import Spread
from bench.machine import facts
from bench.process import Process
from bench.report import DOCS, fill
from keylane import App, Message
from keylane.broker import Broker
from keylane.demo.reader import percentile
from keylane.demo.seed import parse_value
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTITIONS = 8
P99_GROWTH_SHARE_MAX = 0.20
"""How much worse the cold lanes may be."""
COLD_KEY_SHARE_MAX = 0.01
"""Share of the messages below which a key's lane is cold."""
_SKIPPED_SECONDS = 3.0
"""Seconds at the beginning of a load that do not count."""
_REST_SECONDS = 2.0
_RUN_SECONDS_MAX = 300.0
_NAMED = re.compile(r"key b'(k\d+)' of partition (\d+) is hot: (\d+)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the loads and the app."""

    rate: float
    seconds: float
    keys: int
    zipf_s: float
    stage_ms: float
    capacity: int

    @property
    def messages(self) -> int:
        """Of one load."""
        return int(self.rate * self.seconds)

    def share(self, kind: str, rank: int) -> float:
        """Of the messages, that are of the key with this rank, from 1."""
        if kind == "uniform":
            return 1 / self.keys
        return float(rank**-self.zipf_s / sum(n**-self.zipf_s for n in range(1, self.keys + 1)))

    @property
    def lane_rate(self) -> float:
        """Messages per second that one lane can do at best."""
        return 1000 / self.stage_ms

    @property
    def hot(self) -> list[int]:
        """Ranks of the keys that get more than a lane can do."""
        return [n for n in range(1, 100) if self.rate * self.share("zipf", n) > self.lane_rate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds."""

    count: int
    p50: float
    second: float
    """The median of the p99 of every second."""
    p99: float
    max: float

    @classmethod
    def of(cls, found: list[tuple[float, float]]) -> Latency:
        """From the milliseconds at which messages were due, and how long they took; all zero for none."""
        took = [late for _, late in found]
        seconds: dict[int, list[float]] = defaultdict(list)
        for due, late in found:
            seconds[int(due // 1000)].append(late)
        return cls(
            count=len(found),
            p50=percentile(took, 0.5),
            second=median(percentile(each, 0.99) for each in seconds.values()) if seconds else 0.0,
            p99=percentile(took, 0.99),
            max=max(took, default=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load's results."""

    kind: str
    cold: Latency
    warm: Latency
    hot: Latency
    hot_per_second: float
    """Results of the hottest key while it had a backlog."""
    late_ms: float
    """How late the generator was, at most."""


# The app, in a process of its own.


def run_app(bootstrap: str, name: str, stage_ms: float, capacity: int) -> None:
    """Run until told to end."""
    import asyncio  # noqa: PLC0415 - only here

    app = App(name, source=f"{name}.in", sink=f"{name}.out", max_buffered=capacity)

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(stage_ms / 1000)
        return msg.value  # type: ignore[no-any-return]

    asked: list[int] = []
    parent = os.getppid()
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder:
        spark = session("local[2]", "keylane bench")
        try:
            for number in (signal.SIGTERM, signal.SIGINT):  # after Spark has put its own handlers in place
                signal.signal(number, lambda got, _frame: asked.append(got))
            query = app.start(spark, bootstrap=bootstrap, checkpoint_location=folder, epoch=3600)
            while query.isActive and not asked and os.getppid() == parent:
                time.sleep(0.1)
            failure = query.exception()
            query.stop()
        finally:
            spark.stop()
    if failure is not None:
        raise SystemExit(str(failure))


# The loads.


class Ground:
    """One broker, one app, its topics."""

    def __init__(self, bootstrap: str, name: str, settings: Settings) -> None:
        self.bootstrap, self.name, self.settings = bootstrap, name, settings
        self.cluster = Cluster(KafkaSettings(bootstrap))
        self.cluster.ensure(f"{name}.in", PARTITIONS, {})
        self.cluster.ensure(f"{name}.out", PARTITIONS, {"message.timestamp.type": "LogAppendTime"})
        self._loads = 0

    def app(self, folder: Path) -> Process:
        """Not started."""
        settings = self.settings
        given = (self.bootstrap, self.name, settings.stage_ms, settings.capacity)
        return Process(
            [sys.executable, "-m", "bench.skew", "--app", *map(str, given)], folder / f"{self.name}.log"
        )

    def load(self, kind: str, messages: int, app: Process) -> Run:
        """Send a load, wait for all its results, judge them."""
        settings = self.settings
        self._loads += 1
        begins = self._ends()
        command = [
            *(sys.executable, "-m", "keylane", "seed", f"{self.name}.in", "--bootstrap", self.bootstrap),
            *("--messages", str(messages), "--keys", str(settings.keys), "--rate", str(settings.rate)),
            *("--dist", kind, "--zipf-s", str(settings.zipf_s), "--seed", str(self._loads), "--json"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS_MAX)
        if said.returncode:
            raise BenchError(f"the load generator failed: {said.stderr.strip()[-300:]}")
        deadline = time.monotonic() + _RUN_SECONDS_MAX
        wanted = sum(begins.values()) + messages
        while sum((ends := self._ends()).values()) < wanted:
            app.must_run()
            if time.monotonic() > deadline:
                raise BenchError(f"{wanted - sum(ends.values()):,} results are missing; {app.last_words()}")
            time.sleep(0.1)
        return self._judge(kind, begins, messages, json.loads(said.stdout)["behind_ms"])

    def _ends(self) -> dict[int, int]:
        return self.cluster.ends(f"{self.name}.out", range(PARTITIONS))

    def _judge(self, kind: str, begins: dict[int, int], messages: int, late_ms: float) -> Run:
        settings = self.settings
        tag = f"{self._loads}-"
        hot = set(settings.hot) if kind == "zipf" else set()
        cold_from = next(
            n for n in range(1, settings.keys + 1) if settings.share(kind, n) < COLD_KEY_SHARE_MAX
        )
        first: float | None = None
        sequences: dict[bytes, int] = defaultdict(int)
        groups: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": [], "hot": []}
        hottest: list[float] = []
        for key, value, at in self._read(begins, messages):
            sequence, due_us, event_id = parse_value(value)
            if not event_id.startswith(tag) or sequence != sequences[key]:
                raise BenchError(
                    f"{kind}: key {key!r}: message {sequence} comes where {sequences[key]} should be: "
                    "lost, twice or overtaken"
                )
            sequences[key] += 1
            due, rank = due_us / 1000, int(key[1:]) + 1
            first = due if first is None else min(first, due)
            group = "hot" if rank in hot else "cold" if rank >= cold_from else "warm"
            if rank == 1:
                hottest.append(at)
            if due - first >= 1000 * _SKIPPED_SECONDS:
                groups[group].append((due, at - due))
        took = max(hottest) - min(hottest) if len(hottest) > 1 else 0
        return Run(
            kind=kind,
            cold=Latency.of(groups["cold"]),
            warm=Latency.of(groups["warm"]),
            hot=Latency.of(groups["hot"]),
            hot_per_second=1000 * len(hottest) / took if took else 0.0,
            late_ms=late_ms,
        )

    def _read(self, begins: dict[int, int], messages: int) -> list[tuple[bytes, bytes, float]]:
        """Key, value and the millisecond at which the broker wrote it, in the order of each partition."""
        reader: Any = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "bench", "enable.auto.commit": False}
        )
        reader.assign([TopicPartition(f"{self.name}.out", p, at) for p, at in begins.items()])
        found: list[tuple[bytes, bytes, float]] = []
        heard = time.monotonic()
        while len(found) < messages:
            for message in reader.consume(10_000, 0.2):
                if message.error() is None:
                    heard = time.monotonic()
                    found.append((message.key(), message.value(), message.timestamp()[1]))
            if time.monotonic() - heard > 10:
                raise BenchError(f"{len(found):,} results of {messages:,} messages")
        reader.close()
        found.sort(key=lambda one: one[2])  # stable: a partition's order stays
        return found


def measure(
    ground: Ground, rounds: int, folder: Path, say: Callable[[str], None]
) -> tuple[list[Run], list[str]]:
    """All loads, and what the app's log said of hot keys."""
    runs: list[Run] = []
    settings = ground.settings
    with ground.app(folder) as app:
        ground.load("uniform", int(settings.rate * 6), app)
        say("warmed up")
        for number in range(rounds):
            kinds = ("uniform", "zipf")
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                time.sleep(_REST_SECONDS)
                run = ground.load(kind, settings.messages, app)
                runs.append(run)
                hottest = f", the hottest key {run.hot_per_second:.0f}/s" if kind == "zipf" else ""
                say(
                    f"round {number + 1}/{rounds}, {kind}: cold lanes p50 {run.cold.p50:.0f} ms, p99 of a second "
                    f"{run.cold.second:.0f} ms, of all {run.cold.p99:.0f} ms{hottest}"
                )
        app.stop()
    most: dict[tuple[str, str], int] = {}
    for key, partition, share in _NAMED.findall(app.log.read_text()):
        most[key, partition] = max(most.get((key, partition), 0), int(share))
    return runs, [
        f"{key} (up to {share}% of what the task of partition {partition} read)"
        for (key, partition), share in most.items()
    ]


def table(settings: Settings, runs: Sequence[Run], named: Sequence[str]) -> str:
    """Markdown."""
    top = settings.rate * settings.share("zipf", 1)
    what = (
        f"{settings.rate:,.0f} messages per second of {settings.keys:,} keys for {settings.seconds:g} s; a stage of "
        f"{settings.stage_ms:g} ms, so a lane does {settings.lane_rate:.0f} per second at best. With Zipf "
        f"(s = {settings.zipf_s:g}) the hottest key gets {top:.0f} per second: it cannot keep up. "
        f"A task holds {settings.capacity:,} messages."
    )
    lines = [
        what,
        "",
        "| load | lanes | messages | p50, ms | p99 of a second, ms | p99 of all, ms | max, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = (
        ("uniform", "cold", "all"),
        ("zipf", "cold", "cold: below 1% of the messages each"),
        ("zipf", "warm", "warm: 1% and more, and keep up"),
        ("zipf", "hot", "hot: get more than they can do"),
    )
    for kind, group, title in rows:
        found: list[Latency] = [getattr(run, group) for run in runs if run.kind == kind]
        if not any(one.count for one in found):
            continue
        columns = ("p50", "second", "p99", "max")
        spreads = [Spread.of([getattr(one, name) for one in found]) for name in columns]
        figures = " | ".join(f"{s.median:,.0f} ({s.low:,.0f} to {s.high:,.0f})" for s in spreads)
        lines.append(f"| {kind} | {title} | {found[0].count:,} | {figures} |")
    worse, hottest = change(runs), Spread.of([run.hot_per_second for run in runs if run.kind == "zipf"])
    verdict = (
        f"Cold lanes' p99 of all beside the uniform load: {worse:+.0%}; within {P99_GROWTH_SHARE_MAX:.0%}: "
        f"**{'yes' if worse <= P99_GROWTH_SHARE_MAX else 'NO'}**. The hottest lane did "
        f"{hottest.median:.0f} per second. "
        f"Named in the log: {', '.join(named) or '**none**'}. Results: each once, in order."
    )
    lines += [
        "",
        verdict,
        "",
        f"Median of {len(runs) // 2} (lowest to highest). "
        + "; ".join(f"{k} {v}" for k, v in facts().items())
        + ".",
    ]
    return "\n".join(lines)


def change(runs: Sequence[Run]) -> float:
    """How much worse the cold lanes' p99 is than the uniform load's: 0.02 is 2% worse."""
    found = {k: Spread.of([r.cold.p99 for r in runs if r.kind == k]).median for k in ("uniform", "zipf")}
    return found["zipf"] / found["uniform"] - 1


def run_grid(*, update_docs: bool) -> int:
    """Every case of the grid; 0 when all of them are sound."""
    with multiprocessing.Pool() as pool:
        outcomes = list(pool.imap(skew_model.run, skew_model.grid(), chunksize=8))
    bad = [outcome for outcome in outcomes if not outcome.sound]
    text = grid_table(outcomes)
    print(text)
    for outcome in bad:
        print(f"NOT SOUND: {outcome}", file=sys.stderr)
    if update_docs and not bad:
        fill(DOCS, "skew grid", text)
    return 1 if bad else 0


def grid_table(outcomes: Sequence[skew_model.Outcome]) -> str:
    """Markdown: the worst of all cases with the same capacity and kind of load."""
    groups: dict[tuple[bool, int], list[skew_model.Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.case.live > 0, outcome.case.capacity].append(outcome)
    lines = [
        "| load | capacity | cases | s above optimum | times optimum, above 5 s | held | read, mean | read, most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (live, capacity), group in sorted(groups.items()):
        late = max(one.took - one.optimum for one in group)
        times = max((one.took / one.optimum for one in group if one.optimum >= 5.0), default=1.0)
        reads = [one.read for one in group]
        lines.append(
            f"| {'arrives' if live else 'backlog'} | {capacity:,} | {len(group)} | {late:.1f} | {times:.2f} | "
            f"{max(one.most for one in group):,} | {sum(reads) / len(reads):.2f} | {max(reads):.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.skew",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, default=2_000.0, help="messages per second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a load (%(default)s)")
    parser.add_argument("--keys", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--zipf-s", type=float, default=1.2, help="the larger, the hotter (%(default)s)")
    parser.add_argument("--stage-ms", type=float, default=5.0, help="what the stage waits (%(default)s)")
    parser.add_argument("--capacity", type=int, default=2_048, help="messages a task holds (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the app's log; a temporary one by default")
    parser.add_argument(
        "--grid", action="store_true", help="many distributions in virtual time; 3 minutes, no broker"
    )
    parser.add_argument(
        "--update-docs", action="store_true", help="also put the grid's table into docs/benchmarks.md"
    )
    parser.add_argument("--app", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.grid:
        return run_grid(update_docs=given.update_docs)
    if given.app:
        bootstrap, name, stage_ms, capacity = given.app
        run_app(bootstrap, name, float(stage_ms), int(capacity))
        return 0
    settings = Settings(
        rate=given.rate,
        seconds=given.seconds,
        keys=given.keys,
        zipf_s=given.zipf_s,
        stage_ms=given.stage_ms,
        capacity=given.capacity,
    )
    if not settings.hot:
        parser.error(
            f"at {given.rate:g} per second the hottest key gets {given.rate * settings.share('zipf', 1):.0f}, which "
            f"its lane can do ({settings.lane_rate:.0f}): raise --rate, --zipf-s or --stage-ms"
        )
    if given.rounds < 1 or given.seconds <= 2 * _SKIPPED_SECONDS or given.keys < 100:
        parser.error(f"--rounds needs at least 1, --seconds more than {2 * _SKIPPED_SECONDS:g}, --keys 100")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as temporary, Broker() as broker:
        ground = Ground(broker.bootstrap, "skew", settings)
        try:
            runs, named = measure(ground, given.rounds, (given.out or Path(temporary)).absolute(), say)
        except BenchError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print(table(settings, runs, named))
    print(json.dumps({"settings": asdict(settings), "named": named, "runs": [asdict(run) for run in runs]}))
    return 0 if change(runs) <= P99_GROWTH_SHARE_MAX and any(name.startswith("k0 ") for name in named) else 1


if __name__ == "__main__":
    raise SystemExit(main())
