from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from keylane import logs
from keylane.cli.layout import say
from keylane.cli.main import main
from keylane.kafka import settings
from keylane.kafka.settings import KafkaSettings
from keylane.redaction import is_secret, redact
from keylane.spark.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

HUNTER = "hunter2-s3cr3t"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Said:
    """A logger with our handler, and its output."""

    def __init__(self, form: str = "text") -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.handler = logs.LimitedHandler(self.stream, self.clock)
        self.handler.setFormatter(logs.JsonFormatter() if form == "json" else logs.TextFormatter())
        # Not by getLogger: pytest would capture it, and xdist cannot send a lone surrogate.
        self.log = logging.Logger(f"keylane.test.{id(self)}")  # noqa: LOG001
        self.log.setLevel(logging.INFO)
        self.log.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def said() -> Iterator[Said]:
    made = Said()
    yield made
    made.handler.close()


@pytest.fixture
def said_json() -> Iterator[Said]:
    made = Said("json")
    yield made
    made.handler.close()


# -- repeated lines ------------------------------------------------------------------------------------------------


def test_repeated_lines_are_counted_after_the_first(said: Said) -> None:
    for number in range(322):
        said.log.warning("message %d failed", number)
    said.log.warning("something else")
    assert len(said.lines) == logs.BURST_LINES_MAX + 1
    said.clock.now = logs.BURST_WINDOW_SECONDS + 0.1
    said.log.warning("message %d failed", 999)
    assert said.lines[-2].endswith("… 312 more like this in the last 10 s: message %d failed")
    assert said.lines[-1].endswith("message 999 failed")


def test_left_out_lines_are_reported_after_the_window(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BURST_WINDOW_SECONDS", 0.05)
    for _ in range(15):
        said.log.error("again")
    timer = next(iter(said.handler._kinds.values())).timer
    assert timer is not None
    timer.join(5)
    assert "… 5 more like this" in said.lines[-1]
    assert not said.handler._kinds


def test_left_out_lines_are_reported_at_close(said: Said) -> None:
    for _ in range(15):
        said.log.error("again")
    said.handler.close()
    assert "… 5 more like this" in said.lines[-1]


def test_kind_is_logger_level_and_text(said: Said) -> None:
    for number in range(30):
        said.log.warning(f"text {number}")  # noqa: G004 - each is a kind of its own
        said.log.warning("fixed")
        said.log.error("fixed")
    assert len(said.lines) == 30 + 2 * logs.BURST_LINES_MAX


def test_number_of_kinds_is_bounded(said: Said) -> None:
    for number in range(3000):
        said.log.warning(f"text {number}")  # noqa: G004
    assert len(said.handler._kinds) <= 1000


# -- form ----------------------------------------------------------------------------------------------------------


def test_json_has_the_key_and_the_offset(said_json: Said) -> None:
    said_json.log.warning(
        "failed: %s", "why", extra={"key": "k1", "partition": 3, "offset": 17, "stage": "pay", "error": "no"}
    )
    (found,) = said_json.facts
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found.pop("at"))
    assert found.pop("logger").startswith("keylane.test")
    assert found == {
        "level": "WARNING", "message": "failed: why", "key": "k1", "partition": 3, "offset": 17, "stage": "pay",
        "error": "no",
    }  # fmt: skip


def test_every_event_is_one_line(said: Said, said_json: Said) -> None:
    for one in (said, said_json):
        one.log.warning("first\nsecond\r\n{}")
        assert len(one.lines) == 1
    try:
        raise ValueError("a\nb")
    except ValueError:
        said_json.log.exception("broken")
    assert len(said_json.lines) == 2
    assert "ValueError: a\nb" in said_json.facts[1]["traceback"]


def test_json_has_the_number_of_left_out_lines(said_json: Said) -> None:
    for _ in range(logs.BURST_LINES_MAX + 7):
        said_json.log.warning("again")
    said_json.handler.close()
    assert said_json.facts[-1]["more"] == 7


def test_existing_logging_is_not_changed() -> None:
    before = logging.getLogger().handlers[:]  # pytest's own
    assert before
    logs.set_up(logging.INFO, "json")
    assert logging.getLogger().handlers == before


