"""Reads an app's telemetry: what its tasks have lately told, and what they tell from now on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # re-exported there without saying so

from keylane.core.telemetry import Snapshot, decode, topic_of
from keylane.kafka.cluster import Cluster, introduce

if TYPE_CHECKING:
    from types import TracebackType

    from keylane.kafka.settings import KafkaSettings

_LAST_WORDS = 50
"""Records that are read when none came lately."""


class TelemetryLog:
    """Reads an app's telemetry from ``seconds`` ago on, and follows it; of an app that has ended, its last words.

    One thread uses it; close it at the end.
    Raises :class:`KafkaError` when the cluster does not answer; an app without the topic has no telemetry so far.
    """

    def __init__(self, settings: KafkaSettings, app: str, *, seconds: float = 15.0) -> None:
        self.unreadable = 0
        self._settings = settings
        self._topic = topic_of(app)
        self._cluster = Cluster(settings)
        self._since = time.time() - seconds
        self._consumer: Any = None
        self._next: dict[int, int] = {}
        self._looked = -1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, wait: float = 0.0) -> list[Snapshot]:
        """What has come since the last call; for the first of it is waited so long. In the order of the topic."""
        if not self._find():
            time.sleep(wait)
            return []
        return self._decoded(wait)

    def catch_up(self, wait: float = 5.0) -> list[Snapshot]:
        """All that there is now, waited for at most so long."""
        if not self._find():
            return []
        found: list[Snapshot] = []
        ends = self._cluster.ends(self._topic, self._next)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and any(self._next[p] < end for p, end in ends.items()):
            found += self._decoded(0.1)
        return found

    def close(self) -> None:
        """Let go of the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _find(self) -> bool:
        """Whether there is a topic to be read."""
        if self._consumer is not None:
            return True
        if time.monotonic() < self._looked:
            return False
        count = self._cluster.topics().get(self._topic)
        if not count:
            self._looked = time.monotonic() + 1.0
            return False
        spec = OffsetSpec.for_timestamp(int(self._since * 1000))
        starts = self._cluster.offsets({(self._topic, p): spec for p in range(count)})
        ends = self._cluster.ends(self._topic, range(count))
        begins = self._cluster.ends(self._topic, range(count), earliest=True)
        self._next = {
            p: at if at >= 0 else max(begins[p], ends[p] - _LAST_WORDS) for (_, p), at in starts.items()
        }
        consumer = self._settings.consumer("keylane-telemetry", **{"queued.min.messages": 1000})
        introduce(consumer, self._topic)
        consumer.assign([TopicPartition(self._topic, p, at) for p, at in self._next.items()])
        self._consumer = consumer
        return True

    def _decoded(self, wait: float) -> list[Snapshot]:
        first = self._consumer.poll(wait)
        if first is None:
            return []
        found = []
        for message in [first, *self._consumer.consume(1000, 0)]:
            if message.error() is not None:
                continue  # the end of the partition; a broker that is away is found out by the next question to it
            self._next[message.partition()] = message.offset() + 1
            try:
                found.append(decode(message.value()))
            except ValueError:  # anybody may have written into the topic
                self.unreadable += 1
        return found
