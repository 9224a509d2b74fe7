"""Who is measured, and the command line of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.build import NEEDED, PEERS, TOOL, Workshop
from bench.errors import BenchError
from keylane.broker import find_java

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NAMES = ("keylane", "java", "aiokafka", "raw", "go")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a peer is to do."""

    brokers: str
    topic: str
    out: str
    group: str
    n: int = 0
    """End after so many; 0: on SIGTERM."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """The peers that can run here, where they were built, and why others cannot."""

    tool: Path
    built: dict[str, Path]
    left_out: dict[str, str]

    def drain(self) -> list[Contestant]:
        """No-op handlers."""
        return self._there(
            [self._keylane(), self._java(256), self._python("aiokafka"), self._python("raw"), self._go(256)]
        )

    def chat(self) -> list[Contestant]:
        """Those that run the keys of a partition at the same time; the others could not keep up by far."""
        return self._there([self._keylane(), self._go(256), self._go(2048), self._java(1000)])

    def stuck(self) -> list[Contestant]:
        """Keylane alone."""
        return self._there([self._keylane()])

    def _there(self, all_: list[Contestant]) -> list[Contestant]:
        return [one for one in all_ if one.peer in self.built]

    def _keylane(self) -> Contestant:
        python = [sys.executable, "-m", "bench.keylane_peer"]
        return Contestant(label="keylane", peer="keylane", command=lambda job: [*python, *_pairs(job)])

    def _java(self, threads: int) -> Contestant:
        def command(job: Job) -> list[str]:
            to = self.built["java"]
            path = f"{to / 'classes'}:{to / 'libs'}/*"
            return [
                str(find_java()),
                "-Xmx2g",
                "-cp",
                path,
                "peer.Main",
                *_pairs(job),
                f"concurrency={threads}",
            ]

        return Contestant(label=f"parallel-consumer KEY {threads}", peer="java", command=command)

    def _python(self, peer: str) -> Contestant:
        def command(job: Job) -> list[str]:
            return [
                str(self.built[peer] / "bin" / "python"),
                str(PEERS / "python" / f"{peer}_peer.py"),
                *_pairs(job),
            ]

        label = {"aiokafka": "aiokafka", "raw": "raw confluent-kafka, 2 processes"}[peer]
        return Contestant(label=label, peer=peer, command=command)

    def _go(self, workers: int) -> Contestant:
        def command(job: Job) -> list[str]:
            pairs = [part for pair in _pairs(job) for part in ("-" + pair).split("=", 1)]
            return [str(self.built["go"] / "program"), *pairs, "-workers", str(workers)]

        return Contestant(label=f"go-affinity {workers}", peer="go", command=command)


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
            built[name] = workshop.build(NEEDED[name])
        except BenchError as error:
            left_out[name] = str(error)
    return Lineup(tool=tool, built=built, left_out=left_out)


def _pairs(job: Job) -> list[str]:
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
