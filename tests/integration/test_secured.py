"""A secured broker: TLS, passwords, certificates, and nothing but the documented rights."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from keylane import App, DeliveryError, Ledger, Message, Poison, Publisher
from keylane.broker import Broker
from keylane.broker.certificates import CertificateAuthority
from keylane.cli.arguments import client
from keylane.cli.main import app as commands
from keylane.dlq.reader import read_dead_letters
from keylane.doctor.facts import AppFacts
from keylane.doctor.finding import Level
from keylane.doctor.judge_kafka import judge_rights
from keylane.doctor.probe_kafka import probe_cluster
from keylane.errors import AccessDeniedError, BrokerError
from keylane.kafka import cluster as kafka_cluster
from keylane.kafka.cluster import Cluster
from keylane.outcome import Outcome
from keylane.rights import (
    Operation,
    ResourceKind,
    app_rights,
    operator_rights,
    publisher_rights,
    reader_rights,
)
from keylane.spark import register
from keylane.spark.failure_report import QueryFailureKind, cause
from keylane.state.admin import AdminClient
from keylane.state.answers import RedriveCounts
from support.planned import Planned
from support.topics import Log, Running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.kafka.settings import KafkaSettings
    from keylane.rights import Right

pytestmark = pytest.mark.timeout(120)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def secured() -> Iterator[Broker]:
    with Broker(secure=True, settings={"log.retention.ms": -1}) as running:
        yield running


def settings(broker: Broker, options: Path, **changes: str) -> KafkaSettings:
    """Client settings from a user's file, as ``-o @FILE`` reads them."""
    certificate = options.name.endswith(".certificate.options")
    bootstrap = broker.access.certificate_bootstrap if certificate else broker.bootstrap
    given = [f"kafka.{name.replace('_', '.')}={value}" for name, value in changes.items()]
    return client(bootstrap, [f"@{options}", *given])


@pytest.fixture(scope="module")
def log(secured: Broker) -> Log:
    """Topics, written as the user that may do everything."""
    found = Log(secured.bootstrap)
    found.settings = settings(secured, secured.admin_file)
    found.cluster = Cluster(found.settings)
    found.create("source", "sink", partitions=1)
    return found


def send(log: Log, messages: list[tuple[bytes, bytes]]) -> None:
    producer = Producer({"bootstrap.servers": log.bootstrap, **dict(log.settings.extra)})
    for key, value in messages:
        producer.produce("source", value, key)
    assert producer.flush(20) == 0


class As:
    """A ``Log`` for another user."""

    def __init__(self, log: Log, given: KafkaSettings) -> None:
        self.bootstrap, self.settings, self.cluster = given.bootstrap, given, Cluster(given)


def make(name: str, delivery: Any = "at_least_once", *, ledger: bool = False) -> tuple[App, list[bool]]:
    app = App(name, source="source", sink="sink", delivery=delivery, ledger=Ledger() if ledger else None)
    fixed: list[bool] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"bad" and not fixed:
            raise Poison("the cause is still there")
        return bytes(msg.value)

    return app, fixed


