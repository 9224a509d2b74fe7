"""A producer for programs that write to the topics that apps read.

Keylane's order rests on the writers: one key is in one partition, in the order in which it was sent. A publisher keeps
that order, gives every event its id, and reports everything that was not delivered.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.denial import remedy
from keylane.errors import DeliveryError, SettingsError, Undelivered
from keylane.event import BY_FUNCTION, Form, encode_value
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from keylane.event import Event, KeyLike, MoreHeaders

    Then = Callable[["Delivered | DeliveryError"], None]

log = logging.getLogger("keylane.publisher")

_KNOWN = ("key", "event_id", "type", "version", "encode", "keyless", "timeout", "bootstrap")
_POLL_SECONDS = 0.1
_FULL_SLEEP_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Position of a delivered message. All replicas have it."""

    event_id: str
    partition: int
    offset: int


class _Handed:
    """A message on its way; called with the client's report, on the publisher's thread."""

    __slots__ = ("event_id", "publisher", "then")

    def __init__(self, publisher: Publisher, event_id: str, then: Then | None) -> None:
        self.publisher = publisher
        self.event_id = event_id
        self.then = then

    def __call__(self, error: Any, message: Any) -> None:
        self.publisher._reported(self, error, message)  # noqa: SLF001 - one class in two


class Publisher:
    """Sends events to one topic: keys partitioned as Java clients do (murmur2), in the order of the calls.

    >>> with Publisher("orders", key=lambda order: order["id"], type="OrderPaid") as orders:  # doctest: +SKIP
    ...     orders.send({"id": "o-1", "amount": 12})

    ``key`` takes the key out of a value; ``send(…, key=…)`` names it instead. A key is text, bytes, a whole number or
    a UUID; the latter two are sent as their text. A message without a key has no order: it is refused unless
    ``keyless=True``. ``event_id`` and ``version`` are taken out of a value likewise; without one an event gets a new
    id, a UUID that begins with the time. ``type`` and ``version`` may also be the same for all. ``encode`` turns a
    value into bytes; without it bytes stay as they are, text becomes UTF-8, everything else JSON, dataclasses
    included. None is a null value: a tombstone in a compacted topic.

    :meth:`send` hands a message over and returns; :meth:`deliver`, in asyncio, waits until all replicas have it. Both
    may be called from any thread. Each message is written once, even if a broker fails (an idempotent producer).
    A message that cannot be delivered within ``timeout`` seconds, or that the broker refuses, is reported by the next
    call, and in any case by :meth:`flush` and :meth:`close`, as a :class:`DeliveryError` with everything that was not
    delivered. From then on the publisher refuses messages, and those still in its queue are withdrawn: they must not be
    written before the failed message is sent again.

    ``bootstrap`` is the broker's address, or the environment's ``KEYLANE_BOOTSTRAP``. Options that begin with
    ``kafka.`` go to the client: ``Publisher("orders", **{"kafka.security.protocol": "SSL"})``.

    Raises :class:`SettingsError` for settings that cannot work, and :class:`BrokerError` when there is no such topic.
    """

    def __init__(
        self,
        topic: str,
        *,
        key: Callable[[Any], KeyLike | None] | None = None,
        event_id: Callable[[Any], str] | None = None,
        type: str | Callable[[Any], str | None] | None = None,  # noqa: A002 - as Message has it
        version: int | Callable[[Any], int | None] | None = None,
        encode: Callable[[Any], bytes | None] | None = None,
        keyless: bool = False,
        timeout: float = 60.0,
        bootstrap: str | None = None,
        **options: Any,
    ) -> None:
        from keylane.kafka.cluster import Cluster  # noqa: PLC0415 - Kafka's client is needed only from here on
        from keylane.kafka.rejection import RECORD_OVERHEAD_BYTES  # noqa: PLC0415
        from keylane.kafka.settings import settings_from_options  # noqa: PLC0415

        for name, function in (("key", key), ("event_id", event_id), ("encode", encode)):
            if function is not None and not callable(function):
                raise SettingsError(
                    f"Publisher({topic!r}): {name} must be a function of the value, got {function!r}"
                    + (f". For one message: send(value, {name}=…)" if name != "encode" else "")
                )
        if timeout.__class__ not in (int, float) or not 0 < timeout <= 86_400:
            raise SettingsError(
                f"Publisher({topic!r}): timeout must be more than 0 and at most 86400 seconds, got {timeout!r}"
            )
        self.topic = topic
        settings = settings_from_options(bootstrap, options, known=_KNOWN, what=f"Publisher({topic!r})")
        cluster = Cluster(settings)
        cluster.partitions(topic, operation=Operation.WRITE)
        batch_limit = cluster.rules([topic])[topic].limit
        # Unless it may not describe the topic: then the broker decides.
        limit = batch_limit - RECORD_OVERHEAD_BYTES if batch_limit else 1 << 31
        self._form = Form(
            topic=topic,
            key=key,
            event_id=event_id,
            type=type,
            version=version,
            encode=encode or encode_value,
            keyless=keyless,
            limit=limit,
        )
        room: dict[str, Any] = {
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 262_144,
        }
        for name, _ in settings.extra:
            room.pop(name, None)
        self._producer = settings.producer(
            batch_limit=batch_limit, **{"message.timeout.ms": int(timeout * 1000)}, **room
        )
        self._pid = os.getpid()
        # Guards the fields below, and the order in which messages are handed over.
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)
        self._open = 0
        self._undelivered: list[Undelivered] = []
        self._closed = False
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="keylane-publisher", daemon=True)
        self._thread.start()
        atexit.register(self._left_open)

    def send(
        self,
        value: Any,
        *,
        key: Any = BY_FUNCTION,
        event_id: str | None = None,
        type: str | None = None,  # noqa: A002
        version: int | None = None,
        headers: MoreHeaders = (),
        timestamp: int | None = None,
    ) -> str:
        """Hand a message over; returns its event id. Waits only while 100,000 messages or 256 MiB are in flight.

        ``headers`` come behind the event's own; ``timestamp`` is in milliseconds since 1970, now if not given.

        Raises TypeError or ValueError for a message that cannot be sent: the publisher stays usable. Raises
        :class:`DeliveryError` when an earlier message was not delivered.
        """
        event = self._form.event(value, key, event_id, type, version, headers, timestamp)
        while not self._hand_over(event, None):
            time.sleep(_FULL_SLEEP_SECONDS)
        return event.event_id

    async def deliver(
        self,
        value: Any,
        *,
        key: Any = BY_FUNCTION,
        event_id: str | None = None,
        type: str | None = None,  # noqa: A002
        version: int | None = None,
        headers: MoreHeaders = (),
        timestamp: int | None = None,
    ) -> Delivered:
        """Send a message and wait, without blocking the loop, until it is delivered. Raises as :meth:`send` does.

        Calls that run at the same time are sent in the order in which they began.
        """
        event = self._form.event(value, key, event_id, type, version, headers, timestamp)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Delivered] = loop.create_future()

        def told(report: Delivered | DeliveryError) -> None:
            if answer.done():  # the caller was cancelled
                return
            if isinstance(report, DeliveryError):
                answer.set_exception(report)
            else:
                answer.set_result(report)

        def then(report: Delivered | DeliveryError) -> None:
            try:
                loop.call_soon_threadsafe(told, report)
            except RuntimeError:  # the loop has ended; close() raises what was not delivered
                return

        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        async with self._turn[1]:  # first come, first served: no call overtakes one that waits for room
            while not self._hand_over(event, then):  # noqa: ASYNC110 - the client does not say when there is room
                await asyncio.sleep(_FULL_SLEEP_SECONDS)
        return await answer

    def flush(self) -> None:
        """Wait until everything sent so far is delivered or has failed; about ``timeout`` seconds at most.

        Raises :class:`DeliveryError` with everything that was not delivered since the publisher was made.
        """
        self._mine()
        with self._lock:
            self._landed.wait_for(lambda: self._open == 0)
            undelivered = list(self._undelivered)
        if undelivered:
            raise self._error(undelivered)

    async def drain(self) -> None:
        """Like :meth:`flush`, without blocking the loop."""
        await asyncio.to_thread(self.flush)

    def close(self) -> None:
        """Flush, and close the client; raises as :meth:`flush` does. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._left_open)
        try:
            self.flush()
        finally:
            self._ending.set()
            self._thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DeliveryError as undelivered:
            if error is None:
                raise
            # The block's own error is raised; the delivery error is logged.
            told = error.undelivered if isinstance(error, DeliveryError) else ()
            if len(undelivered.undelivered) > len(told):
                log.error("%s", undelivered)  # noqa: TRY400 - where it was raised tells nothing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    # Sending and delivery reports.

    def _hand_over(self, event: Event, then: Then | None) -> bool:
        """Hand a message to the client; False if it has no room. Raises when nothing more may be sent."""
        self._mine()
        # Its stub asks for headers of a wider type, which lists are not.
        produce: Any = self._producer.produce
        with self._lock:
            if self._undelivered:
                raise self._error(list(self._undelivered))
            if self._closed:
                raise ValueError(f"the publisher of topic {self.topic!r} is closed; make a new one")
            try:
                produce(
                    self.topic,
                    event.value,
                    event.key,
                    on_delivery=_Handed(self, event.event_id, then),
                    timestamp=event.timestamp,
                    headers=event.headers,
                )
            except BufferError:
                return False
            self._open += 1
        return True

    def _reported(self, handed: _Handed, error: Any, message: Any) -> None:
        report: Delivered | DeliveryError
        if error is None:
            report = Delivered(
                event_id=handed.event_id, partition=message.partition(), offset=message.offset()
            )
        else:
            lost = Undelivered(
                event_id=handed.event_id,
                key=message.key(),
                value=message.value(),
                headers=tuple(message.headers() or ()),
                why=error.str() + remedy(error, on_topic(self.topic, Operation.WRITE)),
            )
            report = self._error([lost])
        with self._lock:
            if error is not None:
                self._undelivered.append(lost)
            self._open -= 1
            if not self._open:
                self._landed.notify_all()
        if handed.then is not None:
            handed.then(report)

    def _serve(self) -> None:
        """Serve delivery reports; when a message has failed, withdraw those behind it."""
        called_back = False
        while not self._ending.is_set():
            self._producer.poll(_POLL_SECONDS)
            if self._undelivered and not called_back:
                called_back = True
                self._producer.purge(in_flight=False)

    def _error(self, undelivered: list[Undelivered]) -> DeliveryError:
        first = undelivered[0]
        many = f"{len(undelivered):,} messages were" if len(undelivered) > 1 else "a message was"
        return DeliveryError(
            f"{many} not delivered to topic {self.topic!r}: {first.why} (the first: event {first.event_id}, "
            f"key {first.key!r}). This publisher takes no more messages. When the cause is fixed, send these again in "
            "the order of 'undelivered' and with their event ids, through a new publisher",
            undelivered,
        )

    def _mine(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the publisher of topic {self.topic!r} was made in another process, and nothing would be sent from "
                "here: make it after the fork"
            )

    def _left_open(self) -> None:
        """Close a publisher that was still open when the process ends."""
        if os.getpid() != self._pid:
            return
        log.warning(
            "the publisher of topic %r was not closed: use it in a 'with', or call close()", self.topic
        )
        try:
            self.close()
        except DeliveryError as error:
            log.error("%s", error)  # noqa: TRY400
