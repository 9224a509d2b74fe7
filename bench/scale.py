"""One partition and several tasks: ``python -m bench.scale [--rounds 3]``.

A topic with a single partition is worked off by one task and by two, which share its ring, taking turns:

======= ==============================================================================================================
``cpu`` a stage of 1 ms of pure Python, 1,000 keys: one task has one core, two have two
``io``  a stage that waits for 50 ms, 20,000 keys: the handlers set the pace, not the partition
======= ==============================================================================================================

The broker is warm when it begins. Throughput is taken from the times at which the broker wrote the results: from 20% to
100% of them. The lanes in flight are the throughput times the stage's time. Every result is checked: each message
once, in the order of its key. Exit code 0: two tasks do at least 1.7 times what one does in ``cpu``. Prints a table and
a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.delivery import Ground, Results
from bench.errors import BenchError
from bench.field import Spread
from bench.process import Process
from keylane import App, Message
from keylane.broker import Broker
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEEDUP_RATIO_MIN = 1.7
_WARM_UP_SHARE = 0.2
_RUN_SECONDS_MAX = 300.0
STAGE = {"cpu": 0.001, "io": 0.05}
KEYS = {"cpu": 1_000, "io": 20_000}


def run_app(bootstrap: str, name: str, kind: str, tasks: int) -> None:
    """Work off what is there."""
    app = App(name, source=f"{name}.in", sink=f"{name}.out")
    lasts = STAGE[kind]

    @app.stage
    async def work(msg: Message) -> bytes:
        if kind == "io":
            await asyncio.sleep(lasts)
        else:
            until = time.thread_time() + lasts  # of this thread's own time: not what others take from it
            while time.thread_time() < until:
                sum(range(100))
        return msg.value  # type: ignore[no-any-return]

    spark = session("local[2]", "keylane bench")
    try:
        app.start(spark, bootstrap=bootstrap, tasks=tasks, available_now=True).awaitTermination()
    finally:
        spark.stop()


def measure(ground: Ground, name: str, kind: str, tasks: int, n: int) -> float:
    """Messages per second."""
    ground.topics(name, partitions=1)
    ground.load(name, n, rate=None, keys=KEYS[kind])
    command = [sys.executable, "-m", "bench.scale", "--app", ground.bootstrap, name, kind, str(tasks)]
    with Process(command, ground.folder / f"{name}.log") as app:
        deadline = time.monotonic() + _RUN_SECONDS_MAX
        while ground.cluster.ends(f"{name}.out", [0])[0] < n:  # who reads now takes from those who work
            if time.monotonic() > deadline:
                raise BenchError(f"{name}: not drained within {_RUN_SECONDS_MAX:g} s; {app.last_words()}")
            time.sleep(0.5)
    results = Results(ground.reader(name, partitions=1))
    results.read(n)
    written = sorted(results.written)
    return 1000 * n * (1 - _WARM_UP_SHARE) / (written[-1] - written[int(n * _WARM_UP_SHARE)])


def warm_up(ground: Ground) -> None:
    """Wait: a broker that has just been started uses half a core for what takes a tenth of one later."""
    ground.topics("warm", partitions=1)
    ground.load("warm", 1_000_000, rate=None)
    measure(ground, "warmer", "io", 2, 100_000)


def table(found: dict[tuple[str, int], list[float]]) -> str:
    """Markdown."""
    lines = ["| stage | tasks | messages/s | spread | lanes in flight |", "|---|---|---|---|---|"]
    for (kind, tasks), figures in found.items():
        spread = Spread.of(figures)
        lanes = spread.median * STAGE[kind]
        lines.append(
            f"| {kind} | {tasks} | {spread.median:,.0f} | {min(figures):,.0f} to {max(figures):,.0f} | {lanes:,.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--n", type=int, default=10_000, help="messages of the cpu stage; the io stage has ten times as many"
    )
    parser.add_argument("--app", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.app:
        bootstrap, name, kind, tasks = given.app
        run_app(bootstrap, name, kind, int(tasks))
        return 0
    found: dict[tuple[str, int], list[float]] = {(kind, tasks): [] for kind in STAGE for tasks in (1, 2)}
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        ground = Ground(broker.bootstrap, Path(folder))
        warm_up(ground)
        for number in range(given.rounds):
            for kind in STAGE:
                for tasks in (1, 2) if number % 2 == 0 else (2, 1):
                    n = given.n * (10 if kind == "io" else 1)
                    per_second = measure(ground, f"{kind}{tasks}-{number}", kind, tasks, n)
                    found[kind, tasks].append(per_second)
                    print(f"{number + 1}: {kind}, {tasks} tasks: {per_second:,.0f}/s", flush=True)
    ratio = Spread.of(found["cpu", 2]).median / Spread.of(found["cpu", 1]).median
    print(f"\n{table(found)}\n\ncpu: two tasks do {ratio:.2f} times what one does")
    print(json.dumps({f"{kind}{tasks}": figures for (kind, tasks), figures in found.items()}))
    return 0 if ratio >= SPEEDUP_RATIO_MIN else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
