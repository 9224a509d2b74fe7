"""How far a run is: lines in a log, a status in a terminal."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keylane.cli.layout import say
from keylane.errors import KafkaError
from keylane.kafka.lag import LagMeter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.status import Status

    from keylane.app import App
    from keylane.kafka.lag import Lag
    from keylane.kafka.settings import KafkaSettings

_EVERY = 10.0
"""Seconds between two lines when the output is no terminal."""
_LAST = 5.0
"""Seconds to wait for the last figures."""


class Progress:
    """Asks the cluster in threads of its own: with the broker away an answer takes long, and a stop must not.

    ``first`` is there after :meth:`begin`.
    """

    def __init__(self, settings: KafkaSettings, app: App, console: Console) -> None:
        self._settings = settings
        self._app = app
        self._console = console
        self._ended = threading.Event()
        self._status: Status | None = None  # written by who shows it, read by the thread
        self._shown = False
        self.first: Lag

    def begin(self) -> None:
        """Note where the app stands. Raises KafkaError when there is no answer."""
        meter = self._meter()
        self.first = meter.read()
        threading.Thread(target=self._report, args=(meter,), name="keylane-progress", daemon=True).start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Tell how far the app is, meanwhile."""
        with self._console.status("waiting for messages …") as self._status:
            self._shown = True
            try:
                yield
            finally:
                self._shown = False

    def end(self) -> Lag | None:
        """Where the app stands now; None when there is no answer soon."""
        self._ended.set()
        found: list[Lag] = []

        def ask() -> None:
            try:
                found.append(self._meter().read())
            except KafkaError as error:
                say(self._console, f"how far the app is cannot be told: {error}")

        thread = threading.Thread(target=ask, name="keylane-lag", daemon=True)
        thread.start()
        thread.join(_LAST)
        return found[0] if found else None

    def _meter(self) -> LagMeter:
        return LagMeter(self._settings, self._app.name, self._app.source)

    def _report(self, meter: LagMeter) -> None:
        before, at = self.first, time.monotonic()
        while not self._ended.wait(1.0 if self._console.is_terminal else _EVERY):
            try:
                lag = meter.read()
            except KafkaError as error:
                line = str(error)
            else:
                now = time.monotonic()
                rate = (lag.committed - before.committed) / (now - at)
                line = f"{lag.committed - self.first.committed:,} done, {rate:,.0f}/s, lag {lag.lag:,}"
                before, at = lag, now
            if self._shown and self._console.is_terminal and self._status is not None:
                self._status.update(line)
            elif self._shown:
                say(self._console, line)
