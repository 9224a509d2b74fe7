"""The plan of one task: what it reads in one epoch, and until when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.offsets.shard import WHOLE, Shard
from keylane.offsets.slots import ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.identity import AppIdentity
    from keylane.offsets.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What one task does in one epoch. The planner makes it and Spark takes it to the task."""

    run: str
    epoch: int
    task: int
    settings: KafkaSettings
    identity: AppIdentity
    """The source and the dead-letter topic, as they were when the epoch was planned."""
    starts: Mapping[int, int]
    """The task's partitions, and the offset where each begins if the group has no progress for it."""
    cuts: Mapping[int, Slots] = field(default_factory=dict)
    """The task's slots of partitions that several tasks share."""
    until: Mapping[int, int] | None
    """The offset where each partition ends, for a run over a backlog; None to read until the epoch is over."""
    seconds: float
    planned: float = 0.0
    """Unix time of the plan. All tasks of an epoch end together, also those that Spark starts later."""
    sink_limit: int
    """The first sink's ``max.message.bytes``."""
    sink_stamps: bool = False
    """Whether the first sink gives records a timestamp of its own."""
    outcomes: str = "all"
    partitions: int
    """How many partitions of the source the app reads in this epoch."""
    former: tuple[int, ...] = ()
    """Earlier partition counts of the source."""
    replan: int = 0
    """The number of the last replan command that the plan takes into account."""
    since: Mapping[int, int] = field(default_factory=dict)
    """Where the state topic says that the app belongs to this run, for each of the task's partitions."""
    shard: Shard = WHOLE
    """The share of the partitions that the run processes."""
    keep_alive: float = 0.0
    """Seconds that the lanes keep running without a Spark task; 0: they are drained at the end of the epoch."""
    spark_task: int = 0
    """The number of the Spark task; ``task`` is that of the part of the plan, which another task may take."""

    def continues(self, other: TaskPlan) -> bool:
        """Whether the lanes of the other plan can keep running under this one, where they are in both."""
        return bool(self.keep_alive) and self._lanes() == other._lanes()

    def _lanes(self) -> tuple[object, ...]:
        return (
            *(self.run, self.settings, self.identity, self.until, self.keep_alive),
            *(self.sink_limit, self.sink_stamps, self.outcomes),
        )

    def has_parts_of(self, other: TaskPlan) -> bool:
        """Whether it reads the same ranges of a source with the same partitions."""
        return (self.slots, self.partitions, self.former) == (other.slots, other.partitions, other.former)

    @property
    def share(self) -> float:
        """The part of the app's rates that this task has: its part of all slots. Those of all tasks add up to 1.

        A slot has one owner at any time, so the rates of owners that come and go never add up to more.
        """
        return self.share_of(self.slots.values())

    def share_of(self, slots: Iterable[Slots]) -> float:
        """The same for these slots, one entry for each partition."""
        return sum(map(len, slots)) / (len(ALL) * self.partitions)

    @property
    def slots(self) -> dict[int, Slots]:
        """The task's slots of each partition."""
        return {p: self.cuts.get(p, ALL) for p in self.starts}
