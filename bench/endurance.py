"""Whether anything grows: ``python -m bench.endurance [--minutes 30] [--rate …]`` (or the environment's ``MINUTES``).

Runs the chat pipeline (four stages, 100 ms together, 10% of the messages fail at first) for half an hour at half of its
maximum rate, which is measured first, in loads of 30 seconds with new keys: hundreds of thousands of lanes come and go.
Every ten seconds it samples all processes of the app: memory of the Python workers and of Spark's JVM, threads and open
files. Spark's Java collects its garbage once a minute here, so growth is not garbage. Before that an overload fills the
app: otherwise a machine that hangs for seconds would fill it in the middle, and that memory would look like growth. The
results of every load are checked: all there, once, in order; and then no lane may be left.

The verdict is drift: the median of the last third against that of the first third after a warm-up of a fifth of the
time (at most 5 minutes). Exit code 0: memory, threads and files drift upwards by less than 5%, no lane was left, and
every result was sound. The table goes to ``bench/results/endurance.json`` and into the report, the samples to the
logs' folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench import report
from bench.build import Workshop, default_folder
from bench.cli import LOCAL_FOLDER, RESULTS_FOLDER
from bench.drain import RUN_SECONDS_MAX
from bench.errors import BenchError
from bench.field import PARTITIONS, Field, next_base
from bench.lineup import assemble
from bench.machine import facts
from bench.progress import rate, read_progress
from bench.results import Column, ResultSheet
from bench.tool import Load, Tool
from keylane.broker import Broker
from keylane.errors import KeylaneError
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.lineup import Job
    from bench.process import Process

GROWTH_SHARE_MAX = 0.05
STAGES, FAIL, KEYS = (5, 20, 65, 10), 10, 2_000
_LOAD_SECONDS = 30.0
_SAMPLE_INTERVAL_SECONDS = 10.0
_WARM, _WARM_MOST = 0.2, 300.0
_FILL, _FILLS = 3, 15.0
"""Duration of the load that is timed: more than tasks can buffer piles up."""
_REST_SECONDS = 10.0
"""Seconds within which no lane is left when all results are there; tasks count them every two."""
_CALIBRATION_MESSAGES = 60_000
_RATE_PER_SECOND_MAX = 10_000.0
"""Messages per second at most: the log of half an hour is to fit on a disk."""
_KEPT = {"retention.ms": "180000", "segment.ms": "60000", "segment.bytes": str(64 << 20)}
_COLLECTIONS = "collections.log"
COLLECT = "-XX:G1PeriodicGCInterval=60000 -XX:-G1PeriodicGCInvokesConcurrent -Xlog:gc:file={}"
"""For Java: collect everything once a minute and write down what is left. By itself it may use up the memory that it
set aside at its start before it collects, and what grows meanwhile may be garbage."""
_COLUMNS = [
    Column(figure="first", title="after the warm-up", form=",.1f"),
    Column(figure="last", title="at the end", form=",.1f"),
    Column(figure="drift", title="drift, %", form="+.1f"),
]
JUDGED = {
    "workers_mib": "memory of the Python workers, MiB",
    "jvm_mib": "memory of Spark's JVM, MiB",
    "heap_mib": "its heap after a full collection, MiB",
    "threads": "threads",
    "files": "open files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All processes of the app at one moment."""

    at: float
    """Seconds since the beginning."""
    workers_mib: float
    jvm_mib: float
    heap_mib: float
    """0 before the first collection."""
    threads: int
    files: int
    lanes: int
    processes: int


def drift(values: Sequence[float]) -> tuple[float, float, float]:
    """The medians of the first and of the last third, and how much more the last is: 0.02 is 2% more.

    Raises BenchError for fewer than three.
    """
    third = len(values) // 3
    if not third:
        raise BenchError("too few samples for a verdict: let it run longer")
    first, last = median(values[:third]), median(values[-third:])
    return first, last, (last / first - 1 if first else float(bool(last)))


