"""``python -m bench``: what to measure, against whom, and where to put it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench import report
from bench.build import CASSANDRA, Workshop, default_folder
from bench.cassandra import Cassandra
from bench.errors import BenchError
from bench.field import PARTITIONS, Field
from bench.lineup import NAMES, assemble
from bench.machine import cores, facts
from bench.tool import Tool
from bench.workloads import ALL, Sizes, Workload
from bench.workloads import NAMES as WORKLOADS
from keylane.broker import Broker, shown
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from bench.lineup import Lineup
    from bench.results import ResultSheet

RESULTS_FOLDER = Path(__file__).parent / "results"
LOCAL_FOLDER = RESULTS_FOLDER / "local"
"""Not kept in the repository."""
_BUSY_LOAD_PER_CORE = 0.25
"""Load average per core above which other programs distort the figures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when every line that was measured is sound."""
    signal.signal(signal.SIGTERM, _terminated)
    given = _parser().parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    out: Path = given.out or (LOCAL_FOLDER / "quick" if given.quick else RESULTS_FOLDER)
    try:
        if given.list:
            print("\n".join(f"{one.name:15} {one.what}" for one in ALL))
            return 0
        measured = [] if given.report else _measure(given, out, say)
        report.write(out)
        name = "report.json" if given.json else "report.md"
        print((out / name).read_text(encoding="utf-8"), flush=True)
        say(f"written to {out}")
        if given.update_docs:
            report.update_docs(out)
    except (BenchError, KeylaneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = [problem for sheet in measured for problem in sheet.all_problems]
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _measure(given: argparse.Namespace, out: Path, say: Callable[[str], None]) -> list[ResultSheet]:
    wanted = _chosen("--peers", given.peers, NAMES)
    only = [*given.workload, *(given.only.split(",") if given.only else [])]
    parts = _chosen(
        "--only", ",".join(only) if only and "all" not in only else ",".join(WORKLOADS), WORKLOADS
    )
    sizes = _sizes(given)
    rounds = given.rounds or (1 if given.quick else 3)
    machine = facts()
    if os.getloadavg()[0] > _BUSY_LOAD_PER_CORE * cores():
        say(f"the machine is busy (load average {os.getloadavg()[0]:.2f}): do not trust the figures")
    lineup = assemble(wanted, Workshop(given.build or default_folder(), say))
    logs = (LOCAL_FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    with ExitStack() as stack:
        lineup, store = _store(lineup, logs, stack, say)
        for name, why in lineup.left_out.items():
            say(f"left out: {name}: {why}")
        say("starting Kafka …")
        with shown() as progress:
            broker = stack.enter_context(Broker(progress=progress))
        ground = Field(
            brokers=broker.bootstrap,
            broker_pid=broker.nodes[0].pid,
            tool=Tool(lineup.tool, broker.bootstrap, PARTITIONS),
            lineup=lineup,
            rounds=rounds,
            logs=logs,
            say=say,
            machine=machine,
            store=store,
        )
        say("warming the broker up …")
        ground.warm_broker(seconds=5 if given.quick else 30)
        return [_one(workload, ground, sizes, out) for workload in ALL if workload.name in parts]


def _one(workload: Workload, ground: Field, sizes: Sizes, out: Path) -> ResultSheet:
    """Measure it and write its file at once: a run that is ended later has this one done."""
    sheet = workload.measure(ground, sizes)
    if sheet.lines:
        sheet.write(out)
    return sheet


def _store(
    lineup: Lineup, logs: Path, stack: ExitStack, say: Callable[[str], None]
) -> tuple[Lineup, Cassandra | None]:
    if "prosody" not in lineup.built:
        return lineup, None
    say("starting Cassandra, which prosody needs …")
    try:
        store = stack.enter_context(Cassandra(lineup.built[CASSANDRA.name], logs / "cassandra"))
    except BenchError as error:
        built = {name: place for name, place in lineup.built.items() if name != "prosody"}
        return replace(lineup, built=built, left_out=lineup.left_out | {"prosody": str(error)}), None
    return replace(lineup, store=store.address), store


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        what = f"there is no {unknown[0]!r}" if unknown else "names nothing"
        raise BenchError(f"{option} {text}: {what}; there are {', '.join(known)}")
    return found


def _sizes(given: argparse.Namespace) -> Sizes:
    for name in ("rounds", "n", "seconds", "rate"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise BenchError(f"--{name} {value:g}: needs a number above 0")
    if not 0 <= given.fail <= 100:
        raise BenchError(f"--fail {given.fail}: needs a percentage, 0 to 100")
    return Sizes(
        n=given.n,
        rate=given.rate,
        seconds=given.seconds,
        rates=tuple(map(float, _numbers("--rates", given.rates))) if given.rates else None,
        keys=_numbers("--keys", given.keys) if given.keys else None,
        backlogs=_numbers("--backlogs", given.backlogs) if given.backlogs else None,
        fail=given.fail,
        rotate=given.rotate,
        quick=given.quick,
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise BenchError(f"{option} {text}: needs whole numbers above 0 with commas, for example 1000,20000")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("workload", nargs="*", help="all, or some of those that --list shows")
    parser.add_argument("--only", help="the same with commas")
    parser.add_argument("--peers", default=",".join(NAMES), help="which, with commas (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small round, to bench/results/local/quick")
    parser.add_argument("--list", action="store_true", help="the workloads, and nothing else")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: the report from what is there"
    )
    parser.add_argument("--rounds", type=int, help="how often each is measured (3; with --quick 1)")
    parser.add_argument("--n", type=int, help="drain: messages (300000)")
    parser.add_argument("--rate", type=float, help="chat, stuck: messages per second (2000)")
    parser.add_argument("--seconds", type=float, help="length of a load (10 to 30, by workload)")
    parser.add_argument("--rates", help="offered, curve: messages per second, with commas")
    parser.add_argument("--keys", help="keys: how many, with commas (10 to 1,000,000)")
    parser.add_argument("--backlogs", help="backlog: messages, with commas (100000,1000000)")
    parser.add_argument(
        "--rotate", action="store_true", help="chat: keys take turns, so that none waits behind its own"
    )
    parser.add_argument("--fail", type=int, default=10, help="chat: percent that fail at first (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for figures and the report (bench/results)")
    parser.add_argument(
        "--build", type=Path, help="folder for what is built; this user's cache folder by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument(
        "--update-docs", action="store_true", help="also put the report into docs/benchmarks.md"
    )
    return parser


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)  # so that everything that was started is stopped on the way out
