from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from campaign.handle import running, stopped

BUSY = "import threading\nfor _ in range(3): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()"


def test_stopped_means_that_no_thread_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        assert not stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while not stopped(process.pid):
            assert time.monotonic() < until
            time.sleep(0.001)
        assert running(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        while stopped(process.pid):
            assert time.monotonic() < until
    finally:
        process.kill()
        process.wait()
    assert stopped(process.pid)
    assert not running(process.pid)