def judge(samples: Sequence[Sample], seconds: float) -> dict[str, tuple[float, float, float]]:
    """The drift after the warm-up of each figure that is known; 0 is one that was not known yet."""
    warm = min(_WARM * seconds, _WARM_MOST)
    counted = [sample for sample in samples if sample.at >= warm]
    known = {name: [float(value) for one in counted if (value := getattr(one, name))] for name in JUDGED}
    return {name: drift(values) for name, values in known.items() if values}


class Watcher:
    """Looks at a process every ten seconds, from a thread of its own, until it is closed."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.samples: list[Sample] = []
        self._process, self._folder = process, folder
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more samples."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_INTERVAL_SECONDS):
            found = self._process.footprints()
            java = [one for name, one in found if name == "java"]
            others = [one for name, one in found if name != "java"]
            every = [*java, *others]
            self.samples.append(
                Sample(
                    at=round(time.monotonic() - self._began, 1),
                    workers_mib=sum(one.memory for one in others) / 2**20,
                    jvm_mib=sum(one.memory for one in java) / 2**20,
                    heap_mib=heap_mib(self._folder / _COLLECTIONS),
                    threads=sum(one.threads for one in every),
                    files=sum(one.files for one in every),
                    lanes=_lanes(self._folder),
                    processes=len(every),
                )
            )


def heap_mib(collections: Path) -> float:
    """MiB that were left by the last full collection in a log of Java's."""
    try:
        found = re.findall(r"Pause Full .*->(\d+)M\(", collections.read_text())
    except OSError:
        return 0.0
    return float(found[-1]) if found else 0.0


def _lanes(folder: Path) -> int:
    """Lanes that the tasks hold, as they counted them last."""
    return sum(_number(path) for path in folder.glob("lanes-*"))


