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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLag:
    """One partition as the broker has it."""

    begin: int
    end: int
    committed: int | None
    """None when the group has no progress there."""

    @property
    def at(self) -> int:
        """Where the group goes on: at the beginning of the log when its offset is missing, or no longer there."""
        return self.begin if self.committed is None else max(self.begin, self.committed)

    @property
    def lag(self) -> int:
        """Offsets that are not done; never below 0, should the log have been made anew."""
        return max(0, self.end - self.at)


class LagMeter:
    """Asks again and again with one client. Raises KafkaError when there is no answer."""

    def __init__(self, settings: KafkaSettings, group: str, topic: str) -> None:
        self._cluster = Cluster(settings)
        self._group = group
        self._topic = topic

    def read(self) -> Lag:
        """The lag now. A partition without progress counts from its beginning."""
        found = self.partitions().values()
        return Lag(committed=sum(one.at for one in found), end=sum(one.end for one in found))

    def partitions(self) -> dict[int, PartitionLag]:
        """The same, by partition."""
        partitions = range(self._cluster.partitions(self._topic))
        begins = self._cluster.ends(self._topic, partitions, earliest=True)
        committed = self._cluster.committed(self._group, self._topic, partitions)
        # The end comes last: a commit that is newer than it would make a lag below 0.
        ends = self._cluster.ends(self._topic, partitions)
        return {
            p: PartitionLag(begin=begins[p], end=ends[p], committed=committed.get(p, (None, None))[0])
            for p in partitions
        }
