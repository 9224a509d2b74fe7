"""Events of orders and their read model, shared by the tests of read models."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from keylane import Message, ReadModel, ReadModelField
from keylane.testing import MemoryRecord

if TYPE_CHECKING:
    import random

ORDERS = ReadModel(
    "orders",
    key="order_id",
    fields={
        "OrderPlaced": {"placed_at": datetime, "total": int, "city": ReadModelField(str, "address.city")},
        "OrderPaid": {"paid_at": datetime, "amount": float, "partly": bool},
        "order.shipped": {"shipped_at": datetime, "due": ReadModelField(datetime, "due")},
    },
    status={"placed": "placed_at", "paid": "paid_at", "shipped": "shipped_at"},
)

_PAYLOADS: dict[str, Any] = {
    "OrderPlaced": {
        "total": st.integers(-5, 5),
        "address": st.fixed_dictionaries(
            {"city": st.sampled_from(["Bonn", "Ürüm", "", "a\x00b", "\U0001f600"])}
        ),
    },
    "OrderPaid": {"amount": st.sampled_from([1, 2.5, -0.25, 1e300]), "partly": st.booleans()},
    "order.shipped": {"due": st.sampled_from(["2026-01-31T12:00:00Z", "0999-12-31T23:59:59.000001+01:00"])},
    "Chatter": {"said": st.integers(0, 3)},
}


@st.composite
def one_event(draw: st.DrawFn) -> dict[str, Any]:
    """Few keys, types, versions, times and ids, so that they meet; a version, an id or a field may be missing."""
    kind = draw(st.sampled_from(list(_PAYLOADS)))
    headers = [("event-type", kind.encode())]
    version = draw(st.none() | st.integers(0, 3) | st.just(2**63 - 1))
    if version is not None:
        headers.append(("event-version", b"%d" % version))
    event_id = draw(st.none() | st.sampled_from([b"e1", b"e10", b"e2", "é".encode(), b"\xff"]))
    if event_id is not None:
        headers.append(("event-id", event_id))
    value = draw(st.fixed_dictionaries({}, optional=_PAYLOADS[kind]))
    return {
        "key": draw(st.sampled_from([b"o1", b"o2", "ö".encode(), b"o\x00"])),
        "value": json.dumps(value).encode(),
        "headers": headers,
        "timestamp": draw(st.sampled_from([0, 1, 1_700_000_000_000, 1_700_000_000_001])),
        "topic": "orders.events",
        "partition": draw(st.integers(0, 1)),
        "offset": draw(st.integers(0, 3)),
    }


def many_events(
    rng: random.Random, count: int, keys: int, began: int = 1_700_000_000_000
) -> list[dict[str, Any]]:
    """The same without Hypothesis, and more of them. ``began``: a broker's retention takes old ones."""
    events = []
    for number in range(count):
        kind = rng.choice(list(_PAYLOADS))
        values: dict[str, dict[str, Any]] = {
            "OrderPlaced": {
                "total": rng.randrange(100),
                "address": {"city": rng.choice(["Bonn", "Ürüm", ""])},
            },
            "OrderPaid": {"amount": rng.choice([1, 2.5]), "partly": rng.random() < 0.5},
            "order.shipped": {"due": f"2026-01-{rng.randrange(1, 29):02d}T12:00:00Z"},
        }
        value = {name: found for name, found in values.get(kind, {}).items() if rng.random() < 0.9}
        headers = [("event-type", kind.encode())]
        if rng.random() < 0.5:
            headers.append(("event-version", b"%d" % rng.randrange(4)))
        if rng.random() < 0.7:
            headers.append(("event-id", b"e%d" % number))
        events.append(
            {
                "key": b"o%d" % rng.randrange(keys),
                "value": json.dumps(value).encode(),
                "headers": headers,
                "timestamp": began + rng.randrange(50),
                "topic": "orders.events",
                "partition": number % 3,
                "offset": number // 3,
            }
        )
    return events


def as_message(event: dict[str, Any]) -> Message:
    return Message(MemoryRecord(**event))


def folded(messages: list[Message]) -> dict[str, dict[str, Any]]:
    """The model by the rule itself: of every key and type, what the event of the highest rank says."""
    best: dict[tuple[str, str], Any] = {}
    for msg in messages:
        facts = ORDERS.facts(msg)
        if facts is not None and ((facts.key, facts.type) not in best or facts.rank > best[facts[:2]].rank):
            best[facts[:2]] = facts
    rows: dict[str, dict[str, Any]] = {}
    for (key, kind), facts in best.items():
        row = rows.setdefault(key, {"order_id": key, **dict.fromkeys(ORDERS.columns)})
        row |= dict(zip(ORDERS.fields[kind], facts.values, strict=True))
    for row in rows.values():
        row["status"] = _status(row)
    return rows


def _status(row: dict[str, Any]) -> str | None:
    times = [(row[f"{state}_at"], place) for place, state in enumerate(("placed", "paid", "shipped"))]
    known = [found for found in times if found[0] is not None]
    return ("placed", "paid", "shipped")[max(known)[1]] if known else None
