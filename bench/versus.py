"""Compares this checkout with another one: ``python -m bench.versus ../before [--only drain] [--rounds 3]``.

Both run the same workloads on one warm broker, taking turns, each with the Python of its own ``.venv``. So a figure
that changes with the hour, or with what else the machine does, changes for both. The other checkout can be a
worktree of an older commit: ``git worktree add ../before <commit>``, and ``make dev-env`` in it.

=============  =====================================================================================================
``drain``      300,000 messages, a handler that does nothing: messages per second, and processor time per message
``drain-one``  the same with one task: the cost of a message when nothing runs beside it
``drain-5ms``  300,000 messages, a stage of 5 ms
``offered``    5,000 messages per second, a handler that does nothing: latency
``chat``       four stages of 100 ms together, 2,000 messages per second, one in ten fails at first: latency
=============  =====================================================================================================

``--keep FILE`` adds the rounds of this call to those in the file, and the table shows all of them: a long comparison
can be made in pieces. ``--bootstrap`` uses a broker that runs and is warm, instead of starting one.

Exit code 0: every result of both was in order and complete. A slower figure is reported, and is no error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench import chat, drain, offered
from bench.build import TOOL, Workshop, default_folder
from bench.cli import LOCAL_FOLDER
from bench.errors import BenchError
from bench.field import PARTITIONS, Field
from bench.lineup import Contestant, Job, Lineup, pairs
from bench.machine import facts
from bench.results import table
from bench.tool import Tool
from keylane.broker import Broker, shown
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.results import ResultSheet

HERE, OTHER = "this", "other"
WORKLOADS = ("drain", "drain-one", "drain-5ms", "offered", "chat")
FIGURES = {
    "per_second": ("messages per second", ",.0f"),
    "cpu_per_million": ("us of processor time per message", ".2f"),
    "p50": ("p50 ms", ",.1f"),
    "p99": ("p99 ms", ",.1f"),
    "cores": ("cores", ".2f"),
}
Rounds = dict[str, dict[str, dict[str, list[float]]]]
"""Every round's figure: by workload, by figure, of this checkout and of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A folder with the sources and the ``.venv`` that runs them."""

    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / ".venv" / "bin" / "python"

    def check(self) -> None:
        """Raise BenchError for a folder that cannot run the workloads."""
        for needed in (self.folder / "bench" / "keylane_peer.py", self.python):
            if not needed.is_file():
                raise BenchError(
                    f"{self.folder} is not a checkout with an environment: {needed} is missing; "
                    "run 'make dev-env' in it"
                )

    def contestant(self, label: str, *more: str) -> Contestant:
        """Its Keylane, as a peer."""
        paths = f"PYTHONPATH={self.folder / 'src'}:{self.folder}"
        start = ["env", paths, str(self.python), "-m", "bench.keylane_peer"]
        return Contestant(label=label, peer="keylane", command=lambda job: self._command(start, job, more))

    @staticmethod
    def _command(start: Sequence[str], job: Job, more: Sequence[str]) -> list[str]:
        return [*start, *pairs(job), *more]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Lineup):
    """Two checkouts instead of the peers."""

    both: tuple[Contestant, ...]

    def drain(self) -> list[Contestant]:
        """Both, in every workload."""
        return list(self.both)

    waiting = skewed = offered = curve = chat = alone = drain


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and a line of JSON."""
    given = _parser().parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        only = _chosen(given.only)
        rounds = _read(given.keep) if given.keep else {}
        problems = _measure(given, only, rounds, say)
    except (BenchError, KeylaneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.keep:
        given.keep.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")
    print(compared(rounds))
    print(json.dumps(rounds))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def compared(rounds: Rounds) -> str:
    """A table: medians of both, with their extremes, and by how much this checkout differs."""
    rows = []
    for name, figures in rounds.items():
        for figure, (title, form) in FIGURES.items():
            mine, theirs = (figures.get(figure, {}).get(who, []) for who in (HERE, OTHER))
            if mine and theirs:
                change = median(mine) / median(theirs) - 1
                cells = [_cell(values, form) for values in (theirs, mine)]
                rows.append([f"{name}, {title}", *cells, f"{change:+.1%}", f"{len(theirs)}, {len(mine)}"])
    return table(["", OTHER, HERE, "change", "rounds"], rows)


def _cell(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def add(rounds: Rounds, name: str, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Append the figures of a call: by checkout, by figure."""
    for who, figures in found.items():
        for figure, values in figures.items():
            if figure in FIGURES:
                rounds.setdefault(name, {}).setdefault(figure, {}).setdefault(who, []).extend(values)


def _measure(
    given: argparse.Namespace, only: Sequence[str], rounds: Rounds, say: Callable[[str], None]
) -> list[str]:
    here, there = Checkout(folder=Path(__file__).parents[1]), Checkout(folder=given.other.absolute())
    for one in (here, there):
        one.check()
    program = Workshop(default_folder(), say).build(TOOL) / "program"
    problems: list[str] = []
    with ExitStack() as stack:
        bootstrap, pid = given.bootstrap, 0
        if not bootstrap:
            say("starting Kafka …")
            with shown() as progress:
                broker = stack.enter_context(Broker(progress=progress))
            bootstrap, pid = broker.bootstrap, broker.nodes[0].pid
        for number, name in enumerate(only):
            more = ("master=local[1]",) if name == "drain-one" else ()
            both = there.contestant(OTHER, *more), here.contestant(HERE, *more)
            ground = Field(
                brokers=bootstrap,
                broker_pid=pid,
                tool=Tool(program, bootstrap, PARTITIONS),
                lineup=Pair(tool=program, built={}, left_out={}, both=both),
                rounds=given.rounds,
                logs=(LOCAL_FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute(),
                say=say,
                machine=facts(),
            )
            if number == 0 and given.warm:
                say("warming the broker up …")
                ground.warm_broker(seconds=given.warm)
            sheet = _workload(ground, name, given)
            problems += sheet.all_problems
            add(rounds, name, {line.label.split(",")[0]: line.figures for line in sheet.lines})
    return problems


def _workload(ground: Field, name: str, given: argparse.Namespace) -> ResultSheet:
    if name == "offered":
        settings = offered.Settings(rates=(5_000.0,), seconds=given.seconds)
        return offered.measure(ground, name, settings, ground.lineup.offered())
    if name == "chat":
        return chat.measure(ground, name, chat.Settings(seconds=given.seconds))
    stage_ms = 5 if name == "drain-5ms" else 0
    return drain.measure(ground, name, drain.Settings(n=given.n, stage_ms=stage_ms))


def _chosen(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in WORKLOADS:
            raise BenchError(f"--only {text}: there is no {name!r}; there are {', '.join(WORKLOADS)}")
    return found


def _read(path: Path) -> Rounds:
    try:
        found: Rounds = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        compared(found)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BenchError(f"--keep {path} does not hold rounds of earlier calls ({error})") from error
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.versus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout, with its .venv")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, with commas (%(default)s)")
    parser.add_argument(
        "--rounds", type=_positive, default=3, help="how often each is measured (%(default)s)"
    )
    parser.add_argument("--n", type=_positive, default=300_000, help="drains: messages (%(default)s)")
    parser.add_argument(
        "--seconds", type=_positive, default=20, help="offered, chat: length of a load (%(default)s)"
    )
    parser.add_argument(
        "--warm", type=int, default=30, help="seconds to warm the broker up; 0: it is (%(default)s)"
    )
    parser.add_argument("--bootstrap", help="a broker that runs, host:port; otherwise one is started")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add the rounds to those in this file")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"needs a whole number above 0, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
