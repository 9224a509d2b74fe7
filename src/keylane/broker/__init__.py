"""Embedded broker: real Kafka on this machine. `with Broker() as broker: broker.bootstrap`."""

from keylane.broker.cluster import Broker, BrokerState
from keylane.broker.errors import EmbeddedBrokerError, PortTakenError
from keylane.broker.node import Node
from keylane.broker.progress import DownloadProgress, DownloadStep, OnProgress, shown
from keylane.spark.java import JavaError, find_java

__all__ = [
    "Broker",
    "BrokerState",
    "DownloadProgress",
    "DownloadStep",
    "EmbeddedBrokerError",
    "JavaError",
    "Node",
    "OnProgress",
    "PortTakenError",
    "find_java",
    "shown",
]
