"""A request that ends a transaction comes to the broker when the next one has begun. No Spark.

Each scenario runs twice: with the client used on after it, which shows the hole, and as it is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

from campaign.proxy import Cut, Proxy, Weather
from keylane.errors import AbortedError
from keylane.kafka.cluster import Cluster
from keylane.kafka.lost_requests import LostRequests
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.transactional_client import TransactionalClient, fence
from keylane.kafka.transactional_writer import TransactionalWriter
from support.state_log import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.topics import Log

CUT = Weather(cut=Cut.LATE, late_by_itself=False)


@pytest.fixture
def proxy(log: Log) -> Iterator[Proxy]:
    with Proxy([int(address.rpartition(":")[2]) for address in log.bootstrap.split(",")]) as proxy:
        yield proxy


@pytest.fixture(params=[False, True], ids=["used-on", "as-it-is"])
def safe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the client is given up after a request without an answer, as it is; else it is used on."""
    if not request.param:
        monkeypatch.setattr(LostRequests, "_take", lambda *_: None)
    return bool(request.param)


def group_of(settings: KafkaSettings, name: str) -> Any:
    consumer = settings.consumer(name)
    group = consumer.consumer_group_metadata()
    consumer.close()
    return group


def test_late_commit_does_not_commit_results_without_progress(
    log: Log, name: str, proxy: Proxy, safe: bool
) -> None:
    log.create(f"{name}.out", f"{name}.state", partitions=1)
    settings = KafkaSettings(proxy.bootstrap)
    group = group_of(settings, name)
    writer = TransactionalWriter(settings, name, f"{name}.state", group, labels=LABELS, exact=True)

    async def run() -> None:
        writer.attach()
        writer.put(f"{name}.out", b"first", b"k")
        proxy.weather = CUT
        await writer.commit()
        proxy.weather = Weather()
        assert proxy.late == 1
        assert writer.failed is safe
        writer.put(f"{name}.out", b"second", b"k")
        if safe:
            with pytest.raises(AbortedError, match="got no answer at its first try"):
                writer.check()
            await asyncio.to_thread(writer.reconnect)
            writer.resume()
        writer._client._producer.flush(10)
        (error,) = proxy.deliver_late().values()
        assert (error == 0) is not safe, "the broker takes the late request, unless it is of an older epoch"

    asyncio.run(run())
    fence(
        log.settings, writer.id
    )  # the process was killed before its next commit, and its message runs again
    found = [row.value for row in log.read(f"{name}.out")]
    assert found == ([b"first"] if safe else [b"first", b"second"])


def test_late_abort_does_not_abort_results_of_the_next_commit(
    log: Log, name: str, proxy: Proxy, safe: bool
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    settings = KafkaSettings(proxy.bootstrap)
    group = group_of(settings, name)
    client = TransactionalClient(settings, f"{name}.one", group, exact=False)
    client.put((f"{name}.out", b"aborted", b"k"))
    client._producer.flush(10)
    proxy.weather = CUT
    client.abort()
    client.open = False
    proxy.weather = Weather()
    assert proxy.late == 1
    if safe:
        assert isinstance(client.failure, AbortedError)
        client.discard()
        client = TransactionalClient(settings, f"{name}.one", group, exact=False)
    assert client.failure is None
    client.put((f"{name}.out", b"result", b"k"))
    client._producer.flush(10)
    (error,) = proxy.deliver_late().values()
    assert (error == 0) is not safe
    client.commit([TopicPartition(f"{name}.in", 0, 1)])
    assert Cluster(log.settings).committed(name, f"{name}.in", [0], stable=True)[0][0] == 1
    found = [row.value for row in log.read(f"{name}.out")]
    assert found == ([b"result"] if safe else []), "the progress is there, and the result is lost"
