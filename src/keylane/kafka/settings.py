"""Kafka client settings: Keylane's own, the user's ``kafka.*`` options, and those that users may not change."""

from __future__ import annotations

import difflib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import AdminClient

from keylane.denial import is_denied
from keylane.errors import AccessDeniedError, BrokerError, SettingsError
from keylane.redaction import HIDDEN, is_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.kafka.lost_requests import LostRequests

log = logging.getLogger("keylane.kafka")

BOOTSTRAP = "kafka.bootstrap.servers"
BATCH_BYTES = 1_000_000
"""The client's default ``batch.size``."""
BATCH_OVERHEAD_BYTES = 128
"""Bytes of a batch besides its records, rounded up."""

_ENVIRONMENT_PREFIX = "KEYLANE_KAFKA_"
"""Environment variables with this prefix are settings of the Kafka client."""
_MESSAGE_BYTES_MAX = 1_000_000_000
"""The largest ``message.max.bytes`` that the client accepts."""
_OUTAGE_QUIET_SECONDS = 10.0
"""After an outage no other one is logged for this time: one broker of several may be down while others answer."""
_REPEAT_SECONDS = 10.0
_CONNECTION_FACILITIES = ("FAIL", "REQTMOUT", "METADATAUPDATE")
"""The client's log facilities that are about a connection."""
_HARMLESS = (
    ("GETPID", "Not coordinator"),  # the coordinator has just moved
    ("GETPID", "Coordinator load in progress"),  # the broker was just started; the client asks again
    ("BGQUEUE", "Purging"),  # unread events when a client closes
    ("METADATAUPDATE", "not found in cache"),  # follows a lost connection, which has a line of its own
    ("ADDOFFSETS", "Timed out"),  # an aborted commit, which the app retries and logs
    ("CONFWARN", "enable.gapless.guarantee is experimental"),
    ("CONFWARN", "is a consumer property"),  # kafka.* settings are for all clients
    ("CONFWARN", "is a producer property"),
)
"""Facility and text of client log lines that are always dropped."""


