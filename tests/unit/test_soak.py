"""Many seeds of crashes, drains and slow brokers over one app: `make soak SEEDS=n`."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from keylane import App, Message, Poison, Transient
from keylane.testing import Crash, Drain, Harness, Pause

SEEDS = int(os.environ.get("KEYLANE_SEEDS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_schedule_of_faults_keeps_the_order_and_loses_nothing(seed: int) -> None:
    """Replay one with `pytest -m slow tests/unit/test_soak.py -k '[7]'`."""
    rng = random.Random(seed)
    app = App("soak", source="in", sink="out", commit_interval=rng.choice([0.05, 0.2, 1.0]))

    @app.stage
    async def first(msg: Message) -> bytes:
        await asyncio.sleep(random.Random(msg.offset).random() * 0.02)
        if int(msg.value) % 97 == 0:
            raise Poison("never")
        return bytes(msg.value)

    @app.stage
    async def second(msg: Message) -> bytes:
        await asyncio.sleep(0.001)
        if msg.attempt <= int(msg.value) % 13 - 10:
            raise Transient("not yet")
        return bytes(msg.value)

    faults: list[Crash | Drain | Pause] = []
    for _ in range(rng.randrange(4)):
        at = rng.random() * 4
        faults.append(Crash(at=at) if rng.random() < 0.5 else Drain(at=at))
    faults.append(Pause(at=rng.random() * 3, for_=rng.random()))
    run = Harness(
        app,
        partitions=rng.randrange(1, 5),
        seed=seed,
        faults=faults,
        latency=(0.001, 0.03),
        holes=rng.random() * 0.2,
    )
    keys = rng.choice([3, 20, 200])
    for number in range(600):
        run.send(key=b"k%d" % rng.randrange(keys), value=b"%d" % number, at=number * 0.005)
    result = run.run()
    result.verdict.raise_if_bad()
    done = {record.value for record in result.results} | {letter.value for letter in result.dead}
    assert done == {b"%d" % number for number in range(600)}
