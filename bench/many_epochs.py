"""Whether epochs leave anything behind: ``python -m bench.many_epochs [--epochs 1000] [--epoch 1]``.

Runs an app under a low, steady load with very short epochs, as many as a day has with ordinary ones. Every five seconds
it samples the processes of the app, by what they are: the workers, which keep their lanes from epoch to epoch, the
planner, the driver's Python, and Spark's JVM. Every half minute the JVM is told to collect its garbage (by the JDK's
`jcmd`; without it the heap is not judged), and what is left counts, so growth is not garbage.

The verdict is drift: the median of the last third against that of the first third, after a warm-up of a fifth of the
time (at most 5 minutes). Exit code 0: no kind of process drifts upwards by 5% or more in memory, threads or open
files, the heap of the JVM neither, and the history has every message once and in order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.delivery import Ground
from bench.endurance import GROWTH_SHARE_MAX, drift
from bench.errors import BenchError
from bench.pauses import Load
from bench.process import Process
from keylane import App, Idempotency, Message
from keylane.broker import Broker
from keylane.testing import HistoryWriter, Sent, check, read_history

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITIONS = 4
KINDS = {
    "python_streaming_source_runner": "planner",
    "pyspark.daemon": "workers",
    "keylane run": "driver",
}
"""Processes by a part of their command line; a program called java is the JVM."""
WARM_SHARE, WARM_SECONDS_MAX = 0.2, 300.0
_SAMPLE_SECONDS = 5.0
_SAMPLES_PER_COLLECTION = 6
_START_SECONDS_MAX = 180.0
_SLACK = {"memory_mib": 1.0, "threads": 1.0, "files": 2.0}
"""What a median may differ by without drift: of 5 threads, one more is 20%."""

if name := os.environ.get("KEYLANE_BENCH_APP"):
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        delivery=os.environ.get("KEYLANE_BENCH_DELIVERY", "at_least_once"),  # type: ignore[arg-type]
        observer=HistoryWriter(os.environ["KEYLANE_BENCH_HISTORY"]),
        idempotency=Idempotency(count=500),  # as it comes, the window of event ids would fill for ten minutes
    )

    @app.stage
    async def passed_on(msg: Message) -> bytes:
        """No work of its own: only what epochs cost is to be seen."""
        return bytes(msg.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSample:
    """All processes of one kind at one moment."""

    at: float
    """Seconds since the first epoch began."""
    kind: str
    memory_mib: float
    threads: int
    files: int


def kind_of(program: str, command: str) -> str | None:
    """What the process is in an app; None for a helper that is there for a moment."""
    if program == "java":
        return "jvm"
    return next((kind for part, kind in KINDS.items() if part in command), None)


def growth(
    samples: Sequence[KindSample], seconds: float
) -> dict[tuple[str, str], tuple[float, float, float]]:
    """The drift of each figure of each kind after the warm-up, by kind and figure.

    Raises BenchError when there are too few samples, or none of a kind.
    """
    warm = min(WARM_SHARE * seconds, WARM_SECONDS_MAX)
    found = {}
    for kind in ("workers", "planner", "driver", "jvm"):
        of_kind = [one for one in samples if one.kind == kind and one.at >= warm]
        if not of_kind:
            raise BenchError(f"no process of the app was recognised as its {kind}")
        for figure in _SLACK:
            found[kind, figure] = drift([float(getattr(one, figure)) for one in of_kind])
    return found


def grown(found: dict[tuple[str, str], tuple[float, float, float]]) -> list[str]:
    """One line per figure that drifts upwards."""
    return [
        f"{kind}: {figure} grew from {first:,.1f} to {last:,.1f} ({change:+.1%})"
        for (kind, figure), (first, last, change) in found.items()
        if change >= GROWTH_SHARE_MAX and last - first > _SLACK[figure]
    ]


def _look(process: Process, began: float) -> list[KindSample]:
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    for program, one in process.footprints():
        kind = kind_of(program, one.command)
        if kind is not None:
            by_kind.setdefault(kind, []).append((one.memory, one.threads, one.files))
    at = round(time.monotonic() - began, 1)
    return [
        KindSample(
            at=at,
            kind=kind,
            memory_mib=round(sum(one[0] for one in rows) / 2**20, 1),
            threads=sum(one[1] for one in rows),
            files=sum(one[2] for one in rows),
        )
        for kind, rows in by_kind.items()
    ]


def _epochs(log: Path) -> int:
    return max(map(int, re.findall(r"epoch (\d+) began", log.read_text())), default=0)


def collected(log: str) -> list[tuple[float, float]]:
    """Seconds since Java's start, and MiB that were left, of every full collection in its log."""
    return [
        (float(at), float(left)) for at, left in re.findall(r"\[([\d.]+)s\].* Pause Full .*->(\d+)M\(", log)
    ]


