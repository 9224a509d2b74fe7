"""A Spark cluster on this machine for a measurement: a master, and workers with an executor of one core each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyspark

from bench.errors import BenchError

if TYPE_CHECKING:
    from types import TracebackType

_HOME = Path(pyspark.__file__).parent
_START_SECONDS_MAX = 60.0


class Standalone:
    """A context manager; ``url`` is for ``--master``. Everything that it starts has ended when the block has.

    Executors get the environment of this process as it is now, not that of the driver: what an app needs is shipped.
    """

    def __init__(self, folder: Path, executors: int) -> None:
        self._folder = folder
        self._executors = executors
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        port = ("--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0")
        self._start("master", "org.apache.spark.deploy.master.Master", *port)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            if time.monotonic() > deadline:
                raise BenchError(
                    f"Spark's master did not answer at {self.url} within {_START_SECONDS_MAX:g} s"
                )
            time.sleep(0.1)
        for number in range(self._executors):
            self._start(
                f"worker-{number}",
                "org.apache.spark.deploy.worker.Worker",
                self.url,
                *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"),
                *("--work-dir", str(self._folder / f"work-{number}")),
            )
        while self._registered() < self._executors:
            if time.monotonic() > deadline:
                raise BenchError(f"Spark's workers did not register within {_START_SECONDS_MAX:g} s")
            time.sleep(0.2)
        return self

    def _registered(self) -> int:
        return (self._folder / "master.log").read_text(errors="replace").count("Registering worker")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # executors are in its group
            process.wait()

    def _start(self, name: str, *command: str) -> None:
        environment = os.environ | {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{name}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(_HOME / "bin" / "spark-class"), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    start_new_session=True,
                )
            )

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
