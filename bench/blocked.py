"""What a blocked lane with a long backlog costs the others: ``python -m bench.blocked [--n 1000000] [--rounds 3]``.

``n`` messages of 1,000 healthy keys, and between every two of them one of a single further key. Its first message fails
for good, so everything else of it is a backlog behind a blocked lane (``on_failure="block"``). Three runs are compared:

=========== ==========================================================================================================
``blocked`` that: ``n`` healthy messages to be done, ``n`` to be kept somewhere
``running`` the very same log, and the further key works. The broker sends and the tasks read the same bytes in the
            same order; what differs is only whether its messages are handed on or kept. This is the fair comparison
            for what blocking costs, but ``n`` further results are work too, so ``blocked`` should win
``alone``   the healthy messages only, half as much to read: what is lost against this is what the backlog costs
=========== ==========================================================================================================

Healthy throughput is taken from the times at which the broker wrote the healthy results: from 20% to 100% of them.
Memory is that of Spark's Python workers, which hold the messages: the sum of their peaks, and as it is at the end.
Each run has processes of its own; the kinds take turns. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.errors import BenchError
from bench.field import Spread, turns
from bench.process import Process
from keylane import App, Message, Poison
from keylane.broker import Broker
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["blocked", "running", "alone"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PARTITIONS = 4
KEYS = 1_000
FURTHER = b"further"
_VALUE_BYTES = b"x" * 100
_WARM_UP_SHARE = 0.2
_RUN_SECONDS_MAX = 600.0
_POLL_SECONDS = 0.1
_PROC = Path("/proc")
_DAEMON = b"pyspark.daemon\0pyspark.worker\0"
"""The end of its command line, and its children's; the planner's is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. Memory in MiB, of both workers together."""

    kind: Kind
    per_second: float
    seconds: float
    """From the first healthy result to the last."""
    peak: float
    end: float


# A run, in a process of its own.


def make_app(name: str, source: str, sink: str, kind: Kind) -> App:
    """Hands every message on, but the first of the blocked key."""
    app = App(name, source=source, sink=sink, on_failure="block")
    bad = FURTHER if kind == "blocked" else b"nobody"

    @app.stage
    async def hand_on(msg: Message) -> bytes:
        if msg.key == bad:
            raise Poison("it does not work")
        return msg.value  # type: ignore[no-any-return]

    return app


def run(bootstrap: str, name: str, source: str, sink: str, kind: Kind, results: int) -> dict[str, float]:
    """Process the source until there are this many results; returns the workers' memory by then."""
    cluster = Cluster(KafkaSettings(bootstrap))
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder:
        spark = session("local[2]", "keylane bench")
        try:
            query = make_app(name, source, sink, kind).start(
                spark, bootstrap=bootstrap, checkpoint_location=folder
            )
            while query.isActive and sum(cluster.ends(sink, range(PARTITIONS)).values()) < results:
                time.sleep(_POLL_SECONDS)
            time.sleep(2.0)  # the last progress
            memory = [_memory(worker) for worker in _workers()]
            print(f"{len(memory)} workers: {memory}")
            failure = query.exception()
            query.stop()
        finally:
            spark.stop()
    if failure is not None:
        raise SystemExit(str(failure))
    return {"peak": sum(peak for peak, _ in memory), "end": sum(end for _, end in memory)}


def _workers() -> Iterator[int]:
    """Spark's Python workers below this process: children of a daemon that are no daemon of their own."""
    parents: dict[int, int] = {}
    daemons: set[int] = set()
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if (entry / "cmdline").read_bytes().endswith(_DAEMON):
                    daemons.add(pid)
    for pid in daemons:
        above = pid
        while above > 1 and above != os.getpid():
            above = parents.get(above, 0)
        if above == os.getpid() and parents[pid] in daemons:
            yield pid


def _memory(pid: int) -> tuple[float, float]:
    """Peak and present resident memory, in MiB."""
    status = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]


