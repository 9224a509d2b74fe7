"""Lookup of an app's source topic in what the app has written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from keylane.errors import SettingsError
from keylane.state.admin import AdminClient
from keylane.telemetry.lag_monitor import STARTS_WITHIN_SECONDS
from keylane.telemetry.reader import TelemetryLog
from keylane.wording import age

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings


class StartingError(SettingsError):
    """The app was just started, and its source is not recorded yet."""


def find_source(settings: KafkaSettings, app: str) -> str:
    """Return the source from the app's last plan or its telemetry.

    Raises NeverRanError, SettingsError if neither names it, and StartingError if the app was just started.
    """
    with AdminClient(settings, app) as operator:
        plan, started = operator.plan(), operator.started()
    if plan is not None and isinstance(plan.get("source"), str):
        return str(plan["source"])
    with TelemetryLog(settings, app) as records:
        found = records.catch_up()
    if found:
        return found[-1].source
    if started is None:
        raise StartingError(
            f"{app} is starting, or ended before its first epoch: its topics exist, but no run owns it yet"
        )
    ago = max(0.0, time.time() - started)
    if ago < STARTS_WITHIN_SECONDS:
        raise StartingError(
            f"{app} is starting: it was started {age(ago)} ago and has not planned an epoch yet. Try again in a moment"
        )
    raise SettingsError(f"could not find the source topic of app {app!r}; give it: --topic TOPIC")