def heap_growth(collections: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """As of :func:`drift`, of the smallest heap after a full collection; None if there were too few of them."""
    ends = max((at for at, _ in collections), default=0.0)
    warm = min(WARM_SHARE * ends, WARM_SECONDS_MAX)
    third = (ends - warm) / 3
    first = [left for at, left in collections if warm <= at < warm + third]
    last = [left for at, left in collections if at >= ends - third]
    if len(first) < 3 or len(last) < 3:
        return None
    return min(first), min(last), min(last) / min(first) - 1


def _collect_garbage(process: Process) -> None:
    if (jcmd := shutil.which("jcmd")) is None:
        return
    for program, one in process.footprints():
        if program == "java":
            subprocess.run([jcmd, str(one.pid), "GC.run"], check=False, capture_output=True, timeout=60)


def measure(
    ground: Ground, given: argparse.Namespace
) -> tuple[list[KindSample], list[tuple[float, float]], int, float]:
    """Run it. Returns the samples, the JVM's collections, the number of epochs, and the seconds."""
    name = "epochs"
    ground.topics(name, PARTITIONS)
    history, collections = ground.folder / f"{name}.history", ground.folder / "collections.log"
    os.environ["KEYLANE_BENCH_APP"] = name
    os.environ["KEYLANE_BENCH_HISTORY"] = str(history)
    os.environ["KEYLANE_BENCH_DELIVERY"] = given.delivery
    command = [
        *("env", f"JAVA_TOOL_OPTIONS=-Xlog:gc:file={collections}:uptime:filecount=0"),
        *(sys.executable, "-m", "keylane", "run", "bench.many_epochs:app", "--bootstrap", ground.bootstrap),
        *("--master", given.master, "--epoch", f"{given.epoch:g}"),
    ]
    samples: list[KindSample] = []
    with Process(command, ground.folder / f"{name}.log") as process:
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not _epochs(process.log):
            process.must_run()
            if time.monotonic() > deadline:
                raise BenchError(f"no epoch began within {_START_SECONDS_MAX:g} s; {process.last_words()}")
            time.sleep(0.5)
        began, said, looks = time.monotonic(), 0, 0
        with Load(ground.bootstrap, f"{name}.in", given.rate, slow=0) as load:
            load.ready.set()
            while (epochs := _epochs(process.log)) < given.epochs:
                process.must_run()
                time.sleep(_SAMPLE_SECONDS)
                samples += _look(process, began)
                looks += 1
                if looks % _SAMPLES_PER_COLLECTION == 0:
                    _collect_garbage(process)
                if epochs - said >= 50:
                    said = epochs
                    print(
                        f"epoch {epochs}: {[asdict(one) for one in samples[-4:]]}",
                        file=sys.stderr,
                        flush=True,
                    )
        seconds = time.monotonic() - began
        time.sleep(2.0)
        process.must_run()
        process.stop()
        epochs = _epochs(process.log)
    reader = ground.reader(name, PARTITIONS, f"{name}.in")
    sent: list[Sent] = []
    while len(sent) < load.sent:
        came = reader.consume(1000, 10.0)
        if not came:
            raise BenchError(f"{name}.in has {len(sent)} messages of {load.sent}")
        sent += [Sent(key=m.key(), partition=m.partition(), offset=m.offset()) for m in came]
    check(read_history(history), sent=sent).raise_if_bad()
    return samples, collected(collections.read_text()), epochs, seconds


def main() -> int:
    """Measure and print; 0 when nothing grew."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.many_epochs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=1000, help="number of epochs (1000)")
    parser.add_argument("--epoch", type=float, default=1.0, help="seconds of an epoch (1)")
    parser.add_argument("--rate", type=float, default=100.0, help="messages per second (100)")
    parser.add_argument("--master", default="local[2,4]", help="Spark's master (local[2,4])")
    parser.add_argument("--delivery", choices=["at_least_once", "exactly_once"], default="at_least_once")
    parser.add_argument("--samples", type=Path, help="file for the samples, as JSON lines")
    given = parser.parse_args()
    if min(given.epochs, given.epoch, given.rate) <= 0:
        parser.error("--epochs, --epoch and --rate need a number above 0")
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder, Broker() as broker:
        samples, collections, epochs, seconds = measure(Ground(broker.bootstrap, Path(folder)), given)
    if given.samples is not None:
        given.samples.write_text("".join(json.dumps(asdict(one)) + "\n" for one in samples))
    print(
        f"{epochs} epochs in {seconds:.0f} s, {given.delivery}, {given.rate:g} messages/s: all once and in order\n"
    )
    found = growth(samples, seconds)
    print("| process | figure | after the warm-up | at the end | drift |\n|---|---|---|---|---|")
    for (kind, figure), (first, last, change) in found.items():
        print(f"| {kind} | {figure} | {first:,.1f} | {last:,.1f} | {change:+.1%} |")
    problems = grown(found)
    heap = heap_growth(collections)
    if heap is not None:
        first, last, change = heap
        print(f"| jvm | heap after a full collection, MiB | {first:,.1f} | {last:,.1f} | {change:+.1%} |")
        if change >= GROWTH_SHARE_MAX and last - first > _SLACK["memory_mib"]:
            problems.append(f"jvm: its heap grew from {first:,.1f} to {last:,.1f} MiB ({change:+.1%})")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
