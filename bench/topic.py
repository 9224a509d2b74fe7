"""How fast a topic becomes a table: ``python -m bench.topic [--n 2000000] [--rounds 3]``.

``n`` messages of 200 bytes in 8 partitions, read by two processes or tasks, in one run, taking turns:

=========== ==========================================================================================================
``raw``     a ``consume(1000)`` loop in each of two processes, which looks at every message's offset and no more: what
            the client library gives
``columns`` the same, and key, value, offset and timestamp of every message taken out into lists: what it takes at the
            least to make rows of them in Python
``table``   ``spark.read.format("keylane.topic")`` on ``local[2]`` into Spark's ``noop`` sink, the whole query
``stream``  ``spark.readStream.format("keylane.topic")``, ``availableNow``, the same sink, the whole query
=========== ==========================================================================================================

Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.field import Spread, turns
from keylane.broker import Broker
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.spark import session
from keylane.spark.topic import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

KINDS = ("raw", "columns", "table", "stream")
PARTITIONS = 8
TOPIC = "bench"
_VALUE = b"x" * 180


def load(bootstrap: str, n: int) -> None:
    """Fill the topic."""
    Cluster(KafkaSettings(bootstrap)).ensure(TOPIC, PARTITIONS, {})
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 50, "compression.type": "lz4", "batch.size": 500_000}
    )
    for number in range(n):
        while True:
            try:
                producer.produce(TOPIC, _VALUE, b"key-%d" % (number % 1000), number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(60):
        raise SystemExit("the load was not taken")


def consume(bootstrap: str, ends: dict[int, int], columns: bool, ready: Any) -> None:
    """Read these partitions to their ends, once everybody is ready: starting Python is not measured."""
    ready.wait(60)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "queued.min.messages": 100_000,
            "fetch.queue.backoff.ms": 10,
            "fetch.wait.max.ms": 10,
        }
    )
    consumer.assign([TopicPartition(TOPIC, p, 0) for p in ends])
    left = sum(ends.values())
    while left:
        messages: list[Any] = consumer.consume(1000, 0.05)
        messages = [m for m in messages if m.error() is None and m.offset() < ends[m.partition()]]
        if columns:
            _ = [m.key() for m in messages], [m.value() for m in messages]
            _ = [m.offset() for m in messages], [m.timestamp() for m in messages]
        left -= len(messages)
    consumer.close()


def raw(bootstrap: str, *, columns: bool) -> float:
    """Seconds that two processes take."""
    ends = Cluster(KafkaSettings(bootstrap)).ends(TOPIC, range(PARTITIONS))
    context = multiprocessing.get_context("spawn")
    shares = [{p: end for p, end in ends.items() if p % 2 == share} for share in range(2)]
    ready = context.Barrier(3)
    processes = [context.Process(target=consume, args=(bootstrap, share, columns, ready)) for share in shares]
    for process in processes:
        process.start()
    ready.wait(60)
    began = time.monotonic()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a reader failed")
    return time.monotonic() - began


def table(spark: SparkSession, bootstrap: str) -> float:
    """Seconds that the query takes."""
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": TOPIC}
    began = time.monotonic()
    frame = spark.read.format("keylane.topic").options(**options).load()
    frame.write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def stream(spark: SparkSession, bootstrap: str) -> float:
    """Seconds that the query takes."""
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": TOPIC, "startingOffsets": "earliest"}
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder:
        began = time.monotonic()
        frame = spark.readStream.format("keylane.topic").options(**options).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", folder)
        writer.trigger(availableNow=True).start().awaitTermination()
        return time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.topic", description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=2_000_000, help="messages (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with Broker() as broker:
        say(f"loading {given.n:,} messages")
        load(broker.bootstrap, given.n)
        spark = session("local[2]", "keylane bench")
        try:
            register(spark)
            for measure in (table, stream):  # Spark and the workers are warm
                measure(spark, broker.bootstrap)
            for number in range(given.rounds):
                for kind in turns(KINDS, number):
                    if kind in ("raw", "columns"):
                        seconds = raw(broker.bootstrap, columns=kind == "columns")
                    else:
                        seconds = (table if kind == "table" else stream)(spark, broker.bootstrap)
                    rates[kind].append(given.n / seconds)
                    say(f"round {number + 1}/{given.rounds}, {kind}: {given.n / seconds:,.0f}/s")
        finally:
            spark.stop()
    spreads = {kind: Spread.of(found) for kind, found in rates.items()}
    print(f"| {given.n:,} messages | messages/s | of raw |\n|---|---|---|")
    for kind, spread in spreads.items():
        share = spread.median / spreads["raw"].median
        print(f"| {kind} | {spread.median:,.0f} ({spread.low:,.0f} to {spread.high:,.0f}) | {share:.0%} |")
    print(json.dumps({"n": given.n, "rates": rates}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
