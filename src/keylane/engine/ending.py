"""No stage may outlive its task: it would still work on a message that another task runs again.

A thread, or a coroutine that swallows its cancellation, cannot be ended; the process it lives in can. Spark runs the
task again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.engine import Engine
    from keylane.engine.pipeline import Step

log = logging.getLogger("keylane.task")

_CODE = 70


async def end_stages(engine: Engine, owner: str) -> None:
    """Cancel what runs. Does not return when something runs on all the same."""
    await engine.abort()
    if engine.stubborn:
        _end_process(owner, "a stage swallows its cancellation and goes on")


async def end_threads(steps: Sequence[Step], owner: str, timeout: float) -> None:  # noqa: ASYNC109
    """Wait for the threads of ``def`` stages; does not return when ``timeout`` seconds were not enough."""
    deadline = time.monotonic() + timeout
    while busy := [step.name for step in steps if step.threads]:
        if time.monotonic() > deadline:
            _end_process(owner, f"stages {busy} are still running")
        await asyncio.sleep(0.02)


def _end_process(owner: str, why: str) -> NoReturn:
    log.error("%s: %s; this process ends with it", owner, why)
    os._exit(_CODE)
