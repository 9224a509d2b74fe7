"""Restoring a state topic: the real reader, and records of stopped lanes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from keylane.kafka.cluster import Cluster
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.policies.failure_info import FailureInfo
from keylane.state.labels import Labels
from keylane.state.ownership import take_over
from keylane.state.topic import StateTopic
from simulate.cluster import broker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.kafka.settings import KafkaSettings
    from simulate.table import Row

_IDENTITY = AppIdentity(
    source=TopicIdentity(cluster="c", topic="orders", id="1"),
    dlq=TopicIdentity(cluster="c", topic="shop.dlq", id="2"),
)
_FAILURE = FailureInfo(
    stage="charge", error="ValueError", message="no amount", traceback="x" * 300, attempts=3, failed_at=1e9
)


def measure(counts: Sequence[int], partitions: Sequence[int]) -> list[Row]:
    """The time to read this many records, and what the planner asks, by the number of partitions of an empty topic."""
    rows: list[Row] = []
    with broker() as (_, settings):
        cluster = Cluster(settings)
        for count in counts:
            app = f"shop{count}"
            cluster.ensure(f"{app}.state", 1, {"cleanup.policy": "compact"})
            _fill(settings, app, count)
            rows.append({"partitions": 1, "records": count, **_restore(settings, app, 1, count), **_EMPTY})
        for number in partitions:
            app = f"wide{number}"
            topic = f"{app}.state"
            cluster.ensure(topic, number, {"cleanup.policy": "compact"})
            first = _seconds(lambda: take_over(settings, app, topic, number, "first"))  # noqa: B023 - called at once
            again = _seconds(lambda: take_over(settings, app, topic, number, "second"))  # noqa: B023
            row = {"partitions": number, "records": 0, **_restore(settings, app, number, 0)}
            ends = _seconds(lambda: cluster.all_ends([topic], range(number)))  # noqa: B023
            offsets = _seconds(lambda: cluster.progress(app, _IDENTITY.source, range(number)))  # noqa: B023
            rows.append(
                row | {"take over s": first, "again s": again, "ends s": ends, "group's offsets s": offsets}
            )
    return rows


_EMPTY = dict.fromkeys(("take over s", "again s", "ends s", "group's offsets s"), "")


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _fill(settings: KafkaSettings, app: str, count: int) -> None:
    producer, labels = settings.producer(), Labels(_IDENTITY)
    for number in range(count):
        record = LaneRecord(
            stop=LaneStatus.BLOCKED,
            key=b"%d" % number,
            partition=0,
            offset=number,
            since=1e9,
            letter=_FAILURE,
        )
        while True:
            try:
                headers = list(labels.of(record.name))
                producer.produce(f"{app}.state", record.encode(), record.name, partition=0, headers=headers)  # type: ignore[arg-type]
                break
            except BufferError:
                producer.poll(0.1)
    assert not producer.flush(60)


def _restore(settings: KafkaSettings, app: str, partitions: int, count: int) -> Row:
    begin = time.perf_counter()
    state = StateTopic(settings, app, f"{app}.state", range(partitions), "run", labels=Labels(_IDENTITY))
    state.restore()
    seconds = time.perf_counter() - begin
    assert len(state.lanes) == count, len(state.lanes)
    state.close()
    return {"seconds": seconds, "records/s": count / seconds}
