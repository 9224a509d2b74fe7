"""Spark's daemon of Python workers, but for one thing: its order to kill a worker that is stopped never arrives.

That is what makes a real zombie of a worker that gets SIGSTOP: Spark takes the task away from it, tells the daemon to
kill it, and runs the task elsewhere. If the daemon did that, no zombie would be left to wake up. On a machine that was
cut off or froze, it is not carried out either.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pyspark import daemon

_kill = os.kill


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _kill_unless_stopped(pid: int, number: int) -> None:
    if number != signal.SIGKILL or _state(pid) != "T":
        _kill(pid, number)


if __name__ == "__main__":
    os.kill = _kill_unless_stopped
    daemon.manager()
