"""Fetcher: the thread that owns the source consumer, with its backpressure."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from keylane.errors import BrokerError
from keylane.kafka.partition_reader import ErrorKind, ReadErrors, classify
from keylane.kafka.settings import outage
from keylane.lanes.lane_table import EVICTED_ENTRIES_MAX, REFETCH_ROOM_DIVISOR

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from confluent_kafka import Consumer

    from keylane.message import Record

log = logging.getLogger("keylane.kafka")

BATCH_MESSAGES = 1000
"""Messages delivered at once, at most; and at most a quarter of the room."""
BUFFERED_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of message values that a task buffers. It fetches up to half of them; large messages reduce its capacity."""
PREFETCH_MESSAGES_MAX = 2048
"""While lanes queue for the loop, fetching stops at this number of buffered messages that are not stuck."""
_POLL_SECONDS = 0.02
_FULL_SLEEP_SECONDS = 0.005
_PAUSE_AFTER_SECONDS = 0.5
"""The task must be full for this time before the fullest partition is paused."""
_QUERY_SECONDS = 10.0
"""Time for the broker to answer where a log begins and ends."""


@dataclass(slots=True)
class PartitionFlow:
    """Flow control of one partition. The loop writes ``done``, ``bytes_done`` and ``evicted``, the thread the rest."""

    delivered: int = 0
    done: int = 0
    """Messages that are done, and for the time being those that were evicted."""
    bytes_delivered: int = 0
    """Bytes of values."""
    bytes_done: int = 0
    position: int = 0
    """The next offset to fetch."""
    evicted: int = 0
    """Messages that only count as done: their lanes keep the offsets, to read them again."""
    paused_at: int = 0
    """Buffered messages when the partition was paused; 0 while it is not paused."""
    ended: bool = False
    end: int = 0
    """End of the log, as the last fetch reported it; 0 if it was not needed."""

    @property
    def buffered(self) -> int:
        """Messages that were delivered, or are being read again, and are not done."""
        return self.delivered - self.done

    @property
    def bytes_buffered(self) -> int:
        """Bytes of their values."""
        return self.bytes_delivered - self.bytes_done


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """What the fetcher's thread delivers to the loop."""

    records: Mapping[int, list[Record]]
    """By partition; no list is empty."""
    ends: Mapping[int, int]
    """The ends of the partitions that were read to their end."""
    removed: Collection[int] = ()
    """Partitions of which nothing is delivered any more, because they were removed."""


