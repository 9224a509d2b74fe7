"""What kind of failure an exception is."""

from __future__ import annotations

import asyncio
import errno
import socket
from enum import Enum

from keylane.errors import Poison, Transient


class Failure(Enum):
    """The two kinds there are."""

    TRANSIENT = "transient"
    """May work later: the lane waits, the message runs again."""
    POISON = "poison"
    """Will never work: no retry."""


# asyncio.TimeoutError is TimeoutError since Python 3.11; ConnectionError and TimeoutError are kinds of OSError, but not
# every OSError is about a network: a missing file stays missing.
_TRANSIENT = (Transient, TimeoutError, ConnectionError, asyncio.IncompleteReadError, socket.gaierror)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""What a network says of itself in a plain OSError."""


def classify(error: BaseException) -> Failure:
    """Time-outs, network trouble and :class:`Transient` may pass; all else is poison, unexpected errors included."""
    if isinstance(error, Poison):
        return Failure.POISON
    if isinstance(error, _TRANSIENT) or (isinstance(error, OSError) and error.errno in _NETWORK):
        return Failure.TRANSIENT
    return Failure.POISON
