"""Reads evicted messages again: messages of stuck lanes, of which only the offsets were kept.

It has a consumer of its own, with one owner thread. One pass over a partition serves all lanes that need messages of
it.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from keylane.denial import broker_error
from keylane.kafka.client import KafkaException, TopicPartition
from keylane.kafka.cluster import load_metadata
from keylane.kafka.partition_reader import PartitionReader
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keylane.kafka.client import Consumer
    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Record

log = logging.getLogger("keylane.kafka")

_BATCH_MESSAGES = 1000
_POLL_SECONDS = 0.1
_LEAP_OFFSETS_MIN = 20_000
"""Gaps between requested offsets that are at least this long are skipped with a seek; shorter ones are read."""
_TURN_MESSAGES_MAX = 200_000
"""Messages read in one pass while a request waits for the next pass."""
_IDLE_SECONDS = 1.0
"""Time without a request after which prefetching stops."""
_END = -1
"""Instead of an offset: the end of the log."""
_SILENT_SECONDS = 10.0
"""Time without messages after which a partition is assigned again."""
_MISSING_SECONDS = 30.0
"""Time for which a topic must be unknown to the broker, or a log too short, before its messages count as missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refetched:
    """A part of what a request asked for. Its offsets, found or not, are above those of the parts before it."""

    ticket: int
    partition: int
    records: Sequence[Record]
    """In ascending request."""
    missing: Sequence[int]
    """Offsets that are no longer in the log, ascending: retention or compaction has taken them."""
    last: bool
    """True if this is the last part for its ticket."""


@dataclass(slots=True, eq=False)
class _TicketRequest:
    """The offsets of one ticket. After it is queued, only the owner thread uses it."""

    ticket: int
    partition: int
    offsets: Sequence[int]
    at: int = 0
    """Index of the next offset that is expected."""
    cancelled: bool = False
    records: list[Any] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """Read position in one partition. Only the owner thread uses it."""

    number: int
    asked: list[tuple[int, int, _TicketRequest]] = field(default_factory=list)
    """A heap of the requests served by this pass, by their next offset."""
    late: list[_TicketRequest] = field(default_factory=list)
    """Requests that begin below the position of this pass."""
    position: int | None = None
    """Messages below this will not come in this pass; None while the partition is not assigned."""
    certain: bool = False
    """True when the messages are known to come from the position that was assigned."""
    doubted: tuple[int, int] | None = None
    """The offset that was missing right after a seek to it, and the offset that came instead."""
    passed: int = 0
    """Messages read since the first request in ``late``."""
    ended: float | None = None
    """When the end of the log was reached; None before."""
    last_message_at: float = 0.0
    """When the last message of this partition came."""


