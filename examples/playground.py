"""The surroundings of the examples: a broker, topics, a Spark and a folder on this machine, removed at the end."""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Consumer, TopicPartition

from keylane import KeylaneError, Message
from keylane.broker import Broker
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from keylane import App


class Playground:
    """Use it in a ``with``. A broker or a Spark that is passed in is used, and stays."""

    def __init__(self, bootstrap: str | None = None, spark: SparkSession | None = None) -> None:
        self._stack = ExitStack()
        self._given = spark
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="keylane-example-")))
        self.bootstrap = bootstrap or self._stack.enter_context(Broker()).bootstrap
        self._cluster = Cluster(KafkaSettings(self.bootstrap))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def spark(self) -> SparkSession:
        """Two slots on this machine."""
        if self._given is not None:
            return self._given
        started = session("local[2]", "keylane example", spark_sql_shuffle_partitions="4")
        self._stack.callback(started.stop)
        return started

    def topics(self, *names: str, partitions: int = 4) -> None:
        """Create them. Raises RuntimeError when one exists: its messages would be taken for this run's."""
        there = sorted(self._cluster.topics().keys() & set(names))
        if there:
            raise RuntimeError(
                f"the broker at {self.bootstrap} has the topic {there[0]!r} already; take one where the example has "
                "not run yet, or leave --bootstrap out"
            )
        for name in names:
            self._cluster.ensure(name, partitions, {})

    def run(self, app: App, **options: Any) -> None:
        """Let the app work through what is there."""
        query = app.start(self.spark, bootstrap=self.bootstrap, available_now=True, **options)
        query.awaitTermination(120)
        if query.isActive or query.exception() is not None:
            raise RuntimeError(f"{app.name} did not come to its end: {query.exception()}")

    def read(self, topic: str, count: int, patience: float = 60.0) -> list[Message]:
        """Committed records of the topic, as soon as there are this many; fewer if they do not come in time."""
        places = [TopicPartition(topic, p, 0) for p in range(self._cluster.partitions(topic))]
        consumer: Any = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "example-reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        consumer.assign(places)
        found: list[Message] = []
        deadline = time.monotonic() + patience
        quiet = 0
        while (
            quiet < 2 and time.monotonic() < deadline
        ):  # and nothing more: what is there twice is to be seen
            some = [Message(record) for record in consumer.consume(1000, 0.3) if record.error() is None]
            found += some
            quiet = 0 if some or len(found) < count else quiet + 1
        consumer.close()
        return found

    def count(self, topic: str) -> int:
        """Messages in the topic."""
        partitions = range(self._cluster.partitions(topic))
        return sum(self._cluster.ends(topic, partitions).values())


def by_key(messages: list[Message]) -> dict[str, list[Any]]:
    """The values of each key, in their order."""
    found: dict[str, list[Any]] = {}
    for msg in messages:
        found.setdefault((msg.key or b"").decode(), []).append(msg.value.decode())
    return found


def command(main: Callable[..., bool], messages: int) -> int:
    """An example's command line: its exit code is 0 when its claims hold."""
    told = inspect.getdoc(sys.modules[main.__module__])
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=messages, help="how many (default: %(default)s)")
    parser.add_argument("--bootstrap", help="a broker that runs already; one of its own if not given")
    given = parser.parse_args()
    if given.messages < 100:
        parser.error("--messages: at least 100, or there is nothing to see")
    logging.getLogger("keylane").setLevel(logging.ERROR)  # what fails here fails on purpose
    try:
        return 0 if main(messages=given.messages, bootstrap=given.bootstrap) else 1
    except (RuntimeError, KeylaneError) as error:
        print(error, file=sys.stderr)
        return 2


def verdict(**ownership: bool) -> bool:
    """Print the claims, and whether they hold."""
    for claim, kept in ownership.items():
        print(f"  {'yes' if kept else 'NO '}  {claim.replace('_', ' ')}")
    return all(ownership.values())
