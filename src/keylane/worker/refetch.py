"""Reads again what a lane that was stuck has left behind: of that only the offsets were kept.

A consumer of its own, with one owner thread, goes through a partition once for all lanes that ask for a part of it.
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

from keylane.errors import BrokerError
from keylane.kafka.client import KafkaException, TopicPartition
from keylane.kafka.cluster import load_metadata
from keylane.kafka.partition_reader import PartitionReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keylane.kafka.client import Consumer
    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Record

log = logging.getLogger("keylane.kafka")

_BATCH = 1000
_POLL = 0.1
_LEAP = 20_000
"""Offsets that nobody asked for: from so many on they are leapt over, below it is quicker to read them."""
_TURN = 200_000
"""Messages read in one pass while a request waits for the next one."""
_IDLE = 1.0
"""Seconds without a request after which nothing is fetched ahead any more."""
_END = -1
"""Instead of an offset: the log has ended."""
_SILENT = 10.0
"""Seconds after which a partition of which nothing comes is asked for anew."""
_GONE = 30.0
"""Seconds after which a topic that the broker does not know, or a log that is shorter than it was, is believed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refetched:
    """A part of what a request asked for. Its offsets, found or not, are above those of the parts before it."""

    ticket: int
    partition: int
    records: Sequence[Record]
    """Ascending."""
    missing: Sequence[int]
    """Offsets that are no longer in the log, ascending: retention or compaction has taken them."""
    last: bool
    """Nothing more will come for this ticket."""


@dataclass(slots=True, eq=False)
class _Request:
    """What one ticket asks for. Used by the owner thread alone, once it is there."""

    ticket: int
    partition: int
    offsets: Sequence[int]
    at: int = 0
    """The place of the next offset to come."""
    cancelled: bool = False
    records: list[Any] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """How far reading is in one partition. Used by the owner thread alone."""

    number: int
    asked: list[tuple[int, int, _Request]] = field(default_factory=list)
    """A heap of the requests that this pass serves, by their next offset."""
    late: list[_Request] = field(default_factory=list)
    """Requests that begin below where this pass is."""
    position: int | None = None
    """What lies below will not come; None while the partition is not assigned."""
    certain: bool = False
    """Whether what comes is known to begin where it was told to."""
    doubted: tuple[int, int] | None = None
    """The offset that did not come when reading was sent there, and the one that came instead."""
    passed: int = 0
    """Messages read since the first of ``late`` came."""
    ended: float | None = None
    """Since when nothing comes because the log has ended."""
    heard: float = 0.0
    """When something came of it last."""