class Fetcher:
    """Fetches the task's partitions in a thread that owns the consumer, with backpressure.

    ``deliver`` gets the batches on that thread; it must be thread-safe and quick. ``fail`` gets what ends the thread.

    Backpressure:

    - An eighth of ``capacity`` is reserved for evicted messages that are read again. At half of the rest the thread
      stops polling, which keeps librdkafka's prefetched messages; a pause would discard them. It asks for at most a
      quarter at once, so the task never buffers more than ``capacity``. It also stops at half of
      :data:`BUFFERED_BYTES_MAX`; a message larger than the rest of these bytes is fetched alone.
    - If the task stays full for half a second, the fullest partition is paused, so that a stuck partition does not stop
      the others. It is resumed when half of its buffered messages are done. Each pause takes at most half of the room.
    - While ``loop_busy`` returns true, the thread stops at :data:`PREFETCH_MESSAGES_MAX` messages that are not
      ``stuck`` in stopped lanes. Messages that only wait for the loop leave the processor's caches before they run.
    - ``downstream_full``: nothing is fetched while it returns true.
    - A partition with very many evicted messages is paused until half of them have been read again.

    ``assigned``: the consumer's assignment and positions. If they equal ``starts``, the assignment is kept, and with it
    what the client has prefetched. ``until``: offsets at which delivery ends; :attr:`ended` is true when all partitions
    have reached theirs. ``log_end_interval``: seconds between two updates of :attr:`PartitionFlow.end`.
    """

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        starts: Mapping[int, int],
        *,
        capacity: int,
        deliver: Callable[[FetchedBatch], None],
        fail: Callable[[BaseException], None],
        assigned: Mapping[int, int] | None = None,
        until: Mapping[int, int] | None = None,
        downstream_full: Callable[[], bool] = lambda: False,
        loop_busy: Callable[[], bool] = lambda: False,
        stuck: Callable[[], int] = lambda: 0,
        log_end_interval: float = inf,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._starts = dict(starts)
        self._assigned = assigned or {}
        self._deliver = deliver
        self._fail = fail
        self._until = dict(until) if until is not None else None
        self._downstream_full = downstream_full
        self._loop_busy = loop_busy
        self._stuck = stuck
        self._capacity = capacity
        self.room = capacity
        """Messages that may be buffered: fewer than the capacity if they are large. Written by the thread."""
        self._evicted_max = EVICTED_ENTRIES_MAX // max(1, len(starts))
        self._mean_size = 0.0
        self._bytes_left = BUFFERED_BYTES_MAX // 2
        self._batch_max = BATCH_MESSAGES
        self._full_since = 0.0
        self.flows: Mapping[int, PartitionFlow] = {
            p: PartitionFlow(position=offset) for p, offset in starts.items()
        }
        """By partition. Replaced by the thread, and never changed."""
        self._changes: SimpleQueue[tuple[int, PartitionFlow | None, bool]] = SimpleQueue()
        self._log_end_interval = log_end_interval
        self._log_end_due = 0.0 if log_end_interval < inf else inf
        self._closing = threading.Event()
        self._errors = ReadErrors(topic)
        self._thread = threading.Thread(target=self._main, name="keylane-fetcher", daemon=True)

    def start(self) -> None:
        """Start the owner thread."""
        self._thread.start()

    def add(self, partition: int, start: int, *, new: bool = False) -> PartitionFlow:
        """Fetch this partition too, from this offset. Only without ``until``. ``new``: the consumer may not know it."""
        flow = PartitionFlow(position=start)
        self._changes.put((partition, flow, new))
        return flow

    def remove(self, partition: int) -> None:
        """Do not fetch this partition any more. What was fetched before may still be delivered."""
        self._changes.put((partition, None, False))

    def stop_fetching(self) -> None:
        """Deliver nothing more."""
        self._closing.set()

    def close(self) -> dict[int, int]:
        """End the thread. Returns the positions of the consumer, which stays assigned.

        Empty if the consumer must be assigned again: partitions are paused or have ended, or the thread does not end.
        """
        self._closing.set()
        self._thread.join(timeout=30)
        if self._thread.is_alive() or any(flow.paused_at or flow.ended for flow in self.flows.values()):
            return {}
        return {p: flow.position for p, flow in self.flows.items()}

    @property
    def buffered(self) -> int:
        """Messages that were delivered, or are being read again, and are not done."""
        return sum([flow.buffered for flow in self.flows.values()])

    @property
    def paused(self) -> list[int]:
        """Partitions that are paused now."""
        return [p for p, flow in self.flows.items() if flow.paused_at]

    def _main(self) -> None:
        try:
            if self._assigned != self._starts or not self._starts:
                self._consumer.assign([TopicPartition(self._topic, p, o) for p, o in self._starts.items()])
                # A paused partition stays paused over assignments.
                self._consumer.resume([TopicPartition(self._topic, p) for p in self._starts])
            for partition in self._starts:
                self._check_end(partition, self._starts[partition])
            while not self._closing.is_set():
                self._apply_changes()
                if time.monotonic() >= self._log_end_due:
                    self._update_log_ends()
                if self._may_fetch():
                    self._fetch()
                else:
                    time.sleep(_FULL_SLEEP_SECONDS)
        except BaseException as error:
            self._fail(error)

    def _apply_changes(self) -> None:
        while not self._changes.empty():
            partition, flow, new = self._changes.get()
            if new:
                self._consumer.list_topics(self._topic, timeout=_QUERY_SECONDS)
            flows = dict(self.flows)
            if partition in flows:
                del flows[partition]
                self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
            if flow is not None:
                flows[partition] = flow
                place = TopicPartition(self._topic, partition, flow.position)
                self._consumer.incremental_assign([place])
                self._consumer.resume([place])  # a paused partition stays paused over assignments
            self.flows = flows
            if flow is None:
                self._deliver(FetchedBatch(records={}, ends={}, removed=[partition]))
            self._evicted_max = EVICTED_ENTRIES_MAX // max(1, len(flows))

    def _update_log_ends(self) -> None:
        self._log_end_due = time.monotonic() + self._log_end_interval
        for partition, flow in self.flows.items():
            if not flow.ended:
                known = self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, partition), cached=True
                )
                flow.end = max(flow.end, known[1])  # negative before the first fetch

    def _fetch(self) -> None:
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            return
        # The mean lags behind: without this first large message, a thousand more like it could follow.
        size = max(self._mean_size, len(first)) if first.error() is None else self._mean_size
        more = (
            min(BATCH_MESSAGES, self._batch_max, int(self._bytes_left / size) if size else BATCH_MESSAGES) - 1
        )
        # poll() blocks for the first message only. consume(n, timeout) would wait the whole timeout for n messages.
        self._hand_over([first, *self._consumer.consume(more, 0)] if more > 0 else [first])

    def _hand_over(self, messages: list[Any]) -> None:
        # The hot path: as little as possible per message, the rest per partition.
        records = [message for message in messages if message.error() is None]
        if records:
            outage.answered()
        groups: dict[int, list[Any]] = defaultdict(list)
        for record in records:
            groups[record.partition()].append(record)
        if groups.keys() - self.flows.keys():  # fetched before their partition was removed
            groups = defaultdict(list, {p: group for p, group in groups.items() if p in self.flows})
        if self._errors.missing:
            self._errors.answered(groups)
        ends: dict[int, int] = {}
        flows, until = self.flows, self._until
        for partition, group in groups.items():
            flows[partition].position = group[-1].offset() + 1
        if len(records) < len(messages):
            self._handle_reports([message for message in messages if message.error() is not None], ends)
        if until is not None:
            for partition, flow in flows.items():
                if partition in groups and flow.position > until[partition]:
                    groups[partition] = [r for r in groups[partition] if r.offset() < until[partition]]
                    ends[partition] = until[partition]
            groups = {partition: group for partition, group in groups.items() if group}
        total = 0
        for partition, group in groups.items():
            size = sum(map(len, group))
            total += size
            flows[partition].delivered += len(group)
            flows[partition].bytes_delivered += size
        if records:
            mean = total / len(records)
            self._mean_size = 0.9 * self._mean_size + 0.1 * mean if self._mean_size else mean
        if groups or ends:
            self._deliver(FetchedBatch(records=groups, ends=ends))
        if until is not None:
            for partition, flow in flows.items():
                self._check_end(partition, flow.position)

    def _handle_reports(self, reports: list[Any], ends: dict[int, int]) -> None:
        """The client's ends and errors. The messages before them are counted already."""
        for message in reports:
            kind, partition = classify(message.error()), message.partition()
            if partition >= 0 and partition not in self.flows:
                continue
            if kind is ErrorKind.END:
                self._errors.answered([partition])
                # Reported after the last message. It only says something new if offsets without a message follow.
                if message.offset() > self.flows[partition].position:
                    ends[partition] = self.flows[partition].position = message.offset()
            elif kind is ErrorKind.OUT_OF_RANGE:
                self._out_of_range(partition)
            else:
                self._errors.handle(partition, message.error())

    def _check_end(self, partition: int, position: int) -> None:
        if self._until is None or position < self._until[partition]:
            return
        flow = self.flows[partition]
        if not flow.ended:
            flow.ended = True
            # Not pause(): a client whose partitions were all paused may take a second to fetch again.
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])

    @property
    def ended(self) -> bool:
        """Whether every partition was delivered up to its ``until``."""
        return self._until is not None and all(flow.ended for flow in self.flows.values())

    def _may_fetch(self) -> bool:
        """Update the room, pause and resume single partitions, and return whether to fetch now."""
        room, buffered, fullest, unpaused = self._capacity, 0, None, 0
        if self._mean_size * room > BUFFERED_BYTES_MAX:
            room = max(2, int(BUFFERED_BYTES_MAX / self._mean_size))
        self.room = room
        self._bytes_left = BUFFERED_BYTES_MAX // 2 - sum(
            [flow.bytes_buffered for flow in self.flows.values()]
        )
        room -= max(1, room // REFETCH_ROOM_DIVISOR)  # reserved for evicted messages that are read again
        for partition, flow in self.flows.items():
            now = flow.buffered
            if flow.paused_at:
                if now * 2 > flow.paused_at or flow.evicted * 2 > self._evicted_max:
                    room -= now
                    continue
                flow.paused_at = 0
                self._consumer.resume([TopicPartition(self._topic, partition)])
            elif flow.evicted > self._evicted_max and not flow.ended:
                self._pause(partition)
                log.warning(
                    "paused partition: its lanes are stopped or too slow, until half of the evicted messages are done "
                    "partition=%d evicted=%d",
                    partition,
                    flow.evicted,
                )
                room -= now
                continue
            if flow.ended:
                room -= now
                continue
            buffered += now
            unpaused += 1
            if fullest is None or now > self.flows[fullest].buffered:
                fullest = partition
        self._batch_max = max(1, room // 4)
        if 0 < room >= buffered * 2 and self._bytes_left > 0 and not self._downstream_full():
            self._full_since = 0.0
            return (
                buffered < PREFETCH_MESSAGES_MAX
                or not self._loop_busy()
                or buffered - self._stuck() < PREFETCH_MESSAGES_MAX
            )
        if not self._full_since:
            self._full_since = time.monotonic()
        elif (
            unpaused > 1
            and fullest is not None
            and time.monotonic() - self._full_since > _PAUSE_AFTER_SECONDS
        ):
            self._pause(fullest)
            self._full_since = 0.0
            log.info(
                "paused partition: it fills the task, until half of it is done partition=%d buffered=%d",
                fullest,
                self.flows[fullest].paused_at,
            )
        return False

    def _out_of_range(self, partition: int) -> None:
        """The next offset is not in the log: log what was lost and continue where the log begins.

        Raises BrokerError if the log ends before the next offset.
        """
        position = self.flows[partition].position
        begin, end = self._consumer.get_watermark_offsets(
            TopicPartition(self._topic, partition), timeout=_QUERY_SECONDS
        )
        if position > end:
            raise BrokerError(
                f"{self._topic}/{partition}: the log ends at {end} and has been read up to {position}: it was "
                "truncated, or the topic was deleted and created again. The task starts over with the log as it is now"
            )
        if position < begin:
            log.error(
                "messages lost: retention deleted them before they were read, it must be longer than the lag "
                "partition=%s/%d from=%d log_begins_at=%d",
                self._topic,
                partition,
                position,
                begin,
            )
        # Not seek(): the client does not seek in a partition that it has given up.
        self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
        self._consumer.incremental_assign([TopicPartition(self._topic, partition, max(position, begin))])

    def _pause(self, partition: int) -> None:
        flow = self.flows[partition]
        flow.paused_at = max(1, flow.buffered)
        self._consumer.pause([TopicPartition(self._topic, partition)])