class _ClientLogFilter(logging.Filter):
    """Passes each kind of client log line at most once in ten seconds. The client may repeat it many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged."""
        facility = str(record.args[0] if isinstance(record.args, tuple) and record.args else record.msg)
        if any(name == facility and text in record.getMessage() for name, text in _HARMLESS):
            return False
        if facility in _CONNECTION_FACILITIES or (
            facility == "ERROR" and "brokers are down" in record.getMessage()
        ):
            return outage.began(record)
        now = time.monotonic()
        if now - self._logged_at.get(facility, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            return False
        self._logged_at[facility] = now
        return True


class Outage:
    """A broker that does not answer: logs one line when the outage begins and one when it ends.

    All clients of the process share one outage, because each of them complains many times. Code that gets an answer
    from a broker calls :meth:`answered`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.since: float | None = None
        self._ended = -_OUTAGE_QUIET_SECONDS

    def began(self, record: logging.LogRecord) -> bool:
        """Rewrite a client's log line as the outage's first line. False if the line must be dropped instead."""
        with self._lock:
            if self.since is not None or self._clock() - self._ended < _OUTAGE_QUIET_SECONDS:
                return False
            self.since = self._clock()
        reason = record.args[-1] if isinstance(record.args, tuple) and record.args else record.msg
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "no answer from a Kafka broker; retrying, nothing is lost reason=%s"
        record.args = (str(reason).rpartition("]: ")[2],)
        return True

    def answered(self) -> None:
        """A broker has answered."""
        if self.since is None:  # the hot path
            return
        with self._lock:
            began, self.since = self.since, None
            self._ended = self._clock()
        if began is not None:
            log.warning("Kafka answers again outage_seconds=%.0f", self._ended - began)


outage = Outage()
client_log = logging.getLogger("keylane.kafka.client")
client_log.addFilter(_ClientLogFilter())

_BROKER_NOT_TRUSTED = (
    "this client does not trust the broker's certificate: kafka.ssl.ca.location must name the certificate of the "
    "authority that signed it, and it must be valid for this address and today"
)
_CLIENT_NOT_TRUSTED = (
    "the broker does not accept the client's certificate: it has expired, is signed by another authority, or is "
    "missing; check kafka.ssl.keystore.location, or kafka.ssl.certificate.location and kafka.ssl.key.location"
)
_NO_TLS = "the port does not speak TLS; check the address and kafka.security.protocol"
_TLS_REFUSALS = {
    "alert certificate expired": (_CLIENT_NOT_TRUSTED, True),
    "certificate verify failed": (_BROKER_NOT_TRUSTED, True),
    "alert unknown ca": (_CLIENT_NOT_TRUSTED, True),
    "alert bad certificate": (_CLIENT_NOT_TRUSTED, True),
    "alert certificate required": (_CLIENT_NOT_TRUSTED, True),
    "alert certificate unknown": (_CLIENT_NOT_TRUSTED, True),
    "PLAINTEXT broker listener": (_NO_TLS, False),
    "wrong version number": (_NO_TLS, False),
}
"""Parts of the client's text about a failed TLS handshake, what they mean, and whether another try fails too."""

C = TypeVar("C", Consumer, Producer, AdminClient)

_REFUSAL_SECONDS = 60.0
"""How long a refused connection explains that no broker answers."""
_refusals: dict[str, tuple[str, bool, float]] = {}
"""By bootstrap address: why a broker last refused a connection of this process, whether it always would, and when."""
_REFUSED = {
    ClientError._AUTHENTICATION: (  # noqa: SLF001 - the client's public constants
        "the broker refused the login; check kafka.sasl.mechanism, kafka.sasl.username and kafka.sasl.password"
    ),
    ClientError._SSL: (  # noqa: SLF001
        "the TLS handshake failed; check kafka.security.protocol, kafka.ssl.ca.location, and the client's certificate "
        "and key if the broker requires them"
    ),
    ClientError._RESOLVE: "the host name could not be resolved; check the address and this machine's DNS",  # noqa: SLF001
}

RESERVED_SETTINGS = {
    "group.id": "the app's name is its group",
    "enable.auto.commit": "progress is committed when messages are done",
    "enable.auto.offset.store": "progress is committed when messages are done",
    "auto.offset.reset": "use startingOffsets",
    "enable.partition.eof": "the engine needs it",
    "enable.idempotence": "the order in the sink depends on it",
    "acks": "a result counts as written when all replicas have it",
    "max.in.flight": "the order in the sink depends on it",
    "max.in.flight.requests.per.connection": "the order in the sink depends on it",
    "partitioner": "results are partitioned as by Java clients",
    "transactional.id": "the engine sets its own",
    "message.timeout.ms": "a result is retried as long as its task runs",
    "delivery.timeout.ms": "a result is retried as long as its task runs",
    "on_delivery": "the engine needs it",
    "error_cb": "the engine needs it",
}
"""Settings that users may not change, each with the reason."""
_COMMON = {
    "log_level": 4,
    # The client's default backoff grows to 10 s. A restarted broker should be found within a second.
    "reconnect.backoff.max.ms": 1000,
    # Nothing here reads the client's own metrics.
    "enable.metrics.push": False,
}


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach the brokers. ``extra``: librdkafka settings that the user gave as ``kafka.*`` options.

    Raises :class:`SettingsError` for a setting in :data:`RESERVED_SETTINGS`.
    """

    bootstrap: str
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, _ in self.extra:
            if name in RESERVED_SETTINGS:
                raise SettingsError(f"option 'kafka.{name}' cannot be set: {RESERVED_SETTINGS[name]}")

    def __repr__(self) -> str:
        shown = {k: HIDDEN if is_secret(k) else v for k, v in self.extra}
        return f"KafkaSettings({self.bootstrap!r}, {shown})"

    @property
    def login(self) -> str:
        """The user's name for SASL; empty without one, as with a certificate."""
        return dict(self.extra).get("sasl.username", "")

    def reads_committed(self, delivery: str) -> bool:
        """Whether the app's consumer reads committed messages only. Always with exactly_once, else by default.

        Such a consumer reads up to the last stable offset, where the first open transaction begins. Others read up to
        the high watermark.
        """
        return delivery == "exactly_once" or dict(self.extra).get("isolation.level") != "read_uncommitted"

    def consumer(self, group: str, **more: Any) -> Consumer:
        """A consumer without auto-commit that reads committed messages only. ``more`` overrides any setting."""
        return self._make(
            Consumer,
            {
                "group.id": group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                # librdkafka stops fetching for this time when its queue is full. The default of 1,000 stalls a drain.
                "fetch.queue.backoff.ms": 10,
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 50_000,
                "queued.max.messages.kbytes": 65_536,
            },
            more,
        )

    def producer(self, *, batch_limit: int = 0, record_limit: int = 0, **more: Any) -> Producer:
        """An idempotent producer that waits for all replicas and partitions by murmur2 as Java clients do.

        ``batch_limit``: the smallest ``max.message.bytes`` of its topics, 0 if unknown. The broker applies it to whole
        batches, and the client does not split a rejected batch. ``record_limit``: the client itself refuses larger
        records; 0 for no limit.
        """
        return self._producer(batch_limit, record_limit, more)

    def watched_producer(self, lost: LostRequests, *, batch_limit: int = 0, **more: Any) -> Producer:
        """The same. ``lost`` learns of requests without an answer while the producer is polled."""
        return self._producer(batch_limit, 0, more | lost.settings(dict(self.extra)), lost)

    def _producer(
        self,
        batch_limit: int,
        record_limit: int,
        more: dict[str, Any],
        logger: logging.Logger | LostRequests = client_log,
    ) -> Producer:
        if batch_limit:
            more["batch.size"] = self._at_most(
                "batch.size", BATCH_BYTES, max(1, batch_limit - BATCH_OVERHEAD_BYTES)
            )
        if record_limit:
            more["message.max.bytes"] = self._at_most(
                "message.max.bytes", _MESSAGE_BYTES_MAX, max(1000, record_limit)
            )
        return self._make(
            Producer,
            {
                "enable.idempotence": True,
                "acks": "all",
                "partitioner": "murmur2_random",
                "compression.type": "lz4",
                "linger.ms": 5,
                "message.timeout.ms": 0,
                # Sizes are checked against the topic's own limit before a result is handed over.
                "message.max.bytes": _MESSAGE_BYTES_MAX,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 2_097_151,
            },
            more,
            logger,
        )

    def _at_most(self, name: str, default: int, maximum: int) -> int | str:
        given = dict(self.extra).get(name, str(default))
        return (
            min(int(given), maximum) if given.isdigit() else given
        )  # the client reports what is wrong with it

    def admin(self) -> AdminClient:
        """An admin client."""
        return self._make(AdminClient, {}, {})

    def explain_no_answer(self) -> str:
        """Why no broker answered: the last refusal that a client of this process met, or the result of a test. Blocks.

        The test opens a TCP connection to each address.
        """
        refusal, _ = self._last_refusal()
        if refusal:
            _refusals.pop(self.bootstrap)
            return refusal
        if any(map(_accepts_connections, self.bootstrap.split(","))):
            protocol = dict(self.extra).get("security.protocol", "plaintext")
            return (
                f"it accepts connections but does not answer to {protocol!r}; check kafka.security.protocol, the port "
                "may expect TLS or a login"
            )
        return "Is it running, and is the address right? 'keylane broker start' starts one on this machine"

    def no_answer(self, seconds: float, reason: str) -> BrokerError:
        """The error for a broker that did not answer in this time. Blocks as :meth:`explain_no_answer` does."""
        _, lasting = self._last_refusal()
        kind = AccessDeniedError if lasting else BrokerError
        return kind(
            f"no Kafka broker answered at {self.bootstrap} within {seconds:g} s ({reason}): "
            f"{self.explain_no_answer()}"
        )

    def unknown_hosts(self) -> str:
        """The reason when the names of all hosts are unknown; empty if one is known, or if that is not certain."""
        reasons = [_unknown(address) for address in self.bootstrap.split(",")]
        return "; ".join(reasons) if all(reasons) else ""

    def _on_error(self, error: ClientError) -> None:
        """Keep the reason of a refused connection. Called while a client is polled."""
        text = error.str()
        # The client reports what a broker says about its certificate as a lost connection.
        known = [found for part, found in _TLS_REFUSALS.items() if part in text]
        if known or error.code() in _REFUSED:
            why, lasting = known[0] if known else (_REFUSED[error.code()], is_denied(error))
            _refusals[self.bootstrap] = f"{why} ({text})", lasting, time.monotonic()

    def refused_for_good(self, what: str) -> AccessDeniedError | None:
        """An error that begins with ``what``, if a broker has just refused the login or a certificate."""
        why, lasting = self._last_refusal()
        return AccessDeniedError(f"{what}: {why}") if lasting else None

    def _last_refusal(self) -> tuple[str, bool]:
        why, lasting, at = _refusals.get(self.bootstrap, ("", False, 0.0))
        return (why, lasting) if time.monotonic() - at < _REFUSAL_SECONDS else ("", False)

    def _make(
        self,
        kind: type[C],
        base: dict[str, Any],
        more: dict[str, Any],
        logger: logging.Logger | LostRequests = client_log,
    ) -> C:
        conf = {
            "bootstrap.servers": self.bootstrap,
            "error_cb": self._on_error,
            **_COMMON,
            **base,
            **dict(self.extra),
            **more,
        }
        try:
            return kind(conf, logger=logger)
        except KafkaException as error:
            raise SettingsError(
                f"the Kafka client refused its settings: {error.args[0].str()}. "
                "Options that begin with 'kafka.' use librdkafka's names (CONFIGURATION.md of librdkafka)"
            ) from error


def _accepts_connections(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def _unknown(address: str) -> str:
    """Why the address's host has no network address; empty if it has, or if the DNS does not answer now."""
    host = address.strip().rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError) as error:
        temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        return "" if temporary else f"the host name {host!r} is not known"
    return ""


def client_settings(bootstrap: str, given: Mapping[str, str]) -> KafkaSettings:
    """The given settings, added to those from the environment: ``KEYLANE_KAFKA_SASL_PASSWORD=…``."""
    extra = {
        name.removeprefix(_ENVIRONMENT_PREFIX).lower().replace("_", "."): value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT_PREFIX) and value
    }
    return KafkaSettings(bootstrap, tuple(sorted((extra | dict(given)).items())))


def find_bootstrap(*given: object) -> str:
    """The first given address, or that of the environment. Raises :class:`SettingsError` if there is none."""
    for address in (*given, os.environ.get("KEYLANE_BOOTSTRAP")):
        if address:
            return str(address)
    raise SettingsError(
        "no broker given: pass bootstrap='host:9092' or set KEYLANE_BOOTSTRAP. "
        "'keylane broker start' starts one on this machine"
    )


def settings_from_options(
    bootstrap: str | None, options: Mapping[str, Any], *, known: tuple[str, ...], what: str
) -> KafkaSettings:
    """Settings from an address and ``kafka.*`` options. ``known``: option names to suggest for an unknown one.

    Raises :class:`SettingsError` for any other option; ``what`` begins its message.
    """
    extra = {}
    for name, value in options.items():
        if not name.startswith("kafka."):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(known)}, kafka.*"
            raise SettingsError(f"{what}: unknown option {name!r}{hint}")
        if name != BOOTSTRAP:
            extra[name.removeprefix("kafka.")] = str(value)
    return client_settings(find_bootstrap(bootstrap, options.get(BOOTSTRAP)), extra)
