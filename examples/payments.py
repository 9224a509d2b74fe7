"""Payments, exactly once: a worker dies in the middle, and every booking exists once.

With ``delivery="exactly_once"`` bookings, dead letters and progress are one transaction, so whoever reads what is
committed sees each booking once, in the order of its account, although a process was killed with bookings in flight. A
payment of nothing is poison.

    python examples/payments.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground import Playground, by_key, command, verdict

from keylane import App, Message, Poison, Publisher

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def bank(folder: Path, dies_at: int) -> App:
    """Books payments. Its process is killed, as by the kernel, at payment number ``dies_at``, once."""
    app = App(
        "example-payments",
        source="example-payments.in",
        sink="example-payments.booked",
        decode="json",
        delivery="exactly_once",
    )
    marker = str(folder / "died")

    @app.stage
    async def check(msg: Message) -> dict[str, Any]:
        if msg.value["amount"] == 0:
            raise Poison("a payment of nothing")
        return dict(msg.value)

    @app.stage
    def book(msg: Message) -> str:
        if msg.value["number"] == dies_at and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{msg.value['number']} {msg.value['amount']}"  # the bank is asked with msg.request_id

    return app


def main(messages: int = 4000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether every payment is booked once, in the order of its account."""
    accounts = 40
    expected: dict[str, list[str]] = {}
    with Playground(bootstrap, spark) as place:
        app = bank(place.folder, dies_at=messages // 2)
        place.topics(app.source, str(app.sink))
        with Publisher(app.source, bootstrap=place.bootstrap, type="Paid") as payments:
            for number in range(messages):
                amount = 0 if number == 11 else number % 100 + 1
                key = f"account-{number % accounts}"
                payments.send({"number": number, "amount": amount}, key=key, event_id=f"p-{number}")
                if amount:
                    expected.setdefault(key, []).append(f"{number} {amount}")
        place.run(app)
        found = by_key(place.read(str(app.sink), messages - 1))
        letters = place.read(app.dlq, 1)
        died = (place.folder / "died").exists()
    total = sum(int(booked.split()[1]) for each in found.values() for booked in each)
    print(f"{sum(map(len, found.values())):,} payments of {len(found)} accounts booked, {total:,} in all")
    return verdict(
        a_worker_was_killed_in_the_middle=died,
        every_payment_is_booked_once_in_the_order_of_its_account=found == expected,
        the_payment_of_nothing_is_the_one_dead_letter=[
            json.loads(letter.value)["number"] for letter in letters
        ]
        == [11],
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=4000))
