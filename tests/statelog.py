"""A state topic in memory, behind the real :class:`State` and :class:`Operator`: for tests that need no broker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError

from keylane.core.letter import DeadLetter, Failed
from keylane.core.ranges import Ranges
from keylane.core.record import LaneRecord, Stop
from keylane.kafka.cluster import Cluster
from keylane.kafka.orders import ORDER, Order, audit_name, decode_order
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.state import REDRIVEN

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

AT = 1_700_000_000.0
OWNER = "host:17/0"


@dataclass(frozen=True, slots=True)
class _Record:
    at: int
    place: int
    name: bytes
    content: bytes | None
    trouble: Any = None

    def key(self) -> bytes:
        return self.name

    def value(self) -> bytes | None:
        return self.content

    def partition(self) -> int:
        return self.at

    def offset(self) -> int:
        return self.place

    def error(self) -> Any:
        return self.trouble


class _Consumer:
    def __init__(self, log: StateLog) -> None:
        self._log = log
        self._next = 0
        self._ended = False
        self._rest: list[_Record] = []

    def list_topics(self, topic: str, timeout: float) -> None:
        assert topic == "chat.state"

    def assign(self, partitions: list[Any]) -> None:
        assert [p.topic for p in partitions] == ["chat.state"] * self._log.partitions

    def poll(self, timeout: float) -> _Record | None:
        found = self.consume(1, timeout)
        self._rest = found[1:]
        return found[0] if found else None

    def consume(self, number: int, _timeout: float) -> list[_Record]:
        if self._rest:
            rest, self._rest = self._rest, []
            return rest
        found = self._log.records[self._next : self._next + number]
        self._next += len(found)
        if not found and not self._ended:
            self._ended = True
            eof = ClientError(ClientError._PARTITION_EOF)
            return [_Record(p, self._next, b"", None, eof) for p in range(self._log.partitions)]
        self._log.polls += 1
        return found

    def close(self) -> None:
        self._log.closed += 1


class _Producer:
    def __init__(self, log: StateLog) -> None:
        self._log = log
        self._waiting: list[Any] = []

    def produce(self, topic: str, value: bytes, name: bytes, *, partition: int, on_delivery: Any) -> None:
        assert topic == "chat.state"
        if len(self._waiting) >= self._log.room:
            raise BufferError
        self._waiting.append((partition, name, value, on_delivery))

    def poll(self, timeout: float) -> None:
        if timeout:
            self.flush(timeout)

    def flush(self, _timeout: float) -> int:
        for partition, name, value, report in self._waiting:
            report(self._log.refuses, None)
            if self._log.refuses is None:
                self._log.put(partition, name, value)
        self._waiting.clear()
        return 0


class StateLog:
    """The records of ``chat.state``. ``app`` is called with every order that is written, as a running app would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partitions: int = 3) -> None:
        self.partitions = partitions
        self.records: list[_Record] = []
        self.given: list[Order] = []
        self.polls = 0
        self.closed = 0
        self.room = 1_000_000
        self.refuses: str | None = None
        self.app: Callable[[Order], None] | None = None
        self.topics = {"chat.state": partitions, "chat.dlq": partitions}
        monkeypatch.setattr(KafkaSettings, "admin", lambda _settings: None)
        monkeypatch.setattr(KafkaSettings, "consumer", lambda _settings, _group, **_more: _Consumer(self))
        monkeypatch.setattr(KafkaSettings, "producer", lambda _settings, **_more: _Producer(self))
        monkeypatch.setattr(Cluster, "topics", lambda _cluster: self.topics)
        monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")

    def put(self, partition: int, name: bytes, value: bytes | None) -> None:
        self.records.append(_Record(partition, len(self.records), name, value))
        if value is not None and name.startswith(ORDER):
            order = decode_order(name, partition, value)
            self.given.append(order)
            if self.app is not None:
                self.app(order)

    def stop(self, record: LaneRecord) -> None:
        self.put(record.partition, record.name, record.encode())

    def redriven(self, partition: int, *offsets: int) -> None:
        self.put(partition, REDRIVEN, Ranges(offsets).encode())

    def answer(self, order: Order, result: str = "done", *, ok: bool = True, after: float = 0.3) -> None:
        """As the task does it: the answer, then the order is taken back."""
        said = {"result": result, "ok": ok, "owner": OWNER, "at": order.at + after}
        self.put(order.partition, audit_name(order.id, done=True), json.dumps(said).encode())
        self.put(order.partition, order.name, None)


def stopped(key: bytes | None = b"k1", stop: Stop = Stop.BLOCKED, **more: Any) -> LaneRecord:
    """A lane that has stopped."""
    given: dict[str, Any] = {"partition": 1, "offset": 100, "since": AT, "why": ""}
    letter = DeadLetter(
        stage="answer",
        error="builtins.TimeoutError",
        message="no answer after 31 ms",
        traceback="Traceback (most recent call last):\n  File …\nTimeoutError: no answer",
        attempts=2,
        failed_at=AT,
        failures=tuple(
            Failed(stage="answer", attempt=n, at=AT - 2 + n, error="TimeoutError: no answer") for n in (1, 2)
        ),
    )
    return LaneRecord(stop=stop, key=key, letter=letter, **{**given, **more})
