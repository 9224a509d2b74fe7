"""Orders, fanned out into items by key: one message, many results, in two topics.

The handler of an order yields one result for each item, with the product as its key, and an invoice for another topic.
All results of an order are written together, in one transaction, and a worker dies in the middle. Each product's items
come in the order of the log, because all orders of a region are in one lane.

    python examples/order_items.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from playground import Playground, by_key, command, verdict

from keylane import App, Message, Poison, Publisher, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

PRODUCTS = 7


@dataclass
class Item:
    """One line of an order."""

    order: int
    count: int


@dataclass
class Order:
    """What a shop sends; the counts are by product."""

    number: int
    items: dict[str, int]


def warehouse(folder: Path, dies_at: int) -> App:
    """Splits orders. Its process is killed, as by the kernel, in the middle of order number ``dies_at``, once."""
    app = App(
        "example-items",
        source="example-items.orders",
        sinks=("example-items.items", "example-items.invoices"),
        delivery="exactly_once",
    )
    marker = str(folder / "died")

    @app.stage
    def split(order: Order, msg: Message) -> Iterator[Result]:
        region = (msg.key or b"").decode()
        for product, count in order.items.items():
            yield Result(Item(order=order.number, count=count), key=f"{region}/{product}")
            if order.number == dies_at and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if not order.items:
            raise Poison("an order of nothing")
        total = sum(order.items.values())
        yield Result({"order": order.number, "items": total}, topic="example-items.invoices")

    return app


def ordered_items(number: int) -> dict[str, int]:
    """From one to four products; nothing in order 11."""
    return (
        {} if number == 11 else {f"p{(number + step) % PRODUCTS}": step + 1 for step in range(number % 4 + 1)}
    )


def main(messages: int = 2000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether every item and invoice is there once, in order."""
    items: dict[str, list[int]] = {}
    invoices: dict[str, list[int]] = {}
    with Playground(bootstrap, spark) as place:
        app = warehouse(place.folder, dies_at=messages // 2)
        place.topics(app.source, *app.sinks)
        with Publisher(app.source, bootstrap=place.bootstrap, type="Ordered") as shop:
            for number in range(messages):
                region, content = f"region-{number % 20}", ordered_items(number)
                shop.send({"number": number, "items": content}, key=region, event_id=f"o-{number}")
                for product in content:
                    items.setdefault(f"{region}/{product}", []).append(number)
                if content:
                    invoices.setdefault(region, []).append(number)
        place.run(app)
        sent = sum(map(len, items.values()))
        of_items = place.read("example-items.items", sent)
        of_invoices = place.read("example-items.invoices", messages - 1)
        letters = place.read(app.dlq, 1)
        died = (place.folder / "died").exists()
    found = {key: [json.loads(each)["order"] for each in values] for key, values in by_key(of_items).items()}
    billed = {
        key: [json.loads(each)["order"] for each in values] for key, values in by_key(of_invoices).items()
    }
    print(
        f"{messages:,} orders became {len(of_items):,} items of {len(found)} keys and {len(of_invoices):,} invoices"
    )
    return verdict(
        a_worker_was_killed_in_the_middle=died,
        every_item_is_there_once_in_the_order_of_its_key=found == items,
        every_invoice_is_there_once_in_the_order_of_its_region=billed == invoices,
        the_order_of_nothing_is_the_one_dead_letter_and_left_no_results=[
            json.loads(letter.value)["number"] for letter in letters
        ]
        == [11],
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=2000))
