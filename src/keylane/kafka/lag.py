"""How far an app is: what its group has committed against the ends of its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition

from keylane.errors import KafkaError
from keylane.kafka.cluster import TIMEOUT, Cluster, patiently

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The sums over all partitions. ``committed`` counts from the beginning of the log, so both can be subtracted."""

    committed: int
    end: int

    @property
    def lag(self) -> int:
        """Messages that are not done."""
        return self.end - self.committed


class LagMeter:
    """Asks again and again with one client. Not thread-safe. Raises KafkaError when there is no answer."""

    def __init__(self, settings: KafkaSettings, group: str, topic: str) -> None:
        self._cluster = Cluster(settings)
        self._topic = topic
        self._consumer = settings.consumer(group)

    def read(self) -> Lag:
        """The lag now. A partition without progress counts from its beginning."""
        partitions = range(self._cluster.partitions(self._topic))
        beginnings = self._cluster.ends(self._topic, partitions, earliest=True)
        ends = self._cluster.ends(self._topic, partitions)
        asked = [TopicPartition(self._topic, p) for p in partitions]
        try:
            found = patiently(lambda: self._consumer.committed(asked, timeout=TIMEOUT))
        except KafkaException as error:
            raise KafkaError(f"progress could not be read: {error.args[0].str()}") from error
        committed = {at.partition: at.offset for at in found if at.offset >= 0}
        return Lag(
            committed=sum(max(committed.get(p, 0), beginnings[p]) for p in partitions),
            end=sum(ends.values()),
        )

    def close(self) -> None:
        """Let go of the client."""
        self._consumer.close()
