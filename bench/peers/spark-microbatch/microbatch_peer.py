# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call"
"""The plain Spark way: Kafka source, mapInArrow, Kafka sink, micro-batches back to back.

Needs Spark's Kafka connector (``jars=<folder>``). Messages of a partition run one after another; nothing is retried.
Prints "P <time> <done>" lines. Runs until ``n`` messages are done, or endlessly.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PER_BATCH = "60100"


def handler(delay: float) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Hands everything on, after a wait for each message."""

    def hand_on(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if delay:
                for _ in range(batch.num_rows):
                    time.sleep(delay)
            yield batch

    return hand_on


def main() -> None:
    """Run it."""
    opt = dict(a.split("=", 1) for a in sys.argv[1:])
    n, delay = int(opt.get("n", "0")), sum(float(ms) for ms in opt.get("stages", "").split(",") if ms) / 1000
    jars = ",".join(map(str, sorted(Path(opt["jars"]).glob("*.jar"))))
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    kafka = {"kafka.bootstrap.servers": opt["brokers"]}
    source = spark.readStream.format("kafka").options(
        **kafka, subscribe=opt["topic"], startingOffsets="earliest"
    )
    if n:
        source = source.option("maxOffsetsPerTrigger", "2000" if delay else _PER_BATCH)
    frame = source.load().select("key", "value").mapInArrow(handler(delay), "key binary, value binary")
    with tempfile.TemporaryDirectory(prefix="microbatch-") as folder:
        query = (
            frame.writeStream.trigger(processingTime="0 seconds")
            .option("checkpointLocation", folder)
            .format("kafka")
            .options(**kafka, topic=opt["out"])
            .option("kafka.acks", "all")
            .option("kafka.linger.ms", "2")
            .option("kafka.compression.type", "lz4")
            .start()
        )
        done, seen = 0, -1
        print("P", time.time(), 0, flush=True)
        while (not n or done < n) and query.isActive:
            for progress in query.recentProgress:
                if progress.batchId > seen and progress.numInputRows:
                    seen, done = progress.batchId, done + progress.numInputRows
                    print("P", time.time(), done, flush=True)
            time.sleep(0.02)
        failure = query.exception()
        query.stop()
    spark.stop()
    if failure is not None:
        raise SystemExit(str(failure))


if __name__ == "__main__":
    main()
