"""Claims that only a reader of uncommitted records can see: their transaction, or one before it, is open.

A worker that dies while it claims leaves such a transaction. The broker ends it after a minute, and until then nothing
behind it can be read. Nobody can know its transactional id from committed records.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keylane.kafka.offset_range import OffsetRange, RangeReader, RangeReaderSettings
from keylane.state import records
from keylane.state.topic import OWNER, Claim
from keylane.strict_json import MalformedRecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.kafka.cluster import Cluster
    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.task")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenClaims:
    """What is behind the first open transaction of each partition of a state topic."""

    starts: dict[int, int] = field(default_factory=dict)
    """By partition with an open transaction: the offset at which the first one begins."""
    claims: dict[int, dict[str, Claim]] = field(default_factory=dict)
    """By partition and transactional id: the claims at that offset and behind it."""


def read_hidden_claims(
    settings: KafkaSettings, cluster: Cluster, app: str, topic: str, partitions: Iterable[int]
) -> HiddenClaims:
    """Read the records of these partitions that ``read_committed`` readers do not get. Blocks. Raises BrokerError."""
    numbers = list(partitions)
    # The stable end first: what is committed in between then only makes the range longer.
    stable = cluster.ends(topic, numbers, committed=True)
    ends = cluster.ends(topic, numbers)
    found = HiddenClaims(starts={p: stable[p] for p in numbers if stable[p] < ends[p]})
    if not found.starts:
        return found
    reader = RangeReader(RangeReaderSettings(kafka=settings, group=app, committed=False, fail_on_loss=False))
    try:
        for partition, start in found.starts.items():
            for batch in reader.read(OffsetRange(topic, partition, start, ends[partition])):
                for message in batch:
                    _take(app, found.claims.setdefault(partition, {}), message)
    finally:
        reader.close()
    return found


def _take(app: str, claims: dict[str, Claim], message: Any) -> None:
    key, value = message.key() or b"", message.value()
    if not key.startswith(OWNER):
        return
    owner = key.removeprefix(OWNER).decode(errors="replace")
    if value is None:
        claims.pop(owner, None)
        return
    if not owner.startswith(f"{app}."):  # its id may be fenced, so it must be one of this app's
        return
    try:
        read = records.decode_claim(value)
    except MalformedRecordError as error:
        log.warning("ignoring malformed state record record=%r reason=%s", key[:200], error)
        return
    claims[owner] = Claim(
        claims[owner].place if owner in claims else message.offset(),
        read.slots,
        read.run,
        read.who,
        read.leaving,
        time.monotonic(),
        read.epoch,
        read.task,
    )
