"""The campaign's side of a driver process: commands, events, its death and its next life."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from keylane.spark.spark_session import worker_python

if TYPE_CHECKING:
    from collections.abc import Callable

    from campaign.workload import Spec

_READY_SECONDS_MAX = 180.0
_ANSWER_SECONDS_MAX = 120.0


class DriverError(Exception):
    """The driver did not do what it was told, and should not be dead."""


class Driver:
    """One driver at a time. `on_event` gets its unsolicited events, on the reader's thread."""

    def __init__(self, master: str, log: Path) -> None:
        self.master = master
        self.on_event: Callable[[dict[str, Any]], None] = lambda _event: None
        self._log = log
        self.spared = log.with_suffix(".spared")
        """Names of files in it are pids of workers that Spark does not get killed: see :mod:`campaign.daemon`."""
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._talking = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def ensure(self) -> None:
        """Start it unless it runs. Raises DriverError when it does not come up."""
        if self.alive:
            return
        top = Path(__file__).parents[2]
        known = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(top / "tools"), str(top / "tests"), *known]),
        }
        self.spared.mkdir(exist_ok=True)
        env["KEYLANE_CAMPAIGN_SPARED"] = str(self.spared)
        # Java is up sooner and leaves more of the machine to others; nothing is measured here.
        env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        if self.master.startswith("local-cluster"):
            env["SPARK_HOME"] = str(_spark_home(self._log.with_suffix(".home")))
            env |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(worker_python())}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "campaign.driver", self.master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=env,
                cwd=top,
            )
        self._answers = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process, self._answers), daemon=True)
        self._reader.start()
        self._answer(_READY_SECONDS_MAX)

    def start(self, spec: Spec) -> None:
        self._tell({"do": "start", "spec": asdict(spec)})

    def stop(self) -> None:
        """Drain the app and end its query."""
        self._tell({"do": "stop"})

    def kill_task(self, number: int) -> bool:
        return bool(self._tell({"do": "kill_task", "number": number})["answer"])

    def kill(self) -> None:
        """kill -9 of the driver: its Python and its Java at once, as a machine's out-of-memory killer does."""
        process = self._process
        if process is None:
            return
        doomed = [*(pid for pid in children(process.pid) if name_of(pid) == "java"), process.pid]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self._forget(process)

    def close(self) -> None:
        """End it; whatever it still runs ends with it."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._forget(process)

    def _forget(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        if self._reader is not None:
            self._reader.join(5)  # it ends with the process that it reads from
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        with self._talking:
            if self._process is None or self._process.stdin is None:
                raise DriverError("there is no driver")
            try:
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                raise DriverError(f"the driver is gone: {error}") from error
            return self._answer(_ANSWER_SECONDS_MAX)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise DriverError(f"the driver gave no answer within {seconds:g} s: see {self._log}") from None
        if found["answer"] in ("failed", "gone"):
            raise DriverError(f"the driver could not do it: {found.get('why')} (see {self._log})")
        return found

    def _read(self, process: subprocess.Popen[str], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
        if process.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            for line in process.stdout:
                said = json.loads(line)
                if "answer" in said:
                    answers.put(said)
                else:
                    self.on_event(said)
        answers.put({"answer": "gone", "why": "its process has ended"})


def _spark_home(folder: Path) -> Path:
    """PySpark's own folder as links: a local cluster keeps its executors' files inside of its home."""
    folder.mkdir(exist_ok=True)
    for entry in Path(pyspark.__file__).parent.iterdir():
        link = folder / entry.name
        if entry.name != "work" and not link.is_symlink():
            link.symlink_to(entry)
    return folder


def children(pid: int) -> list[int]:
    """Processes that this one started and that run."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            if task.name != str(pid)
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def parent(pid: int) -> int:
    """Its parent, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def name_of(pid: int) -> str:
    """The program it runs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """Its whole command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def running(pid: int) -> bool:
    """Whether it lives: a zombie in the sense of ps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def stopped(pid: int) -> bool:
    """Whether all of its threads are stopped, or it is gone. SIGSTOP takes milliseconds when processors are busy."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread that has just ended
        return not running(pid)
    return all(text.rpartition(")")[2].split()[0] in "TtZX" for text in threads)
