"""Serves an app's figures to Prometheus: telemetry added up, and the lag as the broker has it.

The lag comes from the group's own offsets, so it is there, and grows, also when no task runs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from keylane.errors import BrokerError, SettingsError
from keylane.outcome import Outcome
from keylane.telemetry.aggregate import Totals
from keylane.telemetry.exposition import CONTENT_TYPE, Family, render
from keylane.telemetry.lag import LagMeter
from keylane.telemetry.reader import TelemetryLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.kafka.settings import KafkaSettings
    from keylane.telemetry.lag import PartitionLag
    from keylane.telemetry.snapshot import Snapshot

log = logging.getLogger("keylane.telemetry")

PORT = 9464
HOST = "127.0.0.1"
"""Where metrics are served unless the user says otherwise: there is neither encryption nor authentication."""
CONNECTIONS_MAX = 16
"""Connections that are answered at the same time; more of them are closed."""
CONNECTION_SECONDS = 10.0
"""After this time a connection is closed, whether it was answered or not."""
_LAG_EVERY = 2.0
_BREAKERS = {"closed": 0, "recovering": 1, "half_open": 2, "open": 3}


class _Server(ThreadingHTTPServer):
    """Answers a bounded number of connections at the same time, each for a bounded time."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The client's silence is not enough to go by: it may send a byte now and then.
        limit = threading.Timer(CONNECTION_SECONDS, _end, [request])
        limit.daemon = True
        try:
            limit.start()
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()


