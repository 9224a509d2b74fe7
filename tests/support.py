"""What integration tests share: topics of the test broker, and Spark's worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.testing import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record as read back from a topic."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int
    offset: int
    timestamp: int

    def header(self, name: str) -> bytes | None:
        return dict(self.headers).get(name)


class Log:
    """Topics of the test broker: made, filled and read back."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.settings = KafkaSettings(bootstrap)
        self.cluster = Cluster(self.settings)
        self._producer: Producer | None = None

    def create(self, *topics: str, partitions: int = 4, **config: str) -> None:
        for topic in topics:
            self.cluster.ensure(topic, partitions, {k.replace("_", "."): v for k, v in config.items()})

    def delete(self, topic: str) -> None:
        """Take a topic away, and wait until it is gone."""
        for future in self.cluster._admin.delete_topics([topic]).values():
            future.result(10)
        wait_until(lambda: topic not in self.cluster.topics(), 10, f"topic {topic} is gone")

    def alter(self, topic: str, **config: str) -> None:
        """Change settings of a topic that exists, and wait until they are in force."""
        changes = {k.replace("_", "."): v for k, v in config.items()}
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in changes.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self.cluster._admin.incremental_alter_configs([resource]).values():
            future.result(10)
        for name, value in changes.items():
            wait_until(lambda n=name, v=value: self.cluster.setting(topic, n) == v, 10, f"{name}={value}")  # type: ignore[misc]

    def send(self, topic: str, messages: Iterable[dict[str, Any]]) -> list[Sent]:
        """Produce in order; returns where each message went, in the order of the messages."""
        if self._producer is None:  # kept: a new idempotent one takes half a second to be ready
            self._producer = Producer(
                {
                    "bootstrap.servers": self.bootstrap,
                    "enable.idempotence": True,
                    "linger.ms": 20,
                    "compression.type": "lz4",
                    "partitioner": "murmur2_random",
                    "queue.buffering.max.messages": 1_000_000,
                    "message.max.bytes": 4_000_000,
                }
            )
        producer = self._producer
        went: list[Sent] = []

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            went.append(Sent(message.key(), message.partition(), message.offset()))

        for number, message in enumerate(messages):
            producer.produce(topic, on_delivery=delivered, **message)
            if number % 1000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0
        return went

    def read(self, topic: str) -> list[Row]:
        """Everything in the topic, partition by partition."""
        partitions = range(self.cluster.partitions(topic))
        ends = self.cluster.ends(topic, partitions)
        consumer: Any = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "fetch.wait.max.ms": 20,  # it asks for more than there is at the end of every partition
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        rows: list[Row] = []
        try:
            for partition in partitions:
                if not ends[partition]:
                    continue
                consumer.assign([TopicPartition(topic, partition, 0)])
                open_ = True
                while open_:
                    # consume(n, timeout) would wait for n messages; the first one is waited for alone.
                    first = consumer.poll(10)
                    assert first is not None, f"{topic}/{partition} gives no answer"
                    for message in [first, *consumer.consume(5000, 0)]:
                        if (error := message.error()) is not None:
                            assert error.name() == "_PARTITION_EOF", error
                            open_ = False
                            continue
                        rows.append(
                            Row(
                                key=message.key(),
                                value=message.value(),
                                headers=list(message.headers() or []),
                                partition=message.partition(),
                                offset=message.offset(),
                                timestamp=message.timestamp()[1],
                            )
                        )
        finally:
            consumer.close()
        return rows

    def count(self, topic: str) -> int:
        """Records ever written to the topic."""
        return sum(self.cluster.ends(topic, range(self.cluster.partitions(topic))).values())

    def lag(self, app: str, topic: str) -> int:
        partitions = range(self.cluster.partitions(topic))
        ends = self.cluster.ends(topic, partitions)
        committed = self.cluster.committed(app, topic, partitions)
        return sum(end - committed.get(p, (0, None))[0] for p, end in ends.items())


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Ask again and again until it is so. Fails after so many seconds, and says what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.05)


def ids(rows: Iterable[Row]) -> list[tuple[bytes | None, bytes | None]]:
    """Keys and event ids, for :func:`keylane.testing.check_results`."""
    return [(row.key, row.header("event-id")) for row in rows]


def python_workers(of: int | None = None) -> list[int]:
    """Processes of Spark's Python workers below this process: those that run tasks, not their daemon or the planner."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for line in listed.splitlines()[1:]:
        pid, ppid, command = line.split(None, 2)
        parents[int(pid)], commands[int(pid)] = int(ppid), command
    daemons = {
        p
        for p, c in commands.items()
        if c.endswith("pyspark.daemon pyspark.worker")
        and "pyspark.daemon" not in commands.get(parents[p], "")
    }

    def below(pid: int) -> bool:
        while pid > 1:
            if pid == (of or os.getpid()):
                return True
            pid = parents.get(pid, 0)
        return False

    return [p for p, parent in parents.items() if parent in daemons and below(p)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
