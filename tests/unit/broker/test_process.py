from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from keylane.broker.process import Process, launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


def until(true: Callable[[], bool]) -> None:
    """Waits until it is true; the time-out of the test is the limit."""
    while not true():
        time.sleep(0.02)


def test_launched_process_has_its_own_session(tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", "echo hello; exec sleep 60"]
    process = launch(argv, cwd=tmp_path, console="out", owner=None, remove=[])
    try:
        until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "hello\n")
        assert process.alive
        assert os.getsid(process.pid) != os.getsid(0)
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    finally:
        os.kill(process.pid, 9)
    assert process.wait(5)


def test_failed_start_is_in_the_console_file(tmp_path: Path) -> None:
    process = launch([str(tmp_path / "none")], cwd=tmp_path, console="out", owner=None, remove=[])
    assert process.wait(5)
    assert "cannot start" in (tmp_path / "out").read_text()


OWNER = """
import sys, time
from pathlib import Path
from keylane.broker.process import Process, launch
work = Path(sys.argv[1])
(work / "doomed").mkdir()
process = launch(["/bin/sleep", "60"], cwd=work, console="out", owner=Process.current(), remove=[work / "doomed"])
print(process.pid, process.started, flush=True)
time.sleep(60)
"""


def test_launched_process_dies_with_its_killed_owner(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, started = owner.stdout.readline().split()
        process = Process(pid=int(pid), started=started)
        assert process.alive
        owner.kill()
    assert process.wait(5)
    until(lambda: not (tmp_path / "doomed").exists())
