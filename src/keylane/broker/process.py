"""A process that is not our child: known by its id and its start, so that a reused id is not taken for it."""

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
    """One process, running or gone. `started` is what `guard.identity` said when it was new."""

    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """The process that asks."""
        return cls(pid=os.getpid(), started=guard.identity(os.getpid()) or "")

    @property
    def alive(self) -> bool:
        """Whether it runs (or is suspended); a zombie and a stranger with the same id do not count."""
        return guard.identity(self.pid) == self.started

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal; False if the process is gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout: float) -> bool:
        """Waits until the process is gone; False if it still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        while self.alive:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True


def launch(
    argv: Sequence[str], *, cwd: Path, console: str, owner: Process | None, remove: Sequence[Path]
) -> Process:
    """Starts a program in a session of its own, its output in the file `console` (in `cwd`, written anew).

    With an owner the program dies when the owner does, even by SIGKILL, and the paths in `remove` go with it;
    without one it outlives us. It is no child of ours: nothing to reap. Raises EmbeddedBrokerError if it cannot start.
    """
    order = {
        "argv": list(argv),
        "cwd": str(cwd),
        "console": console,
        "owner": None if owner is None else [owner.pid, owner.started],
        "remove": [str(path) for path in remove],
    }
    answer = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-I", "-S", guard.__file__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        start_new_session=True,
    )
    if answer.returncode != 0 or not answer.stdout.strip().isdigit():
        raise EmbeddedBrokerError(
            f"could not start {argv[0]}: {answer.stderr.strip() or 'no process id came back'}"
        )
    pid = int(answer.stdout)
    return Process(pid=pid, started=guard.identity(pid) or "gone before it was seen")
