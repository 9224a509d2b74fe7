"""The embedded broker: real Kafka on this machine. `with Broker() as broker: broker.bootstrap`."""

from keylane.broker.cluster import Broker, State
from keylane.broker.errors import BrokerError, PortTakenError
from keylane.broker.java import JavaError, find_java
from keylane.broker.node import Node
from keylane.broker.progress import OnProgress, Progress, Step, shown

__all__ = [
    "Broker",
    "BrokerError",
    "JavaError",
    "Node",
    "OnProgress",
    "PortTakenError",
    "Progress",
    "State",
    "Step",
    "find_java",
    "shown",
]
