"""Four ways in which events out of order do harm, each with what prevents it; and without that, the harm."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Retry, Transient, VersionOrdering
from keylane.testing import Crash, Drain, Harness, RunResult

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=8, wait_initial=0.1, wait_max=0.5)
LIFE = ("OrderPlaced", "OrderPaid", "OrderShipped")


class Orders:
    """The database: an order's status, and the refused events. Each handler is slower than the one after it."""

    def __init__(self, **settings: Any) -> None:
        self.status: dict[bytes, list[str]] = {}
        self.refused = 0
        self.app = App("orders", source="in", sink="out", retry=SOON, **settings)
        for number, kind in enumerate(LIFE):
            self._handler(kind, LIFE[number - 1] if number else None, 0.3 - number * 0.1)

    def _handler(self, kind: str, needs: str | None, takes: float) -> None:
        async def handle(msg: Message) -> str:
            await asyncio.sleep(takes)
            known = self.status.setdefault(msg.key or b"", [])
            if needs is not None and needs not in known:
                self.refused += 1
                raise Transient(f"no {needs} yet")
            known.append(kind)
            return kind

        handle.__name__ = f"on_{kind}"
        self.app.on(kind)(handle)


def tell(
    app: App, events: Iterable[tuple[bytes, str, int]], *faults: Crash | Drain, step: float = 0.01
) -> RunResult:
    """Key, type and version."""
    harness = Harness(app, faults=faults, latency=(0.001, 0.02))
    for number, (key, kind, version) in enumerate(events):
        headers = [("event-type", kind.encode()), ("event-version", b"%d" % version)]
        harness.send(
            key=key, value=json.dumps({"version": version}).encode(), headers=headers, at=number * step
        )
    return harness.run()


@pytest.mark.parametrize("faults", [(), (Drain(at=0.4), Crash(at=1.0))])
def test_story_paid_is_never_handled_before_placed(faults: tuple[Any, ...]) -> None:
    """Separate handlers that work at the same time would find no order to pay for: one lane for all types."""
    orders = Orders()
    keys = [b"o%d" % n for n in range(50)]
    result = tell(orders.app, [(key, kind, 0) for kind in LIFE for key in keys], *faults)
    result.verdict.raise_if_bad()
    assert orders.refused == 0
    assert all(list(dict.fromkeys(orders.status[key])) == list(LIFE) for key in keys)


def test_paid_that_was_written_before_placed_waits_for_it() -> None:
    """Two services write to the topic, and the quicker one pays: no lane can repair the order of its log."""
    wrong = [(b"o%d" % n, LIFE[version - 1], version) for n in range(20) for version in (2, 1, 3)]
    without = Orders(failure_guard=None)
    result = tell(without.app, wrong)
    assert [dead.message for dead in result.dead[:1]] == ["no OrderPlaced yet"], (
        "it was retried in vain, in place"
    )
    assert len(result.dead) == 40, "and shipped was not paid"

    orders = Orders(versions=VersionOrdering())
    result = tell(orders.app, wrong, Crash(at=0.3))
    result.verdict.raise_if_bad()
    assert (orders.refused, result.dead) == (0, [])
    assert all(list(dict.fromkeys(seen)) == list(LIFE) for seen in orders.status.values())


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_shipped_before_paid_is_put_right(order: tuple[int, ...]) -> None:
    orders = Orders(versions=VersionOrdering())
    result = tell(
        orders.app, [(b"o%d" % n, LIFE[version - 1], version) for version in order for n in range(20)]
    )
    result.verdict.raise_if_bad()
    assert all(seen == list(LIFE) for seen in orders.status.values())
    assert len(orders.status) == 20


def products(table: dict[bytes, int], **settings: Any) -> App:
    """Takes over the whole state of a product, as it comes."""
    app = App("products", source="in", sink="out", retry=SOON, **settings)

    @app.on("ProductUpdated")
    async def update(msg: Message) -> None:
        await asyncio.sleep(0.01)
        table[msg.key or b""] = json.loads(msg.value)["version"]

    return app


def test_story_newer_update_is_not_undone_by_an_older_one() -> None:
    rng = random.Random(1)
    keys = [b"p%d" % n for n in range(30)]
    updates = []
    for key in keys:
        order = list(range(1, 8))
        rng.shuffle(order)
        updates.append([(key, "ProductUpdated", version) for version in order])
    events = [event for turn in zip(*updates, strict=True) for event in turn]
    harmed: dict[bytes, int] = {}
    tell(products(harmed), events)
    assert any(version < 7 for version in harmed.values()), "without versions the last one in the log wins"

    for versions in (
        VersionOrdering(),
        VersionOrdering(on_gap="process"),
        VersionOrdering(on_gap="process", first=None),
    ):
        table: dict[bytes, int] = {}
        result = tell(products(table, versions=versions), events, Drain(at=0.5), Crash(at=1.2))
        result.verdict.raise_if_bad()
        assert set(table.values()) == {7}, versions
        assert len(table) == 30


def test_story_retried_update_is_not_overtaken() -> None:
    """A queue that puts a failed message behind the others would apply 1 after 2."""
    table: dict[bytes, list[int]] = {}
    app = App("products", source="in", sink="out", retry=SOON)

    @app.on("ProductUpdated")
    async def update(msg: Message) -> None:
        await asyncio.sleep(0.01)
        version = json.loads(msg.value)["version"]
        if msg.attempt < 4 and version % 3 == 1:
            raise Transient("the database is away")
        table.setdefault(msg.key or b"", []).append(version)

    events = [(b"p%d" % n, "ProductUpdated", version) for version in range(1, 8) for n in range(20)]
    result = tell(app, events, Drain(at=0.6))
    result.verdict.raise_if_bad()
    assert result.verdict.counts.retried >= 60
    assert all(seen == [1, 2, 3, 4, 5, 6, 7] for seen in table.values())
