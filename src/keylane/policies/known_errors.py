"""Known errors of common client libraries, recognised by class name and attributes, without importing them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, TypeAlias


class FailureKind(Enum):
    """Whether a failure may pass."""

    TRANSIENT = "transient"
    """A retry may succeed: the lane waits, then the message runs again."""
    POISON = "poison"
    """A retry cannot succeed: there is none."""


# Reading an error's attributes runs foreign code: properties of httpx and urllib raise for errors built by hand.


def attribute(thing: object, name: str) -> Any:
    """An attribute's value; None if it is missing or raises."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def item(thing: object, *names: str) -> Any:
    """The value under these nested names, or None."""
    for name in names:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_Answer: TypeAlias = FailureKind | BaseException | None
"""The kind; or the wrapped error, which decides; or None for unknown."""
_Known: TypeAlias = FailureKind | Callable[[BaseException], _Answer]


def _by_status(status: object) -> FailureKind | None:
    if not isinstance(status, int) or not 400 <= status <= 599:
        return None
    transient = status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    return FailureKind.TRANSIENT if transient else FailureKind.POISON


def _by_code(error: BaseException) -> _Answer:
    return _by_status(attribute(error, "code"))


def _by_grpc_code(error: BaseException) -> _Answer:
    return (
        FailureKind.TRANSIENT
        if attribute(attribute(error, "code")(), "name") in _GRPC_CODES
        else FailureKind.POISON
    )


_GRPC_CODES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED")


def _by_aws_code(error: BaseException) -> _Answer:
    response = attribute(error, "response")
    if item(response, "Error", "Code") in _AWS_CODES:
        return FailureKind.TRANSIENT
    return _by_status(item(response, "ResponseMetadata", "HTTPStatusCode"))


# The codes that botocore retries in its standard mode, whatever the HTTP status.
_AWS_CODES = _words(
    "Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException "
    "TooManyRequestsException ProvisionedThroughputExceededException TransactionInProgressException "
    "RequestLimitExceeded BandwidthLimitExceeded LimitExceededException SlowDown PriorRequestNotComplete "
    "EC2ThrottledException RequestTimeout RequestTimeoutException"
)


def _by_sqlstate(error: BaseException) -> FailureKind | None:
    """The kind by the SQL standard's code of five characters; None if there is no code or it does not decide."""
    for name in ("sqlstate", "pgcode"):
        state = attribute(error, name)
        if isinstance(state, str) and len(state) == 5:
            transient = state[:2] in ("08", "40", "53") or state[:4] == "57P0" or state in ("55P03", "57014")
            if transient and state != "40002":
                return FailureKind.TRANSIENT
            # HY000 is ODBC's general error, which MySQL also uses for a lost connection.
            return None if state == "HY000" else FailureKind.POISON
    return None


# 1040 too many connections, 1053 shutdown, 1205 lock wait, 1213 deadlock, 2002 … 2055 cannot connect, connection lost.
_MYSQL_CODES = (1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 2055)


def _by_mysql_code(error: BaseException) -> _Answer:
    code = attribute(error, "errno") or error.args[0]
    return FailureKind.TRANSIENT if code in _MYSQL_CODES else FailureKind.POISON


def _by_sqlite_code(error: BaseException) -> _Answer:
    code = attribute(error, "sqlite_errorcode")
    # The low byte is the primary code: 5 is busy, 6 is locked.
    return FailureKind.TRANSIENT if isinstance(code, int) and code & 0xFF in (5, 6) else FailureKind.POISON


def _by_mongo_label(error: BaseException) -> _Answer:
    has = attribute(error, "has_error_label")
    return FailureKind.TRANSIENT if has("TransientTransactionError") or has("RetryableWriteError") else None


def _by_kafka_error(error: BaseException) -> _Answer:
    inner = error.args[0]
    # librdkafka sets the flag for transactions only; the names decide for everything else.
    transient = inner.retriable() or inner.name() in _KAFKA_NAMES
    return FailureKind.TRANSIENT if transient else FailureKind.POISON


