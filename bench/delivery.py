"""What exactly_once costs beside at_least_once: ``python -m bench.delivery [--n 500000] [--rate 5000] [--rounds 3]``.

Two things are measured for each, taking turns on one broker, with a no-op handler and everything as a user gets it:

=========== ==========================================================================================================
``drain``   a backlog of ``n`` messages: messages per second, by the times at which the broker wrote the results,
            from 20% to 100% of them
``latency`` ``rate`` messages per second for a while, from a process of their own (``keylane seed``): from when a
            message was due to when a reader that is ``read_committed`` got its result, after a warm-up
=========== ==========================================================================================================

Every result is checked: each message once, in the order of its key. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from bench.errors import BenchError
from bench.field import Spread, turns
from bench.process import Process
from keylane.broker import Broker
from keylane.demo.seed import parse_value
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings

KINDS = ("at_least_once", "exactly_once")
PARTITIONS = 8
KEYS = 1_000
_WARM_UP_SHARE = 0.2
_WARM_UP_SECONDS = 6.0
_RUN_SECONDS_MAX = 300.0


@dataclass(slots=True)
class Found:
    """The figures of one kind, one per round."""

    per_second: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)


class Ground:
    """One broker, and its topics."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.cluster = Cluster(KafkaSettings(bootstrap))

    def app(self, name: str, kind: str) -> Process:
        """The app, not started."""
        command = [
            *(sys.executable, "-m", "bench.keylane_peer", f"brokers={self.bootstrap}", f"topic={name}.in"),
            *(f"out={name}.out", f"group={name}", f"delivery={kind}"),
        ]
        return Process(command, self.folder / f"{name}.log")

    def topics(self, name: str, partitions: int = PARTITIONS) -> None:
        """Make the source and the sink."""
        self.cluster.ensure(f"{name}.in", partitions, {})
        self.cluster.ensure(f"{name}.out", partitions, {"message.timestamp.type": "LogAppendTime"})

    def load(self, name: str, messages: int, rate: float | None, seed: int = 0, keys: int = KEYS) -> None:
        """From a process of its own; returns when all are sent."""
        command = [
            *(sys.executable, "-m", "keylane", "seed", f"{name}.in", "--bootstrap", self.bootstrap),
            *("--messages", str(messages), "--keys", str(keys), "--seed", str(seed), "--json"),
            *(() if rate is None else ("--rate", str(rate))),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS_MAX)
        if said.returncode:
            raise BenchError(f"the load generator failed: {said.stderr.strip()[-300:]}")

    def left(self, name: str) -> int:
        """Messages that are not done, by the group's progress."""
        source = f"{name}.in"
        ends = self.cluster.ends(source, range(PARTITIONS))
        found = self.cluster.committed(name, source, range(PARTITIONS))
        return sum(end - found.get(p, (0, None))[0] for p, end in ends.items())

    def reader(self, name: str, partitions: int = PARTITIONS, topic: str = "") -> Any:
        """Of the sink, or another topic, from its beginning: only what is committed."""
        topic = topic or f"{name}.out"
        reader = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": f"{name}.reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 5,
                "enable.partition.eof": False,
            }
        )
        reader.list_topics(topic, timeout=10)
        reader.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        return reader


def drain(ground: Ground, kind: str, name: str, n: int) -> float:
    """Messages per second."""
    ground.topics(name)
    ground.load(name, n, rate=None)
    with ground.app(name, kind) as app:
        deadline = time.monotonic() + _RUN_SECONDS_MAX
        while ground.left(name):
            if time.monotonic() > deadline:
                raise BenchError(f"{kind}: not drained within {_RUN_SECONDS_MAX:g} s; {app.last_words()}")
            app.must_run()
            time.sleep(0.2)
        results = Results(ground.reader(name))
        results.read(n)
    written = sorted(results.written)
    began, ended = written[int(n * _WARM_UP_SHARE)], written[-1]
    return 1000 * n * (1 - _WARM_UP_SHARE) / (ended - began)


def latency(ground: Ground, kind: str, name: str, rate: int, seconds: float) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    ground.topics(name)
    results = Results(ground.reader(name))
    with ground.app(name, kind) as app:
        ground.load(name, rate, rate=rate / 4)  # until everybody is connected and has seen messages
        results.read(rate)
        count = int(rate * (_WARM_UP_SECONDS + seconds))
        loading = threading.Thread(target=ground.load, args=(name, count, rate, 1))
        loading.start()
        results.read(rate + count)
        loading.join()
        app.must_run()
    last = max(due for due, _ in results.came)
    measured = sorted(at - due for due, at in results.came if due > last - seconds)
    if len(measured) < rate * seconds * 0.9:
        raise BenchError(f"{kind}: {len(measured)} results in the time measured")
    return 1e3 * measured[len(measured) // 2], 1e3 * measured[int(len(measured) * 0.99)]


class Results:
    """What a reader gets, checked: every message of a load once, in the order of its key."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._next: dict[tuple[str, bytes], int] = {}
        self.written: list[int] = []
        """When the broker wrote each, in milliseconds."""
        self.came: list[tuple[float, float]] = []
        """When each was due and when it came, in seconds."""

    def read(self, count: int) -> None:
        """Wait until there are this many."""
        heard = time.monotonic()
        while len(self.came) < count:
            messages = self._reader.consume(1000, 0.002)
            now = time.time()
            for message in messages:
                if message.error() is not None:
                    continue
                heard = time.monotonic()
                sequence, due_us, event_id = parse_value(message.value())
                lane = event_id.partition("-")[0], message.key()
                if sequence != self._next.get(lane, 0):
                    raise BenchError(
                        f"key {message.key()!r}: {sequence} comes where {self._next.get(lane)} should"
                    )
                self._next[lane] = sequence + 1
                self.written.append(message.timestamp()[1])
                self.came.append((due_us / 1e6, now))
            if time.monotonic() - heard > 60:
                raise BenchError(f"{len(self.came)} results of {count} messages")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=500_000, help="messages to drain")
    parser.add_argument("--rate", type=int, default=5_000, help="messages per second")
    parser.add_argument("--seconds", type=float, default=12, help="how long latency is measured")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = {kind: Found() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        ground = Ground(broker.bootstrap, Path(folder))
        for number in range(given.rounds):
            for kind in turns(list(KINDS), number):
                each = found[kind]
                each.per_second.append(drain(ground, kind, f"d{number}-{kind}", given.n))
                p50, p99 = latency(ground, kind, f"l{number}-{kind}", given.rate, given.seconds)
                each.p50.append(p50)
                each.p99.append(p99)
                print(
                    f"{number + 1}: {kind:13} {each.per_second[-1]:9,.0f}/s  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms",
                    flush=True,
                )
    spread = {kind: Spread.of(each.per_second) for kind, each in found.items()}
    share = spread["exactly_once"].median / spread["at_least_once"].median
    print(f"\n| | drain, /s | p50 at {given.rate:,}/s, ms | p99, ms |\n|---|---|---|---|")
    for kind, each in found.items():
        late, latest = Spread.of(each.p50), Spread.of(each.p99)
        print(f"| {kind} | {spread[kind].median:,.0f} | {late.median:.1f} | {latest.median:.1f} |")
    print(f"\nexactly_once drains {share:.0%} of at_least_once")
    print(
        json.dumps(
            {kind: {"per_second": e.per_second, "p50": e.p50, "p99": e.p99} for kind, e in found.items()}
        )
    )


if __name__ == "__main__":
    main()
