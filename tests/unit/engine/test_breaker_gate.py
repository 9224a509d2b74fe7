"""The gate before a stage whose breaker is open: which of the waiting lanes it lets in, and when."""

from __future__ import annotations

import asyncio
from typing import Any

from keylane import Breaker
from keylane.engine.breaker_gate import BreakerGate
from keylane.testing.clock import run_virtual


def test_a_gate_lets_another_in_when_a_lane_stays_away() -> None:
    """A lane that was let in may not come: it is held for a redrive, or its message is passed over."""
    let_in: dict[str, float] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        probes: list[asyncio.Task[None]] = []

        async def downstream(_message: Any) -> None:
            if loop.time() < 0.5:
                raise ConnectionError("down")
            await asyncio.sleep(0.25)

        def resume(lane: Any) -> None:
            let_in[lane] = loop.time()
            if lane in ("probe", "other probe"):
                probes.append(loop.create_task(guarded(lane)))

        breaker = Breaker(minimum=1, window=2, open_for=0.5, probes=2)
        gate = BreakerGate("downstream", breaker, loop=loop, transient=lambda _error: True)
        gate.attach(resume=resume, tell=lambda _stage, _state: None)
        guarded: Any = gate.guard(downstream)
        await asyncio.gather(guarded("opens it"), return_exceptions=True)
        lanes: Any = ("probe", "other probe", "held", "passed over", "waits")
        for lane in lanes[:2]:
            gate.wait(lane)
        await asyncio.sleep(0.625)  # both probes run
        for lane in lanes[2:]:
            gate.wait(lane)
        await asyncio.sleep(10)
        gate.close()

    run_virtual(main(), start=0.0, limit=100.0)
    assert let_in == {"probe": 0.5, "other probe": 0.5, "held": 0.75, "passed over": 0.75, "waits": 1.25}
