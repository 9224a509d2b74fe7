"""What the end of an epoch costs, and a crash: ``python -m bench.epochs [--rate 1000] [--epochs 12] [--rounds 3]``.

=========== ==========================================================================================================
``gap``     an epoch every few seconds under a steady load: the longest time in which no message of a partition
            begins; lanes keep running where one epoch ends and the next one begins
``latency`` of that run, beside one of a single epoch: from when a message was due to when its result was read
``worker``  kill -9 of a Python worker on ``local[2,4]``: until messages of its partitions begin again
``driver``  kill -9 of ``keylane run`` and all of its processes, which is started again at once: until messages begin
=========== ==========================================================================================================

The app is run by ``keylane run``, its history judged: order, no overlap, nothing lost. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from confluent_kafka import TopicPartition

from bench.delivery import Ground, Results
from bench.errors import BenchError
from bench.process import Process
from keylane import App, Message
from keylane.broker import Broker
from keylane.testing import EventKind, History, HistoryWriter, Sent, check, read_history

EPOCH_SECONDS = 3.0
PARTITIONS = 8
_RECOVERY_SECONDS_MAX = 60.0

if name := os.environ.get("KEYLANE_BENCH_APP"):
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        observer=HistoryWriter(os.environ["KEYLANE_BENCH_HISTORY"]),
    )

    @app.stage
    async def hand_on(msg: Message) -> bytes:
        """The handler that does nothing."""
        return msg.value  # type: ignore[no-any-return]


@dataclass(slots=True)
class Found:
    """The figures of all rounds, in milliseconds."""

    gap: dict[str, list[float]] = field(default_factory=lambda: {"one epoch": [], "many": []})
    p50: dict[str, list[float]] = field(default_factory=lambda: {"one epoch": [], "many": []})
    p99: dict[str, list[float]] = field(default_factory=lambda: {"one epoch": [], "many": []})
    worker: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)


class Run:
    """An app under load: its process, its history, its results."""

    def __init__(self, ground: Ground, name: str, epoch: float) -> None:
        self.ground = ground
        self.name = name
        self.history = ground.folder / f"{name}.history"
        os.environ["KEYLANE_BENCH_APP"] = name
        os.environ["KEYLANE_BENCH_HISTORY"] = str(self.history)
        command = [
            sys.executable,
            "-m",
            "keylane",
            "run",
            "bench.epochs:app",
            "--bootstrap",
            ground.bootstrap,
        ]
        self.command = [*command, "--master", "local[2,4]", "--epoch", str(epoch)]
        self.results = Results(ground.reader(name, PARTITIONS))
        self.sent = 0

    def start(self, attempt: int = 1) -> Process:
        """Not entered yet."""
        return Process(self.command, self.ground.folder / f"{self.name}.{attempt}.log")

    def load(self, rate: float, seconds: float) -> threading.Thread:
        """In the background; the results of all loads so far are what is to come."""
        count = int(rate * seconds)
        loading = threading.Thread(
            target=self.ground.load, args=(self.name, count, rate, self.sent), kwargs={"keys": 1000}
        )
        self.sent += count
        loading.start()
        return loading

    def judged(self, repeats: int = 0) -> History:
        """All attempts; raises when a promise was broken. A message may be repeated up to ``repeats`` times."""
        reader = self.ground.reader(self.name, PARTITIONS)
        reader.assign([TopicPartition(f"{self.name}.in", p, 0) for p in range(PARTITIONS)])
        sent: list[Sent] = []
        while len(sent) < self.sent:
            came = reader.consume(1000, 10.0)
            if not came:
                raise BenchError(f"{self.name}.in has {len(sent)} messages of {self.sent}")
            sent += [Sent(key=m.key(), partition=m.partition(), offset=m.offset()) for m in came]
        found = read_history(self.history)
        check(found, sent=sent, allow_repeats=repeats).raise_if_bad()
        return found


def gaps(run: Run, rate: float, seconds: float) -> tuple[float, float, float]:
    """The longest gap of a partition, and the median and 99th percentile of latency, in milliseconds."""
    with run.start() as process:
        run.load(rate, 3).join()  # until everything is warm
        run.results.read(run.sent)
        began = time.time()
        loading = run.load(rate, seconds)
        run.results.read(run.sent)
        loading.join()
        process.must_run()
    events = [e for e in run.judged() if e.kind is EventKind.START and e.at > began + 1]
    longest = 0.0
    for partition in range(PARTITIONS):
        starts = [e.seq / 1e6 for e in events if e.partition == partition]
        longest = max(longest, *(later - earlier for earlier, later in pairwise(starts)))
    late = sorted(at - due for due, at in run.results.came if due > began + 1)
    return longest, 1e3 * median(late), 1e3 * late[int(len(late) * 0.99)]


def recovery(run: Run, rate: float, what: str) -> float:
    """Milliseconds from the kill until the last affected partition continues."""
    first = run.start()
    first.__enter__()
    again = None
    try:
        run.load(rate, 3).join()
        run.results.read(run.sent)
        loading = run.load(rate, 20)
        time.sleep(4)
        before = [e for e in read_history(run.history) if e.kind is EventKind.START][-2000:]
        owners = {e.partition: e.owner.partition("+")[0] for e in before}  # their pids
        if what == "worker":
            victim = owners[before[-1].partition]
            hit = {p for p, owner in owners.items() if owner == victim}
            killed = time.monotonic_ns()
            os.kill(int(victim), signal.SIGKILL)
        else:
            hit = set(owners)
            killed = time.monotonic_ns()
            first.kill()
            again = run.start(2)
            again.__enter__()
        loading.join()
        deadline = time.monotonic() + _RECOVERY_SECONDS_MAX
        while True:
            after: dict[int, int] = {}
            for e in read_history(run.history):
                if e.kind is EventKind.START and e.seq > killed + 50_000_000:
                    after.setdefault(e.partition, e.seq)
            if hit <= set(after):
                break
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{what}: partitions {sorted(hit - set(after))} are silent; {first.last_words()}"
                )
            time.sleep(0.5)
    finally:
        if again is not None:
            again.__exit__(None, None, None)
        first.__exit__(None, None, None)
    run.judged(repeats=1)  # messages done since the last commit
    return max(after[p] - killed for p in hit) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=1_000, help="messages per second")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["gap", "crash"], help="only the gaps, or only the crashes")
    given = parser.parse_args()
    found = Found()
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        ground = Ground(broker.bootstrap, Path(folder))
        for number in range(given.rounds):
            if given.only != "crash":
                for kind, epoch in (("one epoch", 300.0), ("many", EPOCH_SECONDS)):
                    name = f"g{number}-{epoch:g}"
                    ground.topics(name)
                    run = Run(ground, name, epoch)
                    gap, p50, p99 = gaps(run, given.rate, given.epochs * EPOCH_SECONDS)
                    found.gap[kind].append(gap)
                    found.p50[kind].append(p50)
                    found.p99[kind].append(p99)
                    print(
                        f"{number + 1}: {kind:9} p50 {p50:.1f} p99 {p99:.1f} ms; longest gap {gap:.0f} ms",
                        flush=True,
                    )
            if given.only != "gap":
                for what, into in (("worker", found.worker), ("driver", found.driver)):
                    name = f"c{number}-{what}"
                    ground.topics(name)
                    into.append(recovery(Run(ground, name, 300.0), given.rate, what))
                    print(f"{number + 1}: {what} killed, goes on after {into[-1]:,.0f} ms", flush=True)
    print("\n| | median of the rounds | worst |\n|---|---|---|")
    rows = {
        "longest gap of a partition, one epoch, ms": found.gap["one epoch"],
        f"longest gap of a partition, an epoch every {EPOCH_SECONDS:g} s, ms": found.gap["many"],
        "p50, one epoch, ms": found.p50["one epoch"],
        f"p50, an epoch every {EPOCH_SECONDS:g} s, ms": found.p50["many"],
        "p99, one epoch, ms": found.p99["one epoch"],
        f"p99, an epoch every {EPOCH_SECONDS:g} s, ms": found.p99["many"],
        "worker killed, ms": found.worker,
        "driver killed and started again, ms": found.driver,
    }
    for what, figures in rows.items():
        if figures:
            print(f"| {what} | {median(figures):,.1f} | {max(figures):,.1f} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
