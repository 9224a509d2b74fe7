"""A broker to measure, and the processor time that it uses."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.broker import Broker
from keylane.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def broker() -> Iterator[tuple[Broker, KafkaSettings]]:
    """An embedded broker with one node, and how to reach it."""
    with Broker(heap="1g") as started:
        yield started, KafkaSettings(started.bootstrap)


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
