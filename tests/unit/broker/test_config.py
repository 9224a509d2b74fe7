from __future__ import annotations

from pathlib import Path

import pytest

from keylane.broker import Broker, EmbeddedBrokerError
from keylane.broker.config import (
    Address,
    Setting,
    TlsFiles,
    bootstrap,
    format_storage,
    heap_flags,
    java_flags,
    new_uuid,
    render,
    server_properties,
    write_node,
)

pytestmark = pytest.mark.timeout(20)

NODES = tuple(Address(node=number, port=2000 + number, controller_port=3000 + number) for number in (1, 2, 3))


def test_config_one_node_has_one_replica() -> None:
    properties = server_properties(NODES[0], NODES[:1], {})
    assert properties["offsets.topic.replication.factor"] == "1"
    assert properties["min.insync.replicas"] == "1"
    assert properties["auto.create.topics.enable"] == "false"


def test_config_three_nodes_have_three_replicas_two_in_sync() -> None:
    properties = server_properties(NODES[1], NODES, {})
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert properties[f"{name}.replication.factor"] == "3"
    assert properties["default.replication.factor"] == "3"
    assert properties["min.insync.replicas"] == properties["transaction.state.log.min.isr"] == "2"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:3001,2@127.0.0.1:3002,3@127.0.0.1:3003"
    assert "0.0.0.0" not in properties["listeners"]  # noqa: S104 - loopback only
    assert bootstrap(NODES) == "127.0.0.1:2001,127.0.0.1:2002,127.0.0.1:2003"


def test_settings_win_and_are_written_as_kafka_reads_them() -> None:
    settings: dict[str, Setting] = {
        "auto.create.topics.enable": True,
        "num.partitions": 7,
        "offsets.topic.num.partitions": "50",
    }
    properties = server_properties(NODES[0], NODES[:1], settings)
    assert properties["auto.create.topics.enable"] == "true"
    assert properties["num.partitions"] == "7"
    assert properties["offsets.topic.num.partitions"] == "50"


def test_secured_node_has_no_open_listener(tmp_path: Path) -> None:
    node = Address(node=1, port=2001, controller_port=3001, certificate_port=4001)
    tls = TlsFiles(store=tmp_path / "broker.p12", password="x", authority=tmp_path / "ca.pem")  # noqa: S106
    properties = server_properties(node, [node], {}, tls)
    assert properties["listeners"] == (
        "SASL_SSL://127.0.0.1:2001,SSL://127.0.0.1:4001,CONTROLLER://127.0.0.1:3001"
    )
    assert "PLAINTEXT" not in properties["listener.security.protocol.map"]
    assert properties["ssl.client.auth"] == "required"
    assert properties["allow.everyone.if.no.acl.found"] == "false"
    assert properties["super.users"] == "User:broker;User:admin"


def test_node_files_can_only_be_read_by_their_owner(tmp_path: Path) -> None:
    write_node(tmp_path, {"ssl.keystore.password": "x"})
    assert (tmp_path / "server.properties").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name",
    [
        "ssl.keystore.location",
        "listeners",
        "node.id",
        "log.dirs",
        "controller.quorum.voters",
        "process.roles",
    ],
)
def test_config_refuses_settings_that_the_broker_decides(name: str) -> None:
    with pytest.raises(EmbeddedBrokerError, match=name):
        Broker(settings={name: "x"})


@pytest.mark.parametrize("nodes", [0, 10])
def test_config_refuses_an_impossible_number_of_nodes(nodes: int) -> None:
    with pytest.raises(EmbeddedBrokerError, match="expected 1 to 9 nodes"):
        Broker(nodes=nodes)


def test_heap_is_checked_and_halved_at_the_start() -> None:
    assert heap_flags("512m") == ("-Xmx512m", "-Xms256m")
    assert heap_flags("2G") == ("-Xmx2048m", "-Xms1024m")
    for wrong in ("512", "64m", "much", "-1g", ""):
        with pytest.raises(EmbeddedBrokerError, match="expected a heap of at least 128m"):
            heap_flags(wrong)


def test_class_archive_is_used_if_it_exists() -> None:
    assert "-XX:SharedArchiveFile=/x.jsa" in java_flags("512m", Path("/x.jsa"))
    assert not any("SharedArchiveFile" in flag for flag in java_flags("512m", None))


def test_properties_are_escaped_as_java_reads_them() -> None:
    assert render({"a b": "c:\\d é\n", "e": " f"}) == "a\\ b=c:\\u005cd \\u00e9\\u000a\ne=\\ f\n"


def test_new_ids_have_kafkas_format() -> None:
    for _ in range(200):
        made = new_uuid()
        assert len(made) == 22
        assert not made.startswith("-")


def test_storage_is_formatted_once(tmp_path: Path) -> None:
    checkpoint = tmp_path / "template"
    checkpoint.write_bytes(b"features")
    format_storage(tmp_path, node=2, cluster="C", checkpoint=checkpoint)
    meta = (tmp_path / "data" / "meta.properties").read_text()
    assert {"version=1", "cluster.id=C", "node.id=2"} <= set(meta.splitlines())
    assert (tmp_path / "data" / "bootstrap.checkpoint").read_bytes() == b"features"
    format_storage(tmp_path, node=2, cluster="other", checkpoint=checkpoint)
    assert (tmp_path / "data" / "meta.properties").read_text() == meta


def test_unstarted_broker_is_an_error() -> None:
    broker = Broker()
    with pytest.raises(EmbeddedBrokerError, match="not started"):
        _ = broker.bootstrap
    broker.stop()
    assert repr(broker) == "<Broker not started>"
