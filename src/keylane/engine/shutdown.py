"""Shutdown of stages that outlive their task, which would still process a message that another task runs again.

A thread, or a coroutine that swallows its cancellation, cannot be ended, but its process can. Spark then runs the task
again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.stages import Step

log = logging.getLogger("keylane.task")

_EXIT_CODE = 70


class Abortable(Protocol):
    """An engine, as far as its end is concerned."""

    async def abort(self) -> bool:
        """Cancel what runs; False if a stage keeps running."""


async def end_stages(engine: Abortable, owner: str) -> None:
    """Cancel all running stages. Ends the process if one of them keeps running."""
    if not await engine.abort():
        _end_process(owner, "a stage swallows its cancellation and keeps running")


async def end_threads(steps: Sequence[Step], owner: str, timeout: float) -> None:  # noqa: ASYNC109
    """Wait for the threads of ``def`` stages. Ends the process if they run longer than ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while busy := [step.name for step in steps if step.threads]:
        if time.monotonic() > deadline:
            _end_process(owner, f"stages {busy} are still running")
        await asyncio.sleep(0.02)


def _end_process(owner: str, why: str) -> NoReturn:
    log.error("%s: ending this process: %s", owner, why)
    os._exit(_EXIT_CODE)