def _end(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        request.shutdown(socket.SHUT_RDWR)


class Exporter:
    """Follows one app, which reads ``source``, in a thread of its own; :meth:`text` never asks anybody."""

    def __init__(self, settings: KafkaSettings, app: str, source: str) -> None:
        self._settings = settings
        self._app = app
        self._source = source
        self._totals = Totals(since=time.time())  # this and what follows: under the lock
        self._offsets: dict[int, PartitionLag] = {}
        self._up = False
        self._followed = time.monotonic()  # when telemetry and offsets were last read
        self._unreadable = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._thread = threading.Thread(target=self._follow, name="keylane-metrics", daemon=True)

    def read(self) -> None:
        """Everything there is now, once. Raises BrokerError when the broker does not answer."""
        with TelemetryLog(self._settings, self._app) as records:
            self._take(records.catch_up(), records.unreadable)
        self._measure(self._meter())

    def start(self) -> None:
        """Follow the app until :meth:`close`."""
        self._thread.start()

    def serve(self, port: int, host: str = HOST) -> int:
        """Answer ``GET /metrics``; the port that was taken (0: any). Raises SettingsError when it is not free."""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404, "ask for /metrics")
                    return
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A scrape is no news."""

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"metrics cannot be served at {host}:{port}: {error}") from error
        threading.Thread(target=self._server.serve_forever, name="keylane-scrapes", daemon=True).start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """End its threads."""
        self._closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread.is_alive():
            self._thread.join(5)

    def text(self) -> str:
        """For a scrape."""
        with self._lock:
            return render(self._families(time.time()))

    def _meter(self) -> LagMeter:
        committed = self._settings.reads_committed("")
        return LagMeter(self._settings, self._app, self._source, committed=committed)

    # In the thread.

    def _follow(self) -> None:
        records: TelemetryLog | None = None
        meter: LagMeter | None = None
        due = said = -60.0
        while not self._closing.is_set():
            try:
                records = records or TelemetryLog(self._settings, self._app)
                self._take(records.read(0.25), records.unreadable)
                if time.monotonic() >= due:
                    meter = meter or self._meter()
                    self._measure(meter)
                    due = time.monotonic() + _LAG_EVERY
            except Exception as error:  # whatever it is: without this thread all figures stand still
                known = isinstance(error, BrokerError)
                with self._lock:
                    self._up = self._up and not known
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    log.warning(
                        "metrics of app %r: %s; asked again", self._app, error if known else repr(error)
                    )
                self._closing.wait(1)
        if records is not None:
            records.close()

    def _take(self, snapshots: list[Snapshot], unreadable: int) -> None:
        with self._lock:
            self._totals.take(snapshots)
            self._unreadable = unreadable

    def _measure(self, meter: LagMeter) -> None:
        found = meter.partitions()
        with self._lock:
            self._offsets, self._up, self._followed = found, True, time.monotonic()

    # What is served.

    def _families(self, now: float) -> list[Family]:
        app = ("app", self._app)
        totals = self._totals
        running = totals.running(now)
        families: list[Family] = []

        def counter(name: str, text: str) -> Family:
            families.append(Family(name, "counter", text))
            return families[-1]

        def gauge(name: str, text: str) -> Family:
            families.append(Family(name, "gauge", text))
            return families[-1]

        done = counter("keylane_messages_total", "Messages that are done, by how they ended.")
        for outcome in Outcome:
            done.add(totals.outcomes[outcome], app, ("outcome", outcome.value))
        counter("keylane_retries_total", "Attempts that failed and were tried again.").add(
            totals.counters["retries"], app
        )
        counter("keylane_telemetry_dropped_total", "Records of telemetry that tasks could not send.").add(
            totals.counters["dropped"], app
        )
        for name, text, found in (
            ("keylane_latency_seconds", "From a message's timestamp until it was done.", totals.latency),
            ("keylane_processing_seconds", "From its first attempt until it was done.", totals.processing),
        ):
            families.append(Family(name, "histogram", text))
            families[-1].observe(found, app)
        self._of_tasks(gauge, running, now)
        lag = gauge(
            "keylane_partition_lag", "Messages of the source that are not done, by the group's offset."
        )
        end = gauge("keylane_partition_end_offset", "Where the log ends.")
        at = gauge("keylane_partition_committed_offset", "The group's offset: everything below it is done.")
        for partition, offsets in sorted(self._offsets.items()):
            labels = app, ("topic", self._source), ("partition", partition)
            lag.add(offsets.lag, *labels)
            end.add(offsets.end, *labels)
            at.add(offsets.at, *labels)
        gauge("keylane_broker_up", "Whether the broker answered the last question.").add(int(self._up), app)
        gauge("keylane_exporter_age_seconds", "Since the exporter last read telemetry and offsets.").add(
            time.monotonic() - self._followed, app
        )
        gauge(
            "keylane_telemetry_unreadable", "Records of telemetry that were malformed, or of another app."
        ).add(self._unreadable, app)
        return families

    def _of_tasks(self, gauge: Callable[[str, str], Family], running: list[Snapshot], now: float) -> None:
        app, totals = ("app", self._app), self._totals
        gauge("keylane_tasks", "Tasks that run now.").add(len(running), app)
        gauge("keylane_epoch", "The epoch that runs, or ran last.").add(
            totals.latest.epoch if totals.latest is not None else 0, app
        )
        if totals.last_at:
            age = max(0.0, now - totals.last_at)
            gauge("keylane_telemetry_age_seconds", "Since the last record of telemetry.").add(age, app)
        lanes = gauge("keylane_lanes", "Lanes now, by what they do.")
        for state in ("ready", "running", "retrying", "waiting", "blocked", "parked"):
            lanes.add(sum(getattr(one.lanes, state) for one in running), app, ("state", state))
        held = gauge("keylane_held_messages", "Messages that a task has read and not finished.")
        room = gauge("keylane_capacity_messages", "Messages that a task has room for.")
        for one in running:
            held.add(one.held, app, ("task", one.task))
            room.add(one.capacity, app, ("task", one.task))
        position = gauge("keylane_partition_position", "Where reading goes on.")
        paused = gauge("keylane_partition_paused", "Whether reading has stopped for want of room.")
        found: dict[int, list[tuple[int, bool]]] = {}
        for one in running:
            for partition, figures in one.partitions.items():
                found.setdefault(partition, []).append((figures.position, figures.paused))
        for partition, owners in sorted(found.items()):
            labels = app, ("topic", self._source), ("partition", partition)
            position.add(min(at for at, _ in owners), *labels)
            paused.add(int(any(stopped for _, stopped in owners)), *labels)
        breakers: dict[str, int] = {}
        for one in running:
            for stage, state in one.breakers.items():
                breakers[stage] = max(breakers.get(stage, 0), _BREAKERS.get(state, 0))
        breaker = gauge(
            "keylane_breaker_state", "Worst of the tasks: 0 closed, 1 recovering, 2 half open, 3 open."
        )
        for stage, worst in sorted(breakers.items()):
            breaker.add(worst, app, ("stage", stage))
        hot = [key for one in running for key in one.hot]
        gauge("keylane_hottest_key_share", "Of what its task reads, the share of one key; 0 to 1.").add(
            max((key.share for key in hot), default=0.0), app
        )
        gauge("keylane_hottest_key_waiting", "Messages that wait in the longest lane of a hot key.").add(
            max((key.waiting for key in hot), default=0), app
        )
