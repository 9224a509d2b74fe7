"""Which topic an app reads, found out from what it has written down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.errors import SettingsError
from keylane.kafka.operator import Operator
from keylane.kafka.telemetry_log import TelemetryLog

if TYPE_CHECKING:
    from keylane.kafka.settings import KafkaSettings


def find_source(settings: KafkaSettings, app: str) -> str:
    """From its last plan, or its telemetry. Raises NeverRanError, or SettingsError when neither names it."""
    with Operator(settings, app) as operator:
        plan = operator.plan()
    if plan is not None and isinstance(plan.get("source"), str):
        return str(plan["source"])
    with TelemetryLog(settings, app) as records:
        found = records.catch_up()
    if found:
        return found[-1].source
    raise SettingsError(f"which topic app {app!r} reads is not written down anywhere; name it: --topic TOPIC")