def test_logging_is_set_up_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "getLogger", lambda *_: root)
    stream = io.StringIO()
    logs.set_up(logging.INFO, "json", stream)
    root.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"


# -- what a line may hold ------------------------------------------------------------------------------------------


def test_a_line_shows_the_beginning_of_a_long_key(said: Said, said_json: Said) -> None:
    message: Any = SimpleNamespace(key=b"k" * 1_000_000, partition=3, offset=17)
    for one in (said, said_json):
        one.log.warning("key=%r failed", message.key, extra=logs.where(message))
        one.log.warning("key=%r failed", logs.short(message.key))
        assert "(1,000,000 bytes)" in one.lines[0]
        assert max(map(len, one.lines)) < 1000
    assert said_json.facts[0]["key"] == "k" * logs.BYTES_SHOWN + "… (1,000,000 bytes)"


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\x1b" * 1_000_000, "password" * 100_000, '"' * 1_000_000])
def test_a_line_is_bounded_in_length_and_time(said: Said, said_json: Said, text: str) -> None:
    began = time.process_time()
    for one in (said, said_json):
        one.log.warning("%s %s", text, text)
        one.log.warning(text)
        one.log.warning("%(a)s %(b)r", {"a": text, "b": text})
        one.log.warning("failed", extra={"error": text})
        try:
            raise ValueError(text)
        except ValueError as error:
            one.log.exception("broken: %s", error)
    assert time.process_time() - began < 2
    assert max(map(len, said.lines)) < 4 * logs.TRACEBACK_CHARACTERS_MAX + 1000
    assert (
        max(map(len, said_json.lines)) < 6 * (logs.TRACEBACK_CHARACTERS_MAX + logs.LINE_CHARACTERS_MAX) + 1000
    )
    assert all(
        len(line) < 4 * logs.LINE_CHARACTERS_MAX + 100 for line in said.lines if not line.startswith(" ")
    )


@pytest.mark.parametrize(
    "bad", ["\x1b[2J", "\x07", "\x9b31m", "\x85", "\u2028", "\u2029", "\u202e", "\v", "\ud800"]
)
def test_line_has_no_control_characters(said: Said, bad: str) -> None:
    said.log.warning("failed: %s", f"a{bad}b")
    try:
        raise ValueError(f"a{bad}b")
    except ValueError:
        said.log.exception("broken")
    assert bad not in said.stream.getvalue()
    said.stream.getvalue().encode()


def test_a_quoted_text_cannot_forge_a_log_line(said: Said) -> None:
    forged = "2026-01-01 00:00:00,000 ERROR keylane.engine all is lost"
    said.log.warning("failed: %s", f"a\n{forged}\r{forged}\u2028{forged}")
    try:
        raise ValueError(f"a\n{forged}\r{forged}\x85{forged}")
    except ValueError:
        said.log.exception("broken")
    assert [line for line in said.lines if line.startswith("2026-01-01")] == []
    assert sum(not line.startswith("  ") for line in said.lines) == 2


def test_line_with_unfitting_values_is_written() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError

    def line(text: str, *values: object) -> str:
        return logs.TextFormatter().format(logging.LogRecord("a", 30, "p", 1, text, values, None))

    assert line("%d messages", "three").endswith("%d messages ('three',)")
    assert line("who: %s", Mute()).endswith("who: <a Mute without a text>")


def test_command_output_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(Console(file=sys.stderr), "a\x1b[2Jb\u202ec\nd")
    monkeypatch.setattr(
        "sys.argv", ["keylane", "lag", "chat", "--bootstrap", "b:1", "-o", "a\x1b]0;x\x07\x85"]
    )
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert "\\x1b[2J" in told
    assert told.replace("\n", "").isprintable()


