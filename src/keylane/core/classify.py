"""What kind of failure an exception is."""

from __future__ import annotations

import asyncio
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
_TRANSIENT = (Transient, TimeoutError, ConnectionError, asyncio.IncompleteReadError)


def classify(error: BaseException) -> Failure:
    """Time-outs, lost connections and :class:`Transient` may pass; everything else is poison, unexpected errors included."""
    if isinstance(error, Poison):
        return Failure.POISON
    return Failure.TRANSIENT if isinstance(error, _TRANSIENT) else Failure.POISON
