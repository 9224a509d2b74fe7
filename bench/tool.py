"""The load generator and order checker (``bench/peers/bench``, Go), called as a program."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds from when a message was due to when its result arrived."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Latency:
        """From what the tool said; all zero when nothing arrived."""
        return cls(
            count=int(said["count"]),
            **{name: float(said[name] or 0) for name in ("p50", "p95", "p99", "max")},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Whether all came out, once, in the order of their keys."""

    sent: int
    got: int
    violations: int
    duplicates: int

    @classmethod
    def read(cls, said: Mapping[str, Any], *, sent: int) -> Order:
        """From what the tool said."""
        return cls(
            sent=sent,
            got=int(said["got"]),
            violations=int(said["order_violations"]),
            duplicates=int(said["duplicates"]),
        )

    @property
    def problems(self) -> list[str]:
        """What is wrong, if anything."""
        missing = self.sent - self.got + self.duplicates
        found = {"lost": missing, "duplicates": self.duplicates, "order violations": self.violations}
        return [f"{count:,} {what}" for what, count in found.items() if count]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load."""

    order: Order
    all: Latency
    clean: Latency | None
    """Of messages that do not fail; with ``fail``."""
    window: Latency | None
    """Of messages that were due in the window."""
    window_per_second: float
    """Results that arrived in the window."""
    stuck: Latency | None
    stuck_order: Order | None
    stuck_early: int
    """Results of the stuck key that came while it was to be stuck."""
    backlog: int
    """Results missing when the load ended."""
    drain_seconds: float
    late_ms: float
    """How late the generator was, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An open-loop load: sent when it is due, whether the peer keeps up or not."""

    rate: float
    seconds: float
    keys: int
    fail: int = 0
    rotate: bool = False
    """Keys take turns instead of being drawn."""
    window: float = 0.0
    stuck: float = 0.0
    base: int = 0
    """The first event id, and part of the keys: loads on the same topic need different ones."""
    json: bool = False
    """Values are JSON strings."""
    patience: float = 60.0
    """Seconds to wait for results after the last message was sent."""


class Tool:
    """The program, at one broker."""

    def __init__(self, program: Path, brokers: str, partitions: int) -> None:
        self._program = program
        self._brokers = brokers
        self._partitions = partitions

    def create(self, *topics: str) -> None:
        """New topics."""
        self._call("create", topic=",".join(topics), parts=self._partitions)

    def delete(self, *topics: str) -> None:
        """Topics that are there or not."""
        self._call("delete", topic=",".join(topics))

    def preload(self, topic: str, n: int, keys: int, *, zipf: float = 0.0, json: bool = False) -> None:
        """Fill a topic."""
        self._call("preload", 900, topic=topic, n=n, keys=keys, zipf=zipf, json=_flag(json))

    def check(self, out: str, n: int) -> Order:
        """Read an output topic back."""
        said = self._call("check", 300, out=out, n=n)
        return Order.read(said | {"got": said["out"]}, sent=n)

    def committed(self, group: str, topic: str) -> int:
        """How far the group's progress is, over all partitions."""
        return int(self._call("group", group=group, topic=topic)["committed"])

    def load(self, topic: str, out: str, load: Load, watch: Callable[[], None]) -> LoadResult:
        """Offer a load and wait for its results. ``watch`` is called at intervals; its exceptions end the load."""
        said = self._call(
            "load",
            load.seconds + load.patience + 60,
            watch,
            topic=topic,
            out=out,
            rate=load.rate,
            dur=f"{load.seconds:g}s",
            keys=load.keys,
            base=load.base,
            drain=f"{load.patience:g}s",
            fail=load.fail,
            json=_flag(load.json),
            rotate=int(load.rotate),
            window=f"{load.window:g}s",
            stuck=load.stuck,
        )
        clean, window, stuck = said.get("clean"), said.get("window"), said.get("stuck")
        return LoadResult(
            order=Order.read(said, sent=int(said["sent"])),
            all=Latency.read(said),
            clean=Latency.read(clean) if clean else None,
            window=Latency.read(window) if window else None,
            window_per_second=float(window["per_s"]) if window else 0.0,
            stuck=Latency.read(stuck) if stuck else None,
            stuck_order=Order.read(stuck, sent=int(stuck["sent"])) if stuck else None,
            stuck_early=int(stuck["early"]) if stuck else 0,
            backlog=int(said["backlog_end"]),
            drain_seconds=float(said["drain_s"]),
            late_ms=float(said["gen_slip_ms"]),
        )

    def _call(
        self, what: str, timeout: float = 60.0, watch: Callable[[], None] = lambda: None, **flags: object
    ) -> dict[str, Any]:
        command = [str(self._program), what, "-brokers", self._brokers]
        for name, value in flags.items():
            command.append(f"-{name}={value}")
        until = time.monotonic() + timeout
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            try:
                while running.poll() is None:
                    if time.monotonic() > until:
                        raise BenchError(f"the load generator's `{what}` took longer than {timeout:.0f} s")
                    watch()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.wait(0.5)
                out, said = running.communicate()
            except BaseException:
                running.kill()
                raise
        if running.returncode:
            raise BenchError(f"the load generator's `{what}` failed: {said.strip()[-300:]}")
        answer: dict[str, Any] = json.loads(out or "{}")
        return answer


def _flag(given: bool) -> str:
    return "true" if given else "false"