def run(user: Any, app: App) -> list[Outcome]:
    """One epoch: take over, plan, run, commit."""
    planned = Planned(user, app)
    assert planned.plan()
    outcomes = [done.outcome for done in planned.attempt()]
    planned.commit()
    return outcomes


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_documented_rights_are_enough(secured: Broker, log: Log, name: str, delivery: Any) -> None:
    app, fixed = make(name, delivery, ledger=True)
    rights = app_rights(name, "source", ["sink"], ledger=True)
    necessary = [
        right for right in rights if not right.optional or right.name.endswith((".dlq", ".telemetry"))
    ]
    user: Any = As(log, settings(secured, secured.access.add_user(name, necessary)))
    send(log, [(b"k%d" % n, b"bad" if n == 7 else b"good") for n in range(20)])
    outcomes = run(user, app)
    assert outcomes.count(Outcome.DEAD) >= 1
    assert outcomes.count(Outcome.OK) >= 19
    letters = list(read_dead_letters(user.settings, app.dlq))
    assert {letter.key for letter in letters} == {b"k7"}
    fixed.append(True)
    operator_file = secured.access.add_user(
        f"{name}-op", operator_rights(name, "source", ["sink"], ledger=True)
    )
    with AdminClient(settings(secured, operator_file), name) as operator:
        command = operator.command("redrive", partition=letters[0].partition, key=b"k7")
        run_again = Planned(user, app)  # takes over from the first run
        assert run_again.plan()
        run_again.attempt()
        run_again.commit()
        answer = operator.answer(command, 10)
    assert answer is not None
    assert answer.counts == RedriveCounts(ok=len(letters))
    for words in (
        ["lag", name, "--over", "1"],
        ["lanes", "list", name],
        ["dlq", "list", name],
        ["plan", name],
    ):
        shown = CliRunner().invoke(
            commands, [*words, "--bootstrap", secured.bootstrap, "-o", f"@{operator_file}", "--json"]
        )
        assert shown.exit_code == 0, (words, shown.output)


def test_certificate_is_a_login(secured: Broker, log: Log, name: str) -> None:
    app, _ = make(name)
    options = secured.access.add_certificate(name, app_rights(name, "source", ["sink"], ledger=False))
    send(log, [(b"k", b"good")])
    assert Outcome.OK in run(As(log, settings(secured, options)), app)


NEEDED = [right for right in app_rights("APP", "source", ["sink"], ledger=True) if not right.optional]
GROUP = next(right for right in NEEDED if right.kind is ResourceKind.GROUP)


# Without a right on the group the doctor answers "unknown" for now: the client waits for a coordinator, and does not
# say that it was denied. The test below covers that.
@pytest.mark.parametrize("right", [each for each in NEEDED if each is not GROUP], ids=str)
def test_missing_right_is_named_and_ends_the_run(secured: Broker, log: Log, right: Right) -> None:
    name = f"missing{next(_numbers)}"
    rights = app_rights(name, "source", ["sink"], ledger=True)
    missing = rights[app_rights("APP", "source", ["sink"], ledger=True).index(right)]
    app, _ = make(name, ledger=True)
    if missing.operation is not Operation.CREATE:
        for topic in (app.dlq, app.spec.state, app.spec.ledger_topic, app.spec.telemetry_topic):
            log.cluster.create(topic, 1, {})
    given = [each for each in rights if each != missing]
    user: Any = As(log, settings(secured, secured.access.add_user(name, given)))
    send(log, [(b"k", b"good")])
    facts = AppFacts(name=name, source="source", sinks=("sink",), ledger=True)
    findings = judge_rights(facts, probe_cluster(user.settings, facts))
    (fault,) = [each.found for each in findings if each.level is Level.FAULT]
    assert fault == f"no {missing}"
    began = time.monotonic()
    with pytest.raises(AccessDeniedError) as raised:
        run(user, app)
    assert f"Allow this user {missing}" in str(raised.value)
    assert cause(raised.value).kind is QueryFailureKind.DENIED
    assert cause(raised.value).final
    assert time.monotonic() - began < 30


def test_missing_right_on_the_group_is_never_called_sound(secured: Broker, log: Log, name: str) -> None:
    rights = app_rights(name, "source", ["sink"], ledger=False)
    given = [each for each in rights if each.kind is not ResourceKind.GROUP]
    user = settings(secured, secured.access.add_user(name, given))
    facts = AppFacts(name=name, source="source", sinks=("sink",))
    findings = list(judge_rights(facts, probe_cluster(user, facts)))
    (found,) = [each for each in findings if f"Read on group {name!r}" in each.found]
    assert found.level in (Level.FAULT, Level.UNKNOWN)
    assert Level.OK not in {each.level for each in findings}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 3.0)


