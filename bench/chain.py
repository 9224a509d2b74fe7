"""Four apps in a chain, at a steady rate: ``python -m bench.chain [--rate 1000] [--seconds 20] [--rounds 3]``.

No-op stages, four queries on one Spark session with a slot for each (``local[4]``), one broker, the load generator and
the reader, all on this machine. A message goes through five topics; latency is from when it was due (the load
generator's clock, ``keylane seed``) to when a reader got the last app's result. A warm-up is left out. Every message is
checked: each once, in the order of its key, from the first topic to the last.

``--linger`` is what producers wait for more, ``--partitions`` what each topic has. On two cores the number of requests
is what costs most, and a request carries one partition: so both are chosen for few of them, where a user gets 5 ms and
as many partitions as the topics have. The load average is printed: latency on a busy machine is the machine's. Exit
code 0: p99 under 200 ms. Prints a table and a line of JSON.
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

P99_MS_MAX = 200.0
APPS_COUNT = 4
KEYS = 1_000
_WARM_UP_SECONDS = 6.0


def topic(name: str, hop: int) -> str:
    """The first is the load generator's, the last the reader's."""
    return f"{name}.in" if hop == 0 else f"{name}.out" if hop == APPS_COUNT else f"{name}.{hop}"


def run_apps(bootstrap: str, name: str, linger: str) -> None:
    """Until told to stop."""

    async def hand_on(msg: Message) -> bytes:
        return msg.value  # type: ignore[no-any-return]

    asked: list[int] = []
    parent = os.getppid()
    spark = session(f"local[{APPS_COUNT}]", "keylane bench", lanes_only=True)
    queries = []
    try:
        signal.signal(signal.SIGTERM, lambda got, _frame: asked.append(got))
        for hop in range(APPS_COUNT):
            app = App(f"{name}-{hop}", source=topic(name, hop), sink=topic(name, hop + 1))
            app.stage(hand_on)
            kafka = {"linger.ms": linger} if linger else {}
            queries.append(app.start(spark, bootstrap=bootstrap, tasks=1, kafka=kafka))
        while not asked and os.getppid() == parent and all(query.isActive for query in queries):
            time.sleep(0.1)
        for query in queries:
            if (failure := query.exception()) is not None:
                raise SystemExit(str(failure))
            query.stop()
    finally:
        spark.stop()


def measure(ground: Ground, name: str, given: argparse.Namespace) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    for hop in range(APPS_COUNT + 1):
        ground.cluster.ensure(topic(name, hop), given.partitions, {})
    results = Results(ground.reader(name, partitions=given.partitions))
    rate = given.rate
    command = [sys.executable, "-m", "bench.chain", "--app", ground.bootstrap, name, given.linger]
    with Process(command, ground.folder / f"{name}.log") as apps:
        ground.load(
            name, rate, rate=rate / 4, keys=KEYS
        )  # until everybody is connected and has seen messages
        results.read(rate)
        count = int(rate * (_WARM_UP_SECONDS + given.seconds))
        loading = threading.Thread(target=ground.load, args=(name, count, rate, 1, KEYS))
        loading.start()
        results.read(rate + count)
        loading.join()
        apps.must_run()
        used = apps.cpu_seconds()
    last = max(due for due, _ in results.came)
    took = sorted(1e3 * (at - due) for due, at in results.came if due > last - given.seconds)
    if len(took) < rate * given.seconds * 0.9:
        raise BenchError(f"{len(took)} results in the time measured")
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    print(
        f"{name} (load average {os.getloadavg()[0]:.1f}): p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {took[-1]:.0f} ms; "
        f"the apps used {used:.0f} s of CPU",
        flush=True,
    )
    return p50, p99


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=1_000, help="messages per second")
    parser.add_argument("--seconds", type=float, default=20, help="how long latency is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=2, help="of each topic")
    parser.add_argument("--linger", default="10", help="linger.ms of the apps' producers; '': the usual 1")
    parser.add_argument("--app", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.app:
        run_apps(*given.app)
        return 0
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        ground = Ground(broker.bootstrap, Path(folder))
        found = [measure(ground, f"chain{number}", given) for number in range(given.rounds)]
    p50, p99 = (Spread.of(figures) for figures in zip(*found, strict=True))
    print(f"\n| {APPS_COUNT} apps, {given.rate:,}/s | ms | spread |\n|---|---|---|")
    for what, spread in (("p50", p50), ("p99", p99)):
        print(f"| {what} | {spread.median:.0f} | {spread.low:.0f} to {spread.high:.0f} |")
    print(json.dumps({"rate": given.rate, "p50": [a for a, _ in found], "p99": [b for _, b in found]}))
    return 0 if p99.median < P99_MS_MAX else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
