"""Aggregated telemetry: totals over the tasks of an app and over successive epochs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from keylane.histogram import Histogram
from keylane.offsets.shard import Shard
from keylane.telemetry.snapshot import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.outcome import Outcome
    from keylane.telemetry.snapshot import Snapshot

_TASK_EPOCHS_REMEMBERED = 1024
"""Task epochs that are remembered, besides those that may still run; a record of a forgotten one would count twice."""
_TASK_EPOCHS_REMEMBERED_MAX = 100_000
"""Task epochs that are remembered at most."""
QUIET_AFTER_SECONDS = 10.0
"""Seconds without a record, or five intervals if that is longer, after which a task does not run any more."""


class Totals:
    """Counts from ``since`` (unix time) on. One thread uses it."""

    def __init__(self, since: float) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.outcomes: Counter[Outcome] = Counter()
        self.latency = Histogram()
        self.processing = Histogram()
        self.last_at = 0.0
        """The time of the latest record; 0 if there is none."""
        self._since = since
        self._lives: OrderedDict[str, Snapshot] = OrderedDict()

    def take(self, snapshots: Iterable[Snapshot]) -> None:
        """Add what is new in these. A task that started earlier counts from its first record here."""
        for snapshot in snapshots:
            before = self._lives.get(snapshot.life)
            if before is not None and before.at > snapshot.at:
                continue  # an older record, received again
            self._lives[snapshot.life] = snapshot
            self._lives.move_to_end(snapshot.life)
            self.last_at = max(self.last_at, snapshot.at)
            if before is None and snapshot.began < self._since:
                continue
            for name in self.counters:
                self.counters[name] += getattr(snapshot, name) - (getattr(before, name) if before else 0)
            self.outcomes.update(snapshot.outcomes)
            if before:
                self.outcomes.subtract(before.outcomes)
            empty = Histogram()
            self.latency = self.latency.plus(snapshot.latency.minus(before.latency if before else empty))
            self.processing = self.processing.plus(
                snapshot.processing.minus(before.processing if before else empty)
            )
        while len(self._lives) > _TASK_EPOCHS_REMEMBERED:
            oldest = next(iter(self._lives.values()))
            if len(self._lives) <= _TASK_EPOCHS_REMEMBERED_MAX and self.last_at - oldest.at < _quiet_seconds(
                oldest
            ):
                break
            self._lives.popitem(last=False)

    def running(self, now: float) -> list[Snapshot]:
        """The latest snapshot of every running task, by shard and task number."""
        found = [one for one in self._lives.values() if not one.final and now - one.at < _quiet_seconds(one)]
        if not found:
            return []
        # A killed task has left no final record, so only the newest run of each shard and its epoch count.
        runs = newest_runs(found)
        latest: dict[tuple[Shard, int], Snapshot] = {}
        for one in sorted(found, key=lambda one: (one.epoch, one.at)):
            if one.run in runs:
                latest[runs[one.run], one.task] = one
        return [latest[key] for key in sorted(latest, key=lambda key: (key[0].number, key[1]))]

    def heard(self) -> dict[int, Snapshot]:
        """The latest snapshot of any task that had a partition, by partition."""
        found: dict[int, Snapshot] = {}
        for one in sorted(self._lives.values(), key=lambda one: one.at):
            found |= dict.fromkeys(one.partitions, one)
        return found

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot of any task."""
        return max(self._lives.values(), key=lambda one: one.at, default=None)

    def of_epoch(self, epoch: int) -> list[Snapshot]:
        """The last snapshot of every task of an epoch, of every run with an epoch of this number."""
        return [one for one in self._lives.values() if one.epoch == epoch]


def newest_runs(snapshots: Iterable[Snapshot]) -> dict[str, Shard]:
    """The newest run of each shard; with the number of shards that the newest of all has."""
    newest: dict[Shard, Snapshot] = {}
    for one in sorted(snapshots, key=lambda one: one.began):
        newest[Shard.parse(one.shard)] = one
    count = max(newest.items(), key=lambda item: item[1].began)[0].count if newest else 1
    return {one.run: shard for shard, one in newest.items() if shard.count == count}


def _quiet_seconds(snapshot: Snapshot) -> float:
    """Seconds without a record after which the task does not run any more."""
    return max(QUIET_AFTER_SECONDS, 5 * snapshot.interval)
