"""Prometheus exporter: an app's telemetry, added up, and its lag as the broker reports it.

The lag comes from the group's committed offsets, so it is served, and grows, also while no task runs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from keylane.errors import BrokerError, SettingsError
from keylane.telemetry.app_metrics import AppMetrics
from keylane.telemetry.lag import LagMeter
from keylane.telemetry.reader import TelemetryLog

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.telemetry")

PORT = 9464
HOST = "127.0.0.1"
"""The default address. It is this machine only, because there is neither encryption nor authentication."""
CONNECTIONS_MAX = 16
"""Connections that are answered at the same time; others are closed at once."""
CONNECTION_SECONDS = 10.0
"""A connection is closed after this time, answered or not."""
_LAG_INTERVAL_SECONDS = 2.0
_LOG_INTERVAL_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class _Server(ThreadingHTTPServer):
    """HTTP server with a bounded number of connections, each for a bounded time."""

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
        # A socket's time-out is not enough: a client may send one byte now and then.
        limit = threading.Timer(CONNECTION_SECONDS, _shut_down, [request])
        limit.daemon = True
        try:
            limit.start()
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()


def _shut_down(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        request.shutdown(socket.SHUT_RDWR)


class Exporter:
    """Follows one app, which reads ``source``, in its own thread. :meth:`text` never waits for the broker."""

    def __init__(self, settings: KafkaSettings, app: str, source: str) -> None:
        self._settings = settings
        self._app = app
        self._source = source
        self._metrics = AppMetrics(app, source)
        self._closing = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._thread = threading.Thread(target=self._follow, name="keylane-metrics", daemon=True)

    def read(self) -> None:
        """Read once everything up to now. Raises BrokerError if the broker does not answer."""
        with TelemetryLog(self._settings, self._app) as records:
            self._metrics.add_snapshots(records.catch_up(), records.unreadable)
        self._metrics.set_offsets(self._meter().partitions())

    def start(self) -> None:
        """Follow the app until :meth:`close`."""
        self._thread.start()

    def serve(self, port: int, host: str = HOST) -> int:
        """Answer ``GET /metrics``; returns the port, which is any free one for 0.

        Raises SettingsError if it cannot listen there.
        """
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404, "ask for /metrics")
                    return
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not logged."""

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"cannot serve metrics at {host}:{port}: {error}; choose another port or address"
            ) from error
        threading.Thread(target=self._server.serve_forever, name="keylane-scrapes", daemon=True).start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """End both threads."""
        self._closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread.is_alive():
            self._thread.join(5)

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
        return self._metrics.text()

    def _meter(self) -> LagMeter:
        committed = self._settings.reads_committed("")
        return LagMeter(self._settings, self._app, self._source, committed=committed)

    def _follow(self) -> None:
        """The body of the thread."""
        records: TelemetryLog | None = None
        meter: LagMeter | None = None
        lag_due = 0.0
        logged_at = -_LOG_INTERVAL_SECONDS
        while not self._closing.is_set():
            try:
                records = records or TelemetryLog(self._settings, self._app)
                self._metrics.add_snapshots(records.read(0.25), records.unreadable)
                if time.monotonic() >= lag_due:
                    meter = meter or self._meter()
                    self._metrics.set_offsets(meter.partitions())
                    lag_due = time.monotonic() + _LAG_INTERVAL_SECONDS
            except Exception as error:  # without this thread every metric would freeze
                known = isinstance(error, BrokerError)
                if known:
                    self._metrics.broker_down()
                if time.monotonic() - logged_at > _LOG_INTERVAL_SECONDS:
                    logged_at = time.monotonic()
                    shown = error if known else repr(error)
                    log.warning("could not read metrics, retrying app=%s error=%s", self._app, shown)
                self._closing.wait(_RETRY_SECONDS)
        if records is not None:
            records.close()
