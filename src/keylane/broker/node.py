"""Node of a broker: a process that can be stopped, killed, suspended and started again."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Protocol

from keylane.broker import config, ports
from keylane.broker.errors import EmbeddedBrokerError, PortTakenError

if TYPE_CHECKING:
    from pathlib import Path

    from keylane.broker.config import Address
    from keylane.broker.process import Process

STOP_TIMEOUT_SECONDS = 30.0
_SHOWN_LINES = 15
_TAIL_BYTES = 64 * 1024
_BIND_FAILED = re.compile(r"failed to bind to \S*?:(\d+)|Address already in use", re.IGNORECASE)


class Host(Protocol):
    """The broker of a node."""

    def process(self, number: int) -> Process | None:
        """The current or last process of a node; None if it was never started.

        Raises EmbeddedBrokerError if the broker is not started.
        """

    def launch(self, node: Node) -> None:
        """Start the process of a node."""

    def wait_ready(self, nodes: tuple[Node, ...], *, wanted: frozenset[int], timeout: float) -> None:
        """Wait until these nodes serve and know the `wanted` ones."""


class Node:
    """One node. It keeps its ports and its data across stops and starts."""

    __slots__ = ("_host", "_log_start", "address", "folder")

    def __init__(self, host: Host, address: Address, folder: Path) -> None:
        self._host = host
        self.address = address
        self.folder = folder
        # The position in the log where the lines of this start begin; written by mark_log.
        self._log_start = 0

    def __repr__(self) -> str:
        return f"<Node {self.id} on port {self.port}>"

    @property
    def id(self) -> int:
        """Kafka's node id; the first is 1."""
        return self.address.node

    @property
    def port(self) -> int:
        """The port for clients."""
        return self.address.port

    @property
    def pid(self) -> int:
        """The id of its current or last process; 0 if it was never started."""
        process = self._host.process(self.id)
        return 0 if process is None else process.pid

    @property
    def alive(self) -> bool:
        """True while its process runs or is suspended."""
        process = self._host.process(self.id)
        return process is not None and process.alive

    @property
    def log(self) -> Path:
        """Kafka's log file of this node."""
        return self.folder / config.LOG

    def start(self, *, wait: bool = True, timeout: float = 60.0) -> None:
        """Start the node again with the same ports and data; returns when it serves, or at once without `wait`.

        Raises PortTakenError if another process has taken its port, EmbeddedBrokerError if it runs or does not start.
        """
        if self.alive:
            raise EmbeddedBrokerError(
                f"node {self.id} is already running (process {self.pid}): stop or kill it first"
            )
        for port in filter(None, (self.port, self.address.controller_port, self.address.certificate_port)):
            ports.require_free(port)
        self._host.launch(self)
        if wait:
            self._host.wait_ready((self,), wanted=frozenset((self.id,)), timeout=timeout)

    def stop(self, timeout: float = STOP_TIMEOUT_SECONDS) -> None:
        """Stop the node with SIGTERM, and kill it after `timeout` seconds. Does nothing if it has ended."""
        self.ask_to_stop()
        if not self.wait(timeout):
            self.kill()

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and resume the node if it is suspended; does not wait."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the node (SIGKILL), as a crash would. Does nothing if it has ended."""
        self._signal(signal.SIGKILL)
        if not self.wait(STOP_TIMEOUT_SECONDS):
            raise EmbeddedBrokerError(
                f"node {self.id} (process {self.pid}) still runs after SIGKILL: end it by hand"
            )

    def wait(self, timeout: float) -> bool:
        """Wait until the node's process has ended; False if it still runs after `timeout` seconds."""
        process = self._host.process(self.id)
        return process is None or process.wait(timeout)

    def suspend(self) -> None:
        """Suspend the node (SIGSTOP); its connections stay open. Raises EmbeddedBrokerError if it has ended."""
        self._signal_running(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a suspended node (SIGCONT). Raises EmbeddedBrokerError if it has ended."""
        self._signal_running(signal.SIGCONT)

    def mark_log(self) -> None:
        """Remember the end of the log: later lines belong to the next start."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0

    def failure(self, what: str) -> EmbeddedBrokerError:
        """An error with the reason from the log why this node is not up; PortTakenError for a taken port."""
        lines = [*_tail(self.log, self._log_start), *_tail(self.folder / config.CONSOLE, 0)]
        text = "\n".join(lines)
        taken = _BIND_FAILED.search(text)
        if taken is not None:
            port = int(taken[1]) if taken[1] else None
            return PortTakenError(
                f"node {self.id} could not use port {port or '(unknown)'}: another process has taken it",
                port=port,
            )
        hint = ""
        if "No space left on device" in text:
            hint = (
                f" because the disk of {self.folder} is full: free space, or choose a folder on another disk"
            )
        elif "Failed to acquire lock" in text:
            hint = f" because another broker uses {self.folder}: stop that one, or choose another folder"
        last = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:]) or "  (nothing)"
        return EmbeddedBrokerError(f"node {self.id} {what}{hint}. Its last log lines:\n{last}")

    def _signal(self, number: signal.Signals) -> bool:
        process = self._host.process(self.id)
        return process is not None and process.signal(number)

    def _signal_running(self, number: signal.Signals) -> None:
        if not self._signal(number):
            raise EmbeddedBrokerError(f"node {self.id} is not running: start it first")


def _tail(path: Path, start: int) -> list[str]:
    """The last lines of a file, from `start` on."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(end - _TAIL_BYTES, start if start <= end else 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]