class RefetchReader:
    """Reads single offsets of one topic again and hands them to ``deliver``, on its own thread.

    ``deliver`` must be quick and must not raise. It gets each requested offset exactly once, as a record or as missing,
    ascending within its ticket. Requests for one partition share a pass over the log: a request that begins above the
    position of the pass joins it, others wait for the next one. The caller decides how much is in memory: requests of a
    few thousand offsets, each made before the last one is complete, read as fast as one of a million.

    It waits for brokers that are down. Permanent errors go to ``fail`` as a :class:`keylane.errors.BrokerError`, and
    nothing more is delivered. It never commits: ``app`` is only the name of the group, for brokers that check it.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        topic: str,
        *,
        deliver: Callable[[Refetched], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._app = app
        self._topic = topic
        self._deliver = deliver
        self._fail = fail
        self._queue: SimpleQueue[_TicketRequest | int | None] = SimpleQueue()  # an int is a ticket to cancel
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # Used only by the owner thread.
        self._open: dict[int, _TicketRequest] = {}
        self._parts: dict[int, _Part] = {}
        self._numbers = 0
        self._reader: PartitionReader
        self.scanned = 0
        """Messages read so far, requested or not. Written by the owner thread."""

    def request(self, ticket: int, partition: int, offsets: Sequence[int]) -> None:
        """Read these offsets again. From any thread. They must ascend; a ticket is used once. The first starts it."""
        self._queue.put(_TicketRequest(ticket, partition, offsets))
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._main, name="keylane-rereader", daemon=True)
                self._thread.start()

    def cancel(self, ticket: int) -> None:
        """Stop reading for this ticket. From any thread; messages already on their way to ``deliver`` still come."""
        self._queue.put(ticket)

    def close(self) -> None:
        """Close the consumer and end the thread; open requests are dropped."""
        with self._starting:
            self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def open(self) -> int:
        """Number of requests that are not complete."""
        return len(self._open)

    def _main(self) -> None:
        try:
            consumer = self._settings.consumer(
                self._app,
                **{
                    "queued.min.messages": 10_000,
                    "queued.max.messages.kbytes": 8192,
                    # A broker serves one fetch at a time: one that waits for new messages would delay a seek.
                    "fetch.wait.max.ms": 10,
                },
            )
            try:
                load_metadata(consumer, self._topic)
                self._reader = PartitionReader(
                    consumer, self._topic, missing_seconds=_MISSING_SECONDS, what="cannot be read again"
                )
                while not self._closing.is_set():
                    self._step(consumer)
            finally:
                consumer.close()
        except KafkaException as error:
            right = on_topic(self._topic, Operation.READ)
            self._fail(broker_error(f"topic {self._topic!r} cannot be read again", error.args[0], right))
        except BaseException as error:
            self._fail(error)

    def _step(self, consumer: Consumer) -> None:
        self._take_requests(consumer)
        for part in self._parts.values():
            self._turn(consumer, part)
        if any(part.asked for part in self._parts.values()):
            self._read(consumer)

    # Requests.

    def _take_requests(self, consumer: Consumer) -> None:
        """Take the queued requests; wait for one if there is nothing to do."""
        if not any(part.asked or part.late for part in self._parts.values()):
            self._take(self._next_request(consumer))
        while True:
            try:
                self._take(self._queue.get_nowait())
            except Empty:
                return

    def _next_request(self, consumer: Consumer) -> _TicketRequest | int | None:
        if any(part.position is not None for part in self._parts.values()):
            try:
                return self._queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                for part in self._parts.values():
                    self._leave(consumer, part)
        return self._queue.get()

    def _take(self, request: _TicketRequest | int | None) -> None:
        if isinstance(request, int):
            self._drop(request)
        elif request is not None:
            self._add(request)

    def _add(self, request: _TicketRequest) -> None:
        if not request.offsets:
            self._hand_over([request])
            return
        self._open[request.ticket] = request
        part = self._parts.setdefault(request.partition, _Part(number=request.partition))
        if not part.asked:
            part.certain, part.doubted = False, None
        if part.asked and part.position is not None and request.offsets[0] < part.position:
            if not part.late:
                part.passed = 0
            part.late.append(request)
        else:
            self._ask(part, request)

    def _ask(self, part: _Part, request: _TicketRequest) -> None:
        self._numbers += 1
        heappush(part.asked, (request.offsets[request.at], self._numbers, request))

    def _drop(self, ticket: int) -> None:
        request = self._open.pop(ticket, None)
        if request is None:
            return
        request.cancelled = True
        part = self._parts[request.partition]
        part.asked = [entry for entry in part.asked if not entry[2].cancelled]
        heapify(part.asked)
        part.late = [waiting for waiting in part.late if not waiting.cancelled]

    # Reading.

    def _turn(self, consumer: Consumer, part: _Part) -> None:
        """Read the partition at its next requested offset; pause it if there is none."""
        if part.late and (not part.asked or part.passed > _TURN_MESSAGES_MAX or part.ended is not None):
            for request in part.late:
                self._ask(part, request)
            part.late.clear()
        if not part.asked:
            # Leave it as it is while no other partition is read either: prefetched messages serve the next request.
            if any(other.asked for other in self._parts.values()):
                self._leave(consumer, part)
            return
        wanted = part.asked[0][0]
        if part.position is None or not part.position <= wanted <= part.position + _LEAP_OFFSETS_MIN:
            part.doubted = None
            self._go_to(consumer, part, wanted)

    def _go_to(self, consumer: Consumer, part: _Part, offset: int) -> None:
        place = TopicPartition(self._topic, part.number, offset)
        if part.position is not None:
            try:
                consumer.seek(place)
            except KafkaException:  # fetching has not started yet, or the broker is down
                self._leave(consumer, part)
        if part.position is None:
            consumer.incremental_assign([place])
        part.position = offset
        part.certain = False
        part.ended = None
        part.last_message_at = time.monotonic()

    def _leave(self, consumer: Consumer, part: _Part) -> None:
        if part.position is not None:
            consumer.incremental_unassign([TopicPartition(self._topic, part.number)])
            self._reader.errors.answered([part.number])  # no messages of it are expected any more
            part.position = None

    def _read(self, consumer: Consumer) -> None:
        messages = self._reader.read(_POLL_SECONDS, _BATCH_MESSAGES)
        touched: dict[_TicketRequest, None] = {}
        self.scanned += len(messages)
        self._sort_out(consumer, messages, touched)
        self._check_deadlines(consumer, touched)
        self._hand_over(touched)

    def _check_deadlines(self, consumer: Consumer, touched: dict[_TicketRequest, None]) -> None:
        now = time.monotonic()
        self._reader.errors.check_missing(_MISSING_SECONDS)  # the client may report a missing topic only once
        for part in self._parts.values():
            if part.asked and part.ended is not None and now - part.ended > _MISSING_SECONDS:
                part.certain = False
                if self._believed(part, _END):
                    self._miss(part, None, touched)
                else:
                    self._go_to(consumer, part, part.asked[0][0])
            elif part.asked and part.ended is None and now - part.last_message_at > _SILENT_SECONDS:
                part.last_message_at = now
                self._check_existence(consumer, part)

    def _check_existence(self, consumer: Consumer, part: _Part) -> None:
        """Check whether a silent partition still exists.

        The client does not report that a topic was deleted while its partition was unassigned, and loses track of a
        topic that was away for a moment. So ask the cluster, and assign the partition again.
        """
        try:
            topic = consumer.list_topics(self._topic, timeout=1.0).topics[self._topic]
        except KafkaException:
            return  # no broker answers: wait
        if topic.error is not None:
            self._reader.errors.handle(part.number, topic.error)
        else:
            self._reader.errors.answered(topic.partitions)
            self._leave(consumer, part)

    def _sort_out(self, consumer: Consumer, messages: list[Any], touched: dict[_TicketRequest, None]) -> None:
        parts, now = self._parts, time.monotonic()
        stale: set[int] = set()  # partitions that were moved elsewhere after these messages had been fetched
        for message in messages:
            error = message.error()
            number = message.partition()
            part = parts[number]
            offset = message.offset()
            if part.position is None or number in stale:
                continue
            part.last_message_at = now
            part.passed += 1
            if offset >= part.position:
                # For every message, requested or not: what is below it will not come again in this pass.
                part.position = offset if error is not None else offset + 1
            part.ended = None if error is None else now
            asked = part.asked
            if asked and asked[0][0] < offset:
                if not self._believed(part, offset):
                    self._go_to(consumer, part, asked[0][0])
                    stale.add(number)
                    continue
                self._miss(part, offset, touched)
                part.certain = True
            if error is None and asked and asked[0][0] == offset:
                part.certain = True
                self._find(part, offset, message, touched)

    @staticmethod
    def _believed(part: _Part, came: int) -> bool:
        """True if an offset counts as missing because ``came``, which is above it, has come.

        Right after a seek that must happen twice: the client may have prefetched the message at its former position,
        and an offset taken for missing is lost.
        """
        look = part.asked[0][0], came
        if part.certain or part.doubted == look:
            return True
        part.doubted = look
        return False

    def _miss(self, part: _Part, below: int | None, touched: dict[_TicketRequest, None]) -> None:
        """Report the requested offsets below this one as missing; with None all of them."""
        asked = part.asked
        while asked and (below is None or asked[0][0] < below):
            request = heappop(asked)[2]
            offsets = request.offsets
            end = len(offsets) if below is None else bisect_left(offsets, below, request.at)
            request.missing += offsets[request.at : end]
            request.at = end
            touched[request] = None
            if end < len(offsets):
                self._ask(part, request)

    @staticmethod
    def _find(part: _Part, offset: int, message: Any, touched: dict[_TicketRequest, None]) -> None:
        asked = part.asked
        while asked and asked[0][0] == offset:
            _, number, request = asked[0]
            request.records.append(message)
            request.at += 1
            touched[request] = None
            if request.at < len(request.offsets):
                heapreplace(asked, (request.offsets[request.at], number, request))
            else:
                heappop(asked)

    def _hand_over(self, requests: Iterable[_TicketRequest]) -> None:
        for request in requests:
            records, request.records = request.records, []
            missing, request.missing = request.missing, []
            last = request.at == len(request.offsets)
            if last:
                self._open.pop(request.ticket, None)
            self._deliver(
                Refetched(
                    ticket=request.ticket,
                    partition=request.partition,
                    records=records,
                    missing=missing,
                    last=last,
                )
            )