class RefetchReader:
    """Reads single offsets of one topic again and hands them to ``deliver``, on its own thread.

    ``deliver`` must be quick and must not raise. Each offset asked for comes to it exactly once, as a record or as
    missing, ascending within its ticket. Requests for the same partition share one pass over the log: one that begins
    above where the pass is joins it, others wait for the next. How much is held in memory is up to who asks: a few
    thousand offsets at once, and the next before the last have come, read as fast as a million.

    Brokers that are away are waited for. What does not pass by itself goes to ``fail`` as a
    :class:`keylane.errors.BrokerError`; then nothing more comes. Nothing is ever committed: ``app`` is only the group's
    name, for brokers that check it.
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
        self._orders: SimpleQueue[_Request | int | None] = SimpleQueue()  # an int is a ticket to cancel
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # The owner thread's own.
        self._open: dict[int, _Request] = {}
        self._parts: dict[int, _Part] = {}
        self._numbers = 0
        self._reader: PartitionReader
        self.scanned = 0
        """Messages read so far, asked for or not. Written by the owner thread."""

    def request(self, ticket: int, partition: int, offsets: Sequence[int]) -> None:
        """Read these offsets, ascending, again. From any thread; a ticket is used once. The first starts the thread."""
        self._orders.put(_Request(ticket, partition, offsets))
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._main, name="keylane-rereader", daemon=True)
                self._thread.start()

    def cancel(self, ticket: int) -> None:
        """Read nothing more for this ticket. From any thread; what is on its way to ``deliver`` still comes."""
        self._orders.put(ticket)

    def close(self) -> None:
        """Let go of the consumer and end the thread; requests that are open are forgotten."""
        with self._starting:
            self._closing.set()
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def open(self) -> int:
        """Requests that are not served to their end."""
        return len(self._open)

    def _main(self) -> None:
        try:
            consumer = self._settings.consumer(
                self._app,
                **{
                    "queued.min.messages": 10_000,
                    "queued.max.messages.kbytes": 8192,
                    # One fetch at a time goes to a broker: one that waits for new messages would hold up a leap.
                    "fetch.wait.max.ms": 10,
                },
            )
            try:
                load_metadata(consumer, self._topic)
                self._reader = PartitionReader(
                    consumer, self._topic, missing_seconds=_GONE, what="cannot be read again"
                )
                while not self._closing.is_set():
                    self._step(consumer)
            finally:
                consumer.close()
        except KafkaException as error:
            self._fail(BrokerError(f"topic {self._topic!r} cannot be read again: {error.args[0].str()}"))
        except BaseException as error:
            self._fail(error)

    def _step(self, consumer: Consumer) -> None:
        self._take_orders(consumer)
        for part in self._parts.values():
            self._turn(consumer, part)
        if any(part.asked for part in self._parts.values()):
            self._read(consumer)

    # Requests.

    def _take_orders(self, consumer: Consumer) -> None:
        """Take what is there; without anything to do, wait for it."""
        if not any(part.asked or part.late for part in self._parts.values()):
            self._take(self._next_order(consumer))
        while True:
            try:
                self._take(self._orders.get_nowait())
            except Empty:
                return

    def _next_order(self, consumer: Consumer) -> _Request | int | None:
        if any(part.position is not None for part in self._parts.values()):
            try:
                return self._orders.get(timeout=_IDLE)
            except Empty:
                for part in self._parts.values():
                    self._leave(consumer, part)
        return self._orders.get()

    def _take(self, order: _Request | int | None) -> None:
        if isinstance(order, int):
            self._drop(order)
        elif order is not None:
            self._add(order)

    def _add(self, request: _Request) -> None:
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

    def _ask(self, part: _Part, request: _Request) -> None:
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
        """See to it that the partition is read where the next offset lies, and not at all when there is none."""
        if part.late and (not part.asked or part.passed > _TURN or part.ended is not None):
            for request in part.late:
                self._ask(part, request)
            part.late.clear()
        if not part.asked:
            # While no other is read either it may stay as it is: what was fetched ahead is kept for the next request.
            if any(other.asked for other in self._parts.values()):
                self._leave(consumer, part)
            return
        wanted = part.asked[0][0]
        if part.position is None or not part.position <= wanted <= part.position + _LEAP:
            part.doubted = None
            self._go_to(consumer, part, wanted)

    def _go_to(self, consumer: Consumer, part: _Part, offset: int) -> None:
        place = TopicPartition(self._topic, part.number, offset)
        if part.position is not None:
            try:
                consumer.seek(place)
            except KafkaException:  # it has not begun to fetch yet, or the broker is away
                self._leave(consumer, part)
        if part.position is None:
            consumer.incremental_assign([place])
        part.position = offset
        part.certain = False
        part.ended = None
        part.heard = time.monotonic()

    def _leave(self, consumer: Consumer, part: _Part) -> None:
        if part.position is not None:
            consumer.incremental_unassign([TopicPartition(self._topic, part.number)])
            self._reader.errors.answered([part.number])  # nothing is expected of it any more
            part.position = None

    def _read(self, consumer: Consumer) -> None:
        messages = self._reader.read(_POLL, _BATCH)
        touched: dict[_Request, None] = {}
        self.scanned += len(messages)
        self._sort_out(consumer, messages, touched)
        self._look_at_the_clock(consumer, touched)
        self._hand_over(touched)

    def _look_at_the_clock(self, consumer: Consumer, touched: dict[_Request, None]) -> None:
        now = time.monotonic()
        self._reader.errors.check_missing(_GONE)  # the client may report it only once
        for part in self._parts.values():
            if part.asked and part.ended is not None and now - part.ended > _GONE:
                part.certain = False
                if self._believed(part, _END):
                    self._miss(part, None, touched)
                else:
                    self._go_to(consumer, part, part.asked[0][0])
            elif part.asked and part.ended is None and now - part.heard > _SILENT:
                part.heard = now
                self._ask_after(consumer, part)

    def _ask_after(self, consumer: Consumer, part: _Part) -> None:
        """Nothing comes of the partition: is it still there?

        The client does not say that a topic was deleted while a partition of it was let go of and taken up again, and
        loses sight of one that was away only for a moment. So the cluster is asked, and the partition taken up anew.
        """
        try:
            topic = consumer.list_topics(self._topic, timeout=1.0).topics[self._topic]
        except KafkaException:
            return  # no broker answers: that is waited for
        if topic.error is not None:
            self._reader.errors.handle(part.number, topic.error)
        else:
            self._reader.errors.answered(topic.partitions)
            self._leave(consumer, part)

    def _sort_out(self, consumer: Consumer, messages: list[Any], touched: dict[_Request, None]) -> None:
        parts, now = self._parts, time.monotonic()
        stale: set[int] = set()  # partitions that were sent elsewhere after these messages had been fetched
        for message in messages:
            error = message.error()
            number = message.partition()
            part = parts[number]
            offset = message.offset()
            if part.position is None or number in stale:
                continue
            part.heard = now
            part.passed += 1
            if offset >= part.position:
                # Of every message, whether it is asked for or not: what is behind will not come again.
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
        """Whether an offset is missing because this one, above it, has come.

        When reading was just sent there it must come twice: the client may have fetched it before, elsewhere, and
        an offset that is taken for missing is lost.
        """
        look = part.asked[0][0], came
        if part.certain or part.doubted == look:
            return True
        part.doubted = look
        return False

    def _miss(self, part: _Part, below: int | None, touched: dict[_Request, None]) -> None:
        """What is asked for below this offset is not there; with None all of it."""
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
    def _find(part: _Part, offset: int, message: Any, touched: dict[_Request, None]) -> None:
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

    def _hand_over(self, requests: Iterable[_Request]) -> None:
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
