"""The load generator: repeatable messages, sent as fast as possible or at a fixed rate, even if the broker is slower.

A value is ``<sequence of its key>|<due time in us>|<event id>|xxx…``. The sequence counts from 0 inside each key, so
readers of the results can check their order; the due time is when the message *should* have been sent, so a
latency measured from it includes the delay of a busy generator.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from keylane.errors import BrokerError, SettingsError
from keylane.kafka.client import AdminClient, ClientError, KafkaException, NewTopic, Producer
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import BATCH_BYTES, BATCH_OVERHEAD_BYTES, RESERVED_SETTINGS, KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

EVENT_ID = "event-id"
DEFAULT_PARTITIONS = 8
BROKER_SECONDS_MAX = 10.0
"""Time until it gives up on a broker that does not answer."""
_STALL_SECONDS_MAX = 30.0  # time without an acknowledgement until sending is given up
_MICROSECONDS = 16  # digits of a due time, until the year 2286


class Distribution(StrEnum):
    """How messages are distributed over keys."""

    UNIFORM = "uniform"
    """Every key is as likely as every other."""
    ZIPF = "zipf"
    """Key number n, counted from 1, is 1/n^s times as likely as the first: a few hot lanes, a long tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedLoad:
    """What to send. The same load makes the same keys, event ids and sequences every time; only due times differ.

    Raises :class:`SettingsError` when it is built with numbers that cannot work.
    """

    messages: int = 10_000
    keys: int = 1_000
    dist: Distribution = Distribution.UNIFORM
    zipf_s: float = 1.1
    value_size: int = 200
    event_ids: bool = True
    """Whether messages carry the header ``event-id``. The id is in the value either way."""
    key_prefix: str = "k"
    seed: int = 0
    """Decides the choice of keys, and is part of every event id: two seeds never share an id."""

    def __post_init__(self) -> None:
        _at_least("messages", self.messages, 0)
        _at_least("keys", self.keys, 1)
        _at_least("seed", self.seed, 0)
        if not math.isfinite(self.zipf_s) or self.zipf_s <= 0:
            raise SettingsError(f"zipf-s must be a number above 0, not {self.zipf_s}")
        last = max(0, self.messages - 1)
        smallest = len(f"{last}|{self.seed}-{last}||") + _MICROSECONDS
        if self.value_size < smallest:
            raise SettingsError(
                f"value-size {self.value_size} is too small: sequence, due time and event id of "
                f"{self.messages} messages need up to {smallest} bytes"
            )


class Value(NamedTuple):
    """What a value says."""

    sequence: int
    due_us: int
    event_id: str


def parse_value(value: bytes) -> Value:
    """Reads a value of this generator. Raises ValueError for any other."""
    parts = value.split(b"|", 3)
    if len(parts) != 4:
        raise ValueError(f"not a value of the load generator: {value[:60]!r}")
    return Value(int(parts[0]), int(parts[1]), parts[2].decode())


