"""The watch over a task's event loop, on a real loop and a real clock."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from keylane import App, Message
from keylane.engine.loop_watch import LoopWatch, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

app = App("shop", source="in")


def ask_the_bank() -> None:
    time.sleep(0.25)


@app.stage
async def blocks(_msg: Message) -> None:
    ask_the_bank()


@app.stage
async def waits(_msg: Message) -> None:
    await asyncio.sleep(0.25)


def told(caplog: pytest.LogCaptureFixture, stage: Callable[..., Any], times: int = 1) -> list[str]:
    async def run() -> None:
        with watched(app.spec.stages):
            await asyncio.sleep(0.06)
            message: Any = SimpleNamespace()
            for _ in range(times):
                await stage(message)

    asyncio.run(run())
    return [record.getMessage() for record in caplog.records]


def test_stage_that_blocks_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = told(caplog, blocks, times=2)
    assert line.startswith(f"stage 'blocks' blocks the event loop for more than 0.1 s, at {__file__}:")
    assert "in ask_the_bank: no other message of its task runs" in line


def test_stage_that_waits_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, waits, times=2) == []


def test_many_short_calls_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch({blocks.__code__: "blocks"})
    for look in range(50):  # another call at every look
        call: Any = SimpleNamespace(f_code=blocks.__code__, f_lineno=7, f_back=None)
        watch._sample(call, look * 0.02)
    assert caplog.records == []


def test_stage_is_named_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch({})
    frame: Any = SimpleNamespace(f_code=blocks.__code__, f_lineno=7)
    for now in (0.0, 30.0, 59.0, 61.0):
        watch._say("blocks", frame, now)
    assert len(caplog.records) == 2


def test_app_without_async_stages_is_not_watched() -> None:
    watch = LoopWatch({})
    watch.start()  # needs no loop
    watch.stop()
