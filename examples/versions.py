"""Product updates that carry versions: whatever order they come in, each product ends with its newest state.

Two writers and a replayed outbox have put the updates of every product into the log in any order; some are there twice.
The app applies them in the order of their versions: one that is early waits for those before it, also over a stop of
the app, and one that has passed is stale and does not run.

    python examples/versions.py
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

from playground import Playground, by_key, command, verdict

from keylane import App, Field, Message, Publisher, VersionOrdering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS = 6

app = App(
    "example-products",
    source="example-products.updates",
    sink="example-products.states",
    decode="json",
    idempotency=None,  # a repeated update is recognised by its version alone
    versions=VersionOrdering(Field("version"), wait=60.0),
)


@app.stage
async def apply(msg: Message) -> str:
    return f"{msg.version}: {msg.value['price']}"


def main(messages: int = 1800, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether every product went through its versions one by one, each once."""
    rng = random.Random(1)
    products = messages // VERSIONS
    updates = [(product, version) for product in range(products) for version in range(1, VERSIONS + 1)]
    late = set(range(0, products, 3))  # of these, the first version comes only after the stop
    first = [one for one in updates if not (one[0] in late and one[1] == 1)]
    rng.shuffle(first)
    second = [(product, 1) for product in sorted(late)] + rng.sample(first, len(first) // 10)
    with Playground(bootstrap, spark) as place:
        place.topics(app.source, str(app.sink))

        def send(some: list[tuple[int, int]]) -> None:
            with Publisher(app.source, bootstrap=place.bootstrap, type="ProductUpdated") as source:
                for product, version in some:
                    source.send(
                        {"version": version, "price": 10 * product + version}, key=f"product-{product}"
                    )

        send(first)
        complete = products - len(late)
        query = app.start(place.spark, bootstrap=place.bootstrap)
        try:
            before = by_key(place.read(str(app.sink), complete * VERSIONS))
        finally:
            query.stop()
        send(second)
        place.run(app)
        found = by_key(place.read(str(app.sink), products * VERSIONS))
    expected = {
        f"product-{product}": [f"{v}: {10 * product + v}" for v in range(1, VERSIONS + 1)]
        for product in range(products)
    }
    print(
        f"{len(first) + len(second):,} updates of {products:,} products, in any order; "
        f"{len(late):,} products waited for their first version"
    )
    return verdict(
        products_without_their_first_version_waited=before.keys()
        == {name for name in expected if int(name.removeprefix("product-")) not in late},
        every_product_went_through_its_versions_in_order_each_once=found == expected,
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=1800))
