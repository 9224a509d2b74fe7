"""Keylane: Kafka messages in Python on Spark, strictly in order inside a key, in parallel across keys."""

from __future__ import annotations

from keylane.app import App
from keylane.core.breaker import Breaker, CircuitState
from keylane.core.flood import FloodGuard
from keylane.core.letter import DeadLetter
from keylane.core.outcome import Outcome
from keylane.core.retry import Retry
from keylane.core.seen import Idempotency
from keylane.core.versions import Versioned
from keylane.errors import (
    FloodError,
    KafkaError,
    KeylaneError,
    Poison,
    ResourceError,
    SettingsError,
    Transient,
)
from keylane.message import Message
from keylane.read import Field

__version__ = "0.1.0"

__all__ = [
    "App",
    "Breaker",
    "CircuitState",
    "DeadLetter",
    "Field",
    "FloodError",
    "FloodGuard",
    "Idempotency",
    "KafkaError",
    "KeylaneError",
    "Message",
    "Outcome",
    "Poison",
    "ResourceError",
    "Retry",
    "SettingsError",
    "Transient",
    "Versioned",
]
