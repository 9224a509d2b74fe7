from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import errno
import http.client
import importlib
import json
import logging
import math
import pickle
import socket
import sqlite3
import ssl
import time
import urllib.error
from contextlib import closing
from datetime import timedelta
from email.message import Message
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest
from confluent_kafka.error import ProduceError
from hypothesis import given
from hypothesis import strategies as st

from keylane import Poison, Transient
from keylane.policies import known_errors as module
from keylane.policies.classify import Classification, FailureKind, Rule, classify

if TYPE_CHECKING:
    from pathlib import Path

TRANSIENT, POISON = FailureKind.TRANSIENT, FailureKind.POISON

# What clients written for older Pythons raise.
old_names = [
    TimeoutError("asyncio"),
    concurrent.futures.TimeoutError("futures"),
    TimeoutError("socket"),
]


class Busy(Transient):
    pass


class Hopeless(Poison, Transient):
    pass


def like(path: str, *bases: type[BaseException], **fields: Any) -> Any:
    """A class as a library has it, without the library: ``like("httpx.ReadTimeout")``."""
    where, _, name = path.rpartition(".")
    return type(name, bases or (Exception,), {"__module__": where, **fields})


def having(error: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def shown(value: object) -> str:
    """An id that a look-alike without a good repr() cannot spoil."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}" if isinstance(value, BaseException) else repr(value)


@pytest.mark.parametrize(
    "error",
    [
        Transient("later"),
        Busy(),
        TimeoutError(),
        *old_names,
        ConnectionError(),
        ConnectionResetError(),
        ConnectionRefusedError(),
        BrokenPipeError(),
        asyncio.IncompleteReadError(b"half", 10),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
        http.client.RemoteDisconnected("Remote end closed connection without response"),
        http.client.IncompleteRead(b"half", 10),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
        urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
        urllib.error.URLError(TimeoutError("timed out")),
        urllib.error.ContentTooShortError("retrieval incomplete", ("file", Message())),
    ],
    ids=repr,
)
def test_passing_errors_are_transient(error: BaseException) -> None:
    assert classify(error) == Classification(failure=TRANSIENT)


@pytest.mark.parametrize(
    "error",
    [
        Poison("never"),
        Hopeless(),
        ValueError(),
        KeyError("k"),
        ZeroDivisionError(),
        json.JSONDecodeError("no", "", 0),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("of no kind"),
        AssertionError(),
        RecursionError(),
        MemoryError(),
        SystemExit(503),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        EOFError(),
        ssl.SSLCertVerificationError(1, "certificate verify failed"),
        urllib.error.URLError("unknown url type: ftpx"),
        urllib.error.URLError(ssl.SSLCertVerificationError(1, "certificate verify failed")),
        like("pydantic_core.ValidationError", ValueError)("1 validation error"),
    ],
    ids=repr,
)
def test_everything_else_is_poison_the_unexpected_included(error: BaseException) -> None:
    assert classify(error) == Classification(failure=POISON)


def test_a_cause_is_not_looked_into() -> None:
    error = ValueError("no such order")
    error.__cause__ = error.__context__ = TimeoutError()
    assert classify(error).failure is POISON


def test_a_cancellation_is_never_transient_whatever_it_carries() -> None:
    for error in (asyncio.CancelledError(), SystemExit(503), KeyboardInterrupt()):
        assert classify(having(error, status=503, retry_after=1)) == Classification(failure=POISON)
        assert classify(urllib.error.URLError(error)) == Classification(failure=POISON)


# What a stage raises on purpose.


@pytest.mark.parametrize("seconds", [None, 0, 0.0, 2, 1.5])
@pytest.mark.parametrize("kind", [Transient, Busy])
def test_classify_transient_keeps_text_and_wait_when_copied(
    kind: type[Transient], seconds: float | None
) -> None:
    error = kind("the model is", 7, retry_after=seconds)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - made in this line
        assert type(same) is kind
        assert same.args == ("the model is", 7)
        assert str(same) == "('the model is', 7)"
        assert same.retry_after == seconds
        assert classify(same) == Classification(failure=TRANSIENT, delay=seconds)
    assert str(kind("later", retry_after=seconds)) == "later"


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, math.inf, "5", timedelta(seconds=5)])
def test_classify_refuses_an_impossible_wait(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"Busy\(retry_after=.*0 or more"):
        Busy("later", retry_after=seconds)


def test_classify_transient_subclass_without_init_has_no_wait() -> None:
    class Lazy(Transient):
        def __init__(self) -> None:
            pass

    assert Lazy().retry_after is None
    assert classify(Lazy()) == Classification(failure=TRANSIENT)


# The app's own rules.


def rule(answer: Any) -> Rule:
    return lambda error: answer


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("transient", Classification(failure=TRANSIENT)),
        ("poison", Classification(failure=POISON)),
        (TRANSIENT, Classification(failure=TRANSIENT)),
        (POISON, Classification(failure=POISON)),
        (Transient, Classification(failure=TRANSIENT)),
        (Poison, Classification(failure=POISON)),
        (Busy, Classification(failure=TRANSIENT)),
        (Hopeless, Classification(failure=POISON)),
        (Transient("later"), Classification(failure=TRANSIENT)),
        (Transient("later", retry_after=3), Classification(failure=TRANSIENT, delay=3)),
        (Poison("never"), Classification(failure=POISON)),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "error", [ValueError(), TimeoutError(), ExceptionGroup("", [ValueError()])], ids=repr
)
def test_a_rule_decides_over_the_defaults(error: BaseException, answer: Any, verdict: Classification) -> None:
    assert classify(error, [rule(answer)]) == verdict


def test_the_first_rule_with_an_opinion_wins() -> None:
    rules = [rule(None), rule("poison"), rule("transient")]
    assert classify(TimeoutError(), rules).failure is POISON
    assert classify(TimeoutError(), rules[:1]).failure is TRANSIENT
    assert classify(ValueError(), rules[:1]).failure is POISON


def test_stages_own_verdict_precedes_the_rules() -> None:
    assert classify(Transient(retry_after=1), [rule("poison")]) == Classification(failure=TRANSIENT, delay=1)
    assert classify(Poison(), [rule("transient")]) == Classification(failure=POISON)
    assert classify(ExceptionGroup("", [Poison()]), [rule(None)]) == Classification(failure=POISON)


def test_classify_rule_keeps_the_wait_of_the_error() -> None:
    error = having(ValueError("slow down"), retry_after=7)
    assert classify(error) == Classification(failure=POISON)
    for answer in ("transient", Transient, Transient("later")):
        assert classify(error, [rule(answer)]) == Classification(failure=TRANSIENT, delay=7)
    assert classify(error, [rule(Transient(retry_after=2))]) == Classification(failure=TRANSIENT, delay=2)


def raising(error: BaseException) -> FailureKind:
    raise LookupError("a bug in the rule")


class Unprintable:
    def __repr__(self) -> str:
        raise LookupError("a bug in the answer")


@pytest.mark.parametrize(
    "bad",
    [
        raising,
        *map(rule, ["TRANSIENT", "", 5, True, object(), Unprintable(), ValueError, ValueError(), int, []]),
    ],
)
def test_classify_broken_rule_is_logged_and_ignored(bad: Rule, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "keylane.classify"):
        assert classify(TimeoutError(), [bad]).failure is TRANSIENT
        assert classify(ValueError(), [bad]).failure is POISON
        assert classify(ValueError(), [bad, rule("transient")]).failure is TRANSIENT
    assert len(caplog.records) == 3
    assert all("ignoring classification rule" in record.getMessage() for record in caplog.records)
    assert ("raising" if bad is raising else "rule") in caplog.text


# Groups.


def test_a_group_is_transient_when_everything_in_it_is() -> None:
    waits = [Transient(retry_after=2), Transient(retry_after=9), TimeoutError()]
    group = ExceptionGroup("out", [ExceptionGroup("in", waits), ConnectionError()])
    assert classify(group) == Classification(failure=TRANSIENT, delay=9)
    assert classify(ExceptionGroup("", [TimeoutError()])) == Classification(failure=TRANSIENT)


@pytest.mark.parametrize("bad", [ValueError(), Poison(), asyncio.CancelledError()], ids=repr)
def test_a_group_with_one_poison_in_it_is_poison(bad: BaseException) -> None:
    group = BaseExceptionGroup(
        "out", [TimeoutError(), BaseExceptionGroup("in", [Transient(retry_after=2), bad]), TimeoutError()]
    )
    assert classify(group) == Classification(failure=POISON)


def test_rules_apply_to_a_group_and_then_to_its_members() -> None:
    asked = []

    def values_pass(error: BaseException) -> str | None:
        asked.append(type(error))
        return "transient" if isinstance(error, ValueError) else None

    group = ExceptionGroup("", [ValueError(), TimeoutError()])
    assert classify(group, [values_pass]).failure is TRANSIENT
    assert asked[0] is ExceptionGroup
    assert set(asked[1:]) == {ValueError, TimeoutError}


def test_a_group_may_be_as_deep_as_it_likes() -> None:
    group: Exception = TimeoutError()
    for _ in range(5000):
        group = ExceptionGroup("", [group])
    assert classify(group).failure is TRANSIENT
    while isinstance(group, ExceptionGroup):  # freed one by one: the interpreter would do it by recursion
        group = group.exceptions[0]


# HTTP.


PASSING = [408, 425, 429, 500, 502, 503, 504, 507, 520, 529, 599]
LASTING = [400, 401, 403, 404, 405, 409, 410, 413, 415, 422, 451, 501, 505]


def answered(kind: str, status: int, headers: dict[str, str]) -> Any:
    """The error that a client raises for this answer."""
    names = Message()
    for name, value in headers.items():
        names[name] = value
    lower = {name.lower(): value for name, value in headers.items()}
    response = Falsy(status_code=status, headers=names)
    match kind:
        case "httpx":
            return having(like("httpx.HTTPStatusError")("no"), response=response)
        case "requests":
            return having(like("requests.exceptions.HTTPError", OSError)("no"), response=response)
        case "aiohttp":
            fields = {"status": status, "headers": names}
            return having(like("aiohttp.client_exceptions.ClientResponseError")("no"), **fields)
        case "urllib":
            return urllib.error.HTTPError("http://a/b", status, "no", names, None)
        case "botocore":
            answer = {
                "Error": {"Code": "X"},
                "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": lower},
            }
            base = like("botocore.exceptions.ClientError")
            return having(like("botocore.errorfactory.NoSuchKey", base)("no"), response=answer)
        case "google":
            base = like("google.api_core.exceptions.GoogleAPICallError")
            code = http.HTTPStatus(status) if status in {s.value for s in http.HTTPStatus} else status
            kind_of = like("google.api_core.exceptions.ServerError", base, code=code)
            return having(kind_of("no"), response=SimpleNamespace(headers=names))
        case "kubernetes":
            return having(
                like("kubernetes.client.exceptions.ApiException")("no"), status=status, headers=lower
            )
        case "openai":
            return having(like("openai.RateLimitError")("no"), status_code=status, response=response)
    raise AssertionError(kind)


class Falsy(SimpleNamespace):
    """As a response of requests is when its status is an error."""

    def __bool__(self) -> bool:
        return False


CLIENTS = ["httpx", "requests", "aiohttp", "urllib", "botocore", "google", "kubernetes", "openai"]


@pytest.mark.parametrize("client", CLIENTS)
def test_an_http_status_says_whether_it_may_pass(client: str) -> None:
    for status in PASSING:
        assert classify(answered(client, status, {})) == Classification(failure=TRANSIENT), status
    for status in LASTING:
        assert classify(answered(client, status, {})) == Classification(failure=POISON), status


@pytest.mark.parametrize("client", CLIENTS)
def test_retry_after_says_how_long_to_wait(client: str) -> None:
    def delay(value: str, status: int = 503) -> float | None:
        return classify(answered(client, status, {"Retry-After": value}), now=lambda: 1_445_412_480.0).delay

    assert delay("120") == 120
    assert delay(" 0.5 ") == 0.5
    assert delay("-5") == 0
    assert delay("Wed, 21 Oct 2015 07:28:30 GMT") == 30
    assert delay("Wed, 21 Oct 2015 07:28:30 -0000") == 30
    assert delay("Wed, 21 Oct 2015 09:28:30 +0200") == 30
    assert delay("Wed, 21 Oct 2015 07:27:00 GMT") == 0
    assert delay("120", status=400) is None
    for garbage in (
        "",
        "soon",
        "nan",
        "inf",
        "1e5",
        "1_000",
        "12 s",
        "9" * 400,
        "Wed, 99 Oct 2015 07:28:30 GMT",
    ):
        assert delay(garbage) is None, garbage


def test_a_date_without_a_zone_is_in_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        for zone in ("GMT", "-0000", ""):
            error = answered("httpx", 503, {"Retry-After": f"Wed, 21 Oct 2015 07:28:30 {zone}"})
            assert classify(error, now=lambda: 1_445_412_480.0).delay == 30
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.one_of(st.text(), st.binary(), st.integers(), st.floats(), st.none(), st.lists(st.integers())))
def test_no_retry_after_can_break_anything(value: Any) -> None:
    error = having(TimeoutError(), headers={"retry-after": value}, retry_after=value)
    verdict = classify(error, now=lambda: 0.0)
    assert verdict.failure is TRANSIENT
    assert verdict.delay is None or 0 <= verdict.delay < math.inf


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        (3, 3),
        (0.25, 0.25),
        (-3, 0),
        (timedelta(minutes=1), 60),
        (timedelta(seconds=-1), 0),
        ("3", None),
        (True, None),
        (math.nan, None),
        (math.inf, None),
        (10**400, None),
    ],
    ids=shown,
)
def test_an_error_may_say_itself_how_long_to_wait(value: Any, delay: float | None) -> None:
    error = having(TimeoutError(), retry_after=value)
    assert classify(error) == Classification(failure=TRANSIENT, delay=delay)


def test_classify_a_wait_alone_is_not_transient() -> None:
    assert classify(having(ValueError(), retry_after=3)) == Classification(failure=POISON)


@pytest.mark.parametrize("status", [0, 200, 302, 399, 600, True, "503", 503.0, None, [503]])
def test_other_http_status_decides_nothing(status: Any) -> None:
    assert classify(having(ValueError(), status=status, status_code=status)).failure is POISON
    assert classify(having(TimeoutError(), status=status, status_code=status)).failure is TRANSIENT


def test_a_code_is_an_http_status_only_where_the_library_says_so() -> None:
    assert classify(having(ValueError(), code=503)).failure is POISON
    assert classify(having(like("shop.OrderError")(), code=429)).failure is POISON


# The usual clients, by the names of their classes.


class GrpcCode(Enum):
    OK = (0, "ok")
    UNAVAILABLE = (14, "unavailable")
    RESOURCE_EXHAUSTED = (8, "resource exhausted")
    ABORTED = (10, "aborted")
    DEADLINE_EXCEEDED = (4, "deadline exceeded")
    INVALID_ARGUMENT = (3, "invalid argument")
    INTERNAL = (13, "internal")


def grpc_error(path: str, code: object) -> Any:
    return like(path, like("grpc.RpcError"), code=lambda self: code)()


def aws(code: str, status: int = 400) -> Any:
    return having(
        like("botocore.exceptions.ClientError")(code),
        response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
    )


def postgres(path: str, base: str, **fields: Any) -> Any:
    return having(like(path, like(base))("no"), **fields)


def sqlalchemy(original: BaseException, *, lost: bool = False) -> Any:
    base = like("sqlalchemy.exc.DBAPIError", like("sqlalchemy.exc.StatementError"))
    return having(
        like("sqlalchemy.exc.OperationalError", base)("no"),
        orig=original,
        connection_invalidated=lost,
        code="e3q8",
    )


def mysql(path: str, *args: object, **fields: Any) -> Any:
    package = path.partition(".")[0]
    return having(
        like(path, like(f"{package}.err.Error", like(f"{package}.err.MySQLError")))(*args), **fields
    )


def mongo(path: str, *labels: str, base: str = "pymongo.errors.PyMongoError") -> Any:
    root = like("pymongo.errors.PyMongoError", has_error_label=lambda self, label: label in labels, code=503)
    return like(path, like(base, root))("no")


def kafka(name: str, **flags: bool) -> confluent_kafka.KafkaException:
    error = confluent_kafka.KafkaError
    return confluent_kafka.KafkaException(error(getattr(error, name), "no", **flags))


asyncpg_interface = like("asyncpg.exceptions._base.InterfaceError")
aiohttp_connection = like("aiohttp.client_exceptions.ClientConnectionError")
redis_connection = like("redis.exceptions.ConnectionError", like("redis.exceptions.RedisError"))
urllib3_error = like("urllib3.exceptions.HTTPError")
retry_error = like("urllib3.exceptions.MaxRetryError", urllib3_error)

transient_clients = [
    like("httpx.ReadTimeout", like("httpx.TimeoutException"))(),
    like("httpx.ConnectError", like("httpx.NetworkError"))(),
    like("httpx.RemoteProtocolError")("Server disconnected without sending a response."),
    like("app.errors.OurTimeout", like("httpx.ConnectTimeout", like("httpx.TimeoutException")))(),
    like("httpcore._exceptions.ReadError", like("httpcore._exceptions.NetworkError"))(),
    like("requests.exceptions.ConnectionError", OSError)(),
    like("requests.exceptions.ReadTimeout", like("requests.exceptions.Timeout", OSError))(),
    like("requests.exceptions.ChunkedEncodingError", OSError)(),
    like("aiohttp.client_exceptions.ServerDisconnectedError", aiohttp_connection)(),
    like("aiohttp.client_exceptions.ClientConnectorError", aiohttp_connection, OSError)(errno.EACCES, "no"),
    like("aiohttp.client_exceptions.ClientPayloadError")(),
    like("urllib3.exceptions.ProtocolError", urllib3_error)("Connection aborted."),
    having(retry_error("Max retries"), reason=like("urllib3.exceptions.NewConnectionError", urllib3_error)()),
    having(
        retry_error("Max retries"),
        reason=like("urllib3.exceptions.ResponseError")("too many 503 error responses"),
    ),
    like("botocore.exceptions.EndpointConnectionError", like("botocore.exceptions.ConnectionError"))(),
    like("botocore.exceptions.ReadTimeoutError", like("botocore.exceptions.HTTPClientError"))(),
    aws("ThrottlingException"),
    aws("ProvisionedThroughputExceededException"),
    aws("RequestTimeout"),
    aws("SlowDown", 503),
    aws("InternalError", 500),
    having(
        like("google.api_core.exceptions.Aborted", like("google.api_core.exceptions.GoogleAPICallError"))(),
        code=409,
    ),
    like("google.api_core.exceptions.RetryError")(),
    like("google.auth.exceptions.TransportError")(),
    like("azure.core.exceptions.ServiceRequestError")(),
    like("openai.APITimeoutError", like("openai.APIConnectionError"))(),
    like("anthropic.APIConnectionError")(),
    *(grpc_error("grpc._channel._InactiveRpcError", code) for code in list(GrpcCode)[1:5]),
    grpc_error("grpc.aio._call.AioRpcError", GrpcCode.UNAVAILABLE),
    like("psycopg.OperationalError")("server closed the connection unexpectedly"),
    like("psycopg.InterfaceError")("the connection is closed"),
    postgres("psycopg_pool.PoolTimeout", "psycopg.OperationalError", sqlstate=None),
    postgres("psycopg2.OperationalError", "psycopg2.DatabaseError", pgcode=None),
    *(
        postgres("psycopg.errors.Some", "psycopg.DatabaseError", sqlstate=state)
        for state in ("08006", "40001", "40P01", "53300", "57P01", "57P03", "57014", "55P03")
    ),
    postgres(
        "psycopg2.errors.DeadlockDetected", "psycopg2.extensions.TransactionRollbackError", pgcode="40P01"
    ),
    asyncpg_interface("connection is closed"),
    having(like("asyncpg.exceptions.ConnectionDoesNotExistError")(), sqlstate="08003"),
    having(like("asyncpg.exceptions.TooManyConnectionsError")(), sqlstate="53300"),
    sqlalchemy(like("oracledb.DatabaseError")(), lost=True),
    sqlalchemy(like("psycopg2.OperationalError")()),
    sqlalchemy(having(like("sqlalchemy.dialects.postgresql.asyncpg.Error")(), sqlstate="40001")),
    sqlalchemy(mysql("pymysql.err.OperationalError", 2006, "MySQL server has gone away")),
    like("sqlalchemy.exc.TimeoutError")("QueuePool limit of size 5 overflow 10 reached"),
    *(mysql("pymysql.err.OperationalError", code, "no") for code in (1205, 1213, 2002, 2003, 2006, 2013)),
    mysql("pymysql.err.InterfaceError", 0, ""),
    mysql("MySQLdb._exceptions.OperationalError", 2013, "Lost connection"),
    having(
        like("mysql.connector.errors.InterfaceError", like("mysql.connector.errors.Error"))(),
        errno=2003,
        sqlstate="HY000",
    ),
    redis_connection(),
    like("redis.exceptions.TimeoutError")(),
    like("redis.exceptions.BusyLoadingError", redis_connection)(),
    like("redis.exceptions.ReadOnlyError")("You can't write against a read only replica."),
    mongo("pymongo.errors.NetworkTimeout", base="pymongo.errors.ConnectionFailure"),
    mongo("pymongo.errors.AutoReconnect", base="pymongo.errors.ConnectionFailure"),
    mongo("pymongo.errors.OperationFailure", "TransientTransactionError"),
    kafka("_TRANSPORT"),
    kafka("NOT_ENOUGH_REPLICAS"),
    kafka("UNKNOWN", retriable=True),
    ProduceError(confluent_kafka.KafkaError(confluent_kafka.KafkaError._MSG_TIMED_OUT)),
    having(like("aiokafka.errors.NodeNotReadyError", like("aiokafka.errors.KafkaError"))(), retriable=True),
]

poison_clients = [
    like("httpx.LocalProtocolError")(),
    like("httpx.UnsupportedProtocol")(),
    like("httpx.DecodingError")(),
    like("requests.exceptions.InvalidURL", OSError, ValueError)(),
    like("requests.exceptions.JSONDecodeError", OSError, ValueError)(),
    like("aiohttp.client_exceptions.ServerFingerprintMismatch", aiohttp_connection)(),
    like("aiohttp.client_exceptions.ClientConnectorCertificateError", aiohttp_connection, OSError)(),
    having(like("aiohttp.client_exceptions.ContentTypeError")(), status=200),
    like("urllib3.exceptions.LocationParseError", urllib3_error, ValueError)(),
    having(retry_error("Max retries"), reason=like("urllib3.exceptions.ResponseError")("too many redirects")),
    aws("ValidationException"),
    aws("AccessDeniedException", 403),
    like("botocore.exceptions.ParamValidationError")(),
    grpc_error("grpc._channel._InactiveRpcError", GrpcCode.INVALID_ARGUMENT),
    grpc_error("grpc.aio._call.AioRpcError", GrpcCode.INTERNAL),
    grpc_error("grpc._channel._InactiveRpcError", None),
    *(
        postgres("psycopg.errors.Some", "psycopg.OperationalError", sqlstate=state)
        for state in ("23505", "22P02", "42601", "40002", "28P01")
    ),
    postgres("psycopg2.errors.UniqueViolation", "psycopg2.IntegrityError", pgcode="23505"),
    like("psycopg.ProgrammingError")("can't adapt type"),
    like("asyncpg.exceptions._base.DataError", asyncpg_interface, ValueError)(
        "invalid input for query argument $1"
    ),
    sqlalchemy(like("psycopg2.IntegrityError")()),
    sqlalchemy(ValueError("a value that the column's type refuses")),
    mysql("pymysql.err.ProgrammingError", 1064, "You have an error in your SQL syntax"),
    mysql("pymysql.err.IntegrityError", 1062, "Duplicate entry"),
    redis_connection.__base__("WRONGTYPE Operation against a key"),
    like("redis.exceptions.AuthenticationError", redis_connection)("invalid password"),
    mongo("pymongo.errors.DuplicateKeyError", base="pymongo.errors.OperationFailure"),
    kafka("MSG_SIZE_TOO_LARGE"),
    kafka("TOPIC_AUTHORIZATION_FAILED"),
    having(
        like("aiokafka.errors.MessageSizeTooLargeError", like("aiokafka.errors.KafkaError"))(),
        retriable=False,
    ),
]


@pytest.mark.parametrize("error", transient_clients, ids=shown)
def test_passing_errors_of_common_clients_are_transient(error: BaseException) -> None:
    assert classify(error) == Classification(failure=TRANSIENT)


@pytest.mark.parametrize("error", poison_clients, ids=shown)
def test_lasting_errors_of_common_clients_are_poison(error: BaseException) -> None:
    assert classify(error) == Classification(failure=POISON)


def test_classify_locked_database_is_transient(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db", timeout=0)) as one:
        one.execute("create table t (n integer primary key)")
        one.execute("begin immediate")
        with closing(sqlite3.connect(tmp_path / "a.db", timeout=0)) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked") as locked:
                other.execute("begin immediate")
            with pytest.raises(sqlite3.OperationalError, match="no such table") as missing:
                other.execute("select * from missing")
    assert classify(locked.value).failure is TRANSIENT
    assert classify(missing.value).failure is POISON
    assert classify(sqlite3.IntegrityError("UNIQUE constraint failed")).failure is POISON


def test_a_class_of_the_same_name_elsewhere_means_nothing() -> None:
    for path in ("app.redis.ConnectionError", "redisx.ConnectionError", "httpx_mock.TimeoutException"):
        assert classify(like(path)()).failure is POISON


class Broken(Exception):  # noqa: N818 - it is broken
    """Every attribute raises, as properties of a half-built error do."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise LookupError(name)


@pytest.mark.parametrize(
    "path",
    [f"{where}.{name}" for where, names in module._LIBRARIES.items() for name in names] + ["app.Error"],
)
def test_error_with_a_misleading_name_breaks_nothing(path: str) -> None:
    assert isinstance(classify(like(path)()), Classification)
    assert isinstance(classify(like(path, Broken)()), Classification)
    odd: dict[str, Any] = {
        name: [{}] for name in ("code", "errno", "reason", "orig", "response", "headers", "sqlstate")
    }
    assert isinstance(classify(having(like(path)([{}]), **odd)), Classification)


def test_an_error_that_wraps_itself_is_poison() -> None:
    error = urllib.error.URLError("")
    error.reason = error
    assert classify(error).failure is POISON


def test_module_name_that_is_not_a_text_breaks_nothing() -> None:
    assert classify(type("Odd", (Exception,), {"__module__": None})()).failure is POISON


def test_classify_known_errors_exist_in_their_libraries() -> None:
    found = set()
    for where, names in module._LIBRARIES.items():
        places = []
        for path in (where, *(f"{where}.{part}" for part in ("exceptions", "errors", "exc", "err", "error"))):
            try:
                places.append(importlib.import_module(path))
            except ImportError:
                continue
        if places:
            found.add(where)
            missing = [name for name in names if not any(hasattr(place, name) for place in places)]
            assert not missing, where
    assert found >= {"urllib.error", "http.client", "ssl", "sqlite3", "confluent_kafka"}
