"""A backfill that gives what the live run gave, row for row.

The app runs live over a topic; then the same app runs over the topic as a DataFrame, with ``keylane.ordered``: the same
engine, the same order inside every key, the same retries and dead letters, and nothing is written to Kafka. Use it to
try a new version of an app on last month's messages before it goes live.

    python examples/backfill.py
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from zlib import crc32

from playground import Playground, command, verdict

from keylane import App, Message, Poison, Publisher, Retry, Transient, ordered
from keylane.spark import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = App(
    "example-meters",
    source="example-meters.readings",
    commit="epoch",  # results are rows of a Spark sink
    decode="json",
    retry=Retry(attempts=3, wait_initial=0.01, wait_max=0.05),
)


@app.stage
async def clean(msg: Message) -> dict[str, Any]:
    if msg.value["watts"] < 0:
        raise Poison("a meter does not run backwards")
    if crc32(msg.event_id.encode()) % 20 == 0 and msg.attempt == 1:
        raise Transient("the catalogue of meters is busy")
    return {"watts": msg.value["watts"], "hour": msg.value["hour"] % 24}


def outcomes(frame: DataFrame) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What became of every message, by its place in the log."""
    columns = ("key", "event_id", "outcome", "attempts", "error", "result")
    rows = frame.select("partition", "offset", *columns).toArrow().to_pylist()
    found = {(row["partition"], row["offset"]): tuple(row[name] for name in columns) for row in rows}
    return found if len(found) == len(rows) else {}


def main(messages: int = 5000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether both runs came to the same."""
    with Playground(bootstrap, spark) as place:
        place.topics(app.source)
        with Publisher(app.source, bootstrap=place.bootstrap, type="Reading") as readings:
            for number in range(messages):
                watts = -1 if number % 500 == 3 else number % 300
                value = {"watts": watts, "hour": number}
                readings.send(value, key=f"meter-{number % 70}", event_id=f"r-{number}")
        live = place.folder / "live"
        place.run(app, format="parquet", path=str(live), checkpoint_location=str(place.folder / "checkpoint"))

        register(place.spark)
        topic = place.spark.read.format("keylane.topic").option("subscribe", app.source)
        topic = topic.option("kafka.bootstrap.servers", place.bootstrap).option("includeHeaders", "true")
        again = place.folder / "again"
        ordered(topic.load(), app=app, order_by="offset").write.parquet(str(again))  # the app runs here, once

        first, second = (outcomes(place.spark.read.parquet(str(path))) for path in (live, again))
    dead = sum(row[2] == "dead" for row in first.values())
    retried = sum(row[3] > 1 for row in first.values())
    print(f"{len(first):,} messages live, {len(second):,} again; {retried:,} were retried, {dead} are dead")
    return verdict(
        every_message_has_one_outcome=len(first) == messages,
        the_backfill_equals_the_live_run_row_for_row=first == second,
        the_readings_that_make_no_sense_are_dead_in_both=dead == len(range(3, messages, 500)),
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=5000))
