"""Handlers by event type through real Kafka: real tasks, one after another, without Spark."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Outcome, Retry, Transient
from keylane.testing import HistoryWriter
from support.tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Verdict
    from support.topics import Log

TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped", "Chatter")


@dataclass
class Paid:
    order: int
    amount: int


def shop(name: str, folder: Path, **settings: Any) -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        unhandled="ignore",
        retry=Retry(wait_initial=0.01, wait_max=0.02),
        observer=HistoryWriter(folder / "history"),
        **settings,
    )

    @app.on("OrderPlaced", "OrderShipped")
    async def moved(msg: Message) -> str:
        await asyncio.sleep(0.001)
        return f"{msg.type}"

    @app.on("OrderPaid")
    async def book(event: Paid, msg: Message) -> dict[str, int]:
        if event.order % 10 == 3 and msg.attempt == 1:
            raise Transient("busy")
        return {"booked": event.amount}

    @app.on("OrderPaid")
    def invoice(event: Paid) -> dict[str, int]:
        return {"invoiced": event.amount}

    return app


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_topic_of_many_types_keeps_entity_order(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], delivery: str
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=3)
    messages: list[dict[str, Any]] = []
    for number in range(1200):
        kind = TYPES[number % 4]
        value: dict[str, Any] = {"order": number % 50, "amount": number}
        if number == 501:
            value["amount"] = "a lot"  # of type OrderPaid: poison
        messages.append(
            {
                "key": b"o%d" % (number % 50),
                "value": json.dumps(value).encode(),
                "headers": [("event-type", kind.encode()), ("event-id", b"%d" % number)],
            }
        )
    sent = log.send(f"{name}.in", messages)
    runner = Runner(log, name, tmp_path, shop(name, tmp_path, delivery=delivery))
    assert len(runner.run()) == 1200
    verdict = judge(sent)
    assert verdict.repeats == 0
    assert verdict.counts.retried > 20
    assert {outcome: runner.outcomes.count(outcome) for outcome in set(runner.outcomes)} == {
        Outcome.OK: 899,
        Outcome.IGNORED: 300,
        Outcome.DEAD: 1,
    }
    (letter,) = log.read(f"{name}.dlq")
    assert letter.header("keylane-message") == b"no Paid: amount: Input should be a valid integer"

    app, expected = name.encode(), dict[bytes, list[bytes]]()
    for number, message in enumerate(messages):
        kind, of = TYPES[number % 4], expected.setdefault(message["key"], [])
        if kind == "OrderPaid" and number != 501:
            of += [app + b"/%d" % number, app + b":invoice/%d" % number]
        elif kind in ("OrderPlaced", "OrderShipped"):
            of.append(app + b"/%d" % number)
    found: dict[bytes, list[bytes]] = {}
    for row in log.read(f"{name}.out"):
        found.setdefault(row.key or b"", []).append(row.header("event-id") or b"")
    assert found == expected, "every result once, in the order of its entity"
    assert not log.lag(name, f"{name}.in")