_KAFKA_NAMES = _words(
    "_TRANSPORT _ALL_BROKERS_DOWN _RESOLVE _TIMED_OUT _TIMED_OUT_QUEUE _MSG_TIMED_OUT _QUEUE_FULL _RETRY _WAIT_COORD "
    "LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION BROKER_NOT_AVAILABLE REQUEST_TIMED_OUT NETWORK_EXCEPTION "
    "NOT_ENOUGH_REPLICAS NOT_ENOUGH_REPLICAS_AFTER_APPEND COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
    "NOT_COORDINATOR NOT_CONTROLLER KAFKA_STORAGE_ERROR THROTTLING_QUOTA_EXCEEDED"
)


def _by_retriable(error: BaseException) -> _Answer:
    return FailureKind.TRANSIENT if attribute(error, "retriable") is True else FailureKind.POISON


def _by_reason(error: BaseException) -> _Answer:
    reason = attribute(error, "reason")
    return reason if isinstance(reason, BaseException) else None


def _by_original(error: BaseException) -> _Answer:
    if attribute(error, "connection_invalidated") is True:
        return FailureKind.TRANSIENT
    original = attribute(error, "orig")
    return original if isinstance(original, BaseException) else None


def _by_too_many(error: BaseException) -> _Answer:
    # urllib3 uses the same class for "too many redirects" and "too many 503 error responses".
    return FailureKind.TRANSIENT if "error responses" in error.args[0] else None


def _passing(names: str) -> dict[str, _Known]:
    return dict.fromkeys(names.split(), FailureKind.TRANSIENT)


def _lasting(names: str) -> dict[str, _Known]:
    return dict.fromkeys(names.split(), FailureKind.POISON)


_REDIS = _passing(
    "ConnectionError TimeoutError BusyLoadingError ReadOnlyError TryAgainError ClusterDownError WatchError"
) | _lasting("AuthenticationError AuthorizationError")
# Without an SQLSTATE the connection was lost, or never established.
_PSYCOPG = _passing("OperationalError InterfaceError")
_PYMYSQL = _passing("InterfaceError") | {"MySQLError": _by_mysql_code}
_LLM = _passing("APIConnectionError")  # other answers carry a status_code
_KAFKA_PYTHON: dict[str, _Known] = {"KafkaError": _by_retriable}

_LIBRARIES: dict[str, dict[str, _Known]] = {
    # HTTP. A response from the server is classified by its status.
    "httpx": _passing("TimeoutException NetworkError RemoteProtocolError ProxyError"),
    "httpcore": _passing("TimeoutException NetworkError RemoteProtocolError ProxyError"),
    "requests": _passing("ConnectionError Timeout ChunkedEncodingError RetryError"),
    "aiohttp": _passing("ClientConnectionError ClientPayloadError")
    | _lasting("ServerFingerprintMismatch ClientConnectorCertificateError"),
    "urllib.error": _passing("ContentTooShortError") | {"HTTPError": _by_code, "URLError": _by_reason},
    "http.client": _passing("IncompleteRead"),
    "urllib3": _passing("TimeoutError NewConnectionError ProtocolError ProxyError EmptyPoolError")
    | {"MaxRetryError": _by_reason, "ResponseError": _by_too_many},
    "ssl": _passing("SSLEOFError SSLZeroReturnError"),
    # Clouds and services.
    "botocore": _passing("ConnectionError HTTPClientError ResponseStreamingError IncompleteReadError")
    | {"ClientError": _by_aws_code},
    "google.api_core": _passing("Aborted RetryError") | {"GoogleAPICallError": _by_code},
    "google.auth": _passing("TransportError"),
    "azure.core": _passing("ServiceRequestError ServiceResponseError"),
    "grpc": {"RpcError": _by_grpc_code},
    "openai": _LLM,
    "anthropic": _LLM,
    # Databases.
    "psycopg": _PSYCOPG,
    "psycopg2": _PSYCOPG,
    "asyncpg": _passing("InterfaceError ConnectionDoesNotExistError")
    | _lasting(  # subclasses of InterfaceError that mean a wrong call
        "DataError ClientConfigurationError UnsupportedClientFeatureError UnsupportedServerFeatureError"
    ),
    "sqlalchemy": _passing("TimeoutError DisconnectionError") | {"StatementError": _by_original},
    "pymysql": _PYMYSQL,
    "MySQLdb": _PYMYSQL,
    "asyncmy": _PYMYSQL,
    "mysql.connector": _passing("PoolError") | {"Error": _by_mysql_code},
    "sqlite3": {"Error": _by_sqlite_code},
    "redis": _REDIS,
    "valkey": _REDIS,
    "pymongo": _passing("ConnectionFailure ExecutionTimeout WTimeoutError")
    | {"PyMongoError": _by_mongo_label},
    "elastic_transport": _passing("ConnectionError ConnectionTimeout"),
    # Kafka. confluent-kafka's class reports "cimpl" as its module.
    "confluent_kafka": {"KafkaException": _by_kafka_error},
    "cimpl": {"KafkaException": _by_kafka_error},
    "aiokafka": _KAFKA_PYTHON,
    "kafka": _KAFKA_PYTHON,
}
"""Kinds by module (submodules included) and class name. Subclasses are included; the nearest class decides."""


