"""The gain of batches if a call is expensive: ``python -m bench.batch [--rounds 3] [--single 3000] [--batch 40000]``.

A stage that stands for a model, or for an endpoint that takes many at once: a call costs 5 ms and 0.05 ms for each
message in it, and there is one call at a time (``max_concurrency=1``, one task). 2,000 keys, taking turns on one
broker:

========== ===========================================================================================================
``single`` ``@app.stage``: a call for every message, 5.05 ms each; it cannot do more than 198 a second
``batch``  ``@app.batch_stage(max_size=64)``: a call for the heads of up to 64 lanes; 7,805 a second at most
========== ===========================================================================================================

So what is compared is the same call made for one or for many, not two engines. Where calls may overlap, ``single``
without its limit would do more. The cost is a sleep in a thread: nothing else is held up by it.

Everything else is as a user gets it: Kafka, Spark on ``local[2]``, results written and acknowledged. Throughput is
taken from the times at which the broker wrote the results, from 20% to 100% of them. Every attempt is recorded and
judged by the checker, and every result is read back: each message once, in the order of its key. Exit code 0: batches
do at least 20 times as much. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.delivery import PARTITIONS, Ground, Results
from bench.errors import BenchError
from bench.field import Spread
from bench.process import Process
from keylane import App, Message
from keylane.broker import Broker
from keylane.spark import session
from keylane.testing import HistoryWriter, Sent, check, read_history

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEEDUP_RATIO_MIN = 20
KEYS = 2_000
CALL, ITEM = 0.005, 0.00005
"""Seconds that a call takes, and each message in it."""
BATCH_MESSAGES = 64
_WARM_UP_SHARE = 0.2
_RUN_SECONDS_MAX = 200.0
KINDS = ("single", "batch")


def make_app(name: str, kind: str, history: Path) -> App:
    """Only their stages differ."""
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(history))

    if kind == "single":

        @app.stage(max_concurrency=1)
        def one(msg: Message) -> bytes:
            time.sleep(CALL + ITEM)
            return msg.value  # type: ignore[no-any-return]

    else:

        @app.batch_stage(max_size=BATCH_MESSAGES, max_concurrency=1)
        def many(msgs: list[Message]) -> list[bytes]:
            time.sleep(CALL + ITEM * len(msgs))
            return [msg.value for msg in msgs]

    return app


def run_app(bootstrap: str, name: str, kind: str, history: Path) -> None:
    """Work off what is there."""
    spark = session("local[2]", "keylane bench")
    try:
        app = make_app(name, kind, history)
        app.start(spark, bootstrap=bootstrap, tasks=1, available_now=True).awaitTermination()
    finally:
        spark.stop()


def measure(ground: Ground, name: str, kind: str, n: int) -> float:
    """Messages per second."""
    ground.topics(name)
    ground.load(name, n, rate=None, keys=KEYS)
    history = ground.folder / f"{name}.history"
    command = [sys.executable, "-m", "bench.batch", "--app", ground.bootstrap, name, kind, str(history)]
    with Process(command, ground.folder / f"{name}.log") as app:
        deadline = time.monotonic() + _RUN_SECONDS_MAX
        while sum(ground.cluster.ends(f"{name}.out", range(PARTITIONS)).values()) < n:
            if time.monotonic() > deadline:
                raise BenchError(f"{name}: not drained within {_RUN_SECONDS_MAX:g} s; {app.last_words()}")
            app.check()
            time.sleep(0.5)
        app.wait(60)
    results = Results(ground.reader(name))
    results.read(n)
    verdict = check(read_history(history), sent=positions(ground, name, n))
    if not verdict.ok or verdict.repeats:
        raise BenchError(f"{name}: {verdict}")
    written = sorted(results.written)
    return 1000 * n * (1 - _WARM_UP_SHARE) / (written[-1] - written[int(n * _WARM_UP_SHARE)])


def positions(ground: Ground, name: str, n: int) -> list[Sent]:
    """The source position of each message."""
    reader: Any = ground.reader(name, topic=f"{name}.in")
    found: list[Sent] = []
    while len(found) < n:
        found += [
            Sent(message.key(), message.partition(), message.offset())
            for message in reader.consume(1000, 0.1)
            if message.error() is None
        ]
    reader.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--single", type=int, default=3_000, help="messages for the stage of one")
    parser.add_argument("--batch", type=int, default=40_000, help="messages for the batch stage")
    parser.add_argument("--app", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.app:
        bootstrap, name, kind, history = given.app
        run_app(bootstrap, name, kind, Path(history))
        return 0
    counts = {"single": given.single, "batch": given.batch}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        ground = Ground(broker.bootstrap, Path(folder))
        for number in range(given.rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                per_second = measure(ground, f"{kind}-{number}", kind, counts[kind])
                found[kind].append(per_second)
                print(f"{number + 1}: {kind:6} {per_second:8,.0f}/s, order judged", flush=True)
    spread = {kind: Spread.of(figures) for kind, figures in found.items()}
    ratio = spread["batch"].median / spread["single"].median
    print("\n| stage | messages/s | spread |\n|---|---|---|")
    for kind, figures in found.items():
        print(f"| {kind} | {spread[kind].median:,.0f} | {min(figures):,.0f} to {max(figures):,.0f} |")
    print(f"\nbatches do {ratio:.1f} times what single calls do")
    print(json.dumps({**found, "ratio": round(ratio, 2)}))
    return 0 if ratio >= SPEEDUP_RATIO_MIN else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
