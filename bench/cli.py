"""``python -m bench``: what to measure, against whom, and where to put it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench import chat, drain, stuck
from bench.build import Workshop, default_folder
from bench.errors import BenchError
from bench.field import PARTITIONS, Field
from bench.lineup import NAMES, assemble
from bench.machine import cores, facts
from bench.report import Results, update_docs
from bench.tool import Tool
from keylane.broker import Broker, shown
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

OUT = Path(__file__).parent / "results"
WORKLOADS = ("drain", "chat", "stuck")
_BUSY = 0.25
"""Load average per core above which the figures are somebody else's as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when every row is sound."""
    signal.signal(signal.SIGTERM, _terminated)
    given = _parser().parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        results, folder = _measure(given, say)
        markdown = "\n\n".join(results.sections().values()) + "\n"
        encoded = json.dumps(results.to_json(), indent=1)
        (folder / "results.md").write_text(markdown, encoding="utf-8")
        (folder / "results.json").write_text(encoded + "\n", encoding="utf-8")
        print(encoded if given.json else markdown, flush=True)
        say(f"written to {folder}")
        if given.update_docs:
            update_docs(results)
    except (BenchError, KeylaneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in results.problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if results.problems else 0


def _measure(given: argparse.Namespace, say: Callable[[str], None]) -> tuple[Results, Path]:
    wanted = given.peers.split(",")
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise BenchError(f"--peers {given.peers}: there is no {unknown[0]!r}; there are {', '.join(NAMES)}")
    if given.rounds < 1 or given.n < 1 or given.seconds <= 0 or given.rate <= 0:
        raise BenchError("--rounds and --n need at least 1, --seconds and --rate a number above 0")
    machine = facts()
    if os.getloadavg()[0] > _BUSY * cores():
        say(f"the machine is busy (load average {os.getloadavg()[0]:.2f}): do not trust the figures")
    lineup = assemble(wanted, Workshop(given.build or default_folder(), say))
    for name, why in lineup.left_out.items():
        say(f"left out: {name}: {why}")
    folder = given.out / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    say("starting Kafka …")
    with shown() as progress, Broker(progress=progress) as broker:
        ground = Field(
            brokers=broker.bootstrap,
            broker_pid=broker.nodes[0].pid,
            tool=Tool(lineup.tool, broker.bootstrap, PARTITIONS),
            lineup=lineup,
            rounds=given.rounds,
            logs=(folder / "logs").absolute(),
            say=say,
        )
        results = Results(machine=machine, rounds=given.rounds, left_out=lineup.left_out)
        parts = WORKLOADS if given.workload == "all" else (given.workload,)
        if "drain" in parts:
            results = replace(results, drain=drain.measure(ground, drain.Settings(n=given.n)))
        if "chat" in parts:
            settings = chat.Settings(
                rate=given.rate, seconds=given.seconds, fail=given.fail, rotate=given.rotate
            )
            results = replace(results, chat=chat.measure(ground, settings))
        if "stuck" in parts:
            results = replace(
                results, stuck=stuck.measure(ground, stuck.Settings(rate=given.rate, seconds=given.seconds))
            )
    return results, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("workload", nargs="?", default="all", choices=("all", *WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    parser.add_argument("--peers", default=",".join(NAMES), help="which, with commas (%(default)s)")
    parser.add_argument("--n", type=int, default=300_000, help="drain: messages (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=2_000.0, help="chat, stuck: messages per second (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="chat, stuck: length of a load (%(default)s)"
    )
    parser.add_argument(
        "--rotate", action="store_true", help="chat: keys take turns, so that none waits behind its own"
    )
    parser.add_argument("--fail", type=int, default=10, help="chat: percent that fail at first (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results and logs (bench/results)")
    parser.add_argument(
        "--build", type=Path, help="folder for what is built; this user's cache folder by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument(
        "--update-docs", action="store_true", help="also put the tables into docs/benchmarks.md"
    )
    return parser


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)  # so that everything that was started is stopped on the way out
