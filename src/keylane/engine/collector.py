"""Python's cyclic collector while a task runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY = 10.0
_BELOW = 5_000
_AT_LEAST = 60.0
_frozen = threading.Lock()


@contextmanager
def own_collector() -> Iterator[None]:
    """No automatic collection inside; whoever uses it collects when it suits.

    The collector runs by the number of new objects and would walk over every message held, again and again: without it
    a drain ran 1.6 times as fast (two runs each). What is there when the process's first task begins, modules for the
    most part, is left out of all later collections: to walk over it takes 40 ms, in which every lane would wait where
    an epoch begins. It is collected first, since a frozen cycle stays for ever, and nothing is frozen later: what a
    task leaves behind must be found.
    """
    gc.collect()
    if _frozen.acquire(blocking=False):  # once in a process
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def collect(held: Callable[[], int]) -> None:
    """Collect cycles that stages left behind, when little is held or it has been long; until cancelled.

    The engine itself leaves none; Python's own runs are off: see :func:`own_collector`.
    """
    last = time.monotonic()
    while True:
        await asyncio.sleep(_EVERY)
        if held() < _BELOW or time.monotonic() - last > _AT_LEAST:
            gc.collect()
            last = time.monotonic()
