"""The first message that is not done, of each partition: read from the log, for its key and its age."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.kafka.cluster import load_metadata
from keylane.kafka.partition_reader import PartitionReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings

_WAIT = 3.0
"""Seconds to wait for all of them."""
_AT_ONCE = 100
"""Messages looked at in one step: of each partition only the first counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestPending:
    """A message that was found."""

    offset: int
    key: bytes | None
    at: float | None
    """Unix time of its timestamp; None when it has none."""


class OldestPendingReader:
    """Reads single messages of a topic, and remembers them: what has not moved is not read again. One thread."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._consumer: Any = None
        self._known: dict[int, tuple[int, OldestPending]] = {}

    def read(self, places: Mapping[int, int]) -> dict[int, OldestPending]:
        """The first message at or behind each offset; partitions that give none in time are left out.

        Raises BrokerError when the topic cannot be read at all.
        """
        wanted = {p: at for p, at in places.items() if self._known.get(p, (-1, None))[0] != at}
        if wanted:
            if self._consumer is None:
                # It is to find one message for each, and would fetch thousands.
                self._consumer = self._settings.consumer(
                    "keylane-heads", **{"queued.min.messages": 1, "fetch.message.max.bytes": 65_536}
                )
                load_metadata(self._consumer, self._topic)
            self._fetch(wanted)
        return {p: self._known[p][1] for p, at in places.items() if self._known.get(p, (-1, None))[0] == at}

    def close(self) -> None:
        """Let go of the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _fetch(self, wanted: dict[int, int]) -> None:
        # Who may not read the messages still gets the lag, without the oldest one.
        reader = PartitionReader(self._consumer, self._topic, raises=False)
        reader.assign(wanted)
        left, deadline = set(wanted), time.monotonic() + _WAIT
        while left and time.monotonic() < deadline:
            for message in reader.read(0.2, _AT_ONCE):
                partition = message.partition()
                if partition not in left:
                    continue
                left.discard(partition)
                if message.error() is not None:  # its end: there was nothing but a hole
                    continue
                kind, milliseconds = message.timestamp()
                head = OldestPending(
                    offset=message.offset(), key=message.key(), at=milliseconds / 1000 if kind else None
                )
                self._known[partition] = wanted[partition], head
        self._consumer.unassign()
