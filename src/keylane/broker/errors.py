"""What the embedded broker raises."""

from __future__ import annotations

from keylane.errors import KeylaneError


class EmbeddedBrokerError(KeylaneError):
    """The broker could not be fetched, started, found or stopped; the message says why and what to do."""


class PortTakenError(EmbeddedBrokerError):
    """A port the broker was to listen on belongs to another process; `port` is the port, if it is known."""

    def __init__(self, message: str, *, port: int | None = None) -> None:
        super().__init__(message)
        self.port = port
