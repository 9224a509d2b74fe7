"""Control of Python's cyclic garbage collector while a task runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHECK_SECONDS = 10.0
_COLLECT_BELOW_MESSAGES = 5_000
_COLLECT_AFTER_SECONDS = 60.0
_frozen = threading.Lock()


@contextmanager
def own_collector() -> Iterator[None]:
    """Disable automatic collection inside the block; the caller runs :func:`collect` instead.

    Automatic collection is triggered by the number of new objects and would walk over all buffered messages again and
    again. Objects that exist when the process's first task starts, mostly modules, are frozen: collections skip them,
    which would otherwise pause every lane at the start of an epoch. They are collected once before, because a frozen
    cycle is never freed. Nothing is frozen later, so that garbage left by tasks is found.
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
    """Collect cycles that stages leave, when few messages are buffered or after a minute; runs until cancelled.

    The engine itself leaves no cycles. Automatic collection is off: see :func:`own_collector`.
    """
    last = time.monotonic()
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        if held() < _COLLECT_BELOW_MESSAGES or time.monotonic() - last > _COLLECT_AFTER_SECONDS:
            gc.collect()
            last = time.monotonic()
