"""The memory of a task whose messages are small in the topic and large when they are unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

if TYPE_CHECKING:
    from support.topics import Log

COUNT, SIZE = 24, 10 << 20


@pytest.mark.timeout(150)
def test_compressed_messages_are_held_to_the_bound(log: Log, name: str) -> None:
    """With bounds of 20 and 8 MB, what a task and its client hold is less than half of the 240 MB that there are."""
    log.create(f"{name}.in", partitions=1)
    producer = Producer(
        {
            "bootstrap.servers": log.bootstrap,
            "compression.type": "gzip",
            "message.max.bytes": 1_000_000_000,
            "linger.ms": 0,
        }
    )
    for number in range(COUNT):
        producer.produce(f"{name}.in", bytes(SIZE), b"k%d" % number)
        assert producer.flush(30) == 0, "each is a batch of its own"
    script = Path(__file__).parents[1] / "support" / "heavy_messages.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parent)])}
    done = subprocess.run(
        [sys.executable, str(script), log.bootstrap, name, str(20 << 20)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ran, grown = map(int, done.stdout.split())
    assert ran == COUNT
    assert grown < COUNT * SIZE / 2, f"it grew by {grown >> 20} MB"
