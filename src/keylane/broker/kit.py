"""Files that a node needs, made once per machine: Kafka's jars, and two files for a quick start.

* `bootstrap.checkpoint`, written by Kafka's StorageTool. With it, formatting a node means writing two small files
  instead of running the tool.
* an archive of Kafka's loaded classes, which Java writes when a node of a training run ends. With it a node starts in
  half the time.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.broker import config
from keylane.broker.errors import EmbeddedBrokerError
from keylane.broker.jars import JarFolder, ensure_jars, locked
from keylane.broker.ports import free_ports
from keylane.broker.probe import Probe
from keylane.broker.process import Process, launch
from keylane.broker.progress import DownloadProgress, DownloadStep, OnProgress, silent
from keylane.spark.java import Java, describe_java

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOG = logging.getLogger("keylane.broker")
_TRAINING_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """Java, Kafka's jars and the two files; `archive` is None if Java could not write one."""

    java: Java
    jars: JarFolder
    checkpoint: Path
    archive: Path | None

    def node_command(self, heap: str) -> list[str]:
        """The command line of a node, to run in the node's folder."""
        flags = config.java_flags(heap, self.archive)
        return [str(self.java.path), *flags, "-cp", self.jars.classpath, "kafka.Kafka", config.PROPERTIES]

    def tool_command(self, class_name: str, args: Sequence[str]) -> list[str]:
        """The command line of one of Kafka's tools, with little compilation because it runs briefly."""
        flags = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
        quiet = "-Dorg.apache.logging.log4j.level=FATAL"
        return [str(self.java.path), *flags, quiet, "-cp", self.jars.classpath, class_name, *args]


def ensure_kit(progress: OnProgress = silent) -> Kit:
    """The kit, made first if it does not exist. Raises JavaError or EmbeddedBrokerError."""
    java = describe_java()
    jars = ensure_jars(progress)
    mark = hashlib.sha256(f"{java.path.resolve()}\n{java.banner}".encode()).hexdigest()[:12]
    checkpoint = jars.path / "bootstrap.checkpoint"
    archive = jars.path / f"classes-{mark}.jsa"
    if not (checkpoint.exists() and archive.exists()):
        try:
            with locked(jars.path.parent, progress):
                if not (checkpoint.exists() and archive.exists()):
                    progress(DownloadProgress(step=DownloadStep.PREPARE, done=0, total=1))
                    _prepare(java, jars, checkpoint, archive)
                    progress(DownloadProgress(step=DownloadStep.PREPARE, done=1, total=1))
        except OSError as cause:
            raise EmbeddedBrokerError(
                f"could not prepare Kafka in {jars.path} ({cause.strerror or cause}): free disk space and make the "
                "folder writable, or set KEYLANE_CACHE to another folder"
            ) from cause
    usable = archive.is_file() and archive.stat().st_size > 0
    return Kit(java=java, jars=jars, checkpoint=checkpoint, archive=archive if usable else None)


def _prepare(java: Java, jars: JarFolder, checkpoint: Path, archive: Path) -> None:
    """Format a node with Kafka's tool and run it once, for the two files."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{jars.path.name}.new-", dir=jars.path.parent))
    try:
        kit = Kit(java=java, jars=jars, checkpoint=checkpoint, archive=None)
        port, controller_port = free_ports(2)
        address = config.Address(node=1, port=port, controller_port=controller_port)
        config.write_node(scratch, config.server_properties(address, [address], {}))
        _format(kit, scratch)
        shutil.copyfile(scratch / config.DATA / checkpoint.name, scratch / checkpoint.name)
        made = scratch / archive.name
        if not _train(kit, scratch, port, made):
            # An empty file means that this Java writes no archive, so that it is not tried again.
            _LOG.info("no class archive, brokers will start more slowly java=%s", java.path)
            made.unlink(missing_ok=True)
            made.touch()
        (scratch / checkpoint.name).replace(checkpoint)
        made.replace(archive)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _format(kit: Kit, scratch: Path) -> None:
    arguments = ("format", "--cluster-id", config.new_uuid(), "--config", config.PROPERTIES)
    command = kit.tool_command("kafka.tools.StorageTool", arguments)
    answer = subprocess.run(  # noqa: S603 - our own command line
        command,
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if answer.returncode != 0:
        raise EmbeddedBrokerError(f"Kafka's StorageTool failed:\n{(answer.stdout + answer.stderr).strip()}")


def _train(kit: Kit, scratch: Path, port: int, archive: Path) -> bool:
    """Run a node until it serves, and end it so that Java writes the archive; False if it wrote none."""
    java, *rest = kit.node_command(config.HEAP)
    command = [java, f"-XX:ArchiveClassesAtExit={archive}", *rest]
    running = launch(command, cwd=scratch, console=config.CONSOLE, owner=Process.current(), remove=[scratch])
    until = time.monotonic() + _TRAINING_TIMEOUT_SECONDS
    try:
        probe = Probe(port)
        while running.alive and time.monotonic() < until:
            if probe.members(1.0):
                running.signal(signal.SIGTERM)
                ended = running.wait(until - time.monotonic())
                return ended and archive.exists() and archive.stat().st_size > 0
            time.sleep(0.05)
        return False
    finally:
        if running.signal(signal.SIGKILL):
            running.wait(10)
