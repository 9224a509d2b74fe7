"""Client settings: ours, the user's ``kafka.*`` options, and which of them may not be changed."""

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

from keylane.errors import SettingsError
from keylane.redaction import HIDDEN, is_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger("keylane.kafka")

BOOTSTRAP = "kafka.bootstrap.servers"
_ENVIRONMENT = "KEYLANE_KAFKA_"
"""What begins the names of environment variables that are settings of the Kafka client."""


class _Seldom(logging.Filter):
    """Lets a client's complaint through once in ten seconds for each kind: it repeats itself many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it may be said now."""
        kind = str(record.args[0] if isinstance(record.args, tuple) and record.args else record.msg)
        if any(name == kind and text in record.getMessage() for name, text in _HARMLESS):
            return False
        if kind in _CONNECTION or (kind == "ERROR" and "brokers are down" in record.getMessage()):
            return outage.began(record)
        now = time.monotonic()
        if now - self._said.get(kind, -_SILENCE) < _SILENCE:
            return False
        self._said[kind] = now
        return True


_AGAIN_SECONDS = 10.0
"""After an outage no other one is told for so long: one node of several may be down while others answer."""
_CONNECTION = ("FAIL", "REQTMOUT", "METADATAUPDATE")
"""Kinds of complaints that are about a connection."""


class Outage:
    """A broker that does not answer: one line when it begins, one when it is over. For all clients of this process.

    The clients complain about it in many ways, many times. Whoever gets an answer says so with :meth:`answered`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.since: float | None = None
        self._ended = -_AGAIN_SECONDS

    def began(self, record: logging.LogRecord) -> bool:
        """Make a client's complaint the first line, if it is the first; whether it may be said."""
        with self._lock:
            if self.since is not None or self._clock() - self._ended < _AGAIN_SECONDS:
                return False
            self.since = self._clock()
        why = record.args[-1] if isinstance(record.args, tuple) and record.args else record.msg
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "a Kafka broker does not answer (%s). Retrying; nothing is lost meanwhile"
        record.args = (str(why).rpartition("]: ")[2],)
        return True

    def answered(self) -> None:
        """A broker has answered."""
        if self.since is None:  # the hot path
            return
        with self._lock:
            began, self.since = self.since, None
            self._ended = self._clock()
        if began is not None:
            log.warning("Kafka answers again, after %.0f s", self._ended - began)


outage = Outage()
_SILENCE = 10.0
_HARMLESS = (
    ("GETPID", "Not coordinator"),  # of a broker whose coordinator has just moved
    ("GETPID", "Coordinator load in progress"),  # of a broker that was just started; the client asks again
    ("BGQUEUE", "Purging"),  # events that nobody asked for, at a client's end
    ("CONFWARN", "enable.gapless.guarantee is experimental"),
    ("CONFWARN", "is a consumer property"),  # kafka.* settings are for all clients
    ("CONFWARN", "is a producer property"),
)
"""What a client complains about that needs nobody's attention."""
BATCH_BYTES = 1_000_000
"""The client's own ``batch.size``."""
_UNLIMITED = 1_000_000_000
BATCH_OVERHEAD = 128
"""Bytes a batch takes besides its records, rounded up."""
_client_log = logging.getLogger("keylane.kafka.client")
_client_log.addFilter(_Seldom())

C = TypeVar("C", Consumer, Producer, AdminClient)

_refusals: dict[str, str] = {}
"""By bootstrap address: why brokers there last refused a client of this process."""
_REFUSED = {
    ClientError._AUTHENTICATION: (  # noqa: SLF001 - the client's public constants
        "the broker refuses the login; check kafka.sasl.mechanism, kafka.sasl.username and kafka.sasl.password"
    ),
    ClientError._SSL: (  # noqa: SLF001
        "no TLS connection could be made; check kafka.security.protocol, kafka.ssl.ca.location, and the client's "
        "certificate and key if the broker wants them"
    ),
}

