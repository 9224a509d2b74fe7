"""A Spark cluster on this machine: a master and workers as processes, from PySpark itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyspark

from support.topics import below, kill, wait_until

if TYPE_CHECKING:
    from types import TracebackType

_HOME = Path(pyspark.__file__).parent
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class Standalone:
    """A master and some workers of one core each. All of it ends with the block."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._start("master", _MASTER, "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        wait_until(lambda: _answers(port), 30, "the master answers")
        for number in range(workers):
            self.add(number)

    def add(self, number: int) -> None:
        """One more worker."""
        work = self._folder / f"work-{number}"
        self._start(
            f"worker-{number}",
            _WORKER,
            self.url,
            *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g"),
            *("--work-dir", str(work), "--webui-port", "0"),
        )

    def executors(self) -> list[int]:
        """The pids of the executors' Java processes."""
        found: dict[int, str] = {}
        for process in self._processes:
            found |= below(process.pid)
        return sorted(pid for pid, line in found.items() if "CoarseGrainedExecutorBackend" in line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            left = below(process.pid)
            process.kill()
            process.wait()
            for pid in left:
                try:
                    kill(pid)
                except ProcessLookupError:
                    continue

    def _start(self, name: str, *command: str) -> None:
        environment = {
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
        }
        with (self._folder / f"{name}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(_HOME / "bin" / "spark-class"), *command],
                    env=environment,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                )
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
