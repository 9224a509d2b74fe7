"""Telemetry added up: over the tasks of an app, and over the epochs that follow each other."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from keylane.core.telemetry import COUNTERS, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.core.telemetry import Snapshot

_LIVES = 1024
"""Tasks' epochs that are remembered: a record of one that was forgotten would count twice."""
QUIET = 10.0
"""Seconds without a record, or five intervals if that is longer, after which a task does not run any more."""


class Totals:
    """Counts from ``since`` (unix time) on. One thread uses it."""

    def __init__(self, since: float) -> None:
        self.counters = dict.fromkeys(("ok", *COUNTERS), 0)
        self.latency = Histogram()
        self.processing = Histogram()
        self.last_at = 0.0
        """When the latest record was written; 0 when there is none."""
        self._since = since
        self._lives: OrderedDict[str, Snapshot] = OrderedDict()

    def take(self, snapshots: Iterable[Snapshot]) -> None:
        """Count what is new in these. A task that began earlier counts from its first record here."""
        for snapshot in snapshots:
            before = self._lives.get(snapshot.life)
            if before is not None and before.at > snapshot.at:
                continue  # an old one, sent once more
            self._lives[snapshot.life] = snapshot
            self._lives.move_to_end(snapshot.life)
            self.last_at = max(self.last_at, snapshot.at)
            if before is None and snapshot.began < self._since:
                continue
            for name in self.counters:
                self.counters[name] += getattr(snapshot, name) - (getattr(before, name) if before else 0)
            empty = Histogram()
            self.latency = self.latency.plus(snapshot.latency.minus(before.latency if before else empty))
            self.processing = self.processing.plus(
                snapshot.processing.minus(before.processing if before else empty)
            )
        while len(self._lives) > _LIVES:
            self._lives.popitem(last=False)

    def running(self, now: float) -> list[Snapshot]:
        """The latest of every task that runs now, by its number."""
        found = [
            one
            for one in self._lives.values()
            if not one.final and now - one.at < max(QUIET, 5 * one.interval)
        ]
        if not found:
            return []
        # A task that was killed has left a record that is not its last: only the newest run counts, and its epoch.
        run = max(found, key=lambda one: one.began).run
        latest: dict[int, Snapshot] = {}
        for one in sorted(found, key=lambda one: (one.epoch, one.at)):
            if one.run == run:
                latest[one.task] = one
        return [latest[task] for task in sorted(latest)]

    @property
    def latest(self) -> Snapshot | None:
        """The last word of any task."""
        return max(self._lives.values(), key=lambda one: one.at, default=None)

    def of_epoch(self, epoch: int) -> list[Snapshot]:
        """What every task of an epoch said last; of every run that had one of this number."""
        return [one for one in self._lives.values() if one.epoch == epoch]
