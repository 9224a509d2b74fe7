"""One app as the console watches it: a thread that reads its topics, for all browsers together."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from keylane.console.app_facts import app_facts, detail_facts
from keylane.console.history import AppHistory
from keylane.errors import BrokerError, KeylaneError
from keylane.kafka.client import OffsetSpec
from keylane.kafka.cluster import Cluster
from keylane.state.stopped_lanes import StoppedLane, stopped_lanes
from keylane.state.topic import order_watch
from keylane.strict_json import MalformedRecordError
from keylane.telemetry.lag_monitor import LagMonitor
from keylane.telemetry.lane_wall import unpack
from keylane.telemetry.source_topic import StartingError, find_source
from keylane.topic_names import dead_letter_topic, state_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import RetryState
    from keylane.state.admin import AdminClient
    from keylane.telemetry.lag_monitor import LagView
    from keylane.telemetry.snapshot import Snapshot

log = logging.getLogger("keylane.console")

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
"""Time between two measurements."""
_OBSERVED_SECONDS = 2.0
"""Time over which rates are measured: a stopped lane must show within five seconds."""
_BACKFILL_SECONDS = 900.0
"""Telemetry from before the console's start that the charts begin with."""
_RETRY_SECONDS = 2.0
_DEAD_INTERVAL_SECONDS = 5.0
_LOOK_SECONDS = 30.0
"""Time for which tasks are asked to send their lanes; they are asked again after a third of it."""
_WALL_SECONDS = 10.0
"""Lanes older than this are not shown any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is known of an app at one moment."""

    at: float
    version: int
    facts: dict[str, Any]
    """The app's line of the overview."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Partitions, tasks and the rest of the app's page."""
    view: LagView | None = None
    stopped: Sequence[StoppedLane] = ()
    attempts: Mapping[int, Mapping[int, RetryState]] = field(default_factory=dict)
    source: str = ""
    partitions: int = 0


