"""A state topic in memory, behind the real :class:`State` and :class:`Operator`: for tests that need no broker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError

from keylane.kafka.cluster import Cluster
from keylane.kafka.rejection import NO_RULES
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.offsets.offset_runs import OffsetRuns
from keylane.policies.failure_info import FailedAttempt, FailureInfo
from keylane.state.answers import CommandAnswer, RedriveCounts
from keylane.state.commands import COMMAND, Command, audit_name, decode_command
from keylane.state.labels import Labels
from keylane.state.topic import PLAN, REDRIVEN

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

AT = 1_700_000_000.0
PLANNED = {"run": "r", "epoch": 1, "at": AT, "tasks": [["0"]], "source": "chat.in"}
OWNER = "host:17/0"


def identity(source: str = "chat.in", dlq: str = "chat.dlq", topic_id: str = "id-1") -> AppIdentity:
    """Of topics in a cluster that does not exist."""
    return AppIdentity(
        source=TopicIdentity(cluster="c1", topic=source, id=topic_id if source else ""),
        dlq=TopicIdentity(cluster="c1", topic=dlq, id=topic_id),
    )


LABELS = Labels(identity())


@dataclass(frozen=True, slots=True)
class _Record:
    at: int
    place: int
    name: bytes
    content: bytes | None
    failure_state: Any = None
    labels: Any = None

    def topic(self) -> str:
        return "chat.state"

    def headers(self) -> Any:
        return self.labels

    def key(self) -> bytes:
        return self.name

    def value(self) -> bytes | None:
        return self.content

    def partition(self) -> int:
        return self.at

    def offset(self) -> int:
        return self.place

    def error(self) -> Any:
        return self.failure_state


class _Consumer:
    def __init__(self, log: StateLog) -> None:
        self._log = log
        self._next = 0
        self._ended = False
        self._rest: list[_Record] = []

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        assert topic == "chat.state"
        return SimpleNamespace(topics={})

    def assign(self, partitions: list[Any]) -> None:
        assert {p.topic for p in partitions} == {"chat.state"}
        assert [p.partition for p in partitions] in ([0], list(range(self._log.partitions)))
        self._next, self._ended, self._rest = 0, False, []

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

    def produce(
        self, topic: str, value: bytes, name: bytes, *, partition: int, headers: Any, on_delivery: Any
    ) -> None:
        assert topic == "chat.state"
        if len(self._waiting) >= self._log.room:
            raise BufferError
        self._waiting.append((partition, name, value, headers, on_delivery))

    def poll(self, timeout: float) -> None:
        if timeout:
            self.flush(timeout)

    def flush(self, _timeout: float) -> int:
        for partition, name, value, headers, report in self._waiting:
            report(self._log.refuses, None)
            if self._log.refuses is None:
                self._log.put(partition, name, value, headers)
        self._waiting.clear()
        return 0


class StateLog:
    """The records of ``chat.state``. ``app`` is called with every written command, like a running app."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partitions: int = 3) -> None:
        self.partitions = partitions
        self.records: list[_Record] = []
        self.given: list[Command] = []
        self.polls = 0
        self.closed = 0
        self.room = 1_000_000
        self.refuses: object = None
        self.app: Callable[[Command], None] | None = None
        self.topics = {"chat.state": partitions, "chat.dlq": partitions}
        monkeypatch.setattr(KafkaSettings, "admin", lambda _settings: None)
        monkeypatch.setattr(KafkaSettings, "consumer", lambda _settings, _group, **_more: _Consumer(self))
        monkeypatch.setattr(KafkaSettings, "producer", lambda _settings, **_more: _Producer(self))
        monkeypatch.setattr(Cluster, "topics", lambda _cluster: self.topics)
        monkeypatch.setattr(Cluster, "identity", lambda _cluster, *topics: identity(*topics))
        monkeypatch.setattr(Cluster, "rules", lambda _cluster, topics: dict.fromkeys(topics, NO_RULES))
        monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")

        self.put(0, PLAN, json.dumps(PLANNED).encode())

    def put(self, partition: int, name: bytes, value: bytes | None, labels: Any = None) -> None:
        labels = LABELS.of(name) if labels is None else labels
        self.records.append(_Record(partition, len(self.records), name, value, labels=labels))
        if value is not None and name.startswith(COMMAND):
            order = decode_command(name, partition, value)
            self.given.append(order)
            if self.app is not None:
                self.app(order)

    def stop(self, record: LaneRecord) -> None:
        self.put(record.partition, record.name, record.encode())

    def redriven(self, partition: int, *offsets: int) -> None:
        self.put(partition, REDRIVEN, OffsetRuns(offsets).encode())

    def answer(
        self,
        order: Command,
        result: str | RedriveCounts = "done",
        *,
        ok: bool = True,
        after: float = 0.3,
    ) -> None:
        """As the task does it: write the answer, then delete the command."""
        why, counts = (result, None) if isinstance(result, str) else ("", result)
        said = CommandAnswer(ok=ok, why=why, counts=counts, owner=OWNER, at=order.at + after)
        self.put(order.partition, audit_name(order.id, done=True), said.encode())
        self.put(order.partition, order.name, None)


def stopped(key: bytes | None = b"k1", stop: LaneStatus = LaneStatus.BLOCKED, **more: Any) -> LaneRecord:
    """A lane that has stopped."""
    given: dict[str, Any] = {"partition": 1, "offset": 100, "since": AT, "why": ""}
    letter = FailureInfo(
        stage="answer",
        error="builtins.TimeoutError",
        message="no answer after 31 ms",
        traceback="Traceback (most recent call last):\n  File …\nTimeoutError: no answer",
        attempts=2,
        failed_at=AT,
        failures=tuple(
            FailedAttempt(stage="answer", attempt=n, at=AT - 2 + n, error="TimeoutError: no answer")
            for n in (1, 2)
        ),
    )
    return LaneRecord(stop=stop, key=key, letter=letter, **{**given, **more})
