"""Spark's daemon of Python workers, but for one thing: its order to kill a worker that is stopped or spared is lost.

That is what makes a real zombie of a worker that gets SIGSTOP: Spark takes the task away from it, tells the daemon to
kill it, and runs the task elsewhere. If the daemon did that, no zombie would be left to wake up. On a machine that was
cut off or froze, it is not carried out either. A worker is spared while there is a file with its pid as its name in
the folder that the environment's ``KEYLANE_CAMPAIGN_SPARED`` names: its calls still run when its task begins elsewhere.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pyspark import daemon

SPARED = "KEYLANE_CAMPAIGN_SPARED"
_kill = os.kill


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _spared(pid: int) -> bool:
    folder = os.environ.get(SPARED, "")
    return bool(folder) and (Path(folder) / str(pid)).exists()


def _kill_unless_stopped(pid: int, number: int) -> None:
    if number != signal.SIGKILL or not (_state(pid) == "T" or _spared(pid)):
        _kill(pid, number)


if __name__ == "__main__":
    os.kill = _kill_unless_stopped
    daemon.manager()