# asyncio.TimeoutError is TimeoutError since Python 3.11. ConnectionError and TimeoutError are subclasses of OSError,
# but not every OSError is about a network: a missing file stays missing.
_TRANSIENT = (TimeoutError, ConnectionError, asyncio.IncompleteReadError, socket.gaierror)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""Network errors that arrive as a plain OSError."""
_WRAPPED_MAX = 8
"""Levels of wrapped errors to unwrap. The limit also ends the loop for an error that wraps itself."""


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that a known library error is; poison if the error is unknown."""
    for _ in range(_WRAPPED_MAX):
        # Cancellation and exits are never transient, whatever they wrap.
        if not isinstance(error, Exception):
            break
        answer = _by_sqlstate(error) or _by_class(error) or _by_response(error)
        if isinstance(answer, BaseException):
            error = answer
            continue
        if answer is None:
            network = isinstance(error, OSError) and error.errno in _NETWORK
            answer = FailureKind.TRANSIENT if network or isinstance(error, _TRANSIENT) else FailureKind.POISON
        return answer
    return FailureKind.POISON


def _by_class(error: BaseException) -> _Answer:
    for kind in type(error).__mro__:
        module: object = kind.__module__
        while module and isinstance(module, str):
            known = _LIBRARIES.get(module, {}).get(kind.__name__)
            module = module.rpartition(".")[0]
            if isinstance(known, FailureKind):
                return known
            answer: _Answer = None
            if known is not None:
                with suppress(
                    Exception
                ):  # not the library's own error: a test double, or a class of the same name
                    answer = known(error)
            if answer is not None:
                return answer
    return None


def _by_response(error: BaseException) -> FailureKind | None:
    # Not .code: outside the libraries above it can be anything, from an exit code to an order number.
    response = attribute(error, "response")
    for thing, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
    ):
        kind = _by_status(attribute(thing, name))
        if kind is not None:
            return kind
    return None


def asks_all_to_wait(error: BaseException) -> bool:
    """Whether the error is a service's answer that its caller sends too much: HTTP 429, itself or as its cause."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(asks_all_to_wait, error.exceptions))
    for one in (error, error.__cause__):
        response = attribute(one, "response")
        for found in (
            attribute(one, "status_code"),
            attribute(one, "status"),
            attribute(response, "status_code"),
            attribute(response, "status"),
            item(response, "ResponseMetadata", "HTTPStatusCode"),
        ):
            if found == _TOO_MANY_REQUESTS:
                return True
    return False


_TOO_MANY_REQUESTS = 429
