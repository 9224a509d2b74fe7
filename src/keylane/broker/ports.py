"""Choosing and checking TCP ports on the loopback address."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

from keylane.broker.errors import EmbeddedBrokerError, PortTakenError

HOST = "127.0.0.1"
# Below the ports that Linux (32768 and up) and macOS (49152 and up) hand to outgoing connections. One of those
# could be given away while a node is down, and a client that keeps knocking there can get connected to itself.
_RANGE = range(15_000, 32_000)
_TRIES = 2_000


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports that nobody listens on now; someone may still take one before it is used.

    Raises EmbeddedBrokerError when there are not enough.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(_RANGE, _TRIES):
            if len(ports) == count:
                break
            opened = _bind(port)
            if opened is not None:
                held.enter_context(opened)
                ports.append(port)
    if len(ports) < count:
        raise EmbeddedBrokerError(
            f"found no {count} free ports between {_RANGE.start} and {_RANGE.stop} on {HOST}"
        )
    return tuple(ports)


def require_free(port: int) -> None:
    """Raises PortTakenError if somebody listens on this port, EmbeddedBrokerError if it cannot be used at all."""
    if not 1 <= port <= 65_535:
        raise EmbeddedBrokerError(f"{port} is not a port: choose one from 1 to 65535")
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
    """The error for a port that was asked for and belongs to somebody else."""
    return PortTakenError(
        f"port {port} on {HOST} is taken by another process: choose another port, or none to get a free one",
        port=port,
    )


def _bind(port: int) -> socket.socket | None:
    """A socket on that port, or None if it is taken."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As Java does: connections of a former listener that are still closing do not count.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((HOST, port))
        # Two bound sockets may share a port until one of them listens.
        opened.listen(1)
    except OSError as cause:
        opened.close()
        if cause.errno == errno.EADDRINUSE:
            return None
        raise
    return opened
