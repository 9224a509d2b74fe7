"""Settings of the Kafka client: from options, from a file of them, and from the environment."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError as ClientError

from keylane.cli.arguments import client
from keylane.cli.run import _options
from keylane.errors import AccessDeniedError, BrokerError, SettingsError
from keylane.kafka import cluster
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings, settings_from_options
from keylane.spark.options import Options
from keylane.spark.topic_options import TopicOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "client.options"
    file.write_text("# ours\n\nkafka.sasl.username = shop\nkafka.sasl.password=a=b c\n")
    return file


def test_environment_gives_client_settings_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_KAFKA_SASL_PASSWORD", "s3cret")
    monkeypatch.setenv("KEYLANE_KAFKA_SASL_USERNAME", "")
    expected = (("sasl.password", "s3cret"),)
    assert client("b:1", None).extra == expected
    assert Options.parse({"bootstrap": "b:1"}, "t").settings.extra == expected
    assert settings_from_options("b:1", {}, known=(), what="Publisher").extra == expected
    topic = TopicOptions.parse({"subscribe": "t", "kafka.bootstrap.servers": "b:1"}, stream=False)
    assert topic.settings.extra == expected


def test_given_option_replaces_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_KAFKA_SASL_PASSWORD", "environment")
    assert client("b:1", ["kafka.sasl.password=given"]).extra == (("sasl.password", "given"),)


def test_setting_that_is_ours_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_KAFKA_GROUP_ID", "mine")
    with pytest.raises(SettingsError, match=r"kafka\.group\.id"):
        client("b:1", None)


def test_options_come_from_a_file(file: Path) -> None:
    assert client("b:1", [f"@{file}"]).extra == (("sasl.password", "a=b c"), ("sasl.username", "shop"))
    assert _options([f"@{file}"]) == {"kafka.sasl.username": "shop", "kafka.sasl.password": "a=b c"}


def test_later_option_replaces_that_of_a_file(file: Path) -> None:
    found = dict(client("b:1", [f"@{file}", "kafka.sasl.username=other"]).extra)
    assert found == {"sasl.password": "a=b c", "sasl.username": "other"}


def test_secret_on_the_command_line_is_warned_of(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _options(["kafka.sasl.password=hunter2"])
    said = capsys.readouterr().err
    assert "kafka.sasl.password is on the command line" in said
    assert "hunter2" not in said
    _options([f"@{file}", "kafka.sasl.username=shop"])
    assert capsys.readouterr().err == ""


def test_file_that_is_missing_is_named() -> None:
    with pytest.raises(SettingsError, match="--option @/nowhere: could not read the file"):
        client("b:1", ["@/nowhere"])


def test_malformed_line_of_a_file_is_not_shown(file: Path) -> None:
    file.write_text("kafka.sasl.username=shop\ns3cret\n")
    with pytest.raises(SettingsError, match="expected NAME=VALUE in line 2") as refused:
        client("b:1", [f"@{file}"])
    assert "s3cret" not in str(refused.value)


class Port:
    """Takes connections and ends each with these bytes, as something that is not the broker one thinks it is."""

    def __init__(self, answer: bytes) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(1000)
                    client.sendall(self._answer)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], str]]:
    monkeypatch.setattr(cluster, "REQUEST_SECONDS", 2.0)
    ports: list[Port] = []

    def opened(answer: bytes) -> str:
        ports.append(Port(answer))
        return ports[-1].address

    yield opened
    for one in ports:
        one.close()


def test_port_that_speaks_another_protocol_is_named(port: Callable[[bytes], str]) -> None:
    alert = b"\x15\x03\x03\x00\x02\x02\x46"  # what TLS answers to something else
    with pytest.raises(BrokerError, match=r"does not answer to 'plaintext'; check kafka\.security\.protocol"):
        Cluster(KafkaSettings(port(alert))).topics()


def test_failed_tls_handshake_is_named(port: Callable[[bytes], str]) -> None:
    settings = KafkaSettings(port(b"HTTP/1.1 400 Bad Request\r\n\r\n"), (("security.protocol", "SSL"),))
    with pytest.raises(BrokerError, match=r"the port does not speak TLS; check .*\(ssl://127"):
        Cluster(settings).topics()


def test_refused_login_is_named(port: Callable[[bytes], str]) -> None:
    settings = KafkaSettings(port(b""))
    settings._on_error(ClientError(ClientError._AUTHENTICATION, "SASL authentication error"))
    said = settings.explain_no_answer()
    assert said.startswith("the broker refused the login; check kafka.sasl.mechanism")
    assert "SASL authentication error" in said
    assert "login;" not in settings.explain_no_answer(), "an old refusal explains nothing new"


def test_broker_that_is_away_is_not_refusing() -> None:
    settings = KafkaSettings("127.0.0.1:1")
    settings._on_error(ClientError(ClientError._TRANSPORT, "Connection refused"))
    assert settings.explain_no_answer().startswith("Is it running")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "SSL handshake failed: certificate verify failed: broker certificate could",
            "does not trust the broker",
        ),
        (
            "Receive failed: ssl/tls alert certificate unknown: SSL alert number 46",
            "does not accept the client",
        ),
        ("Receive failed: ssl/tls alert bad certificate: SSL alert number 42", "does not accept the client"),
    ],
)
def test_refused_certificate_is_named_and_lasts(text: str, said: str) -> None:
    settings = KafkaSettings("127.0.0.1:1")
    settings._on_error(ClientError(ClientError._TRANSPORT, text))
    error = settings.no_answer(10, "timed out")
    assert isinstance(error, AccessDeniedError)
    assert said in str(error)
    assert "Is it running" not in str(error)


def test_old_refusal_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KafkaSettings("127.0.0.1:1")
    settings._on_error(ClientError(ClientError._AUTHENTICATION, "SASL authentication error"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert settings.refused_for_good("reading") is None
    assert settings.explain_no_answer().startswith("Is it running")


def test_unknown_host_is_named_without_waiting_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.kafka.cluster.REQUEST_SECONDS", 60)
    with pytest.raises(BrokerError, match=r"the host name 'no-such-host\.invalid' is not known\. Check "):
        Cluster(KafkaSettings("no-such-host.invalid:9092")).topics()


def test_host_is_unknown_only_when_all_are_and_the_dns_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"gone": socket.EAI_NONAME, "busy": socket.EAI_AGAIN}

    def lookup(host: str, _port: None) -> list[object]:
        if host in codes:
            raise socket.gaierror(codes[host], "why")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert KafkaSettings("gone:1,gone:2").unknown_hosts()
    assert not KafkaSettings("gone:1,there:2").unknown_hosts()
    assert not KafkaSettings("busy:1").unknown_hosts()
