"""Telemetry reader: an app's recent telemetry records, and new ones as they arrive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from keylane.kafka.client import OffsetSpec
from keylane.kafka.cluster import Cluster, load_metadata
from keylane.kafka.partition_reader import PartitionReader
from keylane.strict_json import MalformedRecordError
from keylane.telemetry.snapshot import Snapshot, decode
from keylane.topic_names import telemetry_topic

if TYPE_CHECKING:
    from types import TracebackType

    from keylane.kafka.client import Consumer
    from keylane.kafka.settings import KafkaSettings

_CLOCKS_APART_SECONDS = 3600.0
"""Seconds by which clocks may differ. A record from further in the future is ignored, or it would stay the newest."""
_LAST_RECORDS = 50
"""Records that are read if there is no recent one."""


class TelemetryLog:
    """Reads an app's telemetry from ``seconds`` ago on, and follows it; for an app that has ended, its last records.

    One thread uses it; close it at the end.
    Raises :class:`BrokerError` when the cluster does not answer; an app without the topic has no telemetry so far.
    """

    def __init__(self, settings: KafkaSettings, app: str, *, seconds: float = 15.0) -> None:
        self.unreadable = 0
        self._settings = settings
        self._app = app
        self._topic = telemetry_topic(app)
        self._cluster = Cluster(settings)
        self._since = time.time() - seconds
        self._consumer: Consumer | None = None
        self._reader: PartitionReader
        self._next: dict[int, int] = {}
        self._looked = -1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, wait: float = 0.0) -> list[Snapshot]:
        """Records since the last call, in topic order; waits up to ``wait`` seconds for the first one."""
        if not self._find():
            time.sleep(wait)
            return []
        return self._decoded(wait)

    def catch_up(self, wait: float = 5.0) -> list[Snapshot]:
        """All records up to now; waits at most ``wait`` seconds."""
        if not self._find():
            return []
        found: list[Snapshot] = []
        ends = self._cluster.ends(self._topic, self._next)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and any(self._next[p] < end for p, end in ends.items()):
            found += self._decoded(0.1)
        return found

    def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _find(self) -> bool:
        """Whether the topic exists."""
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
            p: at if at >= 0 else max(begins[p], ends[p] - _LAST_RECORDS) for (_, p), at in starts.items()
        }
        consumer = self._settings.consumer("keylane-telemetry", **{"queued.min.messages": 1000})
        load_metadata(consumer, self._topic)
        # Figures are never worth an error: a broker that is away is found out by the next question to it.
        self._reader = PartitionReader(consumer, self._topic, raises=False)
        self._reader.assign(self._next)
        self._consumer = consumer
        return True

    def _decoded(self, wait: float) -> list[Snapshot]:
        found = []
        for message in self._reader.read(wait):
            if message.error() is not None:
                continue  # the end of the partition
            self._next[message.partition()] = message.offset() + 1
            try:
                snapshot = decode(message.value())
            except MalformedRecordError:  # written by another program
                self.unreadable += 1
                continue
            if snapshot.app == self._app and snapshot.at < time.time() + _CLOCKS_APART_SECONDS:
                found.append(snapshot)
            else:
                self.unreadable += 1
        return found
