"""The least rights of docs/operations.md, at a broker that denies everything else."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from typer.testing import CliRunner

from keylane import App, Ledger, Message, Poison
from keylane.broker import Broker
from keylane.cli.main import app as commands
from keylane.dlq.reader import read_dead_letters
from keylane.outcome import Outcome
from keylane.state.admin import AdminClient
from keylane.state.answers import RedriveCounts
from support.planned import Planned
from support.topics import Log

READ, WRITE, CREATE = AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE
DESCRIBE_CONFIGS = AclOperation.DESCRIBE_CONFIGS
ANYONE, NOBODY = "User:ANONYMOUS", "User:nobody"


def rule(kind: Any, name: str, operation: Any, *, prefix: bool = False, who: str = ANYONE) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
    return AclBinding(kind, name, pattern, who, "*", operation, AclPermissionType.ALLOW)


def least_rights(name: str) -> list[AclBinding]:
    """What the page says. A resource with a rule is closed to everyone that no rule lets in."""
    topic, group, ids = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
    closed = [rule(kind, "*", AclOperation.ALL, who=NOBODY) for kind in (topic, group, ids)]
    return [
        *closed,
        # The broker itself is anonymous too.
        rule(ResourceType.BROKER, "kafka-cluster", AclOperation.CLUSTER_ACTION),
        *(rule(topic, "source", each) for each in (READ, DESCRIBE_CONFIGS)),
        *(rule(topic, "sink", each) for each in (WRITE, DESCRIBE_CONFIGS)),
        *(rule(topic, f"{name}.", each, prefix=True) for each in (READ, WRITE, CREATE)),
        rule(group, name, READ),
        rule(ids, f"{name}.", WRITE, prefix=True),
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_documented_rights_are_enough(name: str, delivery: Any) -> None:
    app = App(name, source="source", sink="sink", delivery=delivery, ledger=Ledger())
    fixed = False

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"bad" and not fixed:
            raise Poison("the cause is still there")
        return bytes(msg.value)

    settings: dict[str, str | bool] = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": True,
    }
    with Broker(settings=settings) as broker:
        log = Log(broker.bootstrap)
        log.create("source", "sink", partitions=2)
        log.send("source", [{"key": b"k%d" % n, "value": b"bad" if n == 7 else b"good"} for n in range(50)])
        # The broker creates its own topics with the rights of the client that needs them first, which is everyone now.
        producer: Any = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "first"})
        producer.init_transactions(30)
        log.cluster.committed("first", "source", [0])
        admin = log.settings.admin()
        for future in admin.create_acls(least_rights(name)).values():
            future.result(10)
        refused: list[Any] = []
        writer = Producer({"bootstrap.servers": broker.bootstrap})
        writer.produce("source", b"v", on_delivery=lambda error, _: refused.append(error and error.code()))
        writer.flush(10)
        assert refused == [ClientError.TOPIC_AUTHORIZATION_FAILED], "everything else is denied"
        run = Planned(log, app)
        assert run.plan()
        outcomes = [done.outcome for done in run.attempt()]
        run.commit()
        assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.DEAD)) == (49, 1)
        (letter,) = read_dead_letters(log.settings, app.dlq)
        fixed = True
        with AdminClient(log.settings, name) as operator:
            command = operator.command("redrive", partition=letter.partition, key=letter.key)
            assert run.plan()
            run.attempt()
            run.commit()
            answer = operator.answer(command, 10)
            assert answer is not None
            assert answer.counts == RedriveCounts(ok=1)
        shown = CliRunner().invoke(
            commands, ["lag", name, "--bootstrap", broker.bootstrap, "--over", "1", "--json"]
        )
        assert '"lag": 0' in shown.output, shown.output
