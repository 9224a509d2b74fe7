r"""Records of lane state, and the reader that restores them.

``<app>.lane-state`` is compacted and has as many partitions as the source. The values of a lane are in the partition of
its messages, whatever the key:

=======================  ==========================================================================
key                      value
=======================  ==========================================================================
``s/<state>/<lane>``     ``1 <offset> <due> <JSON>``: a state, the offset of the message that set it, and the
                         milliseconds since 1970 when it expires (0: never)
=======================  ==========================================================================

A tombstone removes the value. The source's identity is in a header, as for records of the state topic: values of a
source that was deleted and created again do not count.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from keylane.engine.lane_state import StoredValue
from keylane.errors import BrokerError
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster, load_metadata
from keylane.kafka.partition_reader import PartitionReader
from keylane.state.labels import SOURCE
from keylane.strict_json import MalformedRecordError
from keylane.topic_names import lane_state_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Record
    from keylane.offsets.identity import TopicIdentity

    Take = Callable[[int, str, bytes, StoredValue | None, int], None]
    """Called with partition, tag, lane, value (None: removed) and the record's timestamp in milliseconds."""

log = logging.getLogger("keylane.kafka")

_FORMAT = b"1"
_OPEN_TRANSACTION_SECONDS = 75.0
"""Time to wait for records behind an open transaction: the broker ends one that nobody ends after 60 s."""
_READ_RECORDS = 10_000


def record_key(tag: str, lane: bytes) -> bytes:
    """The key of a value's record."""
    return tag.encode() + b"/" + lane


def parse_key(key: bytes) -> tuple[str, bytes]:
    """Tag and lane. Raises MalformedRecordError."""
    parts = key.split(b"/", 2)
    if len(parts) != 3 or parts[0] not in (b"s", b"t"):
        raise MalformedRecordError(f"expected the key of a lane's value, got {key[:60]!r}")
    try:
        return f"{parts[0].decode()}/{parts[1].decode()}", parts[2]
    except UnicodeDecodeError:
        raise MalformedRecordError(f"expected the key of a lane's value, got {key[:60]!r}") from None


def encode_value(value: StoredValue) -> bytes | None:
    """The value of its record; None if it was removed."""
    if value.content is None:
        return None
    return b"%s %d %d %s" % (_FORMAT, value.offset, value.due, value.content)


def decode_value(record: bytes) -> StoredValue:
    """The value of a record. Raises MalformedRecordError."""
    parts = record.split(b" ", 3)
    try:
        if len(parts) != 4 or parts[0] != _FORMAT:
            raise ValueError
        return StoredValue(parts[3], int(parts[2]), int(parts[1]))
    except ValueError:
        raise MalformedRecordError(f"expected a lane's value, got {record[:60]!r}") from None


class LaneValueReader:
    """Reads values from their topic, with a consumer of its own. Blocks. Used by one thread at a time.

    ``label`` is the header that records must have.
    """

    def __init__(self, settings: KafkaSettings, app: str, topic: str, label: tuple[str, bytes]) -> None:
        self._topic = topic
        self._label = label
        # The app's own group: another one would need more rights.
        self._consumer = settings.consumer(
            app, **{"isolation.level": "read_committed", "fetch.wait.max.ms": 20}
        )
        load_metadata(self._consumer, topic)
        self._reader = PartitionReader(self._consumer, topic)

    def read(self, starts: Mapping[int, int], ends: Mapping[int, int], take: Take) -> None:
        """Read from ``starts`` to ``ends``, by partition. Raises BrokerError.

        Records of another source, and malformed ones, count as removed: the last record of a key decides.
        """
        places = {p: start for p, start in starts.items() if start < ends[p]}
        if not places:
            return
        deadline = time.monotonic() + _OPEN_TRANSACTION_SECONDS
        reader = self._reader
        reader.assign(places)
        try:
            while places:
                for message in reader.read(0.05, _READ_RECORDS):
                    partition = message.partition()
                    if partition not in places:
                        continue
                    if message.error() is not None:  # the end of what is committed
                        place = message.offset()
                    else:
                        self._take(message, take)
                        place = message.offset() + 1
                    if place > places[partition]:
                        places[partition] = place
                        deadline = time.monotonic() + _OPEN_TRANSACTION_SECONDS
                    if place >= ends[partition]:
                        del places[partition]
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"topic {self._topic!r} could not be read to its end within {_OPEN_TRANSACTION_SECONDS:g} s: "
                        f"partitions {sorted(places)} are unread, because a transaction in them is open"
                    )
                reader.check_silence(
                    _OPEN_TRANSACTION_SECONDS + REQUEST_SECONDS,
                    f"partitions {sorted(places)} of topic {self._topic!r} were not read to their ends",
                )
        finally:
            self._consumer.unassign()

    def _take(self, record: Record, take: Take) -> None:
        try:
            tag, lane = parse_key(record.key() or b"")
        except MalformedRecordError as error:
            log.warning(
                "ignoring a record of %s/%d@%d: %s", self._topic, record.partition(), record.offset(), error
            )
            return
        content, value = record.value(), None
        if content is not None and self._label in (record.headers() or ()):
            try:
                value = decode_value(content)
            except MalformedRecordError as error:
                log.warning(
                    "ignoring a record of %s/%d@%d: %s",
                    self._topic,
                    record.partition(),
                    record.offset(),
                    error,
                )
        take(record.partition(), tag, lane, value, record.timestamp()[1])

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def read_values(
    settings: KafkaSettings, app: str, source: TopicIdentity, wanted: Callable[[str, bytes], bool]
) -> dict[tuple[int, bytes, str], StoredValue]:
    """The committed values that ``wanted(tag, lane)``, by partition, lane and tag. Blocks. Raises BrokerError."""
    topic = lane_state_topic(app)
    cluster = Cluster(settings)
    if topic not in cluster.topics():
        raise BrokerError(
            f"topic {topic!r} does not exist: no stage of app {app!r} takes a State, or the app has never run"
        )
    partitions = range(cluster.partitions(topic))
    found: dict[tuple[int, bytes, str], StoredValue] = {}

    def take(partition: int, tag: str, lane: bytes, value: StoredValue | None, _written: int) -> None:
        if not wanted(tag, lane):
            return
        if value is None:
            found.pop((partition, lane, tag), None)
        else:
            found[partition, lane, tag] = value

    reader = LaneValueReader(settings, app, topic, (SOURCE, source.encode()))
    try:
        # What is committed: a transaction that is open now is not waited for.
        reader.read(dict.fromkeys(partitions, 0), cluster.ends(topic, partitions, committed=True), take)
    finally:
        reader.close()
    return found
