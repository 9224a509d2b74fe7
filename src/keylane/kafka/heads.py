"""The first message that is not done, of each partition: read from the log, for its key and its age."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from keylane.kafka.cluster import introduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings

_WAIT = 3.0
"""Seconds to wait for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A message that was found."""

    offset: int
    key: bytes | None
    at: float | None
    """Unix time of its timestamp; None when it has none."""


class Heads:
    """Reads single messages of a topic, and remembers them: what has not moved is not read again. One thread."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._consumer: Any = None
        self._known: dict[int, tuple[int, Head]] = {}

    def read(self, places: Mapping[int, int]) -> dict[int, Head]:
        """The first message at or behind each offset; partitions that give none in time are left out.

        Raises KafkaError when the topic cannot be read at all.
        """
        wanted = {p: at for p, at in places.items() if self._known.get(p, (-1, None))[0] != at}
        if wanted:
            if self._consumer is None:
                # It is to find one message for each, and would fetch thousands.
                self._consumer = self._settings.consumer(
                    "keylane-heads", **{"queued.min.messages": 1, "fetch.message.max.bytes": 65_536}
                )
                introduce(self._consumer, self._topic)
            self._fetch(wanted)
        return {p: self._known[p][1] for p, at in places.items() if self._known.get(p, (-1, None))[0] == at}

    def close(self) -> None:
        """Let go of the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _fetch(self, wanted: dict[int, int]) -> None:
        self._consumer.assign([TopicPartition(self._topic, p, at) for p, at in wanted.items()])
        left, deadline = set(wanted), time.monotonic() + _WAIT
        while left and time.monotonic() < deadline:
            message = self._consumer.poll(0.2)
            if message is None or message.partition() not in left:
                continue
            partition = message.partition()
            if message.error() is not None:  # its end: there was nothing but a hole
                left.discard(partition)
                continue
            kind, milliseconds = message.timestamp()
            head = Head(offset=message.offset(), key=message.key(), at=milliseconds / 1000 if kind else None)
            self._known[partition] = wanted[partition], head
            left.discard(partition)
        self._consumer.unassign()
