"""Keylane: Kafka messages in Python on Spark, strictly in order inside a key, in parallel across keys."""

from __future__ import annotations

from keylane.app import App
from keylane.dataframe.ordered import ordered
from keylane.errors import (
    BrokerError,
    DeliveryError,
    FailureGuardError,
    KeylaneError,
    Poison,
    ResourceError,
    SettingsError,
    Transient,
    Undelivered,
)
from keylane.handlers.fields import Field
from keylane.handlers.middleware import CallNext
from keylane.handlers.state import State
from keylane.handlers.timers import Timer, Timers
from keylane.lanes.heavy_hitters import HotKey
from keylane.lanes.ordering import ByField, ByHeader, Ordering
from keylane.ledger import Ledger
from keylane.message import Message
from keylane.outcome import Outcome
from keylane.policies.breaker import Breaker, CircuitState
from keylane.policies.dedup_window import Idempotency
from keylane.policies.failure_guard import FailureGuard
from keylane.policies.failure_info import FailureInfo
from keylane.policies.failure_policy import FailedMessage, FailurePolicy
from keylane.policies.rate import Rate
from keylane.policies.retry import Retry
from keylane.policies.versions import VersionOrdering
from keylane.publisher import Delivered, Publisher
from keylane.readmodel.fields import ReadModelField
from keylane.readmodel.model import ReadModel
from keylane.result import Result
from keylane.sink import Sink, SinkResult
from keylane.telemetry_settings import Telemetry

__version__ = "0.1.0"

__all__ = [
    "App",
    "Breaker",
    "BrokerError",
    "ByField",
    "ByHeader",
    "CallNext",
    "CircuitState",
    "Delivered",
    "DeliveryError",
    "FailedMessage",
    "FailureGuard",
    "FailureGuardError",
    "FailureInfo",
    "FailurePolicy",
    "Field",
    "HotKey",
    "Idempotency",
    "KeylaneError",
    "Ledger",
    "Message",
    "Ordering",
    "Outcome",
    "Poison",
    "Publisher",
    "Rate",
    "ReadModel",
    "ReadModelField",
    "ResourceError",
    "Result",
    "Retry",
    "SettingsError",
    "Sink",
    "SinkResult",
    "State",
    "Telemetry",
    "Timer",
    "Timers",
    "Transient",
    "Undelivered",
    "VersionOrdering",
    "ordered",
]
