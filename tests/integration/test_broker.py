"""Embedded broker: real Kafka nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # type: ignore[attr-defined]
from typer.testing import CliRunner

from keylane.broker import Broker, BrokerState, EmbeddedBrokerError, PortTakenError, cluster, ports, registry
from keylane.broker.process import Process
from keylane.cli.broker import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate registry, so that the developer's own brokers are neither seen nor stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYLANE_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def broker(own_state: None) -> Iterator[Broker]:
    with Broker() as running:
        yield running


def create(bootstrap: str, topic: str, *, partitions: int = 1, replicas: int = -1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, partitions, replicas)]).values():
        future.result(timeout=30)


def produce(bootstrap: str, topic: str, values: Sequence[bytes], *, transaction: str | None = None) -> None:
    """Send messages, and return when all in-sync replicas have them."""
    settings: dict[str, str | int | float | bool | None] = {"bootstrap.servers": bootstrap, "acks": "all"}
    if transaction is not None:
        settings["transactional.id"] = transaction
    producer = Producer(settings)
    failed: list[object] = []
    if transaction is not None:
        producer.init_transactions(30)
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(30) == 0
    assert failed == []
    if transaction is not None:
        producer.commit_transaction(30)


def consume(bootstrap: str, topic: str, count: int, *, group: str | None = None) -> list[bytes | None]:
    """Read partition 0 from the start; commits if a group is given."""
    name = group or f"g-{uuid.uuid4()}"
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": name, "enable.auto.commit": False, "log_level": 0}
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        got: list[bytes | None] = []
        while len(got) < count:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                got.append(message.value())
        if group is not None:
            consumer.commit(asynchronous=False)
        return got
    finally:
        consumer.close()


def until(true: Callable[[], bool]) -> None:
    """Wait until it is true, at most until the time-out of the test."""
    while not true():
        time.sleep(0.05)


def in_sync(bootstrap: str, topic: str) -> list[int]:
    metadata = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=10)
    return sorted(metadata.topics[topic].partitions[0].isrs)


VALUES = [b"message %d" % number for number in range(100)]


def test_messages_are_read_as_they_were_sent(broker: Broker) -> None:
    create(broker.bootstrap, "plain")
    produce(broker.bootstrap, "plain", VALUES)
    assert consume(broker.bootstrap, "plain", 100) == VALUES


def test_transactional_messages_are_read(broker: Broker) -> None:
    create(broker.bootstrap, "transactions")
    produce(broker.bootstrap, "transactions", VALUES, transaction="t1")
    assert consume(broker.bootstrap, "transactions", 100) == VALUES


def test_topics_are_not_created_automatically(broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.list_topics("misspelt", timeout=10)
    assert "misspelt" not in admin.list_topics(timeout=10).topics


def test_consumer_groups_tool_shows_a_groups_lag(broker: Broker) -> None:
    create(broker.bootstrap, "lagging")
    produce(broker.bootstrap, "lagging", VALUES)
    consume(broker.bootstrap, "lagging", 100, group="tool-group")
    produce(broker.bootstrap, "lagging", VALUES[:7])
    shown = broker.tool(GROUPS, "--bootstrap-server", broker.bootstrap, "--describe", "--group", "tool-group")
    row = next(line.split() for line in shown.splitlines() if line.startswith("tool-group"))
    assert row[:6] == ["tool-group", "lagging", "0", "100", "107", "7"]


def test_failed_tool_shows_its_output(broker: Broker) -> None:
    with pytest.raises(EmbeddedBrokerError, match=r"failed with exit code 1:[\s\S]*no-such-option"):
        broker.tool(GROUPS, "--no-such-option")


def test_node_has_a_log_and_listens_on_loopback_only(broker: Broker) -> None:
    node = broker.nodes[0]
    assert "Kafka Server started" in node.log.read_text()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", node.port), timeout=2)


def test_terminals_ctrl_c_does_not_reach_the_broker(broker: Broker) -> None:
    assert os.getsid(broker.nodes[0].pid) != os.getsid(0)
    assert os.getpgid(broker.nodes[0].pid) != os.getpgid(0)


def test_two_brokers_run_side_by_side(broker: Broker) -> None:
    with Broker() as other:
        assert other.id != broker.id
        assert other.bootstrap != broker.bootstrap
        assert {broker.id, other.id} <= {each.id for each in Broker.list()}
        create(other.bootstrap, "only-here")
        produce(other.bootstrap, "only-here", VALUES)
        assert (
            "only-here"
            not in AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10).topics
        )
        process, data = other.process(1), other.data
        assert Broker.find(other.id).state is BrokerState.RUNNING
    assert process is not None
    assert not process.alive
    assert not data.exists()
    assert [each.id for each in Broker.list()] == [broker.id]


def test_suspended_node_continues_after_resume(broker: Broker) -> None:
    create(broker.bootstrap, "frozen")
    broker.nodes[0].suspend()
    quick = Producer({"bootstrap.servers": broker.bootstrap, "message.timeout.ms": 20_000})
    quick.produce("frozen", b"patience")
    assert quick.flush(0.5) == 1
    broker.nodes[0].resume()
    assert quick.flush(20) == 0
    assert consume(broker.bootstrap, "frozen", 1) == [b"patience"]


def test_kept_data_is_used_by_the_next_broker(tmp_path: Path) -> None:
    with Broker(data=tmp_path / "kafka", settings={"num.partitions": 3}) as first:
        create(first.bootstrap, "kept")
        produce(first.bootstrap, "kept", VALUES)
        cluster_id = AdminClient({"bootstrap.servers": first.bootstrap}).list_topics(timeout=10).cluster_id
        used = Broker(data=tmp_path / "kafka")
        with pytest.raises(EmbeddedBrokerError, match=f"broker {first.id} runs on"):
            used.start()
    with Broker(data=tmp_path / "kafka", keep=False) as second:
        metadata = AdminClient({"bootstrap.servers": second.bootstrap}).list_topics(timeout=10)
        assert metadata.cluster_id == cluster_id
        assert consume(second.bootstrap, "kept", 100) == VALUES
    assert not (tmp_path / "kafka").exists()


@pytest.mark.slow
def test_three_nodes_survive_the_loss_of_one() -> None:
    # A killed node counts as up until its session ends, by default after 9 s.
    settings = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}
    with Broker(nodes=3, settings=settings) as trio:
        create(trio.bootstrap, "replicated")
        assert in_sync(trio.bootstrap, "replicated") == [1, 2, 3]
        resource = ConfigResource(ResourceType.TOPIC, "replicated")
        admin = AdminClient({"bootstrap.servers": trio.bootstrap})
        (described,) = admin.describe_configs([resource]).values()
        assert described.result(timeout=10)["min.insync.replicas"].value == "2"
        victim = trio.nodes[1]
        before = victim.pid, victim.port
        victim.kill()
        assert trio.state.value == "degraded"
        produce(trio.bootstrap, "replicated", VALUES, transaction="t3")
        victim.start()
        assert (victim.pid != before[0], victim.port == before[1]) == (True, True)
        until(lambda: in_sync(trio.bootstrap, "replicated") == [1, 2, 3])
        assert consume(f"127.0.0.1:{victim.port}", "replicated", 100) == VALUES
        assert trio.state.value == "running"
        assert Broker.find(trio.id).nodes[1].pid == victim.pid
        with pytest.raises(EmbeddedBrokerError, match="node 2 is already running"):
            victim.start()


def test_taken_port_is_named_before_anything_starts(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken by another process"):
            Broker(port=port).start()
    with pytest.raises(PortTakenError, match=f"is taken by broker {broker.id}"):
        Broker(port=broker.nodes[0].port).start()
    assert list(tmp_path.iterdir()) == []


def test_port_taken_during_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr(ports, "require_free", lambda port: None)
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken by another process"):
            Broker(port=port).start()
    assert list(tmp_path.iterdir()) == []


def test_free_port_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ports.free_ports
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        answers = [(real(1)[0], taken)]
        monkeypatch.setattr(ports, "free_ports", lambda count: answers.pop() if answers else real(count))
        with Broker() as broker:
            assert answers == []
            assert broker.nodes[0].port != taken


def test_node_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(
        EmbeddedBrokerError, match=r"node 1 ended while it was starting[\s\S]*num\.io\.threads"
    ):
        Broker(settings={"num.io.threads": "many"}).start()


def test_start_that_times_out_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[registry.BrokerRecord] = []
    monkeypatch.setattr(cluster, "_save", seen.append)
    with pytest.raises(EmbeddedBrokerError, match=r"node 1 was not ready after 0 s"):
        Broker().start(timeout=0.2)
    process = seen[-1].nodes[0].process
    assert process is not None
    assert not process.alive
    assert not seen[-1].data.exists()


OWNER = """
import json, time
from keylane.broker import Broker
broker = Broker().start()
process = broker.process(1)
print(json.dumps([broker.id, str(broker.data), process.pid, process.started]), flush=True)
time.sleep(60)
"""


def test_broker_dies_with_its_killed_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        broker_id, data, pid, started = json.loads(owner.stdout.readline())
        process = Process(pid=pid, started=started)
        assert process.alive
        owner.send_signal(signal.SIGKILL)
    assert process.wait(5)
    until(lambda: not os.path.exists(data) and registry.load(broker_id) is None)  # noqa: PTH110 - a str


def test_commands_start_show_and_stop_a_broker() -> None:
    runner = CliRunner()
    with Broker():
        started = runner.invoke(app, ["start", "--json", "--heap", "256m"])
        assert started.exit_code == 0, started.output
        facts = json.loads(started.stdout)
        assert sorted(facts) == ["admin_options", "bootstrap", "certificate_bootstrap", "data", "id", "nodes"]
        assert facts["admin_options"] is facts["certificate_bootstrap"] is None, "it is not secured"
        assert facts["bootstrap"] == f"127.0.0.1:{facts['nodes'][0]['port']}"
        create(facts["bootstrap"], "cli")
        (shown,) = json.loads(runner.invoke(app, ["status", facts["id"], "--json"]).stdout)
        assert (shown["state"], shown["owner"], shown["nodes"][0]["pid"]) == (
            "running",
            None,
            facts["nodes"][0]["pid"],
        )
        assert shown["data_bytes"] > 0
        assert facts["id"] in runner.invoke(app, ["status"]).stdout
        # The broker of the with statement belongs to this program, so stop without an id takes the other one.
        stopped = runner.invoke(app, ["stop", "--json"])
        assert json.loads(stopped.stdout) == [{"id": facts["id"], "data": facts["data"], "kept": False}]
        assert not os.path.exists(facts["data"])  # noqa: PTH110 - a str
        again = runner.invoke(app, ["stop"])
        assert again.exit_code == 2
        assert "no running broker" in again.stderr