class AppWatch:
    """Watches one app in its own thread until closed. ``reading`` is replaced, never changed."""

    def __init__(self, settings: KafkaSettings, app: str) -> None:
        self.app = app
        self.reading = Reading(at=time.time(), version=0, facts=_plain_facts(app, "starting", "reading …"))
        self._settings = settings
        self._closing = threading.Event()
        self._asked: queue.SimpleQueue[tuple[Callable[[AdminClient], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the history
        self._history = AppHistory(time.time() - _BACKFILL_SECONDS)
        self._cluster: Cluster | None = None
        self._midnight: tuple[str, dict[int, int]] = ("", {})
        self._dead_today: int | None = None
        self._dead_due = 0.0
        self._version = 0
        self._look_until = 0.0
        self._asked_to_look = -_LOOK_SECONDS
        self._walls: dict[int, tuple[float, bytes]] = {}  # by task; replaced, never changed
        self._thread = threading.Thread(target=self._run, name=f"keylane-console-{app}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, at most in a few seconds."""
        self._closing.set()
        self._asked.put((lambda _operator: None, Future()))
        if self._thread.is_alive():
            self._thread.join(5)

    def series(self, span: str) -> dict[str, Any]:
        """The app's history, for charts."""
        with self._lock:
            return self._history.series(span, time.time())

    def look(self) -> None:
        """Somebody looks at the lane wall now: have tasks send their lanes for a while."""
        self._look_until = time.monotonic() + _LOOK_SECONDS / 2

    def wall(self) -> dict[int, tuple[float, bytes]]:
        """By task: when it sent its lanes, and the lanes as :func:`keylane.telemetry.lane_wall.unpack` gives them."""
        now = time.time()
        return {task: found for task, found in self._walls.items() if now - found[0] < _WALL_SECONDS}

    def ask(self, question: Callable[[AdminClient], T]) -> Future[T]:
        """Run this in the watch's thread, which alone may use the state topic's reader."""
        future: Future[T] = Future()
        self._asked.put((question, future))
        return future

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._watch()
            except StartingError as starting:
                self._publish(Reading(**self._base(_plain_facts(self.app, "starting", str(starting)))))
            except KeylaneError as error:
                self._publish(Reading(**self._base(_plain_facts(self.app, "unknown", str(error)))))
            except Exception as error:  # the thread must live on: the page would freeze without a word
                log.exception("watching failed, retrying app=%s", self.app)
                self._publish(Reading(**self._base(_plain_facts(self.app, "unknown", repr(error)))))
            self._serve(_RETRY_SECONDS, None)

    def _watch(self) -> None:
        source = find_source(self._settings, self.app)
        monitor = LagMonitor(
            self._settings,
            self.app,
            source,
            over=_OBSERVED_SECONDS,
            since=_BACKFILL_SECONDS,
            listen=self._listen,
        )
        try:
            while not self._closing.is_set():
                began = time.monotonic()
                view = monitor.measure()
                operator = monitor.operator
                if operator is None:
                    raise BrokerError(f"the state topic of app {self.app!r} is gone")
                if operator.source not in ("", source):
                    return  # a run with another source has begun
                self._keep_looking(operator)
                if view is not None:
                    self._publish(self._read(view, operator, source))
                self._serve(max(0.05, began + INTERVAL_SECONDS - time.monotonic()), operator)
        finally:
            monitor.close()

    def _listen(self, snapshots: list[Snapshot]) -> None:
        with self._lock:
            self._history.take(snapshots)
        for one in snapshots:
            if one.wall:
                with contextlib.suppress(MalformedRecordError):  # any client may have written into the topic
                    self._walls = {**self._walls, one.task: (one.at, unpack(one.wall))}

    def _keep_looking(self, operator: AdminClient) -> None:
        """Ask the tasks for their lanes while somebody looks."""
        now = time.monotonic()
        if now < self._look_until and now - self._asked_to_look > _LOOK_SECONDS / 3:
            self._asked_to_look = now
            until = time.time() + _LOOK_SECONDS
            order_watch(self._settings, state_topic(self.app), operator.partitions, until)

    def _read(self, view: LagView, operator: AdminClient, source: str) -> Reading:
        stopped = stopped_lanes(operator.lanes(), operator.open_commands())
        with self._lock:
            recent, spark = self._history.recent(view.at), self._history.series("5m", view.at)
        facts = app_facts(
            self.app, source, view, stopped, recent=recent, spark=spark, dead_today=self._dead(view.at)
        )
        return Reading(
            **self._base(facts),
            detail=detail_facts(view, operator.plan(), operator.claims()),
            view=view,
            stopped=stopped,
            attempts=operator.attempts(),
            source=source,
            partitions=operator.partitions,
        )

    def _base(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        return {"at": time.time(), "version": self._version, "facts": facts}

    def _publish(self, reading: Reading) -> None:
        self.reading = reading

    def _serve(self, seconds: float, operator: AdminClient | None) -> None:
        """Answer questions for this time."""
        deadline = time.monotonic() + seconds
        while not self._closing.is_set():
            try:
                question, future = self._asked.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if operator is None:
                future.set_exception(
                    BrokerError(f"app {self.app!r} cannot be read now; try again in a moment")
                )
                continue
            try:
                future.set_result(question(operator))
            except Exception as error:
                future.set_exception(error)

    def _dead(self, now: float) -> int | None:
        """Records written to the dead-letter topic since midnight; None if that is unknown."""
        if time.monotonic() < self._dead_due:
            return self._dead_today
        self._dead_due = time.monotonic() + _DEAD_INTERVAL_SECONDS
        topic = dead_letter_topic(self.app)
        self._cluster = self._cluster or Cluster(self._settings)
        today = datetime.fromtimestamp(now).astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        try:
            count = self._cluster.topics().get(topic, 0)
            if not count:
                return None
            ends = self._cluster.ends(topic, range(count))
            day, starts = self._midnight
            if day != today.isoformat() or len(starts) != count:
                spec = OffsetSpec.for_timestamp(int(today.timestamp() * 1000))
                found = self._cluster.offsets({(topic, p): spec for p in range(count)})
                starts = {p: at if at >= 0 else ends[p] for (_, p), at in found.items()}
                self._midnight = today.isoformat(), starts
            self._dead_today = sum(max(0, ends[p] - starts[p]) for p in ends)
        except BrokerError:
            self._dead_today = None
        return self._dead_today


def _plain_facts(app: str, state: str, sentence: str) -> dict[str, Any]:
    return {"app": app, "state": state, "sentence": sentence, "at": time.time()}
