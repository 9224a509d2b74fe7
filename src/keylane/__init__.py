"""Keylane: Kafka messages in Python on Spark, strictly in order inside a key, in parallel across keys."""

from __future__ import annotations

from keylane.app import App
from keylane.core.breaker import Breaker, CircuitState
from keylane.core.flood import FloodGuard
from keylane.core.hot import HotKey
from keylane.core.ledger import Ledger
from keylane.core.letter import DeadLetter
from keylane.core.outcome import Outcome
from keylane.core.retry import Retry
from keylane.core.seen import Idempotency
from keylane.core.telemetry import Telemetry
from keylane.core.versions import Versioned
from keylane.errors import (
    DeliveryError,
    FloodError,
    KafkaError,
    KeylaneError,
    Poison,
    ResourceError,
    SettingsError,
    Transient,
    Undelivered,
)
from keylane.fact import Fact
from keylane.frames import ordered
from keylane.message import Message
from keylane.publisher import Delivered, Publisher
from keylane.read import Field
from keylane.readmodel import ReadModel

__version__ = "0.1.0"

__all__ = [
    "App",
    "Breaker",
    "CircuitState",
    "DeadLetter",
    "Delivered",
    "DeliveryError",
    "Fact",
    "Field",
    "FloodError",
    "FloodGuard",
    "HotKey",
    "Idempotency",
    "KafkaError",
    "KeylaneError",
    "Ledger",
    "Message",
    "Outcome",
    "Poison",
    "Publisher",
    "ReadModel",
    "ResourceError",
    "Retry",
    "SettingsError",
    "Telemetry",
    "Transient",
    "Undelivered",
    "Versioned",
    "ordered",
]
