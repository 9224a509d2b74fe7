"""The load, and the eye that is kept on the group's progress while it runs."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, Producer, TopicPartition

from campaign.workload import PARTITIONS, messages
from keylane.kafka.settings import KafkaSettings
from keylane.offsets.metadata import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from campaign.plan import Plan
    from keylane.offsets.watermark import PartitionProgress

Position = tuple[int, int]
_TICK_SECONDS = 0.02
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The group's progress as it was, at the latest, at this moment (monotonic ns)."""

    at: int
    progress: Mapping[int, PartitionProgress]
    """Partitions without a committed offset are left out."""
    raw: Mapping[int, str]
    """The metadata as it stood there."""


class Load(threading.Thread):
    """Sends a plan's messages at its rate, straight to the broker, and notes where each went."""

    def __init__(self, bootstrap: str, topic: str, plan: Plan) -> None:
        super().__init__(name="load", daemon=True)
        self.sent: dict[Position, tuple[bytes, int]] = {}
        self.failed: list[str] = []
        self._servers = bootstrap
        self._topic = topic
        self._plan = plan

    def run(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self._servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.timeout.ms": 120_000,
                "reconnect.backoff.max.ms": 1000,
                "linger.ms": 5,
                "log_level": 0,
            }
        )
        began = time.monotonic()
        for key, number in messages(self._plan.seed, self._plan.messages, self._plan.keys):
            while (due := began + number / self._plan.rate) > time.monotonic():
                producer.poll(min(_TICK_SECONDS, max(0.0, due - time.monotonic())))
            name = b"%d" % number
            producer.produce(
                self._topic, name, key, headers=[("event-id", name)], on_delivery=self._delivered
            )
        producer.flush(120)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.sent[message.partition(), message.offset()] = message.key(), int(message.value())


class Watch(threading.Thread):
    """Asks for the group's progress ten times a second, as any lag tool could. `samples` grows while it runs."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        super().__init__(name="watch", daemon=True)
        self.samples: list[Sample] = []
        self._asked = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        # What a transaction has not yet committed is not there; to wait for its end would keep the eye closed.
        settings = KafkaSettings(bootstrap, (("isolation.level", "read_uncommitted"), ("log_level", "0")))
        self._consumer = settings.consumer(group)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.look()
        self._consumer.close()

    def look(self) -> None:
        """One sample, unless the broker does not answer."""
        try:
            found = self._consumer.committed(self._asked, timeout=2.0)
        except KafkaException:
            return
        if any(at.error is not None for at in found):
            return
        self.samples.append(
            Sample(
                at=time.monotonic_ns(),
                progress={
                    at.partition: progress_of(at.offset, at.metadata) for at in found if at.offset >= 0
                },
                raw={at.partition: at.metadata or "" for at in found if at.offset >= 0},
            )
        )

    def position(self) -> dict[int, int]:
        """The committed offsets, as they were seen last."""
        last = self.samples[-1:]
        return {
            partition: progress.watermark
            for sample in last
            for partition, progress in sample.progress.items()
        }

    def close(self) -> None:
        self._over.set()
        self.join(10)


class Ground(threading.Thread):
    """Sleeps and writes to the disk as the broker does, five times a second, and logs whatever took a second longer.

    For the story of a bad run: a broker whose disk or machine hangs answers no request. It excuses nothing.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        super().__init__(name="ground", daemon=True)
        self._file = folder / "disk"
        self._tell = tell
        self._over = threading.Event()

    def run(self) -> None:
        asleep = time.monotonic()
        while not self._over.wait(_SAMPLE_SECONDS * 2):
            began = time.monotonic()
            if began - asleep > 1 + _SAMPLE_SECONDS * 2:
                self._tell(f"the machine stood still for {began - asleep:.1f} s")
            with self._file.open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            asleep = time.monotonic()
            if asleep - began > 1:
                self._tell(f"the disk stood still for {asleep - began:.1f} s")

    def close(self) -> None:
        self._over.set()
        self.join(60)


def progress_of(offset: int, metadata: str | None) -> PartitionProgress:
    """What a committed offset and its metadata say; of metadata that cannot be read, the offset alone."""
    return decode(offset, (metadata or "").split(" ")[0]).progress
