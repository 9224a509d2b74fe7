"""A model that scores payments in batches: `python examples/scoring.py` runs it and judges.

Each card is a lane, so its payments are scored in their order; the model is called once for the heads of up to 256
lanes, with an Arrow table. It is a logistic regression in eight lines of `pyarrow.compute`: put any other in its place
that is dear to call and cheap to call for many.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from keylane import App, Message, Poison, Publisher
from keylane.broker import Broker
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONS = 4
CARDS = 500

app = App("scoring", source="payments", sink="payments.scored", decode="json")


@dataclass(frozen=True, slots=True)
class Model:
    """A logistic regression."""

    amount: float
    abroad: float
    night: float
    bias: float

    def predict(self, payments: pa.StructArray) -> pa.Array:
        """The chance that each is a fraud."""

        def feature(name: str) -> pa.Array:
            return pc.cast(pc.struct_field(payments, name), pa.float64())

        night = pc.cast(pc.less(feature("hour"), 6.0), pa.float64())
        score = pc.multiply(pc.ln(pc.add(feature("amount"), 1.0)), self.amount)
        score = pc.add(score, pc.multiply(feature("abroad"), self.abroad))
        score = pc.add(score, pc.add(pc.multiply(night, self.night), self.bias))
        return pc.divide(1.0, pc.add(pc.exp(pc.negate(score)), 1.0))


@app.resource
def model() -> Iterator[Model]:
    """Loaded once in each task."""
    yield Model(amount=0.4, abroad=1.5, night=0.8, bias=-4.0)


@app.stage
async def check(msg: Message) -> dict[str, Any]:
    """A message that is not a payment does not reach the model."""
    payment = msg.value
    if not isinstance(payment, dict) or not all(
        type(payment.get(name)) in (int, float) for name in ("amount", "abroad", "hour")
    ):
        raise Poison("no payment: it needs the numbers 'amount', 'abroad' and 'hour'")
    return payment


@app.batch_stage(max_size=256, max_wait=0.02, max_concurrency=1)
def score(table: pa.Table, model: Model) -> list[dict[str, Any]]:
    """One call for many cards."""
    chances = model.predict(table["value"].combine_chunks())
    flags = pc.greater(chances, 0.5).to_pylist()
    return [
        {**payment, "fraud": round(chance, 4), "stop": flag, "batch": len(table)}
        for payment, chance, flag in zip(table["value"].to_pylist(), chances.to_pylist(), flags, strict=True)
    ]


def publish(bootstrap: str, count: int) -> dict[bytes, list[str]]:
    """Payments of many cards, one in a hundred malformed; the event ids that will be scored, by card."""
    rng = random.Random(1)
    expected: dict[bytes, list[str]] = {}
    with Publisher(app.source, bootstrap=bootstrap, type="Paid") as payments:
        for number in range(count):
            card = f"card-{rng.randrange(CARDS)}"
            payment = {
                "amount": rng.randrange(1, 5000),
                "abroad": rng.randrange(2),
                "hour": rng.randrange(24),
            }
            if number % 100 == 99:
                del payment["amount"]
            else:
                expected.setdefault(card.encode(), []).append(f"payment-{number}")
            payments.send(payment, key=card, event_id=f"payment-{number}")
    return expected


def read(bootstrap: str, count: int) -> list[Message]:
    """This many results of the sink."""
    consumer: Any = Consumer({"bootstrap.servers": bootstrap, "group.id": "scoring-reader"})
    consumer.assign([TopicPartition(str(app.sink), partition, 0) for partition in range(PARTITIONS)])
    found: list[Message] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += [Message(record) for record in consumer.consume(1000, 0.2) if record.error() is None]
    consumer.close()
    return found


def judge(expected: dict[bytes, list[str]], found: list[Message]) -> list[str]:
    """Cards whose payments were not scored one by one in their order; empty when all is well."""
    came: dict[bytes, list[str]] = {}
    for msg in found:
        came.setdefault(msg.key or b"", []).append(msg.event_id)
    return [card.decode() for card in expected.keys() | came.keys() if came.get(card) != expected.get(card)]


def main() -> int:
    """Run it and report the result."""
    parser = argparse.ArgumentParser(description="A model that scores payments in batches.")
    parser.add_argument("--messages", type=int, default=20_000)
    given = parser.parse_args()
    with ExitStack() as stack:
        bootstrap = os.environ.get("KEYLANE_BOOTSTRAP") or stack.enter_context(Broker()).bootstrap
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for created in admin.create_topics(
            [NewTopic(name, PARTITIONS) for name in (app.source, str(app.sink))]
        ).values():
            created.result(10)
        expected = publish(bootstrap, given.messages)
        spark = session("local[2]", "scoring")
        stack.callback(spark.stop)
        app.start(spark, bootstrap=bootstrap, available_now=True).awaitTermination()
        found = read(bootstrap, sum(map(len, expected.values())))
    sizes = [json.loads(msg.value)["batch"] for msg in found] or [0]
    sound = not judge(expected, found)
    print(
        f"{len(found):,} payments of {len(expected):,} cards scored, the mean one in a call with "
        f"{sum(sizes) / len(sizes) - 1:.0f} others; each card's in order: {'yes' if sound else 'NO'}"
    )
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