OURS = {
    "group.id": "the app's name is its group",
    "enable.auto.commit": "progress is committed when messages are done",
    "enable.auto.offset.store": "progress is committed when messages are done",
    "auto.offset.reset": "use startingOffsets",
    "enable.partition.eof": "the engine needs it",
    "enable.idempotence": "order in the sink rests on it",
    "acks": "a result is done when all replicas have it",
    "max.in.flight": "order in the sink rests on it",
    "max.in.flight.requests.per.connection": "order in the sink rests on it",
    "partitioner": "results are partitioned as Java clients do",
    "transactional.id": "the engine names its own",
    "message.timeout.ms": "a result is never given up while its task runs",
    "delivery.timeout.ms": "a result is never given up while its task runs",
    "on_delivery": "the engine needs it",
    "error_cb": "the engine needs it",
}
_ALL = {
    "log_level": 4,
    # The client doubles its wait up to 10 s; a broker that is back is to be found within a second.
    "reconnect.backoff.max.ms": 1000,
    # Nobody here subscribes to the client's own metrics.
    "enable.metrics.push": False,
}


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach the broker. ``extra`` are librdkafka settings, given by the user as ``kafka.*`` options."""

    bootstrap: str
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, _ in self.extra:
            if name in OURS:
                raise SettingsError(f"option 'kafka.{name}' cannot be set: {OURS[name]}")

    def __repr__(self) -> str:
        shown = {k: HIDDEN if is_secret(k) else v for k, v in self.extra}
        return f"KafkaSettings({self.bootstrap!r}, {shown})"

    def reads_committed(self, delivery: str) -> bool:
        """Whether an app's consumer sees committed messages only: always with exactly_once, else unless set otherwise.

        Such a consumer reads up to the last stable offset, where the first open transaction begins; any other one up to
        the high watermark.
        """
        return delivery == "exactly_once" or dict(self.extra).get("isolation.level") != "read_uncommitted"

    def consumer(self, group: str, **more: Any) -> Consumer:
        """A consumer that commits only what it is told to."""
        return self._make(
            Consumer,
            {
                "group.id": group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                # librdkafka stops fetching for this long when its queue is full; its default of 1,000 stalls a drain.
                "fetch.queue.backoff.ms": 10,
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 50_000,
                "queued.max.messages.kbytes": 65_536,
            },
            more,
        )

    def producer(self, *, batch_limit: int = 0, record_limit: int = 0, **more: Any) -> Producer:
        """An idempotent producer that waits for all replicas and partitions by murmur2 as Java clients do.

        ``batch_limit``: the smallest ``max.message.bytes`` of its topics, 0 when it is not known. The broker applies it
        to whole batches, and the client does not split a batch that was rejected. ``record_limit``: the size from which
        the client itself refuses a record.
        """
        if batch_limit:
            more["batch.size"] = self._at_most(
                "batch.size", BATCH_BYTES, max(1, batch_limit - BATCH_OVERHEAD)
            )
        if record_limit:
            more["message.max.bytes"] = self._at_most(
                "message.max.bytes", _UNLIMITED, max(1000, record_limit)
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
                "message.max.bytes": _UNLIMITED,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 2_097_151,
            },
            more,
        )

    def _at_most(self, name: str, usual: int, most: int) -> int | str:
        asked = dict(self.extra).get(name, str(usual))
        return min(int(asked), most) if asked.isdigit() else asked  # the client says what is wrong with it

    def admin(self) -> AdminClient:
        """An admin client."""
        return self._make(AdminClient, {}, {})

    def why_silent(self) -> str:
        """Why nobody answered just now: what the clients of this process heard, or what a connection tells. Blocks."""
        if refusal := _refusals.pop(self.bootstrap, ""):
            return refusal
        if any(map(_takes_connections, self.bootstrap.split(","))):
            protocol = dict(self.extra).get("security.protocol", "plaintext")
            return (
                f"it takes connections, but does not answer to {protocol!r}: check kafka.security.protocol, the port "
                "may be for TLS or for a login"
            )
        return "Is it running, and is the address right? 'keylane broker start' starts one on this machine"

    def _heard(self, error: ClientError) -> None:
        """What a client says of its connections. Called while it is polled."""
        if error.code() in _REFUSED:
            _refusals[self.bootstrap] = f"{_REFUSED[error.code()]} ({error.str()})"

    def _make(self, kind: type[C], base: dict[str, Any], more: dict[str, Any]) -> C:
        conf = {
            "bootstrap.servers": self.bootstrap,
            "error_cb": self._heard,
            **_ALL,
            **base,
            **dict(self.extra),
            **more,
        }
        try:
            return kind(conf, logger=_client_log)
        except KafkaException as error:
            raise SettingsError(
                f"the Kafka client refused its settings: {error.args[0].str()}. "
                "Options that begin with 'kafka.' take librdkafka's names (CONFIGURATION.md of librdkafka)"
            ) from error


def _takes_connections(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def client_settings(bootstrap: str, given: Mapping[str, str]) -> KafkaSettings:
    """Settings that were given, and for the rest those of the environment: ``KEYLANE_KAFKA_SASL_PASSWORD=…``."""
    extra = {
        name.removeprefix(_ENVIRONMENT).lower().replace("_", "."): value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT) and value
    }
    return KafkaSettings(bootstrap, tuple(sorted((extra | dict(given)).items())))


def find_bootstrap(*given: object) -> str:
    """The first address that was given, or the environment's. Raises :class:`SettingsError` when there is none."""
    for address in (*given, os.environ.get("KEYLANE_BOOTSTRAP")):
        if address:
            return str(address)
    raise SettingsError(
        "no broker given: pass bootstrap='host:9092' or set KEYLANE_BOOTSTRAP. "
        "'keylane broker start' starts one on this machine"
    )


def given_settings(
    bootstrap: str | None, options: Mapping[str, Any], *, known: tuple[str, ...], what: str
) -> KafkaSettings:
    """From an address and options that begin with ``kafka.``; others are an error, which names a near one."""
    extra = {}
    for name, value in options.items():
        if not name.startswith("kafka."):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(known)}, kafka.*"
            raise SettingsError(f"{what}: unknown option {name!r}{hint}")
        if name != BOOTSTRAP:
            extra[name.removeprefix("kafka.")] = str(value)
    return client_settings(find_bootstrap(bootstrap, options.get(BOOTSTRAP)), extra)