# -- secrets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"sasl.password={HUNTER}",
        f"kafka.sasl.password = {HUNTER}, and more",
        f"{{'sasl.password': '{HUNTER}', 'a': 1}}",
        f'{{"sasl.password": "{HUNTER}", "a": 1}}',
        json.dumps(json.dumps({"ssl.key.password": HUNTER})),
        f"--option 'kafka.ssl.keystore.password={HUNTER}'",
        f"client_secret: {HUNTER}",
        f"oauth.token.endpoint.secret=>{HUNTER}",
        f'sasl.jaas.config=org.apache.Plain required username="ann" password="{HUNTER}";',
        f"https://ann:{HUNTER}@registry/x",
        f"Authorization: Bearer {HUNTER}",
        f"API_KEY={HUNTER}",
        f"token={HUNTER}&x=1",
        f"-----BEGIN PRIVATE KEY-----\n{HUNTER}\n-----END PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\\n{HUNTER}",
        f"DB_PASSWORD={HUNTER})",
    ],
)
def test_a_secret_is_not_printed(text: str) -> None:
    assert HUNTER not in redact(text)
    assert "***" in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "chat/3@17: failed for good (skip) key=b'k1' stage=pay attempts=5: TimeoutError: no answer",
        "max_tokens=500, tokenizer=x",
        "http://127.0.0.1:9092/metrics",
        "sasl.username=ann",
        "the password was refused",
        "",
    ],
)
def test_other_text_is_printed_unchanged(text: str) -> None:
    assert redact(text) == text


def test_secret_settings_are_recognised_by_name() -> None:
    for name in ("sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret", "SASL.JAAS.CONFIG"):
        assert is_secret(name)
    for name in ("sasl.username", "security.protocol", "ssl.ca.location"):
        assert not is_secret(name)


def test_settings_errors_and_logs_have_no_secrets(
    said: Said, said_json: Said, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"bootstrap": "b:1", "kafka.sasl.password": HUNTER, "kafka.ssl.key.pem": HUNTER}
    settings = Options.parse(given, "t").settings
    assert HUNTER not in f"{settings} {settings!r} {Options.parse(given, 't')}"
    assert repr(KafkaSettings("b:1", (("sasl.jaas.config", HUNTER),))).count("***") == 1
    for one in (said, said_json):
        one.log.warning("started with %s", given)
        one.log.warning("refused", extra={"error": f"password={HUNTER}"})
        try:
            raise ValueError(f"sasl.password={HUNTER}")
        except ValueError:
            one.log.exception("broken")
        assert HUNTER not in one.stream.getvalue()
    for option in (f"kafka.sasl.password:{HUNTER}", f"sasl.password={HUNTER}"):
        monkeypatch.setattr("sys.argv", ["keylane", "lag", "chat", "--bootstrap", "b:1", "-o", option])
        with pytest.raises(SystemExit):
            main()
        told = capsys.readouterr()
        assert "--option" in told.err
        assert HUNTER not in told.err + told.out


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "GETPID",
            "Failed to acquire idempotence PID: Broker: Coordinator load in progress: retrying",
            False,
        ),
        ("GETPID", "Failed to acquire idempotence PID: Broker: Cluster authorization failed", True),
        ("METADATAUPDATE", "new leader-1 not found in cache", False),
        ("ADDOFFSETS", "TxnCoordinator: Failed to add offsets to transaction: Local: Timed out", False),
        ("ADDOFFSETS", "TxnCoordinator: Failed to add offsets: Broker: Group authorization failed", True),
    ],
)
def test_client_noise_of_a_fresh_broker_is_left_out(
    kind: str, text: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("keylane.kafka.client")
    for each in log.filters:
        getattr(each, "_logged_at", {}).clear()
    log.warning("%s [%s] %s", kind, "rdkafka#producer-3", text)
    assert (text in caplog.text) is said


def test_outage_is_logged_at_its_begin_and_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    outage = settings.Outage(lambda: now[0])
    monkeypatch.setattr(settings, "outage", outage)
    client = logging.getLogger("keylane.kafka.client")

    def complain() -> None:
        client.error(
            "%s [%s] %s",
            "FAIL",
            "rdkafka#consumer-1",
            "[thrd:b1]: b1: Connect to ipv4#127.0.0.1:1 failed: refused",
        )
        client.warning("%s [%s] %s", "REQTMOUT", "rdkafka#consumer-1", "[thrd:b1]: Timed out MetadataRequest")

    for _ in range(20):
        complain()
        now[0] += 1
    outage.answered()
    outage.answered()
    complain()  # an answer that was on its way already
    assert [record.getMessage() for record in caplog.records] == [
        (
            "no answer from a Kafka broker; retrying, nothing is lost "
            "reason=b1: Connect to ipv4#127.0.0.1:1 failed: refused"
        ),
        "Kafka answers again outage_seconds=20",
    ]
