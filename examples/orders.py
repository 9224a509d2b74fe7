"""An order dispatcher with a read model in SQLite.

One topic has the events of all types; handlers take those of their type, in the one order of their order. A read model
keeps a row per order: each event type writes fields of its own, and the status is derived when it is read. Events here
are shuffled before they are sent, some are sent twice, and the app is stopped in the middle and started again: the
table is the one that events in order would give. A table on Spark, made from the same topic, has the same rows.

    python examples/orders.py
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from playground import Playground, command, verdict

from keylane import App, Message, Publisher, ReadModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.readmodel.sqlite import SqliteTable

YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
"""Not longer ago: a broker deletes what is old."""
TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")

orders = ReadModel(
    "orders",
    key="order_id",
    fields={
        "OrderPlaced": {"placed_at": datetime, "customer": str, "total": int},
        "OrderPaid": {"paid_at": datetime, "paid": int},
        "OrderShipped": {"shipped_at": datetime, "carrier": str},
    },
    status={"placed": "placed_at", "paid": "paid_at", "shipped": "shipped_at"},
)


@dataclass
class OrderPaid:
    paid: int


def dispatcher(database: Path) -> App:
    """Confirmations of payments go to the sink; every event goes into the read model."""
    app = App(
        "example-orders", source="example-orders.events", sink="example-orders.confirmed", unhandled="ignore"
    )

    @app.resource
    def table() -> Iterator[SqliteTable]:
        with orders.sqlite(database) as opened:
            yield opened

    @app.on(*TYPES)
    def keep(msg: Message, table: SqliteTable) -> None:
        table.apply(msg)

    @app.on("OrderPaid")  # after the first one, and retried on its own
    async def confirm(event: OrderPaid, msg: Message) -> dict[str, Any]:
        return {"order": (msg.key or b"").decode(), "paid": event.paid, "request": msg.request_id}

    return app


def events(count: int) -> list[dict[str, Any]]:
    """One, two or all three events of every order, an hour apart; and events that have no handler."""
    made: list[dict[str, Any]] = []
    for number in range(count // 3):
        values: tuple[dict[str, Any], ...] = (
            {"customer": f"c-{number % 9}", "total": number},
            {"paid": number},
            {"carrier": "post"},
        )
        for step in range(1 + number % 3):
            at = YESTERDAY + timedelta(seconds=number, hours=step)
            made.append(
                {
                    "value": values[step],
                    "key": f"order-{number}",
                    "type": TYPES[step],
                    "event_id": f"{TYPES[step]}-{number}",
                    "timestamp": round(at.timestamp() * 1000),
                }
            )
    made += [
        {"value": {}, "key": f"order-{n}", "type": "OrderViewed", "event_id": f"view-{n}"} for n in range(5)
    ]
    return made


def main(messages: int = 3000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether the table is what events in order would have given."""
    rng = random.Random(1)
    made = events(messages)
    sent = [*made, *rng.sample(made, len(made) // 10)]
    rng.shuffle(sent)
    with Playground(bootstrap, spark) as place:
        database = place.folder / "orders.db"
        app = dispatcher(database)
        place.topics(app.source, str(app.sink))
        for half in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):  # a stop, and a start, in the middle
            with Publisher(app.source, bootstrap=place.bootstrap) as source:
                for event in half:
                    source.send(**event)
            place.run(app)
        with orders.sqlite(database) as table:
            rows = table.rows()
        lake = orders.table(place.spark, place.folder / "lake")
        lake.update(app.source, bootstrap=place.bootstrap)
        on_spark = sorted(lake.frame().toArrow().to_pylist(), key=lambda row: row["order_id"])
        confirmed = place.read(str(app.sink), sum(event["type"] == "OrderPaid" for event in made))
    statuses = Counter(row["status"] for row in rows)
    print(
        f"{len(sent):,} events, shuffled and some twice, of {len(rows):,} orders: {dict(sorted(statuses.items()))}"
    )
    return verdict(
        every_order_has_the_status_of_its_last_event=statuses
        == Counter(("placed", "paid", "shipped")[n % 3] for n in range(messages // 3)),
        every_row_is_what_events_in_order_would_have_given=sorted(rows, key=by_id)
        == sorted(in_order(made), key=by_id),
        the_table_on_Spark_has_the_same_rows=on_spark == sorted(rows, key=by_id),
        every_payment_was_confirmed_once=sorted(msg.event_id for msg in confirmed)
        == sorted(f"{event['event_id']}/confirm" for event in made if event["type"] == "OrderPaid"),
    )


def by_id(row: dict[str, Any]) -> str:
    return str(row["order_id"])


def in_order(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table, written by hand."""
    rows: dict[str, dict[str, Any]] = {}
    for event in made:
        if event["type"] not in TYPES:
            continue
        row = rows.setdefault(event["key"], {"order_id": event["key"], **dict.fromkeys(orders.columns)})
        at = datetime.fromtimestamp(event["timestamp"] / 1000, UTC)
        state = {"OrderPlaced": "placed", "OrderPaid": "paid", "OrderShipped": "shipped"}[event["type"]]
        row |= {**event["value"], f"{state}_at": at, "status": state}
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(command(main, messages=3000))