def _left(folder: Path) -> int:
    """Lanes that are held though there is nothing to do."""
    deadline = time.monotonic() + _REST_SECONDS
    while (left := _lanes(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _number(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (OSError, ValueError):
        return 0


def measure(ground: Field, seconds: float, offered: float | None, samples_to: Path) -> ResultSheet:
    """Calibrate, load for so long, judge."""
    (one,) = ground.lineup.alone()
    if offered is None:
        offered = min(_RATE_PER_SECOND_MAX, _capacity(ground) / 2)
    loads = max(1, round(seconds / _LOAD_SECONDS))
    title = (
        f"Endurance: {loads * _LOAD_SECONDS / 60:g} minutes of the chat pipeline at {offered:,.0f}/s, "
        f"{FAIL}% fail at first, "
        f"{KEYS:,} new keys every {_LOAD_SECONDS:g} s"
    )
    sheet = ground.sheet("endurance", title, {"seconds": loads * _LOAD_SECONDS}, _COLUMNS)
    latencies: list[float] = []
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder:
        job = replace(ground.job(one, "endurance"), stages=STAGES, fail=FAIL)
        _topics(ground, job)
        java = "JAVA_TOOL_OPTIONS=" + COLLECT.format(Path(folder) / _COLLECTIONS)
        command = replace(one, command=lambda given: ["env", java, *one.command(given), f"lanes={folder}"])
        with ground.process(command, job) as process:
            load = Load(rate=offered, seconds=_LOAD_SECONDS, keys=KEYS, fail=FAIL)
            ground.warm_up(job, process, replace(load, rate=_FILL * offered, seconds=_FILLS))
            watcher = Watcher(process, Path(folder))
            for number in range(loads):
                result = ground.tool.load(
                    job.topic, job.out, replace(load, base=next_base()), process.must_run
                )
                latencies.append(result.all.p99)
                sheet.problems += [f"load {number + 1}: {problem}" for problem in result.order.problems]
                if left := _left(Path(folder)):
                    sheet.problems.append(f"load {number + 1}: {left} lanes left when all results were there")
                ground.say(
                    f"load {number + 1}/{loads}: p99 {result.all.p99:,.0f} ms, {_latest(watcher.samples)}"
                )
            watcher.close()
            process.stop()
    samples_to.parent.mkdir(parents=True, exist_ok=True)
    samples_to.write_text("\n".join(json.dumps(_facts(sample)) for sample in watcher.samples) + "\n")
    for name, (first, last, change) in judge(watcher.samples, loads * _LOAD_SECONDS).items():
        line = sheet.line(JUDGED[name], "keylane")
        line.add(first=first, last=last, drift=100 * change)
        grown = change >= GROWTH_SHARE_MAX
        line.notes.append("GROWS" if grown else "steady")
        if grown:
            sheet.problems.append(f"{JUDGED[name]}: {first:,.1f} became {last:,.1f} ({change:+.1%})")
    if not any(sample.heap_mib for sample in watcher.samples):
        sheet.problems.append("Spark's Java never collected its garbage: what grew cannot be told from it")
    if len(latencies) >= 3:
        first, last, change = drift(latencies)
        line = sheet.line("p99 of a load, ms", "keylane")
        line.add(first=first, last=last, drift=100 * change)
        line.notes.append("not judged")
    sheet.remarks.append(
        f"{loads * int(_LOAD_SECONDS * offered):,} messages, all results in order and complete."
        if not sheet.problems
        else "See above."
    )
    return sheet


def _capacity(ground: Field) -> float:
    """Messages per second that the pipeline can do, by a short drain."""
    (one,) = ground.lineup.alone()
    job = replace(ground.job(one, "capacity"), n=_CALIBRATION_MESSAGES, stages=STAGES, fail=FAIL)
    ground.tool.create(job.topic)
    ground.tool.preload(job.topic, _CALIBRATION_MESSAGES, KEYS)
    with ground.topics(job, source=False), ground.process(one, job) as process:
        process.wait(RUN_SECONDS_MAX)
    found = rate(read_progress(process.log))
    if found is None:
        raise BenchError(f"what it can do could not be measured; {process.last_words()}")
    ground.say(f"the pipeline does {found.per_second:,.0f}/s; half of that is offered")
    return found.per_second


def _topics(ground: Field, job: Job) -> None:
    cluster = Cluster(KafkaSettings(ground.brokers))
    for topic in (job.topic, job.out):
        cluster.ensure(topic, PARTITIONS, _KEPT)


def _latest(samples: Sequence[Sample]) -> str:
    if not samples:
        return "no sample yet"
    last = samples[-1]
    return (
        f"workers {last.workers_mib:,.0f} MiB, JVM {last.jvm_mib:,.0f} MiB, {last.threads} threads, "
        f"{last.files} files, {last.lanes:,} lanes"
    )


def _facts(sample: Sample) -> dict[str, float]:
    return {name: round(float(getattr(sample, name)), 1) for name in Sample.__slots__}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 when nothing grew and every result was sound."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.endurance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("MINUTES") or 30))
    parser.add_argument("--rate", type=float, help="messages per second, instead of half of what it can do")
    parser.add_argument(
        "--out", type=Path, default=RESULTS_FOLDER, help="folder for the table (bench/results)"
    )
    parser.add_argument("--build", type=Path, help="folder for what is built")
    given = parser.parse_args(arguments)
    if given.minutes <= 0 or (given.rate is not None and given.rate <= 0):
        parser.error("--minutes and --rate need a number above 0")
    began = time.monotonic()
    say: Callable[[str], None] = lambda text: print(  # noqa: E731 - a name for its type
        f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True
    )
    logs = (LOCAL_FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    try:
        lineup = assemble(["keylane"], Workshop(given.build or default_folder(), say))
        with Broker() as broker:
            ground = Field(
                brokers=broker.bootstrap,
                broker_pid=broker.nodes[0].pid,
                tool=Tool(lineup.tool, broker.bootstrap, PARTITIONS),
                lineup=lineup,
                rounds=1,
                logs=logs,
                say=say,
                machine=facts(),
            )
            sheet = measure(ground, given.minutes * 60, given.rate, logs / "samples.jsonl")
        sheet.write(given.out)
        report.write(given.out)
    except (BenchError, KeylaneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(sheet.markdown())
    for problem in sheet.all_problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if sheet.all_problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
