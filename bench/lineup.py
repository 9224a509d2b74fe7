"""Who is measured, and the command line of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.build import CASSANDRA, NEEDED, PEERS, TOOL, Workshop
from bench.errors import BenchError
from keylane.broker import find_java

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NAMES = ("keylane", "java", "aiokafka", "raw", "go", "prosody", "spark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a peer is to do."""

    brokers: str
    topic: str
    out: str
    group: str
    n: int = 0
    """Messages after which it ends; 0: on SIGTERM."""
    stages: Sequence[int] = ()
    fail: int = 0
    stuck: bool = False
    """Messages of the load generator's extra key fail until their time has come (Keylane only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One row: a peer with its settings."""

    label: str
    peer: str
    command: Callable[[Job], list[str]]
    json: bool = False
    """It reads JSON only: it gets the same text between quotes."""
    commits: bool = True
    """Its progress is in a Kafka group, where it can be compared with the topic's end."""
    most: int | None = None
    """Messages that are enough to drain; more would take minutes."""
    slow: bool = False
    """Known not to keep up with some loads. Missing results then count as that, not as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """The peers that can run here, where they were built, and why others cannot."""

    tool: Path
    built: dict[str, Path]
    left_out: dict[str, str]
    store: str = ""
    """host:port of the Cassandra node that prosody needs."""

    def drain(self) -> list[Contestant]:
        """No-op handlers."""
        return self._there(
            [
                self._keylane(),
                self._java(256),
                self._python("aiokafka"),
                self._python("raw"),
                self._go(256),
                self._prosody(most=20_000),
                self._spark(),
            ]
        )

    def skewed(self) -> list[Contestant]:
        """No-op handlers and a few hot keys, with which parallel-consumer does a thousand messages per second."""
        return self._there(
            [
                self._keylane(),
                replace(self._java(256), most=30_000),
                self._python("aiokafka"),
                self._python("raw"),
                self._go(256),
            ]
        )

    def waiting(self) -> list[Contestant]:
        """Handlers that wait a few milliseconds for each message."""
        return self._there(
            [
                self._keylane(),
                self._java(256),
                self._aiokafka_by_partition(),
                self._go(256),
                self._go(8192, buffer=100),
                self._prosody(most=20_000),
                replace(self._spark(), most=4_000),
            ]
        )

    def offered(self) -> list[Contestant]:
        """A steady load, no-op handlers."""
        return self._there(
            [
                self._keylane(),
                self._java(256),
                self._python("aiokafka"),
                self._python("raw"),
                self._go(256),
                self._prosody(),
                self._spark(),
            ]
        )

    def curve(self) -> list[Contestant]:
        """A load that grows."""
        return self._there([self._keylane(), self._java(256), self._python("raw"), self._go(256)])

    def chat(self) -> list[Contestant]:
        """Those that run the keys of a partition at the same time; the others could not keep up by far."""
        return self._there(
            [self._keylane(), self._go(256), self._go(2048), self._java(1000), self._prosody(defer=0)]
        )

    def alone(self) -> list[Contestant]:
        """Keylane alone."""
        return self._there([self._keylane()])

    def _there(self, all_: list[Contestant]) -> list[Contestant]:
        return [one for one in all_ if one.peer in self.built]

    def _keylane(self) -> Contestant:
        python = [sys.executable, "-m", "bench.keylane_peer"]
        return Contestant(label="keylane", peer="keylane", command=lambda job: [*python, *pairs(job)])

    def _java(self, threads: int) -> Contestant:
        def command(job: Job) -> list[str]:
            to = self.built["java"]
            path = f"{to / 'classes'}:{to / 'libs'}/*"
            java = [str(find_java()), "-Xmx2g", "-cp", path, "peer.Main"]
            return [*java, *pairs(job), f"concurrency={threads}"]

        return Contestant(label=f"parallel-consumer KEY {threads}", peer="java", command=command)

    def _python(self, peer: str, *more: str) -> Contestant:
        def command(job: Job) -> list[str]:
            program = str(PEERS / "python" / f"{peer}_peer.py")
            return [str(self.built[peer] / "bin" / "python"), program, *pairs(job), *more]

        label = {"aiokafka": "aiokafka", "raw": "raw confluent-kafka, 2 processes"}[peer]
        return Contestant(label=label, peer=peer, command=command)

    def _aiokafka_by_partition(self) -> Contestant:
        made = self._python("aiokafka", "loops=partition", "max_records=50")
        return replace(made, label="aiokafka, a loop per partition", most=10_000)

    def _go(self, workers: int, buffer: int = 10) -> Contestant:
        def command(job: Job) -> list[str]:
            flags = [part for pair in pairs(job) for part in ("-" + pair).split("=", 1)]
            program = [str(self.built["go"] / "program"), *flags]
            return [*program, "-workers", str(workers), "-buffer", str(buffer)]

        return Contestant(
            label=f"go-affinity {workers}",
            peer="go",
            command=command,
            slow=workers
            == 256,  # as it is published: keys share a worker, and a full one holds back its partition
        )

    def _prosody(self, *, most: int | None = None, defer: int = 1) -> Contestant:
        def command(job: Job) -> list[str]:
            program = str(PEERS / "prosody" / "prosody_peer.py")
            python = str(self.built["prosody"] / "bin" / "python")
            return [python, program, *pairs(job), f"cassandra={self.store}", f"defer={defer}"]

        return Contestant(label="prosody", peer="prosody", command=command, json=True, slow=True, most=most)

    def _spark(self) -> Contestant:
        def command(job: Job) -> list[str]:
            to = self.built["spark"]
            program = str(PEERS / "spark-microbatch" / "microbatch_peer.py")
            return [str(to / "bin" / "python"), program, *pairs(job), f"jars={to / 'libs'}"]

        return Contestant(label="Spark micro-batch", peer="spark", command=command, commits=False, slow=True)


def assemble(wanted: Sequence[str], workshop: Workshop) -> Lineup:
    """Build what the wanted peers need. Raises BenchError without a load generator: then nothing can be measured."""
    try:
        tool = workshop.build(TOOL) / "program"
    except BenchError as error:
        raise BenchError(f"no load generator, so nothing can be measured: {error}") from error
    built: dict[str, Path] = {"keylane": PEERS} if "keylane" in wanted else {}
    left_out: dict[str, str] = {}
    for name in wanted:
        if name not in NEEDED:
            continue
        try:
            places = [workshop.build(product) for product in NEEDED[name]]
        except BenchError as error:
            left_out[name] = str(error)
            continue
        built[name] = places[0]
        if name == "prosody":
            built[CASSANDRA.name] = places[1]
    return Lineup(tool=tool, built=built, left_out=left_out)


def pairs(job: Job) -> list[str]:
    """What it is to do, as a peer reads it: name=value."""
    given = {
        "brokers": job.brokers,
        "topic": job.topic,
        "out": job.out,
        "group": job.group,
        "n": job.n,
        "stages": ",".join(map(str, job.stages)),
        "fail": job.fail,
        "stuck": int(job.stuck),
    }
    return [f"{name}={value}" for name, value in given.items() if value]
