"""Reader of each partition's oldest pending message, for its key and its age."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.kafka.cluster import load_metadata
from keylane.kafka.partition_reader import PartitionReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings

_READ_SECONDS = 3.0
"""Time to read the messages of all partitions."""
_POLL_MESSAGES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestPending:
    """The oldest message of a partition that is not done."""

    offset: int
    key: bytes | None
    at: float | None
    """The message's timestamp as Unix time; None if it has none."""


class OldestPendingReader:
    """Reads single messages of a topic. It keeps them until their offset changes. Used by one thread."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._consumer: Any = None
        self._known: dict[int, tuple[int, OldestPending]] = {}

    def read(self, offsets: Mapping[int, int]) -> dict[int, OldestPending]:
        """The first message at or after each partition's offset; partitions without one in time are left out.

        Raises BrokerError if the topic cannot be read at all.
        """
        wanted = {p: at for p, at in offsets.items() if self._known.get(p, (-1, None))[0] != at}
        if wanted:
            if self._consumer is None:
                # It needs one message of each partition. By default it would prefetch thousands.
                self._consumer = self._settings.consumer(
                    "keylane-heads", **{"queued.min.messages": 1, "fetch.message.max.bytes": 65_536}
                )
                load_metadata(self._consumer, self._topic)
            self._fetch(wanted)
        return {p: self._known[p][1] for p, at in offsets.items() if self._known.get(p, (-1, None))[0] == at}

    def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _fetch(self, wanted: dict[int, int]) -> None:
        # Without the right to read the topic, the lag is shown without the oldest message.
        reader = PartitionReader(self._consumer, self._topic, raises=False)
        reader.assign(wanted)
        left, deadline = set(wanted), time.monotonic() + _READ_SECONDS
        while left and time.monotonic() < deadline:
            for message in reader.read(0.2, _POLL_MESSAGES):
                partition = message.partition()
                if partition not in left:
                    continue
                left.discard(partition)
                if message.error() is not None:  # the end of the partition: no message follows
                    continue
                kind, milliseconds = message.timestamp()
                oldest = OldestPending(
                    offset=message.offset(), key=message.key(), at=milliseconds / 1000 if kind else None
                )
                self._known[partition] = wanted[partition], oldest
        self._consumer.unassign()
