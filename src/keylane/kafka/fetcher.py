"""The consumer and its one owner thread: fetching, backpressure and commits."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicPartition

from keylane.errors import KafkaError
from keylane.kafka.cluster import patiently

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Consumer

    from keylane.message import Record

log = logging.getLogger("keylane.kafka")

BATCH = 1000
"""Messages handed over at once, at most."""
MAX_BYTES = 256 * 1024 * 1024
"""Bytes of message values a task holds, about: large messages shrink its capacity."""
_POLL = 0.1
_FULL = 0.005
_GONE = 30.0
"""Seconds after which a topic that the broker does not know counts as deleted."""


@dataclass(slots=True)
class Share:
    """One partition's part of the task's capacity. Written by the owner thread; ``done`` by the loop."""

    limit: int
    handed: int = 0
    done: int = 0
    mean_size: float = 0.0
    paused: bool = False
    ended: bool = False

    @property
    def held(self) -> int:
        """Messages handed over and not done."""
        return self.handed - self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the owner thread hands to the loop."""

    records: Sequence[Record]
    ends: Mapping[int, int]
    """Partitions that were read to their end, and that end."""


class Fetcher:
    """Fetches the task's partitions and hands batches to ``deliver``, which must be thread-safe and quick.

    Every partition has an equal share of ``capacity``. A partition that has used up its share is paused, and resumed
    when half of it is free again; so a partition that is stuck takes no room from the others. When the rest are on
    average at half their shares the thread stops asking for more: that keeps what librdkafka has fetched ahead, which
    a pause would throw away.

    ``until``: hand over nothing at or above these offsets; when every partition has come to it, ``ended`` is true.
    """

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        starts: Mapping[int, int],
        *,
        capacity: int,
        deliver: Callable[[Batch], None],
        fail: Callable[[BaseException], None],
        until: Mapping[int, int] | None = None,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._starts = dict(starts)
        self._deliver = deliver
        self._fail = fail
        self._until = dict(until) if until is not None else None
        self._crowded = crowded
        share = max(1, capacity // max(1, len(starts)))
        self.shares = {p: Share(limit=share) for p in starts}
        self._orders: SimpleQueue[tuple[list[TopicPartition], Future[None]]] = SimpleQueue()
        self._fetching = threading.Event()
        self._fetching.set()
        self._closing = threading.Event()
        self._warned = 0.0
        self._missing_since = 0.0  # when the client first said that the topic is not there
        self._thread = threading.Thread(target=self._main, name="keylane-fetcher", daemon=True)

    def start(self) -> None:
        """Start the owner thread."""
        self._thread.start()

    def stop_fetching(self) -> None:
        """Hand over nothing more; commits still work."""
        self._fetching.clear()

    def commit(self, offsets: list[TopicPartition]) -> Future[None]:
        """Commit these offsets, on the owner thread; the future fails with KafkaError when the broker refused."""
        future: Future[None] = Future()
        self._orders.put((offsets, future))
        return future

    def close(self) -> None:
        """Carry out the commits asked for, close the consumer and end the thread."""
        self._fetching.clear()
        self._closing.set()
        self._thread.join(timeout=30)

    @property
    def paused(self) -> list[int]:
        """Partitions that are paused now."""
        return [p for p, share in self.shares.items() if share.paused]

    def _main(self) -> None:
        try:
            self._consumer.assign([TopicPartition(self._topic, p, o) for p, o in self._starts.items()])
            for partition in self._starts:
                self._check_end(partition, self._starts[partition])
            while not self._closing.is_set():
                self._carry_out()
                if not self._fetching.is_set():
                    # Not a wait on an event: commits asked for while draining must be carried out.
                    time.sleep(_FULL)
                elif self._room():
                    self._fetch()
                else:
                    time.sleep(_FULL)
            self._carry_out()
        except BaseException as error:
            self._fail(error)
            self._refuse_orders(error)
        finally:
            self._consumer.close()

    def _fetch(self) -> None:
        first = self._consumer.poll(_POLL)
        if first is None:
            return
        # Blocking for the first message only: consume(n, timeout) would wait out its time-out for the rest.
        self._hand_over([first, *self._consumer.consume(BATCH - 1, 0)])

    def _hand_over(self, messages: list[Any]) -> None:
        records: list[Any] = []
        ends: dict[int, int] = {}
        counts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        until = self._until
        for message in messages:
            error = message.error()
            partition = message.partition()
            if error is not None:
                if error.code() == ClientError._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
                    ends[partition] = message.offset()
                else:
                    self._problem(error)
                continue
            if until is not None and message.offset() >= until[partition]:
                ends[partition] = until[partition]
                continue
            records.append(message)
            counts[partition] = counts.get(partition, 0) + 1
            sizes[partition] = sizes.get(partition, 0) + len(message)
        for partition, count in counts.items():
            share = self.shares[partition]
            share.handed += count
            size = sizes[partition] / count
            share.mean_size = size if not share.mean_size else 0.8 * share.mean_size + 0.2 * size
        self._deliver(Batch(records=records, ends=ends))
        if until is not None:
            for partition, offset in ends.items():
                self._check_end(partition, offset)
            if records:
                for partition in counts:
                    self._check_end(
                        partition, max(r.offset() for r in records if r.partition() == partition) + 1
                    )

    def _check_end(self, partition: int, reached: int) -> None:
        if self._until is None or reached < self._until[partition]:
            return
        share = self.shares[partition]
        if not share.ended:
            share.ended = True
            self._consumer.pause([TopicPartition(self._topic, partition)])

    @property
    def ended(self) -> bool:
        """Every partition has been handed over up to its ``until``."""
        return self._until is not None and all(share.ended for share in self.shares.values())

    def _room(self) -> bool:
        """Pause and resume single partitions; whether to fetch now."""
        held = limits = 0
        for partition, share in self.shares.items():
            if share.ended:
                continue
            limit = share.limit
            if share.mean_size * limit * len(self.shares) > MAX_BYTES:
                limit = max(1, int(MAX_BYTES / len(self.shares) / share.mean_size))
            now = share.held
            if share.paused:
                if now <= limit // 2:
                    self._consumer.resume([TopicPartition(self._topic, partition)])
                    share.paused = False
            elif now >= limit:
                self._consumer.pause([TopicPartition(self._topic, partition)])
                share.paused = True
                log.info("partition %d paused: it holds %d messages", partition, now)
            if not share.paused:
                held += now
                limits += limit
        if self._crowded():
            return False
        # All paused: poll all the same, for the client's events; it hands out nothing.
        return limits == 0 or held * 2 <= limits

    def _carry_out(self) -> None:
        while True:
            try:
                offsets, future = self._orders.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():  # the commit after it holds more
                continue
            try:
                patiently(lambda offsets=offsets: self._consumer.commit(offsets=offsets, asynchronous=False))  # type: ignore[misc]
            except KafkaException as error:
                future.set_exception(KafkaError(f"progress could not be committed: {error.args[0].str()}"))
            else:
                future.set_result(None)

    def _refuse_orders(self, error: BaseException) -> None:
        while True:
            try:
                _, future = self._orders.get_nowait()
            except Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(KafkaError(f"the consumer has ended: {error}"))

    def _problem(self, error: Any) -> None:
        """An error the client reports: what does not pass by itself ends the task, the rest is said now and then."""
        missing = (
            ClientError.UNKNOWN_TOPIC_OR_PART,
            ClientError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's public constants
            ClientError._UNKNOWN_PARTITION,  # noqa: SLF001
        )
        lasting = (
            ClientError.TOPIC_AUTHORIZATION_FAILED,
            ClientError.GROUP_AUTHORIZATION_FAILED,
            ClientError.CLUSTER_AUTHORIZATION_FAILED,
            ClientError._AUTHENTICATION,  # noqa: SLF001
        )
        now = time.monotonic()
        if error.code() not in missing:
            self._missing_since = 0.0
        elif not self._missing_since:
            self._missing_since = now  # a broker that has just come back may not know its topics yet
        gone = bool(self._missing_since) and now - self._missing_since > _GONE
        if error.fatal() or error.code() in lasting or gone:
            raise KafkaError(f"topic {self._topic!r} cannot be read: {error.str()}")
        if now - self._warned > 10:
            self._warned = now
            log.warning("the Kafka client reports: %s (it goes on trying)", error.str())
