"""The rate of a stage, with the real broker and two tasks that share the keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from keylane import App, Message, Rate
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.slots import SLOTS, Slots
from support.tasks import Runner

if TYPE_CHECKING:
    from pathlib import Path

    from support.topics import Log

pytestmark = pytest.mark.timeout(120)


def test_two_tasks_share_the_rate_of_a_stage(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    app = App(name, source=f"{name}.in", sink=f"{name}.out", commit_interval=0.2)
    starts: list[float] = []

    @app.stage(rate=Rate(300))
    async def work(msg: Message) -> bytes:
        starts.append(time.monotonic())
        return bytes(msg.value)

    log.send(f"{name}.in", [{"key": b"k%d" % (n % 200), "value": b"%d" % n} for n in range(2400)])
    half = SLOTS // 2
    plan = Assignment(
        (
            (AssignedRange(0, Slots(0, half - 1)),),
            (AssignedRange(0, Slots(half, SLOTS - 1)),),
        )
    )
    done = Runner(log, name, tmp_path, app).run_plan(plan)
    assert len(done) == 2400
    starts.sort()
    for begin in starts[:: max(1, len(starts) // 50)]:
        within = sum(begin <= at < begin + 4 for at in starts)
        assert within <= 1.05 * 4 * 300, "never more than the rate"
    # Of the middle, when both tasks have keys.
    first, last = starts[len(starts) // 10], starts[len(starts) // 2]
    assert (len(starts) * 0.4) / (last - first) >= 0.85 * 300, "and not much less"
