"""A peer's process: started in a session of its own, watched, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_PROC = Path("/proc")
_ROOT = Path(__file__).parents[1]
_TICK = os.sysconf("SC_CLK_TCK")
_CPU_INTERVAL_SECONDS = 0.25
STOP_SECONDS = 60.0

_PAGE = os.sysconf("SC_PAGE_SIZE")

Series = list[tuple[float, float]]
"""(unix time, value), by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one process. Memory is what is resident, in bytes, with pages that others share."""

    memory: int
    threads: int
    files: int
    command: str = ""
    pid: int = 0


class Process:
    """A context manager: the process runs inside, and neither it nor a child of it is left after.

    ``cpu`` are the seconds of processor time it and its children had used, sampled by :meth:`wait`; empty where there
    is no /proc. ``peak`` is the most memory they held together, in bytes, seen at the same times.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self.cpu: Series = []
        self.peak = 0
        self.started = 0.0
        self._command = list(command)
        self._seen: dict[int, float] = {}  # of children that have ended too
        self._running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        with self.log.open("wb") as log:
            self._running = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace=STOP_SECONDS if kind is None else 5.0)

    def wait(self, timeout: float) -> None:
        """Wait for its end. Raises BenchError when it does not end, or not with 0."""
        running, until, sampled = self._popen(), time.monotonic() + timeout, 0.0
        while running.poll() is None:
            now = time.monotonic()
            if now > until:
                raise BenchError(f"not finished after {timeout:.0f} s; {self.last_words()}")
            if now - sampled >= _CPU_INTERVAL_SECONDS:
                sampled = now
                self._sample()
            time.sleep(0.05)
        self.check()

    def check(self) -> None:
        """Raise BenchError when it has ended with an error."""
        code = self._popen().poll()
        if code:
            raise BenchError(f"it ended with {code}; {self.last_words()}")

    def must_run(self) -> None:
        """Raise BenchError when it has ended at all."""
        self.check()
        if self._popen().poll() is not None:
            raise BenchError(f"it ended by itself; {self.last_words()}")

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """SIGTERM, time to end, and SIGKILL to whatever of its session is still there."""
        running = self._popen()
        if running.poll() is None:
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(grace)
        if running.poll() is None:
            running.kill()
            running.wait()
        self.kill()

    def kill(self) -> None:
        """SIGKILL to it and to all that it started."""
        for pid in self._session():  # Spark's workers have groups of their own, but stay in the session
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the process alone; one that has ended gets none."""
        if self._popen().poll() is None:
            self._popen().send_signal(number)

    def footprints(self) -> list[tuple[str, Footprint]]:
        """What it and its children hold now, each with its program's name; empty where there is no /proc."""
        found = []
        for pid in self._session():
            with contextlib.suppress(OSError, IndexError):
                name = (_PROC / str(pid) / "comm").read_text().strip()
                held = Footprint(
                    memory=_resident(pid),
                    threads=int(_stat(pid)[17]),
                    files=len(os.listdir(_PROC / str(pid) / "fd")),  # noqa: PTH208 - cheap, as below
                    command=(_PROC / str(pid) / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace"),
                    pid=pid,
                )
                found.append((name, held))
        return found

    def _sample(self) -> None:
        pids, memory = self._session(), 0
        for pid in pids:
            with contextlib.suppress(OSError, IndexError):
                memory += _resident(pid)
        self.peak = max(self.peak, memory)
        self.cpu.append((time.time(), self.cpu_seconds(pids)))

    def cpu_seconds(self, pids: Sequence[int] | None = None) -> float:
        """User and system time of it and its children so far; 0 where there is no /proc."""
        for pid in self._session() if pids is None else pids:
            with contextlib.suppress(OSError):
                self._seen[pid] = cpu_of(pid)
        return sum(self._seen.values())

    def last_words(self) -> str:
        """Where its output is, and the last line of it that is not a progress line."""
        lines = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line[:2] != "P " and line.strip()
        ]
        where = self.log.relative_to(_ROOT) if self.log.is_relative_to(_ROOT) else self.log
        return f"see {where}" + (f", which ends: {lines[-1].strip()[:200]}" if lines else "")

    def _session(self) -> list[int]:
        if not _PROC.is_dir():
            return []
        mine, found = self._popen().pid, []
        for entry in os.listdir(_PROC):  # noqa: PTH208 - half the price of Path objects, and it is called while a peer is measured
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if int(_stat(int(entry))[3]) == mine:
                        found.append(int(entry))
        return found

    def _popen(self) -> subprocess.Popen[bytes]:
        assert self._running is not None, "not started"
        return self._running


def cpu_of(pid: int) -> float:
    """User and system time of one process. Raises OSError when it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICK


def _resident(pid: int) -> int:
    return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE


def _stat(pid: int) -> list[str]:
    """From the state on: state, parent, group, session, …"""
    return (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
