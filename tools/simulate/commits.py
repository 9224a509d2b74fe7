"""Commits of many tasks to one broker: real transactional clients, one thread for each simulated task."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.errors import KeylaneError
from keylane.kafka.client import TopicPartition
from keylane.kafka.cluster import Cluster
from keylane.kafka.transactional_client import TransactionalClient
from keylane.kafka.transactional_writer import COMMIT_SECONDS
from simulate.cluster import broker, cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from keylane.broker import Broker
    from keylane.kafka.settings import KafkaSettings
    from simulate.table import Row

_TOPIC = "orders"
_STATE = "shop.state"
_METADATA = "kl1:" + "x" * 60
_STARTERS = 16
"""Tasks that connect at the same time."""


@dataclass(slots=True)
class _Figures:
    """What all tasks of one round have done."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: list[float] = field(default_factory=list)
    """The time of each commit."""
    errors: list[str] = field(default_factory=list)


def measure(counts: Sequence[int], seconds: float, interval: float) -> list[Row]:
    """One round for each number of tasks. ``interval``: seconds between a task's commits; 0 for no pause."""
    with broker() as (started, settings):
        _create(settings, max(counts))
        group = settings.consumer("shop").consumer_group_metadata()
        _round(started, settings, group, min(counts), min(5.0, seconds), interval)  # warm-up
        return [_round(started, settings, group, count, seconds, interval) for count in counts]


def _create(settings: KafkaSettings, partitions: int) -> None:
    cluster = Cluster(settings)
    cluster.ensure(_TOPIC, partitions, {})
    cluster.ensure(_STATE, partitions, {"cleanup.policy": "compact"})


def _round(
    started: Broker, settings: KafkaSettings, group: Any, tasks: int, seconds: float, interval: float
) -> Row:
    begin = time.perf_counter()
    with ThreadPoolExecutor(_STARTERS) as pool:
        clients = list(pool.map(lambda _: _client(settings, group), range(tasks)))
    starting = time.perf_counter() - begin
    figures, stop = _Figures(), threading.Event()
    threads = [
        threading.Thread(target=_commit, args=(client, number, interval, figures, stop), daemon=True)
        for number, client in enumerate(clients)
    ]
    node = started.nodes[0].pid
    broker_before, own_before, begin = cpu_seconds(node), cpu_seconds(os.getpid()), time.perf_counter()
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    took = time.perf_counter() - begin
    broker_cpu, own_cpu = cpu_seconds(node) - broker_before, cpu_seconds(os.getpid()) - own_before
    deadline = time.monotonic() + COMMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = sorted(figures.seconds) or [0.0]
    return {
        "tasks": tasks,
        "connect s": starting,
        "commits/s": len(figures.seconds) / took,
        "p50 ms": found[len(found) // 2] * 1000,
        "p99 ms": found[int(len(found) * 0.99)] * 1000,
        "broker cores": broker_cpu / took,
        "broker ms/commit": broker_cpu / len(found) * 1000,
        "client ms/commit": own_cpu / len(found) * 1000,
        "errors": len(figures.errors),
        "hanging": sum(thread.is_alive() for thread in threads),
    }


def _client(settings: KafkaSettings, group: Any) -> TransactionalClient:
    return TransactionalClient(settings, f"shop.{uuid.uuid4().hex}", group, exact=False)


def _commit(
    client: TransactionalClient, task: int, interval: float, figures: _Figures, stop: threading.Event
) -> None:
    """One task: a record of the state topic and an offset in every transaction."""
    stop.wait(random.random() * interval)
    offset = 0
    while not stop.is_set():
        offset += 500
        begin = time.perf_counter()
        try:
            client.put((_STATE, b"[]", b"attempts", task, client.on_delivery, None, 0, []))
            client.commit([TopicPartition(_TOPIC, task, offset, _METADATA)])
        except KeylaneError as error:
            with figures.lock:
                figures.errors.append(str(error))
            return
        took = time.perf_counter() - begin
        if not stop.is_set():
            with figures.lock:
                figures.seconds.append(took)
        stop.wait(max(0.0, interval - took))
