"""The owner's transactional producer: what a task writes down is there whole or not at all.

A task owns its partitions as long as nobody has fenced its transactional id. From then on the broker takes nothing
from it: neither progress nor a record of the state topic and, with ``delivery="exactly_once"``, no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.errors import AbortedError, FencedError, KafkaError
from keylane.kafka.cluster import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from confluent_kafka import TopicPartition

    from keylane.engine.engine import Then
    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Headers

log = logging.getLogger("keylane.kafka")

LASTS = 60.0
"""Seconds after which the broker gives up on a transaction."""
PATIENCE = 12.0
"""Seconds that the client has to commit one. After a broker's restart it may wait for an answer that never comes."""
_FENCED = (
    ClientError._FENCED,  # noqa: SLF001 - the client's public constant
    ClientError.PRODUCER_FENCED,
    ClientError.INVALID_PRODUCER_EPOCH,
    ClientError.INVALID_PRODUCER_ID_MAPPING,
)
_ANY_PARTITION = -1

Note = tuple[int, bytes, bytes | None]
"""Partition, name and value of a record of the state topic."""


def transactional(settings: KafkaSettings, name: str) -> Any:
    """A producer of this transactional id; whoever had it before is fenced. Blocks. Raises KafkaError."""
    producer = settings.producer(
        **{
            "transactional.id": name,
            "transaction.timeout.ms": int(LASTS * 1000),
            "message.timeout.ms": int(LASTS * 1000),
            # A transaction that follows another at once is told to come again; the client's 100 ms are long for that.
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 200,
            "socket.timeout.ms": int(TIMEOUT * 1000),
        }
    )
    deadline = time.monotonic() + LASTS
    while True:
        try:
            # The client looks for its coordinator twice a second, unless it knows a broker when it begins.
            producer.list_topics(timeout=TIMEOUT)
            producer.init_transactions(TIMEOUT)
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise KafkaError(
                    f"transactional id {name!r} could not be had: {error.args[0].str()}. "
                    "Progress is written in transactions: the broker must allow ids that begin with the app's name"
                ) from error
        else:
            return producer


