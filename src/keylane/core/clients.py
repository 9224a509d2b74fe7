"""What the usual clients raise: recognised by name and attributes, without importing any of them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, TypeAlias


class Failure(Enum):
    """The two kinds there are."""

    TRANSIENT = "transient"
    """May work later: the lane waits, the message runs again."""
    POISON = "poison"
    """Will never work: no retry."""


# What is known of the usual clients. An error's attributes are foreign code, so they are read with care: properties of
# httpx and urllib raise when an error was built by hand.


def attribute(thing: object, name: str) -> Any:
    """An attribute that may not be there, or may raise."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def item(thing: object, *names: str) -> Any:
    """What lies under these names, one inside the other, or None."""
    for name in names:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_Answer: TypeAlias = Failure | BaseException | None
"""The kind; or the error that this one wraps and that decides; or no opinion."""
_Known: TypeAlias = Failure | Callable[[BaseException], _Answer]


def _by_status(status: object) -> Failure | None:
    if not isinstance(status, int) or not 400 <= status <= 599:
        return None
    passing = status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    return Failure.TRANSIENT if passing else Failure.POISON


def _by_code(error: BaseException) -> _Answer:
    return _by_status(attribute(error, "code"))


def _by_grpc_code(error: BaseException) -> _Answer:
    return (
        Failure.TRANSIENT if attribute(attribute(error, "code")(), "name") in _GRPC_CODES else Failure.POISON
    )


_GRPC_CODES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED")


def _by_aws_code(error: BaseException) -> _Answer:
    response = attribute(error, "response")
    if item(response, "Error", "Code") in _AWS_CODES:
        return Failure.TRANSIENT
    return _by_status(item(response, "ResponseMetadata", "HTTPStatusCode"))


# What botocore itself retries in its standard mode, whatever the HTTP status is.
_AWS_CODES = _words(
    "Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException "
    "TooManyRequestsException ProvisionedThroughputExceededException TransactionInProgressException "
    "RequestLimitExceeded BandwidthLimitExceeded LimitExceededException SlowDown PriorRequestNotComplete "
    "EC2ThrottledException RequestTimeout RequestTimeoutException"
)


def _by_sqlstate(error: BaseException) -> Failure | None:
    """By the SQL standard's code of five characters; None when there is none, or when it leaves the question open."""
    for name in ("sqlstate", "pgcode"):
        state = attribute(error, name)
        if isinstance(state, str) and len(state) == 5:
            passing = state[:2] in ("08", "40", "53") or state[:4] == "57P0" or state in ("55P03", "57014")
            if passing and state != "40002":
                return Failure.TRANSIENT
            # HY000 is ODBC's «something went wrong», which MySQL says of a lost connection too.
            return None if state == "HY000" else Failure.POISON
    return None


# 1040 too many connections, 1053 shutdown, 1205 lock wait, 1213 deadlock, 2002 … 2055 cannot connect, connection lost.
_MYSQL_CODES = (1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 2055)


def _by_mysql_code(error: BaseException) -> _Answer:
    code = attribute(error, "errno") or error.args[0]
    return Failure.TRANSIENT if code in _MYSQL_CODES else Failure.POISON


def _by_sqlite_code(error: BaseException) -> _Answer:
    code = attribute(error, "sqlite_errorcode")
    # The low byte is the kind: 5 busy, 6 locked.
    return Failure.TRANSIENT if isinstance(code, int) and code & 0xFF in (5, 6) else Failure.POISON


def _by_mongo_label(error: BaseException) -> _Answer:
    has = attribute(error, "has_error_label")
    return Failure.TRANSIENT if has("TransientTransactionError") or has("RetryableWriteError") else None


def _by_kafka_error(error: BaseException) -> _Answer:
    inner = error.args[0]
    # librdkafka sets the flag for transactions only; the names say it for everything else.
    passing = inner.retriable() or inner.name() in _KAFKA_NAMES
    return Failure.TRANSIENT if passing else Failure.POISON