@pytest.mark.usefixtures("quick")
def test_four_causes_have_four_messages(secured: Broker, log: Log, tmp_path: Path) -> None:
    user = secured.access.add_user("nobody")
    foreign = CertificateAuthority(tmp_path / "authority").certificate
    given = {
        "the broker refused the login": settings(secured, user, sasl_password=secrets.token_hex(4)),
        "does not trust the broker's certificate": settings(secured, user, ssl_ca_location=str(foreign)),
        "does not answer to 'plaintext'": client(secured.bootstrap, []),
    }
    for said, wrong in given.items():
        with pytest.raises(BrokerError) as raised:
            Cluster(wrong).topics()
        assert said in str(raised.value)
        assert "Is it running" not in str(raised.value)
    with pytest.raises(AccessDeniedError, match="Allow this user Read on topic 'source'"):
        Cluster(settings(secured, user)).partitions("source")


@pytest.mark.usefixtures("quick")
def test_expired_certificate_is_named(secured: Broker, log: Log) -> None:
    options = secured.access.add_certificate("expired", seconds=-60)
    with pytest.raises(AccessDeniedError, match="does not accept the client's certificate: it has expired"):
        Cluster(settings(secured, options)).topics()


@pytest.mark.usefixtures("quick")
def test_rotated_password_ends_the_run_with_its_name(secured: Broker, log: Log, name: str) -> None:
    app, _ = make(name)
    rights = app_rights(name, "source", ["sink"], ledger=False)
    old = settings(secured, secured.access.add_user(name, rights))
    user: Any = As(log, old)
    send(log, [(b"k", b"good")])
    run(user, app)
    new = settings(secured, secured.access.add_user(name))
    send(log, [(b"k", b"good")])
    with pytest.raises(AccessDeniedError, match="the broker refused the login"):
        run(As(log, old), app)
    assert run(As(log, new), app), "continues with the new password"


def test_publisher_needs_write_only(secured: Broker, log: Log) -> None:
    secured.access.add_user("publisher", publisher_rights("source"))
    options: dict[str, Any] = {
        f"kafka.{name}": value for name, value in secured.access.client("publisher").items()
    }
    with Publisher("source", bootstrap=secured.bootstrap, **options) as publisher:
        publisher.send(b"good", key=b"k")
    secured.access.deny("publisher", publisher_rights("source"))
    secured.access.allow("publisher", operator_rights("none", "source", [], ledger=False))
    with (
        pytest.raises(DeliveryError, match="Allow this user Write on topic 'source'"),
        Publisher("source", bootstrap=secured.bootstrap, **options) as publisher,
    ):
        publisher.send(b"good", key=b"k")


APP = """
from keylane import App

app = App("{name}", source="source", sink="sink")

@app.stage
async def work(msg) -> bytes:
    return msg.value
"""


@pytest.mark.timeout(240)
def test_right_taken_away_ends_keylane_run(secured: Broker, log: Log, name: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.format(name=name))
    rights = app_rights(name, "source", ["sink"], ledger=False)
    path = secured.access.add_user(name, rights)
    send(log, [(b"k", b"good")])
    arguments = ("--bootstrap", secured.bootstrap, "-o", f"@{path}", "--master", "local[2]")
    with Running(tmp_path, "shop:app", *arguments) as running:
        running.says("runs: source → sink", seconds=120)
        wait_until(lambda: not log.lag(name, "source"), 60, "everything was done")
        secured.access.deny(name, [right for right in rights if right.name == "sink"])
        send(log, [(b"k", b"good")])
        code, facts = running.ends(within=100)
    assert code == 1
    assert facts["ended"] == "failed"
    assert "Allow this user Write on topic 'sink'" in facts["error"]
    said = "\n".join(running.lines)
    assert "Not restarting: the broker would deny it again" in said
    assert "It is started again" not in said


def test_topic_is_read_with_read_only(secured: Broker, log: Log, spark: SparkSession) -> None:
    send(log, [(b"k", b"good")])
    secured.access.add_user("reader", reader_rights("source"))
    options = {f"kafka.{name}": value for name, value in secured.access.client("reader").items()}
    register(spark)
    read = spark.read.format("keylane.topic").options(
        **{"kafka.bootstrap.servers": secured.bootstrap, "subscribe": "source", **options}
    )
    assert read.load().count() == log.count("source")
