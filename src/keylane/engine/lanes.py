"""Which lane a message belongs to, by the app's order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.app import Order

GLOBAL = b"global"


def lane_keys(order: Order) -> Callable[[int], bytes | None] | None:
    """The lane of a message in this partition, whatever its key; None where every key is a lane."""
    if order == "key":
        return None
    if order == "partition":
        return cache(lambda partition: b"partition %d" % partition)
    if order == "global":
        return lambda _partition: GLOBAL
    return lambda _partition: None