_KAFKA_NAMES = _words(
    "_TRANSPORT _ALL_BROKERS_DOWN _RESOLVE _TIMED_OUT _TIMED_OUT_QUEUE _MSG_TIMED_OUT _QUEUE_FULL _RETRY _WAIT_COORD "
    "LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION BROKER_NOT_AVAILABLE REQUEST_TIMED_OUT NETWORK_EXCEPTION "
    "NOT_ENOUGH_REPLICAS NOT_ENOUGH_REPLICAS_AFTER_APPEND COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
    "NOT_COORDINATOR NOT_CONTROLLER KAFKA_STORAGE_ERROR THROTTLING_QUOTA_EXCEEDED"
)


def _by_retriable(error: BaseException) -> _Answer:
    return Failure.TRANSIENT if attribute(error, "retriable") is True else Failure.POISON


def _by_reason(error: BaseException) -> _Answer:
    reason = attribute(error, "reason")
    return reason if isinstance(reason, BaseException) else None


def _by_original(error: BaseException) -> _Answer:
    if attribute(error, "connection_invalidated") is True:
        return Failure.TRANSIENT
    original = attribute(error, "orig")
    return original if isinstance(original, BaseException) else None


def _by_too_many(error: BaseException) -> _Answer:
    # urllib3 says «too many redirects» with the same class as «too many 503 error responses».
    return Failure.TRANSIENT if "error responses" in error.args[0] else None


def _passing(names: str) -> dict[str, _Known]:
    return dict.fromkeys(names.split(), Failure.TRANSIENT)


def _lasting(names: str) -> dict[str, _Known]:
    return dict.fromkeys(names.split(), Failure.POISON)


_REDIS = _passing(
    "ConnectionError TimeoutError BusyLoadingError ReadOnlyError TryAgainError ClusterDownError WatchError"
) | _lasting("AuthenticationError AuthorizationError")
# Without an SQLSTATE: the connection was lost, or never made.
_PSYCOPG = _passing("OperationalError InterfaceError")
_PYMYSQL = _passing("InterfaceError") | {"MySQLError": _by_mysql_code}
_LLM = _passing("APIConnectionError")  # other answers carry a status_code
_KAFKA_PYTHON: dict[str, _Known] = {"KafkaError": _by_retriable}

_LIBRARIES: dict[str, dict[str, _Known]] = {
    # HTTP. What the server answered is left to the status.
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
    | _lasting(  # kinds of InterfaceError that are about the call
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
    # Kafka. confluent-kafka's class says that it lives in «cimpl».
    "confluent_kafka": {"KafkaException": _by_kafka_error},
    "cimpl": {"KafkaException": _by_kafka_error},
    "aiokafka": _KAFKA_PYTHON,
    "kafka": _KAFKA_PYTHON,
}
"""Module (everything below it counts) and class name: kinds of such classes included, the nearest one decides."""


# asyncio.TimeoutError is TimeoutError since Python 3.11; ConnectionError and TimeoutError are kinds of OSError, but not
# every OSError is about a network: a missing file stays missing.
_TRANSIENT = (TimeoutError, ConnectionError, asyncio.IncompleteReadError, socket.gaierror)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""What a network says of itself in a plain OSError."""
_WRAPPED_MAX = 8
"""How many errors that wrap one another are opened; an error that wraps itself ends here."""


def kind_of(error: BaseException) -> Failure:
    """What kind of failure an error of the usual clients is; poison when it is none of them."""
    for _ in range(_WRAPPED_MAX):
        # Cancellation and exits: whatever they carry, someone wants an end.
        if not isinstance(error, Exception):
            break
        answer = _by_sqlstate(error) or _by_class(error) or _by_response(error)
        if isinstance(answer, BaseException):
            error = answer
            continue
        if answer is None:
            network = isinstance(error, OSError) and error.errno in _NETWORK
            answer = Failure.TRANSIENT if network or isinstance(error, _TRANSIENT) else Failure.POISON
        return answer
    return Failure.POISON


def _by_class(error: BaseException) -> _Answer:
    for kind in type(error).__mro__:
        module: object = kind.__module__
        while module and isinstance(module, str):
            known = _LIBRARIES.get(module, {}).get(kind.__name__)
            module = module.rpartition(".")[0]
            if isinstance(known, Failure):
                return known
            answer: _Answer = None
            if known is not None:
                with suppress(Exception):  # not what the library makes: a double, or a class of the same name
                    answer = known(error)
            if answer is not None:
                return answer
    return None


def _by_response(error: BaseException) -> Failure | None:
    # Not .code: outside the libraries above it is anything, from an exit code to an order number.
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
