"""Launcher of a process that no terminal can interrupt, and that ends when its owner ends.

It runs as a script in a session of its own (standard library only, no import of keylane): it reads a request from
stdin, starts the program, prints its process id and exits. If the request names an owner, a small watcher remains as a
child of the program. When the owner has ended in any way, the watcher kills the program and removes the files that the
request names. PR_SET_PDEATHSIG would exist only on Linux, and acts when the *thread* that forked ends.
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

PROC = Path("/proc/self")  # Linux; other systems have ps
POLL_INTERVAL_SECONDS = 0.2
REMOVE_TIMEOUT_SECONDS = 10.0


def identity(pid: int) -> str | None:
    """A text that distinguishes a process from later ones with its id; None if it has ended or is a zombie."""
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
    answer = subprocess.run(  # noqa: S603 - the only argument is a number
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - where ps lives differs
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return None if answer.returncode != 0 or not started or state.startswith("Z") else started.strip()


def main() -> None:
    """Carry out the request on stdin, which `keylane.broker.process.launch` writes."""
    request = json.load(sys.stdin)
    started = os.fork()
    if started:
        sys.stdout.write(f"{started}\n")
        sys.stdout.flush()
        os._exit(0)
    try:
        os.chdir(request["cwd"])
        _redirect(request["console"])
        program = os.getpid()
        if request["owner"] is not None and os.fork() == 0:
            _watch(program, request["owner"], request["remove"])
            os._exit(0)
        os.execv(request["argv"][0], request["argv"])  # noqa: S606 - no shell is the point
    except OSError as cause:
        sys.stderr.write(f"cannot start {request['argv'][0]}: {cause}\n")
        sys.stderr.flush()
    os._exit(127)


def _redirect(console: str) -> None:
    """Close the caller's stdin, stdout and stderr."""
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _watch(program: int, owner: list[object], remove: list[str]) -> None:
    """Return when the program has ended, or when its owner has ended and everything is cleaned up.

    The program is the parent process: while `getppid` returns its id, it lives and the id is its own.
    """
    pid, started = owner
    while os.getppid() == program:
        if identity(int(str(pid))) != started:
            os.kill(program, signal.SIGKILL)
            _remove(program, remove)
            return
        time.sleep(POLL_INTERVAL_SECONDS)


def _remove(program: int, paths: list[str]) -> None:
    """Remove files and folders, repeatedly, because other nodes may still write there until they are killed."""
    until = time.monotonic() + REMOVE_TIMEOUT_SECONDS
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
