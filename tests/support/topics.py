"""What integration tests share: topics of the test broker, and Spark's worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.testing import Sent, read_history

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


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

    @property
    def came_from(self) -> bytes | None:
        """The event id of the message, if it has no slash; of a result, that of its message."""
        found = self.header("event-id")
        return None if found is None else found.rpartition(b"/")[2]


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

    def close_group_consumers(self) -> None:
        """Close the consumers that read committed offsets; the cluster keeps one for each group."""
        for consumer in self.cluster._group_consumers.values():
            consumer.close()
        self.cluster._group_consumers.clear()

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until it no longer exists."""
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
    """Poll until it is true. Fails after these seconds, and says what was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.05)


def ids(rows: Iterable[Row]) -> list[tuple[bytes | None, bytes | None]]:
    """Keys and event ids of messages or results, for :func:`keylane.testing.check_results`."""
    return [(row.key, row.came_from) for row in rows]


def processes() -> dict[int, tuple[int, str]]:
    """Every process that has not ended: its parent and its command line."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listed.splitlines()[1:]:
        pid, ppid, state, command = line.split(None, 3)
        if not state.startswith("Z"):
            found[int(pid)] = int(ppid), command
    return found


def below(pid: int) -> dict[int, str]:
    """Processes that this one has started, and those that they have started: their command lines."""
    known = processes()

    def is_below(child: int) -> bool:
        while child > 1:
            child = known.get(child, (0, ""))[0]
            if child == pid:
                return True
        return False

    return {child: command for child, (_, command) in known.items() if is_below(child)}


def python_workers(of: int | None = None) -> list[int]:
    """Processes of Spark's Python workers below this process: those that run tasks, not their daemon or the planner."""
    family = below(of or os.getpid())
    known = processes()
    daemons = {
        pid
        for pid, command in family.items()
        if command.endswith("pyspark.daemon pyspark.worker")
        and "pyspark.daemon" not in known.get(known.get(pid, (0, ""))[0], (0, ""))[1]
    }
    return [pid for pid in family if known.get(pid, (0, ""))[0] in daemons]


def at_work(history: Path, number: int = 0) -> int:
    """One of the processes that ran the last messages: others may be idle, and their death hits nothing."""
    pids = sorted({int(event.owner.partition("+")[0]) for event in read_history(history).events[-200:]})
    return pids[number % len(pids)]


class Running:
    """``keylane run`` as a separate process: its output, line by line, and what it leaves behind.

    ``seen`` are the processes below it that were noticed. They have to be gone when it has ended.
    """

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keylane", "run", *arguments, "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self.seen: dict[int, str] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing of it stays."""
        left = below(self.pid)
        self._process.kill()
        self._process.communicate()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())

    def says(self, text: str, times: int = 1, seconds: float = 60) -> None:
        """Wait until it has printed this, this many times."""
        self.until(lambda: sum(text in line for line in self.lines) >= times, seconds, text)

    def has(self, command: str, seconds: float = 60) -> int:
        """Wait until there is a process below it with this in its command line; its pid."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [pid for pid, line in below(self.pid).items() if command in line]
            return bool(found)

        self.until(there, seconds, f"a process {command!r}")
        self.notice()
        return found[0]

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until it is true, while it runs. Fails with its output and the stacks of its threads."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self._process.poll() is not None and not self._reader.is_alive()
            if ended or time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGABRT)  # prints the stacks
                self._reader.join(1)
                said = "\n".join(self.lines)
                raise AssertionError(f"waited up to {seconds:g} s in vain: {what}; it said:\n{said}")
            time.sleep(0.05)

    def notice(self) -> None:
        """Remember what is below it now."""
        self.seen |= below(self.pid)

    def send(self, number: int) -> None:
        """To it alone, as a process manager does."""
        self.notice()
        self._process.send_signal(number)

    def send_all(self, number: int) -> None:
        """To every process in the foreground, as a terminal does."""
        self.notice()
        os.killpg(self.pid, number)

    def ends(self, within: float, leaves: float = 2) -> tuple[int, dict[str, Any]]:
        """Its exit code and its JSON. Fails when it takes longer, or when a process of its own is still there later."""
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within:g} s: {self.lines}") from None

        def gone() -> bool:
            return not self.seen.keys() & processes().keys()

        wait_until(gone, leaves, f"nothing is left behind of {self.seen}")
        self._reader.join(2)
        assert self._process.stdout is not None
        out = self._process.stdout.read()
        return self._process.returncode, json.loads(out) if out else {}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
