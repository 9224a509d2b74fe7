"""The dead letters of an app, read back from ``<app>.dlq``. How one lies there: :mod:`keylane.kafka.letterhead`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition

from keylane.errors import KafkaError
from keylane.kafka.cluster import TIMEOUT, Cluster, introduce
from keylane.kafka.letter import Kind, Letter, LetterRecord, Unreadable
from keylane.kafka.letterhead import letter_headers, parse
from keylane.kafka.operator import NeverRanError, Operator

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from keylane.kafka.settings import KafkaSettings

__all__ = [
    "Kind",
    "Letter",
    "LetterRecord",
    "Repeats",
    "Unreadable",
    "letter_headers",
    "parse",
    "read_letters",
    "redriven_offsets",
]

PATIENCE = 3 * TIMEOUT
"""Seconds without an answer until a reader gives up."""

_REFUSED = (ClientError.TOPIC_AUTHORIZATION_FAILED, ClientError.GROUP_AUTHORIZATION_FAILED)


class Repeats:
    """Recognises letters that stand in the topic more than once: a crash after the letter, before its offset is done.

    A message that was redriven and died again has another letter, and so has one that was archived before it died.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int, Kind], set[int]] = {}

    def seen(self, letter: Letter) -> bool:
        """Whether it was asked about this letter before."""
        kin = (letter.topic, letter.source_partition, letter.redrives, letter.kind)
        of = self._seen.setdefault(kin, set())
        before = len(of)
        of.add(letter.source_offset)
        return len(of) == before


def read_letters(
    settings: KafkaSettings,
    topic: str,
    *,
    partitions: Iterable[int] | None = None,
    start: Mapping[int, int] | None = None,
    upto: Mapping[int, int] | None = None,
) -> Iterator[Letter | Unreadable]:
    """What lies in the topic now, each partition in its order, the partitions mixed.

    ``start`` and ``upto`` narrow a partition down to the offsets from the one, up to and without the other. Commits
    nothing. Holds some 16 MB however much is there; an iterator that is dropped lets go of its consumer.
    Raises KafkaError at once when the topic or a partition does not exist, and when there is no answer.
    """
    cluster = Cluster(settings)
    count = cluster.topics().get(topic)
    if count is None:
        owner = topic.removesuffix(".dlq")
        whose = f"app {owner!r} has no dead letters: " if owner != topic else ""
        raise KafkaError(f"{whose}topic {topic!r} does not exist at {settings.bootstrap}")
    chosen = list(range(count) if partitions is None else partitions)
    for partition in chosen:
        if not 0 <= partition < count:
            raise KafkaError(f"topic {topic!r} has no partition {partition}: its last is {count - 1}")
    if not chosen:
        return iter(())
    start, upto = start or {}, upto or {}
    begins, ends = cluster.ends(topic, chosen, earliest=True), cluster.ends(topic, chosen)
    spans = {p: range(max(begins[p], start.get(p, 0)), min(ends[p], upto.get(p, ends[p]))) for p in begins}
    return _read(settings, topic, {p: span for p, span in spans.items() if span})


def redriven_offsets(settings: KafkaSettings, app: str) -> dict[int, Container[int]]:
    """Which letters were redriven: their offsets in the dead-letter topic, by partition; {} if the app never ran."""
    try:
        with Operator(settings, app) as operator:
            return dict(operator.redriven())
    except NeverRanError:
        return {}


def _read(settings: KafkaSettings, topic: str, spans: Mapping[int, range]) -> Iterator[Letter | Unreadable]:
    if not spans:
        return
    limits = {"queued.min.messages": 1000, "queued.max.messages.kbytes": 16_384}
    consumer = settings.consumer(f"{topic}.reader", **limits)
    try:
        introduce(consumer, topic)
        consumer.assign([TopicPartition(topic, p, span.start) for p, span in spans.items()])
        left = {p: span.stop for p, span in spans.items()}
        heard, complaint = time.monotonic(), "no answer"
        while left:
            if time.monotonic() - heard > PATIENCE:
                raise KafkaError(
                    f"topic {topic!r} was not read to its end: nothing came for {PATIENCE:g} s ({complaint})"
                )
            first = consumer.poll(0.5)
            if first is None:
                continue
            heard_something = False
            messages: list[Any] = [first, *consumer.consume(500, 0)]
            for message in messages:
                partition, error = message.partition(), message.error()
                if error is None or error.code() == ClientError._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
                    heard_something = True
                elif error.fatal() or error.code() in _REFUSED:
                    raise KafkaError(f"topic {topic!r} cannot be read: {error.str()}")
                else:
                    complaint = error.str()
                    continue
                end = left.get(partition)
                if end is None:
                    continue
                if error is not None or message.offset() + 1 >= end:
                    del left[partition]
                    consumer.pause([TopicPartition(topic, partition)])
                if error is None and message.offset() < end:
                    yield parse(message)
            if heard_something:
                heard = time.monotonic()  # here: the caller may have taken its time
    finally:
        consumer.close()