def records(load: SeedLoad, due_us: Callable[[int], int]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """The messages of a load as (key, value, event id), in order; ``due_us`` gives the due time of message n."""
    names = [f"{load.key_prefix}{number}".encode() for number in range(load.keys)]
    sequences = [0] * load.keys
    tag = f"{load.seed}-".encode()
    size = load.value_size
    for number, pick in zip(range(load.messages), picks(load), strict=False):
        event_id = b"%b%d" % (tag, number)
        sequence = sequences[pick]
        sequences[pick] = sequence + 1
        value = b"%d|%d|%b|" % (sequence, due_us(number), event_id)
        yield names[pick], value.ljust(size, b"x"), event_id


def picks(load: SeedLoad) -> Iterator[int]:
    """The numbers of the keys, without end. Only ``Random.random`` is used: that is the same in every Python."""
    random = Random(load.seed).random
    count = load.keys
    if load.dist is Distribution.UNIFORM:
        while True:
            yield int(random() * count)
    table = list(accumulate((rank + 1) ** -load.zipf_s for rank in range(count)))
    total, last = table[-1], count - 1
    while True:
        yield bisect(table, random() * total, 0, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to send it, and how fast.

    Raises :class:`SettingsError` when it is built with a name or numbers that cannot work.
    """

    topic: str
    bootstrap: str
    partitions: int | None = None
    """Partitions of the topic. A missing topic is created with this many (8 if None); an existing one must match."""
    replication: int | None = None
    """Replication of a topic that is created; None leaves it to the broker."""
    rate: float = 0.0
    """Messages per second, whether the broker keeps up or not; 0 is as fast as possible."""
    client: Mapping[str, str] | None = None
    """More settings for the Kafka client: security, for example."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", self.topic) or self.topic in (".", ".."):
            raise SettingsError(
                f"expected a topic name of up to 249 letters, digits, dots, underscores and hyphens, got {self.topic!r}"
            )
        if not self.bootstrap.strip():
            raise SettingsError("no broker address: give it as host:port")
        if self.partitions is not None:
            _at_least("partitions", self.partitions, 1)
        if self.replication is not None:
            _at_least("replication", self.replication, 1)
        if not math.isfinite(self.rate) or self.rate < 0:
            raise SettingsError(f"rate must be 0 (as fast as possible) or a number above it, not {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """What was sent and acknowledged."""

    topic: str
    created: bool
    """True if the topic was created for it."""
    partitions: int
    messages: int
    keys: int
    seed: int
    seconds: float
    per_second: float
    behind_ms: float
    """How late the latest message was handed to the client, in milliseconds; 0 without a rate."""


def send(load: SeedLoad, target: Target, progress: Callable[[int], None] | None = None) -> SeedReport:
    """Sends a load and returns when every message is acknowledged by the broker.

    ``progress`` gets the number of messages handed over, a few times a second. Keys go to partitions as Java clients
    put them there (murmur2). Raises :class:`BrokerError` when no broker answers within ``BROKER_SECONDS_MAX``, refuses
    the topic or a message, or stops acknowledging; :class:`SettingsError` when the topic has another number of
    partitions than asked for.
    """
    partitions, created = ensure_topic(target)
    failures: list[str] = []
    producer = Producer(
        {
            **_client(target),
            "enable.idempotence": True,
            "compression.type": "lz4",
            "partitioner": "murmur2_random",
            "linger.ms": 5 if target.rate else 20,
            "batch.size": _batch_size(target),
            "queue.buffering.max.messages": 200_000,
            "queue.buffering.max.kbytes": 262_144,
            # A callback per message costs a quarter of the rate. Failures are reported; the rest is flushed.
            "delivery.report.only.error": True,
            "on_delivery": lambda error, _: failures.append(error.str()),
        }
    )
    started = time.monotonic()
    behind = _produce(producer, load, target, failures, progress or (lambda _: None))
    _flush(producer, target, failures)
    seconds = time.monotonic() - started
    return SeedReport(
        topic=target.topic,
        created=created,
        partitions=partitions,
        messages=load.messages,
        keys=load.keys,
        seed=load.seed,
        seconds=round(seconds, 3),
        per_second=round(load.messages / seconds, 1) if seconds else 0.0,
        behind_ms=round(behind * 1000, 1),
    )


def ensure_topic(target: Target) -> tuple[int, bool]:
    """Return the topic's partition count, and whether it was created. Raises as :func:`send` does."""
    try:
        admin = AdminClient(_client(target))
    except KafkaException as error:
        raise SettingsError(f"the Kafka client refuses a setting: {error.args[0].str()}") from error
    found = _partitions(admin, target)
    if found is not None:
        if target.partitions not in (None, found):
            raise SettingsError(
                f"topic {target.topic} has {found} partitions, not {target.partitions}: "
                "leave the number out, or name another topic"
            )
        return found, False
    wanted = target.partitions or DEFAULT_PARTITIONS
    topic = NewTopic(target.topic, wanted, target.replication or -1)
    try:
        admin.create_topics([topic], operation_timeout=BROKER_SECONDS_MAX)[target.topic].result(
            BROKER_SECONDS_MAX
        )
    except KafkaException as error:
        if error.args[0].code() == ClientError.TOPIC_ALREADY_EXISTS:  # another program was faster
            return ensure_topic(target)
        raise BrokerError(f"topic {target.topic} could not be created: {error.args[0].str()}") from error
    except TimeoutError as error:
        raise BrokerError(
            f"topic {target.topic} could not be created within {BROKER_SECONDS_MAX:.0f} s"
        ) from error
    deadline = time.monotonic() + BROKER_SECONDS_MAX
    while _partitions(admin, target) != wanted:  # its creation is acknowledged before every broker knows it
        if time.monotonic() > deadline:
            raise BrokerError(
                f"topic {target.topic} was created but is still missing after {BROKER_SECONDS_MAX:.0f} s"
            )
        time.sleep(0.05)
    return wanted, True


def _batch_size(target: Target) -> int:
    """A batch that the topic accepts: the broker rejects a larger one, and the client does not split it."""
    client = tuple((n, str(v)) for n, v in (target.client or {}).items() if n not in RESERVED_SETTINGS)
    rules = Cluster(KafkaSettings(target.bootstrap, client)).rules([target.topic])[target.topic]
    return min(BATCH_BYTES, max(1, rules.limit - BATCH_OVERHEAD_BYTES)) if rules.limit else BATCH_BYTES


def _partitions(admin: AdminClient, target: Target) -> int | None:
    # All topics are listed: to ask for one by name may create it.
    try:
        topics = admin.list_topics(timeout=BROKER_SECONDS_MAX).topics
    except KafkaException as error:
        raise BrokerError(
            f"no broker answers at {target.bootstrap} ({error.args[0].str()}): is it running there? "
            "`keylane broker start` starts one"
        ) from error
    found = topics.get(target.topic)
    return len(found.partitions) if found is not None and found.error is None else None


def _client(target: Target) -> dict[str, str | int | float | bool]:
    # The client's own log lines would run into the progress bar; what matters is raised.
    return {"bootstrap.servers": target.bootstrap, "log_level": 0, **(target.client or {})}


def _produce(
    producer: Producer, load: SeedLoad, target: Target, failures: list[str], progress: Callable[[int], None]
) -> float:
    """Hands all messages to the client; returns how late the latest was, in seconds."""
    topic, rate = target.topic, target.rate
    monotonic, produce, with_id = time.monotonic, producer.produce, load.event_ids
    first_us, started = time.time_ns() // 1000, monotonic()

    def due_us(number: int) -> int:
        return first_us + int(number * 1e6 / rate) if rate else time.time_ns() // 1000

    latest, told = 0.0, started
    for number, (key, value, event_id) in enumerate(records(load, due_us)):
        if rate:
            late = monotonic() - started - number / rate
            while late < 0:
                time.sleep(max(-late, 0.001))  # shorter ones cost a core and gain nothing
                late = monotonic() - started - number / rate
            latest = max(late, latest)
        headers: list[tuple[str, str | bytes | None]] | None = [(EVENT_ID, event_id)] if with_id else None
        while True:
            try:
                produce(topic, value, key, headers=headers)
                break
            except BufferError:
                _poll(producer, target, failures, 0.05)
        if rate or not number % 256:
            _poll(producer, target, failures, 0)
            if monotonic() - told > 0.1:
                told = monotonic()
                progress(number + 1)
    progress(load.messages)
    return latest


def _poll(producer: Producer, target: Target, failures: list[str], timeout: float) -> None:
    producer.poll(timeout)
    if failures:
        raise BrokerError(f"the broker at {target.bootstrap} did not take a message: {failures[0]}")


def _flush(producer: Producer, target: Target, failures: list[str]) -> None:
    left, moved = len(producer), time.monotonic()
    while left:
        still = producer.flush(0.2)
        _poll(producer, target, failures, 0)
        if still != left:
            left, moved = still, time.monotonic()
        elif time.monotonic() - moved > _STALL_SECONDS_MAX:
            raise BrokerError(
                f"the broker at {target.bootstrap} acknowledged nothing for {_STALL_SECONDS_MAX:.0f} s, "
                f"{left} messages are open"
            )


def _at_least(name: str, number: int, smallest: int) -> None:
    if number < smallest:
        raise SettingsError(f"{name} must be at least {smallest}, not {number}")
