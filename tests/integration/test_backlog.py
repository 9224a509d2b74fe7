"""Epochs over a backlog that end before it is done, against a real broker, without Spark."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from keylane import App, Message
from keylane.state.topic import order_plan
from support.planned import Planned

if TYPE_CHECKING:
    from support.topics import Log

pytestmark = pytest.mark.timeout(60)


def slow_app(name: str) -> App:
    app = App(name, source=f"{name}.in", sink=f"{name}.out")

    @app.stage
    async def work(msg: Message) -> bytes:
        await asyncio.sleep(0.02)
        return bytes(msg.value)

    return app


@pytest.mark.parametrize("ends", ["by its time", "by a command"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_backlog_takes_as_many_epochs_as_it_needs(log: Log, name: str, ends: str, split: bool) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    log.send(f"{name}.in", [{"key": b"k%d" % (n % 2), "value": b"%d" % n} for n in range(200)])
    app = slow_app(name)
    run = Planned(log, app, tasks=2 if split else 1, split=split, epoch=1 if ends == "by its time" else 20)
    epochs = 0
    while run.plan():
        if ends == "by a command" and epochs < 2:
            order_plan(log.settings, app.spec.state, 1, "r1", number=epochs + 1, tasks=2 if split else 1)
        run.attempt()
        run.commit()
        epochs += 1
    assert len(log.read(f"{name}.out")) == 200
    assert epochs > 1
