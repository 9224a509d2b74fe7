"""Metrics of one app, as a collector of prometheus_client."""

from __future__ import annotations

import threading
import time
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily

from keylane.histogram import BOUNDS
from keylane.outcome import Outcome
from keylane.telemetry.aggregate import Totals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from keylane.histogram import Histogram
    from keylane.telemetry.lag import PartitionLag
    from keylane.telemetry.snapshot import PartitionFigures, Snapshot

_BREAKER_STATES = {"closed": 0, "recovering": 1, "half_open": 2, "open": 3}
_LANE_STATES = ("ready", "running", "retrying", "waiting", "blocked", "parked")
_PLACE = ("topic", "partition")
_BUCKETS = (*(f"{bound:.6g}" for bound in BOUNDS), "+Inf")


class AppMetrics:
    """Adds up telemetry from its creation on, and keeps the latest offsets. Any thread may use it."""

    def __init__(self, app: str, source: str) -> None:
        self._app = app
        self._source = source
        self._lock = threading.Lock()  # for everything below
        self._totals = Totals(since=time.time())
        self._unreadable = 0
        self._offsets: dict[int, PartitionLag] = {}
        self._broker_up = False
        self._updated_at = time.monotonic()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add_snapshots(self, snapshots: list[Snapshot], unreadable: int) -> None:
        """Add new telemetry; ``unreadable`` counts all records so far that could not be used."""
        with self._lock:
            self._totals.take(snapshots)
            self._unreadable = unreadable

    def set_offsets(self, offsets: dict[int, PartitionLag]) -> None:
        """Replace the offsets of all partitions, as the broker has just reported them."""
        with self._lock:
            self._offsets, self._broker_up, self._updated_at = offsets, True, time.monotonic()

    def broker_down(self) -> None:
        """Note that the broker did not answer."""
        with self._lock:
            self._broker_up = False

    def text(self) -> str:
        """All metrics in the Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry).decode()

    def collect(self) -> list[Metric]:
        """All metric families; called by the registry."""
        now = time.time()
        with self._lock:
            running = self._totals.running(now)
            families = [
                *self._message_metrics(),
                *self._task_metrics(running, now),
                *self._position_metrics(running),
                *self._offset_metrics(),
            ]
        for family in families:
            for sample in family.samples:
                sample.labels["app"] = self._app
        return families

    def _message_metrics(self) -> Iterator[Metric]:
        totals = self._totals
        done = Counter("keylane_messages", "Messages that are done, by how they ended.", labels=["outcome"])
        for outcome in Outcome:
            done.add_metric([outcome.value], totals.outcomes[outcome])
        yield done
        yield Counter(
            "keylane_retries", "Attempts that failed and were tried again.", totals.counters["retries"]
        )
        yield Counter(
            "keylane_telemetry_dropped",
            "Records of telemetry that tasks could not send.",
            totals.counters["dropped"],
        )
        yield _histogram(
            "keylane_latency_seconds", "From a message's timestamp until it was done.", totals.latency
        )
        yield _histogram(
            "keylane_processing_seconds", "From its first attempt until it was done.", totals.processing
        )

    def _task_metrics(self, running: list[Snapshot], now: float) -> Iterator[Metric]:
        latest = self._totals.latest
        yield Gauge("keylane_tasks", "Tasks that run now.", len(running))
        yield Gauge("keylane_epoch", "The epoch that runs, or ran last.", latest.epoch if latest else 0)
        if latest:
            age = max(0.0, now - self._totals.last_at)
            yield Gauge("keylane_telemetry_age_seconds", "Since the last record of telemetry.", age)
        lanes = Gauge("keylane_lanes", "Lanes now, by what they do.", labels=["state"])
        for state in _LANE_STATES:
            lanes.add_metric([state], sum(getattr(task.lanes, state) for task in running))
        yield lanes
        held = Gauge(
            "keylane_held_messages",
            "Messages that a task has read and not finished.",
            labels=["task", "shard"],
        )
        room = Gauge(
            "keylane_capacity_messages", "Messages that a task has room for.", labels=["task", "shard"]
        )
        breakers: dict[str, int] = {}
        for task in running:
            held.add_metric([str(task.task), task.shard], task.held)
            room.add_metric([str(task.task), task.shard], task.capacity)
            for stage, state in task.breakers.items():
                breakers[stage] = max(breakers.get(stage, 0), _BREAKER_STATES.get(state, 0))
        breaker = Gauge(
            "keylane_breaker_state",
            "Worst of the tasks: 0 closed, 1 recovering, 2 half open, 3 open.",
            labels=["stage"],
        )
        for stage, worst in sorted(breakers.items()):
            breaker.add_metric([stage], worst)
        yield from (held, room, breaker)
        hot = [key for task in running for key in task.hot]
        yield Gauge(
            "keylane_hottest_key_share",
            "Of what its task reads, the share of one key; 0 to 1.",
            max((key.share for key in hot), default=0.0),
        )
        yield Gauge(
            "keylane_hottest_key_waiting",
            "Messages that wait in the longest lane of a hot key.",
            max((key.waiting for key in hot), default=0),
        )

    def _position_metrics(self, running: list[Snapshot]) -> Iterator[Metric]:
        position = Gauge("keylane_partition_position", "The next offset to read.", labels=_PLACE)
        paused = Gauge(
            "keylane_partition_paused",
            "Whether reading is paused because the task has no room.",
            labels=_PLACE,
        )
        found: dict[int, list[PartitionFigures]] = {}
        for task in running:
            for partition, figures in task.partitions.items():
                found.setdefault(partition, []).append(figures)
        for partition, owners in sorted(found.items()):  # tasks that share a partition
            place = self._source, str(partition)
            position.add_metric(place, min(owner.position for owner in owners))
            paused.add_metric(place, any(owner.paused for owner in owners))
        yield from (position, paused)

    def _offset_metrics(self) -> Iterator[Metric]:
        lag = Gauge(
            "keylane_partition_lag",
            "Messages of the source that are not done, by the group's offset.",
            labels=_PLACE,
        )
        end = Gauge("keylane_partition_end_offset", "The end of the log.", labels=_PLACE)
        committed = Gauge(
            "keylane_partition_committed_offset",
            "The group's offset: everything below it is done.",
            labels=_PLACE,
        )
        for partition, offsets in sorted(self._offsets.items()):
            place = self._source, str(partition)
            lag.add_metric(place, offsets.lag)
            end.add_metric(place, offsets.end)
            committed.add_metric(place, offsets.at)
        yield from (lag, end, committed)
        yield Gauge("keylane_broker_up", "Whether the broker answered the last question.", self._broker_up)
        yield Gauge(
            "keylane_exporter_age_seconds",
            "Since the exporter last read telemetry and offsets.",
            time.monotonic() - self._updated_at,
        )
        yield Gauge(
            "keylane_telemetry_unreadable",
            "Records of telemetry that were malformed, or of another app.",
            self._unreadable,
        )


def _histogram(name: str, text: str, found: Histogram) -> Metric:
    buckets = list(zip(_BUCKETS, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets, found.sum)
