"""The consumer and its one owner thread: fetching and backpressure."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from keylane.errors import BrokerError
from keylane.kafka.partition_reader import ErrorKind, ReadErrors, classify
from keylane.kafka.settings import outage
from keylane.lanes.lane_table import EVICTED_ENTRIES_MAX, REFETCH_ROOM_DIVISOR

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Consumer

    from keylane.message import Record

log = logging.getLogger("keylane.kafka")

BATCH = 1000
"""Messages handed over at once, at most; and no more than a quarter of the room that is left."""
MAX_BYTES = 256 * 1024 * 1024
"""Bytes of message values a task holds: it reads up to half of them, and large messages shrink its capacity."""
PLENTY = 2048
"""Messages in lanes that can go on at which nothing more is fetched while lanes queue for the loop."""
_POLL = 0.02
_FULL = 0.005
_STUCK = 0.5
"""Seconds for which the task is full before the partition that holds most is paused."""
_ASK = 10.0
"""Seconds for the broker to say where a log begins and ends."""


@dataclass(slots=True)
class PartitionFlow:
    """What the task holds of one partition. By the owner thread; ``done``, ``size_done`` and ``away`` by the loop."""

    handed: int = 0
    done: int = 0
    size_handed: int = 0
    size_done: int = 0
    """Bytes of values."""
    next: int = 0
    """Where reading goes on."""
    away: int = 0
    """Of those that count as done for now, how many are not: their lanes keep their offsets, to read them again."""
    paused_at: int = 0
    """How many it held when it was paused; 0 while it is not."""
    ended: bool = False
    end: int = 0
    """Of the log, as the last fetch saw it; 0 when nobody asked for it."""

    @property
    def held(self) -> int:
        """Messages handed over, or being read again, and not done."""
        return self.handed - self.done

    @property
    def size(self) -> int:
        """Bytes of their values."""
        return self.size_handed - self.size_done


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """What the owner thread hands to the loop."""

    records: Mapping[int, list[Record]]
    """By partition; none is empty."""
    ends: Mapping[int, int]
    """Partitions that were read to their end, and that end."""


class Fetcher:
    """Fetches the task's partitions and hands batches to ``deliver``, which must be thread-safe and quick.

    An eighth of ``capacity`` is for what lanes read again. At half of the rest the task is full and the thread stops
    asking for more; that keeps what librdkafka has fetched ahead, which a pause would throw away. It asks for a quarter
    at most at once, so never more than ``capacity`` is held. Reading stops at half of :data:`MAX_BYTES`, too; a message
    that is larger than what is left of them comes alone.

    When the task stays full for half a second, the partition that holds most is paused, so that a partition that is
    stuck does not stop the others: they share what room it leaves, and it is resumed when half of what it held is done.
    Each pause takes at most half of the room that is left.

    What is held grows cold in the processor's caches before it runs, so it is not read ahead of a loop that has all it
    can do: while ``busy`` says so, the thread stops asking at :data:`PLENTY`, besides those ``stuck`` in lanes that
    stand still. Nothing is paused for that.

    A partition of which millions of offsets are kept for lanes that do not keep up is paused too, until half are read.

    ``reading`` is where the consumer goes on by itself, in each partition that it is assigned: an assignment that fits
    ``starts`` is kept, and what the client has fetched with it.

    ``until``: hand over nothing at or above these offsets; when every partition has come to it, ``ended`` is true.
    ``ends_every``: seconds between two notes of where each log ends, which the client knows from its last fetch.
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
        reading: Mapping[int, int] | None = None,
        until: Mapping[int, int] | None = None,
        crowded: Callable[[], bool] = lambda: False,
        busy: Callable[[], bool] = lambda: False,
        stuck: Callable[[], int] = lambda: 0,
        ends_every: float = inf,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._starts = dict(starts)
        self._reading = reading or {}
        self._deliver = deliver
        self._fail = fail
        self._until = dict(until) if until is not None else None
        self._crowded = crowded
        self._busy = busy
        self._stuck = stuck
        self._capacity = capacity
        self.room = capacity
        """Messages that there is room for: fewer than the capacity when they are large. Written by the thread."""
        self._far = EVICTED_ENTRIES_MAX // max(1, len(starts))
        self._mean_size = 0.0
        self._bytes_left = MAX_BYTES // 2
        self._at_once = BATCH
        self._full_since = 0.0
        self.shares = {p: PartitionFlow(next=offset) for p, offset in starts.items()}
        self._ends_every = ends_every
        self._ends_due = 0.0 if ends_every < inf else inf
        self._closing = threading.Event()
        self._errors = ReadErrors(topic)
        self._thread = threading.Thread(target=self._main, name="keylane-fetcher", daemon=True)

    def start(self) -> None:
        """Start the owner thread."""
        self._thread.start()

    def stop_fetching(self) -> None:
        """Hand over nothing more."""
        self._closing.set()

    def close(self) -> dict[int, int]:
        """End the thread; where the consumer, which stays assigned, goes on in each partition.

        Empty when it must be assigned anew: partitions are paused, or the thread does not end.
        """
        self._closing.set()
        self._thread.join(timeout=30)
        if self._thread.is_alive() or any(share.paused_at or share.ended for share in self.shares.values()):
            return {}
        return {p: share.next for p, share in self.shares.items()}

    @property
    def held(self) -> int:
        """Messages handed over, or being read again, and not done."""
        return sum([share.held for share in self.shares.values()])

    @property
    def paused(self) -> list[int]:
        """Partitions that are paused now."""
        return [p for p, share in self.shares.items() if share.paused_at]

    def _main(self) -> None:
        try:
            if self._reading != self._starts:
                self._consumer.assign([TopicPartition(self._topic, p, o) for p, o in self._starts.items()])
                # A partition stays paused over assignments.
                self._consumer.resume([TopicPartition(self._topic, p) for p in self._starts])
            for partition in self._starts:
                self._check_end(partition, self._starts[partition])
            while not self._closing.is_set():
                if time.monotonic() >= self._ends_due:
                    self._note_ends()
                if self._room():
                    self._fetch()
                else:
                    time.sleep(_FULL)
        except BaseException as error:
            self._fail(error)

    def _note_ends(self) -> None:
        self._ends_due = time.monotonic() + self._ends_every
        for partition, share in self.shares.items():
            if not share.ended:
                known = self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, partition), cached=True
                )
                share.end = max(share.end, known[1])  # below 0 before the first fetch

    def _fetch(self) -> None:
        first = self._consumer.poll(_POLL)
        if first is None:
            return
        # By the size of what comes now, too: the first large message is not followed by a thousand like it.
        size = max(self._mean_size, len(first)) if first.error() is None else self._mean_size
        more = min(BATCH, self._at_once, int(self._bytes_left / size) if size else BATCH) - 1
        # Blocking for the first message only: consume(n, timeout) would wait out its time-out for the rest.
        self._hand_over([first, *self._consumer.consume(more, 0)] if more > 0 else [first])

    def _hand_over(self, messages: list[Any]) -> None:
        # The hot path: as few steps per message as can be, the rest per partition.
        records = [message for message in messages if message.error() is None]
        if records:
            outage.answered()
        groups: dict[int, list[Any]] = defaultdict(list)
        for record in records:
            groups[record.partition()].append(record)
        if self._errors.missing:
            self._errors.answered(groups)
        ends: dict[int, int] = {}
        shares, until = self.shares, self._until
        for partition, group in groups.items():
            shares[partition].next = group[-1].offset() + 1
        if len(records) < len(messages):
            self._hear([message for message in messages if message.error() is not None], ends)
        if until is not None:
            for partition, share in shares.items():
                if partition in groups and share.next > until[partition]:
                    groups[partition] = [r for r in groups[partition] if r.offset() < until[partition]]
                    ends[partition] = until[partition]
            groups = {partition: group for partition, group in groups.items() if group}
        total = 0
        for partition, group in groups.items():
            size = sum(map(len, group))
            total += size
            shares[partition].handed += len(group)
            shares[partition].size_handed += size
        if records:
            mean = total / len(records)
            self._mean_size = 0.9 * self._mean_size + 0.1 * mean if self._mean_size else mean
        if groups or ends:
            self._deliver(FetchedBatch(records=groups, ends=ends))
        if until is not None:
            for partition, share in shares.items():
                self._check_end(partition, share.next)

    def _hear(self, told: list[Any], ends: dict[int, int]) -> None:
        """What the client says besides messages; those that came with it are counted."""
        for message in told:
            kind, partition = classify(message.error()), message.partition()
            if kind is ErrorKind.END:
                self._errors.answered([partition])
                # It comes after every message that was the last one, and says something new only behind a hole.
                if message.offset() > self.shares[partition].next:
                    ends[partition] = self.shares[partition].next = message.offset()
            elif kind is ErrorKind.OUT_OF_RANGE:
                self._out_of_range(partition)
            else:
                self._errors.take(partition, message.error())

    def _check_end(self, partition: int, reached: int) -> None:
        if self._until is None or reached < self._until[partition]:
            return
        share = self.shares[partition]
        if not share.ended:
            share.ended = True
            # Not paused: a client whose partitions were all paused may take a second to fetch again.
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])

    @property
    def ended(self) -> bool:
        """Every partition has been handed over up to its ``until``."""
        return self._until is not None and all(share.ended for share in self.shares.values())

    def _room(self) -> bool:
        """Pause and resume single partitions; whether to fetch now."""
        room, held, most, open_ = self._capacity, 0, None, 0
        if self._mean_size * room > MAX_BYTES:
            room = max(2, int(MAX_BYTES / self._mean_size))
        self.room = room
        self._bytes_left = MAX_BYTES // 2 - sum([share.size for share in self.shares.values()])
        room -= max(1, room // REFETCH_ROOM_DIVISOR)  # for what is read again
        for partition, share in self.shares.items():
            now = share.held
            if share.paused_at:
                if now * 2 > share.paused_at or share.away * 2 > self._far:
                    room -= now
                    continue
                share.paused_at = 0
                self._consumer.resume([TopicPartition(self._topic, partition)])
            elif share.away > self._far and not share.ended:
                self._pause(partition)
                log.warning(
                    "partition %d paused: %d of its messages wait behind lanes that stand still or get more than they "
                    "can do; it is resumed when half of them are done",
                    partition,
                    share.away,
                )
                room -= now
                continue
            if share.ended:
                room -= now
                continue
            held += now
            open_ += 1
            if most is None or now > self.shares[most].held:
                most = partition
        self._at_once = max(1, room // 4)
        if 0 < room >= held * 2 and self._bytes_left > 0 and not self._crowded():
            self._full_since = 0.0
            return held < PLENTY or not self._busy() or held - self._stuck() < PLENTY
        if not self._full_since:
            self._full_since = time.monotonic()
        elif open_ > 1 and most is not None and time.monotonic() - self._full_since > _STUCK:
            self._pause(most)
            self._full_since = 0.0
            log.info("partition %d paused: it holds %d messages", most, self.shares[most].paused_at)
        return False

    def _out_of_range(self, partition: int) -> None:
        """What is to be read next is not in the log: go on where the log begins, and say what is missing."""
        wanted = self.shares[partition].next
        begin, end = self._consumer.get_watermark_offsets(
            TopicPartition(self._topic, partition), timeout=_ASK
        )
        if wanted > end:
            raise BrokerError(
                f"{self._topic}/{partition}: the log ends at {end} and has been read up to {wanted}: it was "
                "truncated, or the topic was made anew. The task begins again with what is there"
            )
        if wanted < begin:
            log.error(
                "%s/%d: the log begins at %d and messages from %d on were not read: their retention is over, they are "
                "lost. Retention must be longer than the lag",
                self._topic,
                partition,
                begin,
                wanted,
            )
        # Assigned anew: the client does not seek in a partition that it has given up.
        self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
        self._consumer.incremental_assign([TopicPartition(self._topic, partition, max(wanted, begin))])

    def _pause(self, partition: int) -> None:
        share = self.shares[partition]
        share.paused_at = max(1, share.held)
        self._consumer.pause([TopicPartition(self._topic, partition)])
