"""What is left out of what Java and the workers say."""

from __future__ import annotations

import subprocess
import sys

from keylane.spark import stderr_filter
from keylane.spark.stderr_filter import passed

DAEMON = [
    b"Traceback (most recent call last):\n",
    b'  File "/venv/pyspark/daemon.py", line 233, in manager\n',
    b"    write_int(pid, stdout)\n",
    b"BrokenPipeError: [Errno 32] Broken pipe\n",
]


def test_lines_of_every_start_are_left_out() -> None:
    lines = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b'Setting default log level to "OFF".\n',
        b"To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).\n",
        b"2026-11-18 16:58:44 ERROR spark.Executor out of memory\n",
    ]
    assert list(passed(lines)) == lines[3:]


def test_end_of_the_daemon_is_left_out() -> None:
    assert list(passed([b"before\n", *DAEMON, b"after\n"])) == [b"before\n", b"after\n"]


def test_other_tracebacks_pass() -> None:
    other = [*DAEMON[:3], b"ValueError: no\n"]
    own = [DAEMON[0], b'  File "/shop.py", line 3\n', DAEMON[3]]
    assert list(passed([*other, *own])) == [*other, *own]
    assert list(passed(DAEMON[:2])) == DAEMON[:2]  # cut off


def test_process_passes_lines_on() -> None:
    done = subprocess.run(
        [sys.executable, "-E", "-S", stderr_filter.__file__],
        input=b"WARNING: Using incubator modules: x\nerror: it matters\nno newline",
        capture_output=True,
        check=True,
    )
    assert done.stderr == b"error: it matters\nno newline"
