"""Offsets of a cluster that has just lost a leader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import OFFSET_INVALID

from keylane import BrokerError
from keylane.broker import Broker
from keylane.kafka import cluster
from keylane.kafka.cluster import Cluster
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable


class Unknown:
    """What the client answers for a partition whose leader has died."""

    def result(self) -> Any:
        return self

    offset = OFFSET_INVALID


def losing(times: int, ask: Callable[..., Any]) -> Callable[..., Any]:
    left = [times]

    def asked(request: Any, **more: Any) -> Any:
        found = ask(request, **more)
        left[0] -= 1
        return found if left[0] < 0 else {at: Unknown() for at in found}

    return asked


def asking(log: Log, monkeypatch: pytest.MonkeyPatch, unknown: int) -> Cluster:
    """A cluster whose client does not know offsets for the first few requests."""
    made = Cluster(log.settings)
    admin: Any = made._admin
    calls = {
        "list_offsets": staticmethod(losing(unknown, admin.list_offsets)),
        "list_topics": staticmethod(admin.list_topics),
    }
    monkeypatch.setattr(made, "_admin", type("Admin", (), calls))
    return made


def test_unknown_offset_is_requested_again(log: Log, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log.create(name, partitions=2)
    log.send(name, [{"partition": 1, "key": b"k", "value": b"v"}])
    assert asking(log, monkeypatch, 2).ends(name, range(2)) == {0: 0, 1: 1}


def test_and_is_an_error_in_the_end(log: Log, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_NEW_LEADER_SECONDS", 0.3)
    log.create(name, partitions=1)
    with pytest.raises(BrokerError, match=f"offsets of topic '{name}' could not be read: .*[Ll]eader"):
        asking(log, monkeypatch, 1000).ends(name, [0])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_dead_leader_is_not_the_end_of_the_log() -> None:
    with Broker(nodes=3) as broker:
        log = Log(broker.bootstrap)
        log.create("t", partitions=6)
        log.send("t", [{"key": b"k%d" % n, "value": b"x"} for n in range(100)])
        client = Cluster(log.settings)
        before = client.ends("t", range(6))
        assert sum(before.values()) == 100
        broker.nodes[0].kill()
        began = time.monotonic()
        while time.monotonic() < began + 20:
            assert client.ends("t", range(6)) == before
            assert client.ends("t", range(6), earliest=True) == dict.fromkeys(range(6), 0)
            time.sleep(0.5)