class Scribe:
    """Used on the loop's thread, but for :meth:`write`. A transaction is open from the first :meth:`put` on.

    ``fail`` is told what makes it useless. While one transaction is being committed, what is put waits for the next.
    ``exact``: what was in a transaction that was aborted is missing from then on, so no other may follow it.
    """

    def __init__(
        self, settings: KafkaSettings, app: str, topic: str, group: Any, *, exact: bool = False
    ) -> None:
        self.id = f"{app}.{uuid.uuid4().hex}"
        self.written: dict[int, int] = {}
        """By partition of the state topic: where the last record lies that was committed."""
        self.fail: Callable[[BaseException], None] = lambda _error: None
        self._settings = settings
        self._topic = topic
        self._group = group
        self._exact = exact
        self._producer = transactional(settings, self.id)
        self._produce = self._producer.produce
        self._open = False
        self._committing = False
        self._waiting: list[tuple[Any, ...]] = []
        self._thens: list[Then] = []
        self._soon: list[Then] = []
        self._sent: list[
            tuple[Any, ...]
        ] = []  # into the open transaction; not of results, which are too many
        self._places: dict[
            int, int
        ] = {}  # of the open transaction's records; written where reports are served
        self._over: FencedError | KafkaError | None = None
        self._lock: asyncio.Lock

    def attach(self) -> None:
        """Work for the running loop: a worker's scribe outlives the loops of its epochs."""
        self._lock = asyncio.Lock()
        self._soon, self._thens, self._sent = [], [], []

    def put(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        timestamp: int = 0,
        headers: Headers | None = None,
        *,
        partition: int = _ANY_PARTITION,
        report: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Add a record to the open transaction, or to the next. Never raises: what goes wrong ends the task."""
        record = (topic, value, key, partition, report, None, timestamp, headers or [])
        if self._committing:
            self._waiting.append(record)
        else:
            self._send(record)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then | None = None) -> None:
        """A record of the state topic; ``then`` is told when its transaction is committed, or why it was not."""
        if then is not None:
            self._thens.append(then)
        self.put(self._topic, value, name, partition=partition, report=self._placed)

    def soon(self, then: Then) -> None:
        """Tell it that all is well: soon, and before the transaction that is open now takes its progress."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._serve)
        self._soon.append(then)

    def _serve(self) -> None:
        while self._soon:
            soon, self._soon = self._soon, []
            for then in soon:
                then(None)

    @property
    def useless(self) -> bool:
        """Whether it takes nothing any more: the task begins again with another one."""
        return self._over is not None

    @property
    def busy(self) -> bool:
        """Whether something waits to be committed."""
        return self._open or bool(self._waiting)

    async def commit(self, offsets: Callable[[], list[TopicPartition]] = list) -> None:
        """Commit what was put, and these offsets, which are asked for when nothing more is added.

        Raises FencedError, or AbortedError when nothing of it was taken. A caller that is cancelled leaves it running.
        """
        committing = asyncio.ensure_future(self._commit(offsets))
        committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(committing)

    async def _commit(self, offsets: Callable[[], list[TopicPartition]]) -> None:
        async with self._lock:
            self._serve()
            positions = offsets()
            if not self._open and not positions:
                return
            self._begin()
            thens, self._thens = self._thens, []
            sent, self._sent = self._sent, []
            self._committing = True
            try:
                await self._aside(lambda: self._end(positions))
            except BaseException as error:
                if self.useless and not self._exact:  # held until it is mended, and then written
                    self._waiting[:0], self._thens[:0] = sent, thens
                    raise
                self._go_on()
                for then in thens:
                    then(str(error))
                raise
            self._go_on()
            for then in thens:
                then(None)

    async def _aside(self, call: Callable[[], None]) -> None:
        """In a thread of its own, and for so long only: a client that hangs must not hold up the end of the task."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = ended.get_loop()

        def tell(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_exception(error) if error else ended.set_result(None)

        def main() -> None:
            error = None
            try:
                call()
            except BaseException as found:
                error = found
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=main, name="keylane-scribe", daemon=True).start()
        try:
            await asyncio.wait_for(ended, PATIENCE)
        except TimeoutError:
            # Whether it was committed after all is known when the next one has fenced this one's id.
            self._over = AbortedError(f"a transaction was not taken: no answer within {PATIENCE:g} s")
            raise self._over from None

    def mend(self) -> None:
        """Make a new client of the same id in place of one that is of no use. Blocks. Raises KafkaError.

        It writes nothing before :meth:`trust`: should somebody have fenced the id, this has taken it back, so whoever
        calls must look first whether it is still the owner.
        """
        self._producer = transactional(self._settings, self.id)
        self._produce = self._producer.produce
        self._open, self._places = False, {}

    def trust(self) -> None:
        """Go on with the new client."""
        self._over = None
        self._go_on()

    def _go_on(self) -> None:
        self._committing = False
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._send(record)

    def write(self, notes: Iterable[Note]) -> None:
        """Write records of the state topic in a transaction of their own, while nothing else is put. Blocks."""
        self._begin()
        for partition, name, value in notes:
            self._send((self._topic, value, name, partition, self._placed, None, 0, []))
        self._end([])

    # The client.

    def _begin(self) -> None:
        if self._over is not None:
            raise type(self._over)(*self._over.args)
        if not self._open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self._error(error) from error
            self._open = True

    def _send(self, record: tuple[Any, ...]) -> None:
        try:
            self._begin()
            while True:
                try:
                    self._produce(*record)
                    if not self._exact:
                        self._sent.append(record)
                except (
                    BufferError
                ):  # gigabytes wait for a broker that does not answer: nothing else can go on either
                    self._producer.poll(0.1)
                else:
                    return
        except KafkaException as error:
            found = error.args[0]
            if found.code() != ClientError._STATE:  # noqa: SLF001 - the client's public constant
                self.fail(self._error(error))
            elif self._exact:
                self._over = AbortedError(f"a transaction was not taken: {self._why(found)}")
                self.fail(self._over)
            # Else the transaction has failed before, and who commits it will be told.
        except (FencedError, KafkaError) as error:
            self.fail(error)

    def _placed(self, error: Any, message: Any) -> None:
        if error is None:
            place = message.partition()
            self._places[place] = max(self._places.get(place, -1), message.offset())

    def _end(self, offsets: list[TopicPartition]) -> None:
        deadline = time.monotonic() + LASTS
        try:
            if offsets:
                # Not again: after a lost connection the client's second call never returns (2.16.1).
                self._insist(
                    lambda: self._producer.send_offsets_to_transaction(offsets, self._group, TIMEOUT),
                    deadline,
                    again=False,
                )
            self._insist(lambda: self._producer.commit_transaction(TIMEOUT), deadline, again=True)
        finally:
            self._open = False
            places, self._places = self._places, {}
        self.written |= places

    def _insist(self, call: Callable[[], None], deadline: float, *, again: bool) -> None:
        """Call until it succeeds, or once. Else nothing of the transaction counts."""
        while True:
            try:
                return call()
            except KafkaException as error:
                found = error.args[0]
                if found.fatal():
                    raise self._error(error) from error
                if not found.txn_requires_abort() and found.retriable():
                    if not again:
                        self._over = AbortedError(f"a transaction was not taken: {found.str()}")
                        raise self._over from error
                    if time.monotonic() < deadline:
                        continue
                why = self._why(found)
                self._abort()
                aborted = AbortedError(f"a transaction was not taken: {why}")
                if self._exact:
                    self._over = aborted
                raise aborted from error

    def _why(self, error: Any) -> str:
        """What went wrong before, when the client says only that something did."""
        if error.code() == ClientError._STATE:  # noqa: SLF001 - the client's public constant
            try:
                self._producer.commit_transaction(TIMEOUT)  # refused in this state, with the reason
            except KafkaException as reason:
                return str(reason.args[0].str())
        return str(error.str())

    def _abort(self) -> None:
        deadline = time.monotonic() + LASTS
        while True:
            try:
                self._producer.abort_transaction(TIMEOUT)
            except KafkaException as error:
                if error.args[0].retriable() and not error.args[0].fatal() and time.monotonic() < deadline:
                    continue
                raise self._error(error) from error
            else:
                return

    def _error(self, error: KafkaException) -> FencedError | KafkaError:
        """What makes this scribe useless: from here on it takes nothing."""
        found = error.args[0]
        if found.code() in _FENCED:
            self._over = FencedError(
                "another task has taken over; nothing that this one does counts any more"
            )
        else:
            kind = (
                AbortedError if self._exact else KafkaError
            )  # nothing of it counts: all of it can run again
            self._over = kind(f"a transaction was not taken, and none will be: {found.str()}")
        return self._over
