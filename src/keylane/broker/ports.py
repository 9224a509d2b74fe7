"""Free TCP ports on the loopback address."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

from keylane.broker.errors import EmbeddedBrokerError, PortTakenError

HOST = "127.0.0.1"
# Below the ports that Linux (32768 and up) and macOS (49152 and up) use for outgoing connections. One of those could be
# taken while a node is down, and a client that reconnects to it repeatedly could connect to itself.
_PORT_RANGE = range(15_000, 32_000)
_MAX_ATTEMPTS = 2_000


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports that are free now; another process may take one before it is used.

    Raises EmbeddedBrokerError if there are not enough.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(_PORT_RANGE, _MAX_ATTEMPTS):
            if len(ports) == count:
                break
            opened = _bind(port)
            if opened is not None:
                held.enter_context(opened)
                ports.append(port)
    if len(ports) < count:
        raise EmbeddedBrokerError(
            f"could not find {count} free ports between {_PORT_RANGE.start} and {_PORT_RANGE.stop} on {HOST}"
        )
    return tuple(ports)


def require_free(port: int) -> None:
    """Raise PortTakenError if another process uses this port, EmbeddedBrokerError if it cannot be used at all."""
    if not 1 <= port <= 65_535:
        raise EmbeddedBrokerError(f"expected a port from 1 to 65535, got {port}")
    try:
        opened = _bind(port)
    except PermissionError as cause:
        raise EmbeddedBrokerError(
            f"this user may not listen on port {port}: choose one above 1023"
        ) from cause
    if opened is None:
        raise taken(port)
    opened.close()


def taken(port: int) -> PortTakenError:
    """The error for a requested port that another process uses."""
    return PortTakenError(
        f"port {port} on {HOST} is taken by another process: choose another port, or leave it out to get a free one",
        port=port,
    )


def _bind(port: int) -> socket.socket | None:
    """A socket on that port, or None if it is taken."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As in Java: closing connections of an earlier listener do not block the port.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((HOST, port))
        # Two sockets may be bound to one port until one of them listens.
        opened.listen(1)
    except OSError as cause:
        opened.close()
        if cause.errno == errno.EADDRINUSE:
            return None
        raise
    return opened
