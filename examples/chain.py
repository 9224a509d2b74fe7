"""Four apps in a chain, joined by topics: check, price, charge, ship. `python examples/chain.py` runs and judges it.

Every app keeps the order inside a key, and writes its results where the next app's keys live: so the order of each
customer's orders holds from the first topic to the last, although one order in ten fails somewhere at first. What
travels along with every order, without a line of code: its event id (so that nothing runs twice if an app crashes and
repeats itself), the trace context of W3C, and the time at which the first message was written.

Here the four run in one process, on one Spark with a slot for each. As four processes, on any machines:

    keylane run chain:check      keylane run chain:price      keylane run chain:charge      keylane run chain:ship
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any
from zlib import crc32

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from keylane import App, Message, Poison, Publisher, Retry, Transient
from keylane.broker import Broker
from keylane.spark import session

TOPICS = ("chain.orders", "chain.checked", "chain.priced", "chain.charged", "chain.shipped")
PARTITIONS = 4
SOON = Retry(wait_initial=0.02, wait_max=0.1)

check = App("chain-check", source=TOPICS[0], sink=TOPICS[1], decode="json", origin_time=True)
price = App("chain-price", source=TOPICS[1], sink=TOPICS[2], decode="json", retry=SOON)
charge = App("chain-charge", source=TOPICS[2], sink=TOPICS[3], decode="json", retry=SOON)
ship = App("chain-ship", source=TOPICS[3], sink=TOPICS[4], decode="json")
APPS = (check, price, charge, ship)


def unlucky(msg: Message, app: str) -> bool:
    """Whether this app fails for this order when it first tries: one in twenty, always the same ones."""
    return msg.attempt == 1 and crc32(f"{app}/{msg.event_id}".encode()) % 20 == 0


@check.stage
async def complete(msg: Message) -> dict[str, Any]:
    if "pieces" not in msg.value:
        raise Poison("an order of nothing")
    return dict(msg.value)


@price.stage
async def multiply(msg: Message) -> dict[str, Any]:
    if unlucky(msg, "price"):
        raise Transient("the price list is being written")
    return {**msg.value, "total": 3 * msg.value["pieces"]}


@charge.stage
async def pay(msg: Message) -> dict[str, Any]:
    if unlucky(msg, "charge"):
        raise Transient(
            "the bank is busy"
        )  # it was asked with msg.request_id, and with msg.trace in its headers
    return {**msg.value, "paid": True}


@ship.stage
async def send(msg: Message) -> dict[str, Any]:
    return {**msg.value, "under way for": round(time.time() * 1000) - (msg.origin_time or 0)}


@dataclass(frozen=True, slots=True)
class Sent:
    """An order as it was published."""

    customer: str
    event_id: str
    trace: str


def publish(bootstrap: str, count: int, rate: float) -> list[Sent]:
    """Orders of fifty customers, at this rate per second."""
    sent = []
    began = time.monotonic()
    with Publisher(TOPICS[0], bootstrap=bootstrap, type="OrderPlaced") as orders:
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            order = Sent(
                customer=f"customer-{number * 7 % 50}",
                event_id=f"order-{number}",
                trace=f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
            )
            orders.send(
                {"order": number, "pieces": number % 9 + 1},
                key=order.customer,
                event_id=order.event_id,
                headers=[("traceparent", order.trace.encode())],
            )
            sent.append(order)
    return sent


def read(bootstrap: str, count: int, patience: float = 60.0) -> list[Message]:
    """This many messages of the last topic, in partition order; fewer if they do not come in time."""
    consumer: Any = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "chain-reader", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(TOPICS[-1], partition, 0) for partition in range(PARTITIONS)])
    found: list[Message] = []
    deadline = time.monotonic() + patience
    while len(found) < count and time.monotonic() < deadline:
        found += [Message(record) for record in consumer.consume(500, 0.2) if record.error() is None]
    consumer.close()
    return found


def judge(sent: list[Sent], found: list[Message]) -> list[str]:
    """Return the broken promises; empty when all is well."""
    wrong = []
    for customer in {order.customer for order in sent}:
        ids = [order.event_id for order in sent if order.customer == customer]
        came = [msg.event_id for msg in found if msg.key == customer.encode()]
        if came != ids:
            wrong.append(f"{customer}: {came} instead of {ids}")
    traces = {order.event_id: order.trace for order in sent}
    wrong += [
        f"{msg.event_id}: another trace"
        for msg in found
        if msg.trace.get("traceparent") != traces[msg.event_id]
    ]
    wrong += [f"{msg.event_id}: no origin time" for msg in found if msg.header("origin-time") is None]
    return wrong


def main() -> int:
    """Run the chain and report the result."""
    parser = argparse.ArgumentParser(description="Four apps in a chain.")
    parser.add_argument("--messages", type=int, default=3_000)
    parser.add_argument("--rate", type=float, default=500.0, help="orders a second (%(default)s)")
    given = parser.parse_args()
    with ExitStack() as stack:
        bootstrap = os.environ.get("KEYLANE_BOOTSTRAP") or stack.enter_context(Broker()).bootstrap
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for created in admin.create_topics([NewTopic(name, PARTITIONS) for name in TOPICS]).values():
            created.result(10)
        spark = session(f"local[{len(APPS)}]", "chain", lanes_only=True)
        stack.callback(spark.stop)
        for app in APPS:  # a slot for each: a query whose task gets none would wait for the others to end
            query = app.start(spark, bootstrap=bootstrap, tasks=1)
            stack.callback(query.stop)
        sent = publish(bootstrap, given.messages, given.rate)
        found = read(bootstrap, len(sent))
        wrong = judge(sent, found)
    for line in wrong[:5]:
        print(line, file=sys.stderr)
    took = sorted(msg_took(msg) for msg in found)
    if took:
        print(
            f"{len(found):,} of {len(sent):,} orders through four apps, each customer's in order: "
            f"{'yes' if not wrong else 'NO'}; p50 {median(took):.0f} ms, p99 {quantiles(took, n=100)[98]:.0f} ms"
        )
    return 0 if found and not wrong else 1


def msg_took(msg: Message) -> int:
    """Milliseconds from the first topic to the last stage."""
    import json  # noqa: PLC0415 - here only

    return int(json.loads(msg.value)["under way for"])


if __name__ == "__main__":
    sys.exit(main())
