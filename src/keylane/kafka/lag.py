"""How far an app is: what its group has committed against the ends of its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.kafka.cluster import Cluster

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
    """Asks again and again with one client. Raises KafkaError when there is no answer."""

    def __init__(self, settings: KafkaSettings, group: str, topic: str) -> None:
        self._cluster = Cluster(settings)
        self._group = group
        self._topic = topic

    def read(self) -> Lag:
        """The lag now. A partition without progress counts from its beginning."""
        partitions = range(self._cluster.partitions(self._topic))
        beginnings = self._cluster.ends(self._topic, partitions, earliest=True)
        ends = self._cluster.ends(self._topic, partitions)
        committed = self._cluster.committed(self._group, self._topic, partitions)
        return Lag(
            committed=sum(max(committed.get(p, (0, None))[0], beginnings[p]) for p in partitions),
            end=sum(ends.values()),
        )
