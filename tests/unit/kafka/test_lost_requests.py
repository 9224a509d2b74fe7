"""Requests without an answer, with a broker inside the client (librdkafka's mock cluster) and the campaign's proxy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from campaign.proxy import Cut, Proxy, Weather
from keylane.errors import AbortedError
from keylane.kafka.lost_requests import LostRequests
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.transactional_client import TransactionalClient

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger("keylane.kafka.client")
CLOSED = "TxnCoordinator: 127.0.0.1:45479: Disconnected: connection closed by peer (after 32ms in state UP)"


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    mock = Producer(
        {"bootstrap.servers": "none", "test.mock.num.brokers": 1}, logger=logging.getLogger("mock")
    )
    (broker,) = mock.list_topics(timeout=5).brokers.values()
    with Proxy([broker.port]) as proxy:
        yield proxy
    del mock


def client_of(proxy: Proxy) -> TransactionalClient:
    return TransactionalClient(KafkaSettings(proxy.bootstrap), "app.one", None, exact=True)


def test_answered_transactions_keep_their_client(proxy: Proxy) -> None:
    client = client_of(proxy)
    for _ in range(5):
        client.put(("out", b"v"))
        client.commit([])
    client.put(("out", b"v"))
    client.abort()
    assert client.failure is None
    client.close()


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER, Cut.LATE])
@pytest.mark.parametrize("how", ["commit", "abort"])
def test_transaction_end_without_an_answer_fails_the_client(proxy: Proxy, cut: Cut, how: str) -> None:
    """The client tries again by itself and succeeds, so without the log nobody would know."""
    client = client_of(proxy)
    client.put(("out", b"v"))
    client._producer.flush(5)
    proxy.on_cut = lambda _what: setattr(proxy, "weather", Weather())
    proxy.weather = Weather(cut=cut)
    if how == "commit":
        client.commit([])
    else:
        client.abort()
    assert isinstance(client.failure, AbortedError)
    with pytest.raises(AbortedError, match="got no answer at its first try"):
        client.begin()
    client.discard()


@pytest.mark.parametrize(
    ("level", "text", "lost"),
    [
        (logging.INFO, CLOSED, True),
        (logging.WARNING, "1 request(s) timed out: disconnect (after 10000ms in state UP)", True),
        (logging.ERROR, "Receive failed: Connection reset by peer (after 3ms in state REAUTH)", True),
        (
            logging.DEBUG,
            "Closing connection due to nodename change (after 3ms in state UP) (_TRANSPORT)",
            True,
        ),
        (logging.ERROR, "a text of a later version, without the state", True),
        (
            logging.DEBUG,
            f"{CLOSED} (_TRANSPORT)",
            False,
        ),  # idle: else the same line is there with a higher level
        (logging.ERROR, "Connect to ipv4#1.2.3.4:9092 failed: refused (after 0ms in state CONNECT)", False),
        (logging.ERROR, "ApiVersionRequest failed (after 4ms in state APIVERSION_QUERY)", False),
    ],
)
def test_lost_requests_are_read_from_the_log(level: int, text: str, lost: bool) -> None:
    found = LostRequests(LOG)
    found.log(level, "%s [%s] %s", "FAIL", "rdkafka#producer-2", f"[thrd:x]: {text}")
    assert found.any is lost


def test_other_lines_lose_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    found = LostRequests(logging.getLogger("other"))
    with caplog.at_level(logging.DEBUG, "other"):
        found.log(logging.DEBUG, "%s [%s] %s", "STATE", "p", "Broker changed state UP -> DOWN")
        found.log(logging.WARNING, "%s [%s] %s", "TXNERR", "p", "failed")
    assert not found.any
    assert [record.getMessage() for record in caplog.records] == ["TXNERR [p] failed"]


def test_lost_requests_keep_the_users_debug_settings(caplog: pytest.LogCaptureFixture) -> None:
    found = LostRequests(logging.getLogger("other"))
    assert found.settings({})["debug"] == "broker"
    assert found.settings({"debug": "eos"})["debug"] == "eos,broker"
    with caplog.at_level(logging.DEBUG, "other"):
        found.log(logging.DEBUG, "%s [%s] %s", "TXN", "p", "begin")
    assert len(caplog.records) == 1
