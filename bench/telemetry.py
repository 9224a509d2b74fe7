"""What telemetry costs: ``python -m bench.telemetry [--messages 150000] [--pairs 8]``.

A full topic is worked off by one task, in this process and without Spark, with handlers that do nothing and results
that are acknowledged: the most messages a second that there are, so the most that telemetry can cost. Each run has a
group, a sink and clients of its own, and is measured from its first message to its last. Two ways:

=============== ======================================================================================================
``on``/``off``  runs with and without it take turns (on, off, off, on, …), so that what else the machine does falls on
                both: messages per second, and processor time of the whole process per message. Medians, and beside them
                the spread of runs without it: a difference that is smaller than that is not known
``accounted``   runs with it in which the processor time inside telemetry's own code on the task's loop is added up,
                against all processor time of the loop, which is what bounds a drain. Other work on the machine falls
                on both parts of that fraction; looking at the clock is counted as telemetry, so it is an upper bound
=============== ======================================================================================================

Exit code 0: at most 1% of the loop is telemetry's, and with it the processor time per message is at most 1% more, or
less more than the spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from bench.machine import facts
from keylane import App, Message
from keylane.broker import Broker
from keylane.engine.latency_sampler import LatencySampler
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan
from keylane.worker.telemetry_sender import TelemetryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU_SHARE_MAX = 0.01
PARTITIONS = 8
_SOURCE = "telemetry.in"
_ACCOUNTED_COUNT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One drain."""

    per_second: float
    cpu_us: float
    """Of processor time, per message."""
    loop: float
    """Seconds of processor time of the task's loop."""


def measure(settings: KafkaSettings, name: str, messages: int, *, telemetry: bool) -> Run:
    """Work the topic off once."""
    cluster = Cluster(settings)
    cluster.ensure(f"{name}.out", PARTITIONS, {})
    app = App(name, source=_SOURCE, sink=f"{name}.out", telemetry=telemetry, idempotency=None)
    seen = 0
    marks: list[tuple[float, float, float]] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        nonlocal seen
        seen += 1
        if seen in (1, messages):
            marks.append((time.perf_counter(), time.process_time(), time.thread_time()))
        return bytes(msg.value)

    topics = cluster.prepare(app.spec)
    ends = cluster.ends(_SOURCE, range(PARTITIONS))
    plan = TaskPlan(
        run=name,
        epoch=1,
        task=0,
        settings=settings,
        identity=cluster.identity(app.source, app.dlq),
        starts=dict.fromkeys(range(PARTITIONS), 0),
        until=ends,
        seconds=120,
        sink_limit=topics.sink_limit,
        outcomes="none",
        partitions=PARTITIONS,
    )
    for _ in Task(app.spec, plan).outcomes():
        pass
    if seen != messages:
        raise SystemExit(f"{name}: {seen:,} of {messages:,} messages ran")
    gc.collect()
    began, ended = marks
    return Run(
        per_second=messages / (ended[0] - began[0]),
        cpu_us=(ended[1] - began[1]) / messages * 1e6,
        loop=ended[2] - began[2],
    )


@contextmanager
def accounted() -> Iterator[list[float]]:
    """The processor time that telemetry's own code takes inside, in seconds."""
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                spent[0] += time.thread_time() - began

        return timing

    places: list[tuple[Any, str]] = [
        (LatencySampler, "done"),
        (LatencySampler, "tick"),
        (TelemetryWriter, "_send_snapshot"),
    ]
    kept = [(kind, name, getattr(kind, name)) for kind, name in places]
    for kind, name, call in kept:
        setattr(kind, name, timed(call))
    try:
        yield spent
    finally:
        for kind, name, call in kept:
            setattr(kind, name, call)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="bench.telemetry", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=150_000)
    parser.add_argument("--pairs", type=int, default=8)
    given = parser.parse_args()
    for name, value in facts().items():
        print(f"{name}: {value}", file=sys.stderr)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    shares = []
    with Broker() as broker:
        settings = KafkaSettings(broker.bootstrap)
        Cluster(settings).ensure(_SOURCE, PARTITIONS, {})
        producer = settings.producer()
        for number in range(given.messages):
            producer.produce(_SOURCE, b"x" * 100, b"k%d" % (number % 1000))
            if number % 1000 == 0:
                producer.poll(0)
        producer.flush(60)
        measure(settings, "warm", given.messages, telemetry=True)
        for number in range(_ACCOUNTED_COUNT):
            with accounted() as spent:
                run = measure(settings, f"accounted{number}", given.messages, telemetry=True)
            shares.append(spent[0] / run.loop)
            print(f"accounted {spent[0] * 1e3:.2f} ms of {run.loop:.2f} s: {shares[-1]:.3%}", file=sys.stderr)
        order = [True, False, False, True] * ((given.pairs + 1) // 2)
        for number, on in enumerate(order[: 2 * given.pairs]):
            run = measure(settings, f"bench{number}", given.messages, telemetry=on)
            runs[on].append(run)
            print(f"{'on ' if on else 'off'} {run.per_second:>9,.0f}/s {run.cpu_us:6.2f} us", file=sys.stderr)
    rate = {on: median(run.per_second for run in found) for on, found in runs.items()}
    cpu = {on: median(run.cpu_us for run in found) for on, found in runs.items()}
    low, _, high = quantiles([run.cpu_us for run in runs[False]], n=4)
    result = {
        "share_of_loop": round(median(shares), 5),
        "off_per_second": round(rate[False]),
        "on_per_second": round(rate[True]),
        "slower": round(1 - rate[True] / rate[False], 4),
        "off_cpu_us": round(cpu[False], 3),
        "on_cpu_us": round(cpu[True], 3),
        "more_cpu": round(cpu[True] / cpu[False] - 1, 4),
        "spread_of_cpu": round((high - low) / cpu[False], 4),
    }
    print("| telemetry | messages/s | processor time |\n|---|---|---|")
    for on in (False, True):
        print(f"| {'on' if on else 'off'} | {rate[on]:,.0f} | {cpu[on]:.2f} us |")
    print(json.dumps(result))
    fine = result["more_cpu"] <= max(CPU_SHARE_MAX, result["spread_of_cpu"])
    return 0 if result["share_of_loop"] <= CPU_SHARE_MAX and fine else 1


if __name__ == "__main__":
    sys.exit(main())
