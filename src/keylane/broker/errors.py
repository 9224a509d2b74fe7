"""Errors of the embedded broker."""

from __future__ import annotations

from keylane.errors import KeylaneError


class EmbeddedBrokerError(KeylaneError):
    """The broker could not be fetched, started, found or stopped; the message says why and what to do."""


class PortTakenError(EmbeddedBrokerError):
    """Another process uses a port that the broker needs; `port` is the port, if it is known."""

    def __init__(self, message: str, *, port: int | None = None) -> None:
        super().__init__(message)
        self.port = port
