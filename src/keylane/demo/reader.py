"""Reads results as they arrive and judges them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from keylane.demo.seed import parse_value
from keylane.kafka.client import Consumer, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ResultReader(threading.Thread):
    """Follows a topic of load-generator values from its beginning.

    For every result: when it arrived, how long that was after it was due, and whether its key's sequence ascends.
    Fields are written by this thread and read by others when they like; ``close`` ends it.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        failed: Callable[[str], bool],
        client: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name="results", daemon=True)
        self.count = 0
        self.violations = 0
        self.duplicates = 0
        self.latencies: list[float] = []  # of messages that did not fail, in milliseconds
        self.all_latencies: list[float] = []
        self.first = 0.0
        self.last = 0.0
        self._failed = failed
        self._sequences: dict[bytes | None, int] = {}
        self._closing = threading.Event()
        self._consumer = Consumer(
            {
                **(client or {}),
                "bootstrap.servers": bootstrap,
                "group.id": "demo-results",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
            }
        )
        self._consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])

    def run(self) -> None:
        """Until closed."""
        while not self._closing.is_set():
            first = self._consumer.poll(0.1)
            if first is None:
                continue
            now = time.time()
            for message in (first, *self._consumer.consume(1000, 0)):
                if message.error() is None:
                    self._see(message.key(), message.value(), now)
        self._consumer.close()

    def forget(self) -> None:
        """Forget everything read so far, after a warm-up. Call it when nothing is in flight."""
        self.count = self.violations = self.duplicates = 0
        self.latencies, self.all_latencies = [], []
        self.first = self.last = 0.0

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self.join(10)

    def _see(self, key: bytes | None, value: bytes | None, now: float) -> None:
        sequence, due_us, event_id = parse_value(value or b"")
        before = self._sequences.get(key, -1)
        if sequence == before:
            self.duplicates += 1
        elif sequence < before:
            self.violations += 1
        else:
            self._sequences[key] = sequence
        latency = now * 1000 - due_us / 1000
        self.all_latencies.append(latency)
        if not self._failed(event_id):
            self.latencies.append(latency)
        self.first = self.first or now
        self.last = now
        self.count += 1


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values is; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