# All runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where it takes place."""

    bootstrap: str
    cluster: Cluster
    n: int
    folder: Path

    def load(self) -> None:
        """The two sources."""
        for source in ("mixed.in", "alone.in"):
            self.cluster.ensure(source, PARTITIONS, {})
            producer: Any = Producer(
                {
                    "bootstrap.servers": self.bootstrap,
                    "enable.idempotence": True,  # as the app: the broker is ready for that afterwards
                    "partitioner": "murmur2_random",
                    "compression.type": "lz4",
                    "linger.ms": 50,
                    "queue.buffering.max.messages": 1_000_000,
                }
            )
            for number in range(self.n):
                producer.produce(source, _VALUE_BYTES, b"k%d" % (number % KEYS))
                if source == "mixed.in":
                    producer.produce(source, _VALUE_BYTES, FURTHER)
                if number % 1000 == 0:
                    producer.poll(0)
                    while len(producer) > 500_000:
                        producer.poll(0.1)
            if producer.flush(120):
                raise BenchError(f"topic {source!r} could not be filled")

    def run(self, kind: Kind, number: int) -> Run:
        """One run and its result."""
        name = f"{kind}-{number}"
        sink = f"{name}.out"
        self.cluster.ensure(sink, PARTITIONS, {"message.timestamp.type": "LogAppendTime"})
        results = 2 * self.n if kind == "running" else self.n
        source = "alone.in" if kind == "alone" else "mixed.in"
        given = [self.bootstrap, name, source, sink, kind, str(results)]
        with Process(
            [sys.executable, "-m", "bench.blocked", "--run", *given], self.folder / f"{name}.log"
        ) as process:
            process.wait(_RUN_SECONDS_MAX)
            memory = json.loads(process.log.read_text().splitlines()[-1])
        times = self._times(sink)
        if len(times) != self.n:
            raise BenchError(f"{name}: {len(times):,} healthy results of {self.n:,}")
        warm = int(self.n * _WARM_UP_SHARE)
        seconds = times[-1] - times[warm]
        return Run(
            kind=kind,
            per_second=round((self.n - warm) / max(seconds, 0.001), 1),
            seconds=round(times[-1] - times[0], 3),
            peak=round(memory["peak"], 1),
            end=round(memory["end"], 1),
        )

    def _times(self, sink: str) -> list[float]:
        """When the healthy results were written, in order."""
        ends = self.cluster.ends(sink, range(PARTITIONS))
        consumer: Any = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "bench", "enable.auto.commit": False}
        )
        times = []
        try:
            consumer.assign([TopicPartition(sink, partition, 0) for partition in ends])
            left = sum(ends.values())
            while left > 0:
                messages = consumer.consume(min(left, 10_000), 10)
                if not messages:
                    raise BenchError(f"topic {sink!r} gives no answer")
                left -= len(messages)
                times += [message.timestamp()[1] / 1000 for message in messages if message.key() != FURTHER]
        finally:
            consumer.close()
        return sorted(times)


def table(runs: Sequence[Run]) -> str:
    """Medians, lowest and highest in brackets."""

    def cell(values: list[float], digits: int) -> str:
        spread = Spread.of(values)
        return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f} to {spread.high:,.{digits}f})"

    columns = {"per_second": 0, "seconds": 1, "peak": 0, "end": 0}
    rows = [
        "| run | healthy messages/s | seconds | peak of the workers, MiB | at the end, MiB |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [one for one in runs if one.kind == kind]
        if mine:
            cells = [cell([getattr(one, name) for one in mine], digits) for name, digits in columns.items()]
            rows.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(rows)


def summary(runs: Sequence[Run], n: int) -> dict[str, Any]:
    """Medians, what the blocked lane costs against each of the others, and all runs."""
    medians = {
        kind: {
            name: Spread.of([getattr(one, name) for one in runs if one.kind == kind]).median
            for name in ("per_second", "peak", "end")
        }
        for kind in KINDS
    }
    blocked = medians["blocked"]
    return {
        "n": n,
        "medians": medians,
        "throughput": {
            f"blocked/{kind}": round(blocked["per_second"] / medians[kind]["per_second"], 3)
            for kind in ("running", "alone")
        },
        "peak_growth_mib": {
            f"blocked-{kind}": round(blocked["peak"] - medians[kind]["peak"], 1)
            for kind in ("running", "alone")
        },
        "runs": [asdict(one) for one in runs],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.blocked", description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000, help="healthy messages (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the runs' logs; a temporary one by default")
    parser.add_argument("--run", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        bootstrap, name, source, sink, kind, results = given.run
        print(json.dumps(run(bootstrap, name, source, sink, kind, int(results))), flush=True)
        return 0
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as temporary, Broker(heap="1g") as broker:
        ground = Ground(
            bootstrap=broker.bootstrap,
            cluster=Cluster(KafkaSettings(broker.bootstrap)),
            n=given.n,
            folder=(given.out or Path(temporary)).absolute(),
        )
        say(f"loading {3 * given.n:,} messages")
        ground.load()
        runs: list[Run] = []
        for number in range(given.rounds):
            for kind in turns(KINDS, number):
                one = ground.run(kind, number)
                runs.append(one)
                say(
                    f"round {number + 1}/{given.rounds}, {kind}: {one.per_second:,.0f}/s, "
                    f"workers {one.peak:,.0f} MiB at most, {one.end:,.0f} MiB at the end"
                )
    print(table(runs))
    print(json.dumps(summary(runs, given.n)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
