"""Lag: a group's committed offsets compared with the ends of its source partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.kafka.cluster import Cluster
from keylane.offsets.shard import WHOLE

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLag:
    """Sums over all partitions. ``committed`` counts from the beginning of the log, so that differences are valid."""

    committed: int
    end: int
    hidden: int = 0
    """Offsets behind the end: of transactions that are open, which the app does not see yet."""

    @property
    def lag(self) -> int:
        """The number of messages that are not done."""
        return self.end - self.committed


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLag:
    """One partition as the broker reports it."""

    begin: int
    end: int
    committed: int | None
    """None if the group has no committed offset there."""
    hidden: int = 0
    """Offsets behind the end: of transactions that are open, which the group does not see yet."""
    text: str | None = None
    """What the app wrote beside its committed offset: :mod:`keylane.offsets.metadata`."""

    @property
    def at(self) -> int:
        """The group's next offset: the beginning of the log if its offset is missing or no longer in the log."""
        return self.begin if self.committed is None else max(self.begin, self.committed)

    @property
    def lag(self) -> int:
        """The number of offsets that are not done; never below 0, even if the topic was created again."""
        return max(0, self.end - self.at)


class LagMeter:
    """Reads a group's lag repeatedly, with one client. Raises BrokerError if the broker does not answer.

    ``committed``: the group reads committed messages only, so a partition ends at its first open transaction.
    ``shard``: the partitions that count.
    """

    def __init__(
        self, settings: KafkaSettings, group: str, topic: str, *, committed: bool, shard: Shard = WHOLE
    ) -> None:
        self._shard = shard
        self._cluster = Cluster(settings)
        self._committed = committed
        self._group = group
        self._topic = topic

    def read(self) -> GroupLag:
        """The current lag. A partition without a committed offset counts from its beginning."""
        found = self.partitions().values()
        return GroupLag(
            committed=sum(one.at for one in found),
            end=sum(one.at + one.lag for one in found),
            hidden=sum(one.hidden for one in found),
        )

    def members(self) -> int | None:
        """The number of consumers in the group; None if unknown."""
        return self._cluster.members(self._group)

    def partitions(self) -> dict[int, PartitionLag]:
        """The current lag by partition."""
        partitions = self._shard.of(range(self._cluster.partitions(self._topic)))
        begins = self._cluster.ends(self._topic, partitions, earliest=True)
        source = self._cluster.identity(self._topic).source
        committed = self._cluster.progress(self._group, source, partitions)
        # Read the ends last: a commit newer than the end would give a negative lag.
        ends = self._cluster.ends(self._topic, partitions, committed=self._committed)
        written = self._cluster.ends(self._topic, partitions) if self._committed else ends
        return {
            p: PartitionLag(
                begin=begins[p],
                end=ends[p],
                committed=committed[p].offset if p in committed else None,
                hidden=max(0, written[p] - ends[p]),
                text=committed[p].text if p in committed else None,
            )
            for p in partitions
        }
