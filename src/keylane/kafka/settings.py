"""Client settings: ours, the user's ``kafka.*`` options, and which of them may not be changed."""

from __future__ import annotations

import difflib
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from keylane.core.redact import HIDDEN, is_secret
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

BOOTSTRAP = "kafka.bootstrap.servers"


class _Seldom(logging.Filter):
    """Lets a client's complaint through once in ten seconds for each kind: it repeats itself many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it may be said now."""
        kind = str(record.args[0] if isinstance(record.args, tuple) and record.args else record.msg)
        now = time.monotonic()
        if now - self._said.get(kind, -_SILENCE) < _SILENCE:
            return False
        self._said[kind] = now
        return True


_SILENCE = 10.0
_client_log = logging.getLogger("keylane.kafka.client")
_client_log.addFilter(_Seldom())

C = TypeVar("C", Consumer, Producer, AdminClient)

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
                # librdkafka stops fetching for this long when its queue is full; its default of 1,000 stalls a drain.
                "fetch.queue.backoff.ms": 10,
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 50_000,
                "queued.max.messages.kbytes": 65_536,
            },
            more,
        )

    def producer(self, **more: Any) -> Producer:
        """An idempotent producer that waits for all replicas and partitions by murmur2 as Java clients do."""
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
                "message.max.bytes": 1_000_000_000,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 2_097_151,
            },
            more,
        )

    def admin(self) -> AdminClient:
        """An admin client."""
        return self._make(AdminClient, {}, {})

    def _make(self, kind: type[C], base: dict[str, Any], more: dict[str, Any]) -> C:
        conf = {"bootstrap.servers": self.bootstrap, **_ALL, **base, **dict(self.extra), **more}
        try:
            return kind(conf, logger=_client_log)
        except KafkaException as error:
            raise SettingsError(
                f"the Kafka client refused its settings: {error.args[0].str()}. "
                "Options that begin with 'kafka.' take librdkafka's names (CONFIGURATION.md of librdkafka)"
            ) from error


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
    return KafkaSettings(find_bootstrap(bootstrap, options.get(BOOTSTRAP)), tuple(sorted(extra.items())))
