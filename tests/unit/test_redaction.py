"""What is hidden in a text that is printed, and how long that takes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.redaction import is_secret, redact

MARK = "MARK3R"
MEGABYTE = 1_000_000

SHAPES = {
    "a secret word again and again": "password",
    "a long word": "a",
    "a long word of dots": "a.",
    "secret words": "pwd ",
    "names without values": "password=",
    "names and values": "password=x ",
    "quoted names": '"password": ',
    "nested names": "'password='",
    "open brackets": "password=(",
    "open quotes": 'password="',
    "escapes": "\\",
    "escaped quotes": '\\"',
    "spaces": "password ",
    "blanks": " ",
    "keys": "-----BEGIN PRIVATE KEY-----",
    "half keys": "-----BEGIN ",
    "addresses": "://",
    "addresses with users": "a://b:",
    "signs": "a://b:c@",
    "schemes": "a.a+a-",
    "bearers": "Bearer ",
    "bearers of little": "basic abc ",
    "pairs": "('password', ",
    "letters without a small one": "\u0130",
    "letters of other alphabets": "\u00df\u1e9e",
    "headers": "Authorization: ",
    "colons": ":",
}


def seconds(text: str) -> float:
    began = time.process_time()
    redact(text)
    return time.process_time() - began


@pytest.mark.parametrize("unit", SHAPES.values(), ids=SHAPES.keys())
def test_redaction_of_a_megabyte_is_quick(unit: str) -> None:
    assert seconds(("password " + unit * MEGABYTE)[:MEGABYTE]) < 2.0


@pytest.mark.parametrize("lead", ["", "password", 'password="', "password=(", "'password='"])
def test_redaction_time_is_linear_in_the_length(lead: str) -> None:
    for unit in SHAPES.values():
        short, long = ((lead + unit * size)[:size] for size in (25_000, 200_000))
        took = min(seconds(long) for _ in range(2))
        assert took < 24 * max(seconds(short), 0.005), unit  # 8 times as long; 64 times would be quadratic


@pytest.mark.parametrize(
    "text",
    [
        f"error: --option 'sasl.password=a,{MARK};{MARK}&{MARK}) {MARK}'",
        f"error: --option 'kafka.sasl.password:{MARK}'",
        f"-o sasl.password=a,{MARK};{MARK}&{MARK}){MARK}",
        f"sasl.password=a,{MARK}",
        json.dumps({"sasl.password": f'a"{MARK}'}),
        json.dumps({"sasl.password": f'a\\"{MARK}, "b"', "x": 1}),
        json.dumps(json.dumps({"sasl.password": f'a"{MARK}\\" {MARK}'})),
        json.dumps(json.dumps(json.dumps({"sasl.password": f'a"{MARK}\\" {MARK}'}))),
        json.dumps({"a": 1, "credentials": {"user": MARK, "key": [MARK, f"]{MARK}"]}, "b": 2}),
        repr({"sasl.password": f"it's {MARK}", "x": 1}),
        repr({"sasl.password": f'it\'s "{MARK}" {MARK}', "x": 1}),
        repr({"password": f"{MARK} {MARK}".encode()}),
        repr((("sasl.password", f"{MARK} {MARK}"), ("a", "b"))),
        f"config['sasl.password'] = '{MARK} {MARK}'",
        f"password=SecretStr('{MARK} {MARK}')",
        f'password="a"{MARK}',
        f"pwd={MARK}",
        f"PWD : {MARK}",
        f"private_key: {MARK}",
        f"privateKey={MARK}",
        f"ssl.keystore.key={MARK}",
        f"ssl.key.pem = {MARK}",
        f"ssl.key.pem=-----BEGIN PRIVATE KEY-----\nx\n{MARK}\n-----END PRIVATE KEY-----",
        f"key: -----BEGIN ENCRYPTED PRIVATE KEY-----\\n{MARK}\\n-----END ENCRYPTED PRIVATE KEY-----",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MARK}\n{MARK}",
        f"Authorization: Token {MARK}",
        f"Authorization: Digest username=x, response={MARK}",
        f"{{'authorization': 'Token {MARK}'}}",
        f"Proxy-Authorization: Negotiate {MARK}",
        f"Cookie: a=1; session={MARK}",
        f'sasl.jaas.config=org.apache.Plain required username="ann" password="a;{MARK}";',
        f"redis://:{MARK}@cache/0",
        f"postgres://ann:p@{MARK}@db/shop",
    ],
)
def test_redaction_hides_the_whole_value(text: str) -> None:
    assert MARK not in redact(text)
    assert "***" in redact(text)
    assert redact(redact(text)) == redact(text)


def test_redaction_keeps_the_text_around_a_secret() -> None:
    assert redact('{"password": "x", "a": 1}') == '{"password": "***", "a": 1}'
    assert redact("f(password=x), b") == "f(password=***), b"
    assert redact("bad option 'sasl.password=x y': no") == "bad option 'sasl.password=***': no"
    assert redact("-----BEGIN PRIVATE KEY-----x-----END PRIVATE KEY-----, b").endswith(", b")
    assert redact("[('sasl.password', 'x'), ('a', 'b')]") == "[('sasl.password', '***'), ('a', 'b')]"


@pytest.mark.parametrize(
    "text",
    [
        "known: 'sasl.password', 'sasl.username'",
        "Topic authorization failed: no right to read",
        "org.apache.kafka.common.errors.TopicAuthorizationException: not authorized",
        "key=b'k1' keys: 3",
        "http://127.0.0.1:9092/a?mail=ann@example.com",
        "max_tokens=500",
    ],
)
def test_redaction_leaves_other_text_alone(text: str) -> None:
    assert redact(text) == text


NAMES = st.sampled_from(
    [
        "sasl.password",
        "ssl.key.password",
        "client_secret",
        "API-KEY",
        "pwd",
        "Token",
        "private.key",
        "ssl.key.pem",
    ]
)
AWKWARD = st.text(st.sampled_from(list("ab,;&)('[]{}:=\\/ @-.\"\u00e4")), max_size=12)
PLAIN = st.text(st.sampled_from(list("abc 0123,.;()[]{}'=-/\u00e4\u4e2d")), max_size=40)


@given(NAMES, AWKWARD, AWKWARD, st.integers(0, 2))
def test_no_secret_survives_in_json(name: str, before: str, after: str, nesting: int) -> None:
    text = json.dumps({"a": 1, name: f"{before}{MARK}{after}{MARK}", "b": [2]})
    for _ in range(nesting):
        text = json.dumps({"text": text})
    assert MARK not in redact(text)


@given(NAMES, AWKWARD, AWKWARD)
def test_no_secret_survives_in_a_repr(name: str, before: str, after: str) -> None:
    assert MARK not in redact(repr({name: f"{before}{MARK}{after}{MARK}"}))
    assert MARK not in redact(repr(f"{name}={before}{MARK}{after}{MARK}"))


@given(NAMES, st.text(st.sampled_from(list("ab,;&)]}:=\\/@-.\u00e4")), max_size=12))
def test_no_secret_survives_without_quotes(name: str, before: str) -> None:
    assert MARK not in redact(f"given {name}={before}{MARK}")


@given(PLAIN)
def test_text_without_a_secret_is_not_changed(text: str) -> None:
    assert redact(text) == text


@given(st.text())
def test_redaction_accepts_any_text(text: str) -> None:
    assert isinstance(redact(text), str)
    assert isinstance(redact(f"password={text}"), str)
    assert is_secret(f"{text}password{text}")
