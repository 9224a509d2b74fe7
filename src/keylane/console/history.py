"""History of an app's figures, from its telemetry: short spans in fine steps, long spans in coarse ones."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keylane.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.telemetry.snapshot import Snapshot

SPANS = {"5m": (300, 2), "15m": (900, 5), "1h": (3600, 20), "6h": (21_600, 120), "24h": (86_400, 300)}
"""By name: seconds that are kept, and seconds per step."""
RECENT_SECONDS = 12.0
"""Latencies and rates of the overview are those of this time."""
_TASK_EPOCHS_MAX = 4096
_MARKS_MAX = 400


@dataclass(slots=True)
class Step:
    """What happened in one step of time."""

    came: int = 0
    done: int = 0
    retries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    latency: Counter[int] = field(default_factory=Counter)
    """Messages by bucket of :data:`keylane.histogram.BOUNDS`."""
    lag: dict[int, int] = field(default_factory=dict)
    """By partition: the last one seen."""
    stopped: int = 0
    """Blocked and parked lanes, the most seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment to be marked on charts."""

    at: float
    kind: str
    """``epoch``, ``restart`` or ``takeover``."""
    what: str


class AppHistory:
    """One app's history. One thread writes it; readers copy what they need under the caller's lock."""

    def __init__(self, since: float) -> None:
        self.marks: deque[Mark] = deque(maxlen=_MARKS_MAX)
        self._since = since
        self._steps: dict[str, OrderedDict[int, Step]] = {name: OrderedDict() for name in SPANS}
        self._lives: OrderedDict[str, Snapshot] = OrderedDict()
        self._ends: dict[int, int] = {}
        self._run = ""
        self._epoch = -1
        self._owners: dict[int, str] = {}

    def take(self, snapshots: Iterable[Snapshot]) -> None:
        """Add what is new in these records."""
        for snapshot in sorted(snapshots, key=lambda one: one.at):
            before = self._lives.get(snapshot.life)
            if before is not None and before.at >= snapshot.at:
                continue
            self._lives[snapshot.life] = snapshot
            self._lives.move_to_end(snapshot.life)
            self._mark(snapshot)
            self._count(snapshot, before)
        while len(self._lives) > _TASK_EPOCHS_MAX:
            self._lives.popitem(last=False)

    def recent(self, now: float) -> Step:
        """The sum of the last :data:`RECENT_SECONDS`."""
        total = Step()
        for at, step in self._steps["5m"].items():
            if at > now - RECENT_SECONDS:
                total.came += step.came
                total.done += step.done
                total.retries += step.retries
                total.outcomes += step.outcomes
                total.latency += step.latency
        return total

    def series(self, span: str, now: float) -> dict[str, Any]:
        """The history of a span as columns; a step without a record has None where a figure would be made up."""
        seconds, width = SPANS[span]
        last = int(now // width) * width
        times = list(range(last - seconds + width, last + width, width))
        found = [self._steps[span].get(at) for at in times]
        buckets = sorted({bucket for step in found if step is not None for bucket in step.latency})
        partitions = sorted({p for step in found if step is not None for p in step.lag})
        outcomes = sorted({name for step in found if step is not None for name in step.outcomes})
        return {
            "span": span,
            "width": width,
            "times": times,
            "in": [None if s is None else s.came / width for s in found],
            "out": [None if s is None else s.done / width for s in found],
            "retries": [None if s is None else s.retries / width for s in found],
            "outcomes": {name: [0 if s is None else s.outcomes[name] for s in found] for name in outcomes},
            "lag": {str(p): [None if s is None else s.lag.get(p) for s in found] for p in partitions},
            "latency": {
                "buckets": buckets,
                "counts": [[0 if s is None else s.latency[b] for s in found] for b in buckets],
                "p50": [quantile(s, 0.5) for s in found],
                "p99": [quantile(s, 0.99) for s in found],
            },
            "marks": [
                {"at": mark.at, "kind": mark.kind, "what": mark.what}
                for mark in self.marks
                if mark.at >= times[0]
            ],
        }

    def _count(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        came = 0
        for partition, figures in snapshot.partitions.items():
            known = self._ends.get(partition, figures.end)
            came += max(0, figures.end - known)
            self._ends[partition] = max(known, figures.end)
        if before is None and snapshot.began < self._since:
            return  # it had counted for a while when this history began
        done = snapshot.done - (before.done if before else 0)
        retries = snapshot.retries - (before.retries if before else 0)
        outcomes = Counter({outcome.value: number for outcome, number in snapshot.outcomes.items() if number})
        if before is not None:
            outcomes.subtract({outcome.value: number for outcome, number in before.outcomes.items()})
        latency = snapshot.latency.minus(before.latency) if before else snapshot.latency
        counts = {bucket: number for bucket, number in enumerate(latency.counts) if number > 0}
        lag = {partition: figures.lag for partition, figures in snapshot.partitions.items()}
        stopped = snapshot.lanes.blocked + snapshot.lanes.parked
        for name, (seconds, width) in SPANS.items():
            steps = self._steps[name]
            at = int(snapshot.at // width) * width
            step = steps.get(at)
            if step is None:
                step = steps[at] = Step()
                while len(steps) > seconds // width + 1:
                    steps.popitem(last=False)
            step.came += came
            step.done += max(0, done)
            step.retries += max(0, retries)
            step.outcomes.update({key: number for key, number in outcomes.items() if number > 0})
            step.latency.update(counts)
            step.lag.update(lag)
            step.stopped = max(step.stopped, stopped)

    def _mark(self, snapshot: Snapshot) -> None:
        if snapshot.run != self._run:
            if self._run:
                self.marks.append(Mark(at=snapshot.began, kind="restart", what=f"run {snapshot.run} started"))
            self._run, self._epoch, self._owners = snapshot.run, snapshot.epoch, {}
        elif snapshot.epoch > self._epoch:
            self._epoch = snapshot.epoch
            self.marks.append(Mark(at=snapshot.began, kind="epoch", what=f"epoch {snapshot.epoch} started"))
        owner = self._owners.get(snapshot.task)
        if owner is not None and owner != snapshot.owner and snapshot.epoch >= self._epoch:
            what = f"task {snapshot.task} is now run by {snapshot.owner}"
            self.marks.append(Mark(at=snapshot.at, kind="takeover", what=what))
        self._owners[snapshot.task] = snapshot.owner


def quantile(step: Step | None, share: float) -> float | None:
    """The latency below which this share of a step's messages is; None without messages."""
    if step is None or not step.latency:
        return None
    made = Histogram()
    for bucket, number in step.latency.items():
        made.counts[bucket] = number
    return made.quantile(share)
