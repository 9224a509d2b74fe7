"""A filter for what Java and its Python workers write to the standard error, run as a process of its own.

It passes every line on as it comes, except for a few harmless ones. It outlives the driver, so nothing that workers
print while they end is lost. It imports nothing of Keylane, so it starts in a few hundredths of a second.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NOISE = (
    b"WARNING: Using incubator modules:",
    b"WARNING: package sun.security.action not in java.base",
    b"Using Spark's default log4j profile:",
    b'Setting default log level to "',
    b"To adjust logging level use sc.setLogLevel",
)
"""Beginnings of lines that Java and Spark print at every start."""
_TRACEBACK = b"Traceback (most recent call last):"
_DAEMON = (b"pyspark/daemon.py", b"pyspark.zip/pyspark/daemon.py")
_GONE = (b"BrokenPipeError", b"ConnectionResetError", b"EOFError")
"""How PySpark's daemon reports that its JVM has ended. Keylane reports that itself."""
_LONGEST_BYTES = 64 * 1024


def passed(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines to show. A traceback is held back until its last line has come."""
    held: list[bytes] = []
    for line in lines:
        if held:
            held.append(line)
            if line[:1].isspace() and sum(map(len, held)) < _LONGEST_BYTES:
                continue
            if not _is_end_of_daemon(held):
                yield from held
            held = []
        elif line.startswith(_TRACEBACK):
            held = [line]
        elif not line.startswith(NOISE):
            yield line
    yield from held


def _is_end_of_daemon(lines: list[bytes]) -> bool:
    return lines[-1].startswith(_GONE) and any(name in line for line in lines for name in _DAEMON)


def main() -> None:
    """Copy the standard input to the standard error; a status line in a terminal is wiped first."""
    clear = b"\r\x1b[2K" if os.isatty(2) else b""
    for line in passed(sys.stdin.buffer):
        os.write(2, clear + line)


if __name__ == "__main__":
    main()
