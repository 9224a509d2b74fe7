"""Process identified by its id and start time, so that a reused id is never mistaken for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.broker import guard
from keylane.broker.errors import EmbeddedBrokerError

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process, running or ended. `started` is the result of `guard.identity` at its start."""

    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """The calling process."""
        return cls(pid=os.getpid(), started=guard.identity(os.getpid()) or "")

    @property
    def alive(self) -> bool:
        """True while it runs or is suspended; False for a zombie and for another process with the same id."""
        return guard.identity(self.pid) == self.started

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has ended."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; False if it still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        while self.alive:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True


def launch(
    argv: Sequence[str], *, cwd: Path, console: str, owner: Process | None, remove: Sequence[Path]
) -> Process:
    """Start a program in a session of its own, with its output in the file `console` in `cwd`.

    With an owner, the program is killed and the paths in `remove` are removed when the owner ends, even by SIGKILL.
    Without an owner it outlives this process. It is not a child process, so it needs no wait. Raises
    EmbeddedBrokerError if it cannot start.
    """
    request = {
        "argv": list(argv),
        "cwd": str(cwd),
        "console": console,
        "owner": None if owner is None else [owner.pid, owner.started],
        "remove": [str(path) for path in remove],
    }
    answer = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-I", "-S", guard.__file__],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        start_new_session=True,
    )
    if answer.returncode != 0 or not answer.stdout.strip().isdigit():
        raise EmbeddedBrokerError(
            f"could not start {argv[0]}: {answer.stderr.strip() or 'the helper returned no process id'}"
        )
    pid = int(answer.stdout)
    return Process(pid=pid, started=guard.identity(pid) or "ended at once")
