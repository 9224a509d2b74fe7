"""Progress of a run: lines in a log, a status line in a terminal."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keylane.cli.layout import StatusLine, say
from keylane.errors import BrokerError
from keylane.offsets.shard import WHOLE
from keylane.telemetry.lag import LagMeter
from keylane.wording import age

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.shard import Shard
    from keylane.spec import AppSpec
    from keylane.telemetry.lag import GroupLag

_LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two lines when the output is not a terminal."""
_BAR_COLUMNS = 20
_LAST_FIGURES_SECONDS = 5.0
"""Seconds to wait for the final figures."""


def bar(done: int, total: int, mean: float, rate: float) -> str:
    """Format progress towards a known end: ``━━━╸      30%  300 of 1,000, 95/s, about 8 s left``.

    ``mean`` is the rate since the first message, ``rate`` that of the last second.
    """
    share = min(1.0, max(0.0, done / total))
    full = int(share * _BAR_COLUMNS)
    drawn = "━" * full + ("╸" if full < _BAR_COLUMNS else "")
    left = max(0, total - done)
    eta = f", about {age(left / mean + 0.5)} left" if left and mean > 0 else ""
    return f"{drawn:<{_BAR_COLUMNS}} {share:4.0%}  {done:,} of {total:,}, {rate:,.0f}/s{eta}"


class RunProgress:
    """Progress, read from the cluster in separate threads: an unreachable broker must not delay a stop.

    ``first`` is set after :meth:`begin`.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: AppSpec,
        console: Console,
        *,
        until_caught_up: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        self._shard = shard
        self._until_caught_up = until_caught_up
        self._settings = settings
        self._app = app
        self._console = console
        self._ended = threading.Event()
        self._status: StatusLine | None = None  # written by :meth:`show`'s caller, read by the thread
        self._shown = False
        self.first: GroupLag

    def begin(self) -> None:
        """Record the app's lag at the start. Raises BrokerError if the broker does not answer."""
        meter = self._meter()
        self.first = meter.read()
        threading.Thread(target=self._report, args=(meter,), name="keylane-progress", daemon=True).start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show progress until the block ends."""
        with StatusLine(self._console, "waiting for messages …") as self._status:
            self._shown = True
            try:
                yield
            finally:
                self._shown = False

    def end(self) -> GroupLag | None:
        """Return the app's lag now; None if the answer takes too long."""
        self._ended.set()
        found: list[GroupLag] = []

        def ask() -> None:
            try:
                found.append(self._meter().read())
            except BrokerError as error:
                say(self._console, f"could not read the app's progress: {error}")

        thread = threading.Thread(target=ask, name="keylane-lag", daemon=True)
        thread.start()
        thread.join(_LAST_FIGURES_SECONDS)
        return found[0] if found else None

    def _meter(self) -> LagMeter:
        app = self._app
        committed = self._settings.reads_committed(app.delivery)
        return LagMeter(self._settings, app.name, app.source, committed=committed, shard=self._shard)

    def _report(self, meter: LagMeter) -> None:
        before, at = self.first, time.monotonic()
        began = at
        while not self._ended.wait(1.0 if self._console.is_terminal else _LINE_INTERVAL_SECONDS):
            try:
                lag = meter.read()
            except BrokerError as error:
                line = str(error)
            else:
                now = time.monotonic()
                rate = (lag.committed - before.committed) / (now - at)
                done = lag.committed - self.first.committed
                line = (
                    bar(done, self.first.lag, done / (now - began), rate)
                    if self._until_caught_up and self.first.lag
                    else f"{done:,} done, {rate:,.0f}/s, lag {lag.lag:,}"
                )
                before, at = lag, now
                if not done:
                    began = now  # the time until the first message says nothing about the rate
            if self._shown and self._console.is_terminal and self._status is not None:
                self._status.update(line)
            elif self._shown:
                say(self._console, line)
