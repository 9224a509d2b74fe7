"""Starts a process that no terminal can interrupt, and ends it when its owner ends.

Run as a script (standard library only, no import of keylane) in a session of its own: reads an order from
stdin, starts the program, prints its process id and leaves. If the order names an owner, a small watcher stays
behind as a child of the program. When the owner is gone, however it went, the watcher kills the program and
removes what the order says. PR_SET_PDEATHSIG exists on Linux alone, and fires when the *thread* that forked ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PROC = Path("/proc/self")  # Linux has it; elsewhere ps is asked
POLL_SECONDS = 0.2
REMOVE_SECONDS = 10.0


def identity(pid: int) -> str | None:
    """What tells this process from a later one with the same id; None if there is none (a zombie is none)."""
    if PROC.is_dir():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"
    return _identity_from_ps(pid)


def _identity_from_ps(pid: int) -> str | None:
    answer = subprocess.run(  # noqa: S603 - a number is all we add
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - where ps lives differs
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return None if answer.returncode != 0 or not started or state.startswith("Z") else started.strip()


def main() -> None:
    """Carries out the order on stdin; see `keylane.broker.process.launch` for what it holds."""
    order = json.load(sys.stdin)
    started = os.fork()
    if started:
        sys.stdout.write(f"{started}\n")
        sys.stdout.flush()
        os._exit(0)
    try:
        os.chdir(order["cwd"])
        _redirect(order["console"])
        program = os.getpid()
        if order["owner"] is not None and os.fork() == 0:
            _watch(program, order["owner"], order["remove"])
            os._exit(0)
        os.execv(order["argv"][0], order["argv"])  # noqa: S606 - no shell is the point
    except OSError as cause:
        sys.stderr.write(f"cannot start {order['argv'][0]}: {cause}\n")
        sys.stderr.flush()
    os._exit(127)


def _redirect(console: str) -> None:
    """Lets go of the caller's stdin, stdout and stderr."""
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _watch(program: int, owner: list[object], remove: list[str]) -> None:
    """Returns when the program has ended by itself, or when the owner was gone and all is cleaned up.

    The program is our parent: as long as `getppid` says so it lives, and its id cannot be another process's.
    """
    pid, started = owner
    while os.getppid() == program:
        if identity(int(str(pid))) != started:
            os.kill(program, signal.SIGKILL)
            _remove(program, remove)
            return
        time.sleep(POLL_SECONDS)


def _remove(program: int, paths: list[str]) -> None:
    """Removes files and folders, again and again while other nodes that are being killed still write there."""
    until = time.monotonic() + REMOVE_SECONDS
    while time.monotonic() < until:
        time.sleep(0.05)
        if os.getppid() == program:
            continue
        for path in map(Path, paths):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not any(path.exists() for path in map(Path, paths)):
            return


if __name__ == "__main__":
    main()
