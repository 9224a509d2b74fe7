from __future__ import annotations

import io
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from keylane import logs
from keylane.cli.main import main
from keylane.core.redact import is_secret, redact
from keylane.kafka.settings import KafkaSettings
from keylane.spark.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

HUNTER = "hunter2-s3cr3t"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Said:
    """A logger of its own with our handler, and what it has said."""

    def __init__(self, form: str = "text") -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.handler = logs.LimitedHandler(self.stream, self.clock)
        self.handler.setFormatter(logs.JsonFormatter() if form == "json" else logs.TextFormatter())
        self.log = logging.getLogger(f"keylane.test.{id(self)}")
        self.log.propagate = False
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


def test_of_many_lines_of_a_kind_the_first_are_said_and_the_others_counted(said: Said) -> None:
    for number in range(322):
        said.log.warning("message %d failed", number)
    said.log.warning("something else")
    assert len(said.lines) == logs.BURST + 1
    said.clock.now = logs.WINDOW + 0.1
    said.log.warning("message %d failed", 999)
    assert said.lines[-2].endswith("… 312 more like this in the last 10 s: message %d failed")
    assert said.lines[-1].endswith("message 999 failed")


def test_what_was_left_out_is_said_when_nothing_follows(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "WINDOW", 0.05)
    for _ in range(15):
        said.log.error("again")
    timer = next(iter(said.handler._kinds.values())).timer
    assert timer is not None
    timer.join(5)
    assert "… 5 more like this" in said.lines[-1]
    assert not said.handler._kinds


def test_what_was_left_out_is_said_at_the_end(said: Said) -> None:
    for _ in range(15):
        said.log.error("again")
    said.handler.close()
    assert "… 5 more like this" in said.lines[-1]


def test_kinds_are_told_apart_by_logger_level_and_text(said: Said) -> None:
    for number in range(30):
        said.log.warning(f"text {number}")  # noqa: G004 - each is a kind of its own
        said.log.warning("fixed")
        said.log.error("fixed")
    assert len(said.lines) == 30 + 2 * logs.BURST


def test_kinds_without_end_do_not_fill_the_memory(said: Said) -> None:
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


def test_json_of_what_was_left_out_has_the_number(said_json: Said) -> None:
    for _ in range(logs.BURST + 7):
        said_json.log.warning("again")
    said_json.handler.close()
    assert said_json.facts[-1]["more"] == 7


def test_logging_that_was_set_up_before_is_left_alone() -> None:
    before = logging.getLogger().handlers[:]  # pytest's own
    assert before
    logs.set_up(logging.INFO, "json")
    assert logging.getLogger().handlers == before


def test_it_is_set_up_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "getLogger", lambda *_: root)
    stream = io.StringIO()
    logs.set_up(logging.INFO, "json", stream)
    root.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"


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
        "chat/3/17: failed for good (skip) key=b'k1' stage=pay attempts=5: TimeoutError: no answer",
        "max_tokens=500, tokenizer=x",
        "http://127.0.0.1:9092/metrics",
        "sasl.username=ann",
        "the password was refused",
        "",
    ],
)
def test_what_is_no_secret_is_printed_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_names_of_secrets() -> None:
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
