"""What exactly_once costs beside at_least_once: ``python -m bench.delivery [--n 500000] [--rate 5000] [--rounds 3]``.

Two things are measured for each, taking turns on one broker, with a no-op handler and everything as a user gets it:

=========== ==========================================================================================================
``drain``   ``n`` messages that lie there: messages per second, by the group's progress from 20% to 100%
``latency`` ``rate`` messages per second for a while: from the time a message was made to the time at which a reader
            that is ``read_committed`` got its result, after a warm-up
=========== ==========================================================================================================

Every result is checked: each message once, in the order of its key. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.errors import BenchError
from bench.field import Spread, turns
from bench.process import Process
from keylane.broker import Broker
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings

KINDS = ("at_least_once", "exactly_once")
PARTITIONS = 8
KEYS = 1_000
_WARM = 0.2
_WARM_UP = 6.0
_LONGEST = 300.0


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

    def topics(self, name: str) -> None:
        """Make the source and the sink."""
        for topic in (f"{name}.in", f"{name}.out"):
            self.cluster.ensure(topic, PARTITIONS, {})

    def producer(self) -> Any:
        """For the load."""
        return Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "linger.ms": 2,
                "partitioner": "murmur2_random",
                "queue.buffering.max.messages": 2_000_000,
            }
        )

    def reader(self, name: str) -> Any:
        """Of the sink, from its beginning: only what is committed."""
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
        reader.list_topics(f"{name}.out", timeout=10)
        reader.assign([TopicPartition(f"{name}.out", p, 0) for p in range(PARTITIONS)])
        return reader


def drain(ground: Ground, kind: str, name: str, n: int) -> float:
    """Messages per second."""
    ground.topics(name)
    producer = ground.producer()
    for number in range(n):
        producer.produce(f"{name}.in", b"%d" % number + b"x" * 100, b"k%d" % (number % KEYS))
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    series: list[tuple[float, int]] = []
    with ground.app(name, kind) as app:
        deadline = time.monotonic() + _LONGEST
        while not series or series[-1][1] < n:
            if time.monotonic() > deadline:
                raise BenchError(f"{kind}: not drained within {_LONGEST:g} s; {app.last_words()}")
            app.check()
            found = ground.cluster.committed(name, f"{name}.in", range(PARTITIONS))
            series.append((time.monotonic(), sum(offset for offset, _ in found.values())))
            time.sleep(0.02)
    reader = ground.reader(name)
    _check(reader, n)
    began = next(point for point in series if point[1] >= n * _WARM)
    ended = next(point for point in series if point[1] >= n)
    return (ended[1] - began[1]) / (ended[0] - began[0])


def latency(ground: Ground, kind: str, name: str, rate: int, seconds: float) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    ground.topics(name)
    reader, producer = ground.reader(name), ground.producer()
    made: list[float] = []
    ready = threading.Event()

    def offer() -> None:
        number = 0
        while not ready.is_set():  # until the app is there: a few, so that everybody is connected
            made.append(time.time())
            producer.produce(f"{name}.in", b"%d" % number, b"k%d" % (number % KEYS))
            number += 1
            producer.poll(0.05)
        began, first = time.time(), number
        while (now := time.time()) < began + _WARM_UP + seconds:
            while number - first < (now - began) * rate:
                made.append(time.time())
                producer.produce(f"{name}.in", b"%d" % number, b"k%d" % (number % KEYS))
                number += 1
            producer.poll(0)
            time.sleep(0.001)
        producer.flush()

    offering = threading.Thread(target=offer)
    took: list[tuple[float, float]] = []
    with ground.app(name, kind) as app:
        offering.start()
        last, deadline = time.time(), time.monotonic() + _LONGEST
        while offering.is_alive() or len(took) < len(made):
            messages = reader.consume(1000, 0.002)
            now = time.time()
            took += [
                (now, now - made[int(message.value())]) for message in messages if message.error() is None
            ]
            if took:
                ready.set()
            last = now if messages else last
            app.check()
            if time.monotonic() > deadline:
                raise BenchError(f"{kind}: {len(took)} of {len(made)} results came; {app.last_words()}")
    ended = time.time() - last
    measured = sorted(late for at, late in took if at > last - seconds + ended)
    if len(took) != len(made) or len(measured) < rate:
        raise BenchError(
            f"{kind}: {len(took)} results of {len(made)} messages, {len(measured)} in the time measured"
        )
    return 1e3 * measured[len(measured) // 2], 1e3 * measured[int(len(measured) * 0.99)]


def _check(reader: Any, n: int) -> None:
    """Every message once, in the order of its key."""
    last: dict[bytes, int] = {}
    count, heard = 0, time.monotonic()
    while count < n:
        for message in reader.consume(10_000, 0.2):
            if message.error() is not None:
                continue
            heard = time.monotonic()
            number = int(message.value().rstrip(b"x"))
            if last.get(message.key(), -1) >= number:
                raise BenchError(f"key {message.key()!r}: result {number} comes after {last[message.key()]}")
            last[message.key()] = number
            count += 1
        if time.monotonic() - heard > 10:
            raise BenchError(f"{count} results of {n} messages")
    reader.close()


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
