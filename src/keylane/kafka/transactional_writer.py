"""The owner's transactional producer: what a task writes down is there whole or not at all.

A task owns its partitions as long as nobody has fenced its transactional id. From then on the broker takes nothing
from it: neither progress nor a record of the state topic and, with ``delivery="exactly_once"``, no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from keylane.errors import AbortedError, BrokerError, FencedError
from keylane.kafka.rejection import is_rejection, record_size
from keylane.kafka.transactional_client import TransactionalClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from confluent_kafka import TopicPartition

    from keylane.engine.output import Then
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_client import Put
    from keylane.message import Headers

log = logging.getLogger("keylane.kafka")

PATIENCE = 12.0
"""Seconds that the client has to commit one. After a broker's restart it may wait for an answer that never comes."""
_ANY_PARTITION = -1
MAX_PROGRESS = 900_000
"""Characters of progress in one record, below a topic's usual limit of 1 MiB."""
_LARGE_OVERHEAD = 2_000
"""Bytes of a large record besides its text: its name, its labels, the batch."""

Note = tuple[int, bytes, bytes | None]
"""Partition, name and value of a record of the state topic."""


class RecordLabels(Protocol):
    """The headers that say which topic's offsets a record of the state topic holds."""

    def of(self, name: bytes) -> Headers:
        """Of a record with this key."""


class TransactionalWriter:
    """Used on the loop's thread, but for :meth:`write`. A transaction is open from the first :meth:`put` on.

    ``fail`` is told what makes it useless. While one transaction is being committed, what is put waits for the next.
    ``exact``: results are in it too; after an abort the task begins again, and nothing else may follow.
    ``limit``: the state topic's ``max.message.bytes``, 0 when it is not known. ``batch_limit``, ``alone``: as
    :class:`TransactionalClient` takes them.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        topic: str,
        group: Any,
        *,
        labels: RecordLabels,
        exact: bool = False,
        limit: int = 0,
        batch_limit: int = 0,
        alone: bool = False,
    ) -> None:
        self.id = f"{app}.{uuid.uuid4().hex}"
        self.written: dict[int, int] = {}
        """By partition of the state topic: where the last record lies that was committed."""
        self.fail: Callable[[BaseException], None] = lambda _error: None
        self.limit = limit
        self._topic = topic
        self._labels = labels
        self._exact = exact
        self._connect = partial(
            TransactionalClient, settings, self.id, group, exact=exact, batch_limit=batch_limit, alone=alone
        )
        self._client = self._connect()
        self._committing = False
        self._waiting: list[Put] = []
        self._thens: list[tuple[bytes, Then]] = []  # with the names of the records that they are about
        self._rejected: dict[bytes, str] = {}  # names of records in the open transaction, and why
        self._soon: list[Then] = []
        self._sent: list[Put] = []  # in the open transaction; empty when it is exact: that is not sent again
        self._mended: TransactionalClient
        self._lock: asyncio.Lock
        self._stirred: asyncio.Event

    def attach(self) -> None:
        """Work for the running loop: a worker's scribe outlives the loops of its epochs."""
        self._lock, self._stirred = asyncio.Lock(), asyncio.Event()
        self._soon, self._thens, self._sent, self._rejected = [], [], [], {}

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
        self._stirred.set()
        if self._committing:
            self._waiting.append(record)
        else:
            self._send(record)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then | None = None) -> None:
        """A record of the state topic; ``then`` is told when it is committed, or why it never will be.

        ``exact``: it is told soon, as :meth:`soon` does.
        """
        labels = self._labels.of(name)
        problem = self._too_large(name, value, labels)
        if problem is not None:
            if then is not None:
                asyncio.get_running_loop().call_soon(then, problem)
            return
        if then is not None and not self._exact:
            self._thens.append((name, then))
        self.put(self._topic, value, name, headers=labels, partition=partition, report=self._placed)
        if then is not None and self._exact:
            self.soon(then)

    def _too_large(self, name: bytes, value: bytes | None, labels: Headers) -> str | None:
        """What is wrong with the size of a record of the state topic, if anything is; it is logged."""
        size = record_size(name, value, labels)
        if not 0 < self.limit < size:
            return None
        problem = (
            f"the record of {size:,} bytes is larger than topic {self._topic!r} takes "
            f"(max.message.bytes: {self.limit:,}); give the topic a higher limit"
        )
        log.error("%s: %r", problem, name[:200])
        return problem

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
    def room(self) -> int:
        """Characters that a large record of the state topic may have."""
        return min(MAX_PROGRESS, max(0, self.limit - _LARGE_OVERHEAD)) if self.limit else MAX_PROGRESS

    @property
    def useless(self) -> bool:
        """Whether it takes nothing any more: the task begins again with another one."""
        return self._client.over is not None

    @property
    def busy(self) -> bool:
        """Whether something waits to be committed."""
        return self._client.open or bool(self._waiting)

    async def stirred(self, seconds: float) -> None:
        """Return when something is put, or after so many seconds."""
        self._stirred.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()

    async def commit(self) -> None:
        """Commit what was put. Raises FencedError, or AbortedError when nothing of it was taken.

        A caller that is cancelled leaves it running.
        """
        committing = asyncio.ensure_future(self._commit())
        committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(committing)

    async def _commit(self) -> None:
        async with self.turn():
            await self.commit_with()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """While it is held, nobody else commits. Everyone has heard by then what :meth:`soon` was to tell them."""
        async with self._lock:
            self._serve()
            yield

    async def commit_with(
        self,
        offsets: Sequence[TopicPartition] = (),
        notes: Iterable[Note] = (),
        records: Iterable[tuple[str, bytes | None, bytes | None]] = (),
    ) -> None:
        """In a :meth:`turn`: commit what was put and, in the same transaction, these offsets and records.

        ``notes`` are records of the state topic, ``records`` those of other topics. Raises as :meth:`commit` does.
        What was put is then in the next transaction; these are not, because whoever collected them does so again. A
        caller must not be cancelled, unless the loop ends.
        """
        batch = [*self._records(notes), *map(_record, records)]
        client = self._client
        if not client.open and not offsets and not batch:
            return
        client.begin()
        thens, self._thens = self._thens, []
        sent, self._sent = self._sent, []
        self._committing = True
        try:
            for record in batch:
                client.put(record)
            places = await self._aside(client, lambda: client.commit(list(offsets)))
        except asyncio.CancelledError:
            raise  # the loop ends, and the thread still commits: what waits must not get in behind its progress
        except BaseException:
            if not self._exact:
                self._keep(sent, thens)
            if self._exact or not self.useless:  # else what waits is held until it is mended
                self._go_on()
            raise
        self.written |= places
        self._rejected.clear()
        self._go_on()
        for _, then in thens:
            then(None)

    def _records(self, notes: Iterable[Note]) -> Iterator[Put]:
        for partition, name, value in notes:
            labels = self._labels.of(name)
            if self._too_large(name, value, labels) is None:
                yield (self._topic, value, name, partition, self._placed, None, 0, labels)

    def _keep(self, sent: list[Put], thens: list[tuple[bytes, Then]]) -> None:
        """Records of a transaction that was not taken go into the next, but for those that the broker rejects."""
        rejected, self._rejected = self._rejected, {}
        self._waiting[:0] = [record for record in sent if record[2] not in rejected]
        for name, then in thens:
            if name in rejected:
                asyncio.get_running_loop().call_soon(then, rejected[name])
        self._thens[:0] = [(name, then) for name, then in thens if name not in rejected]

    @staticmethod
    async def _aside(client: TransactionalClient, call: Callable[[], dict[int, int]]) -> dict[int, int]:
        """In a thread of its own, and for so long only: a client that hangs must not hold up the end of the task.

        The thread may come back when nobody waits any more and another client is in use: it knows its own alone.
        """
        ended: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
        loop = ended.get_loop()

        def tell(found: dict[int, int] | BaseException) -> None:
            if ended.done():
                return
            if isinstance(found, BaseException):
                ended.set_exception(found)
            else:
                ended.set_result(found)

        def main() -> None:
            found: dict[int, int] | BaseException
            try:
                found = call()
            except BaseException as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, found)

        threading.Thread(target=main, name="keylane-scribe", daemon=True).start()
        try:
            return await asyncio.wait_for(ended, PATIENCE)
        except TimeoutError:
            # Whether it was committed after all is known when the next client has fenced this one.
            client.over = AbortedError(f"a transaction was not taken: no answer within {PATIENCE:g} s")
            raise client.over from None

    def mend(self) -> None:
        """Make a new client of the same id in place of one that is of no use. Blocks. Raises BrokerError.

        It writes nothing before :meth:`trust`: should somebody have fenced the id, this has taken it back, so whoever
        calls must look first whether it is still the owner.
        """
        self._mended = self._connect()

    def trust(self) -> None:
        """Go on with the new client."""
        self._client.hand_over()
        self._client = self._mended
        self._go_on()

    def _go_on(self) -> None:
        self._committing = False
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._send(record)

    def _placed(self, error: Any, message: Any) -> None:
        self._client.placed(error, message)  # of the client that it went to: not known when it was put
        if error is not None and is_rejection(error):
            self._rejected[message.key()] = f"topic {self._topic!r} rejects the record: {error.str()}"

    def _send(self, record: Put) -> None:
        try:
            self._client.put(record)
        except (FencedError, BrokerError) as error:
            self.fail(error)
        else:
            if not self._exact:
                self._sent.append(record)

    def close(self) -> None:
        """It is of no use any more. Blocks for a few seconds at most."""
        self._client.give_up()

    def write(self, notes: Iterable[Note]) -> None:
        """Write records of the state topic in a transaction of their own, while nothing else is put. Blocks."""
        client = self._client
        client.begin()
        for partition, name, value in notes:
            client.put((self._topic, value, name, partition, client.placed, None, 0, self._labels.of(name)))
        self.written |= client.commit([])


def _record(record: tuple[str, bytes | None, bytes | None]) -> Put:
    topic, value, key = record
    return (topic, value, key, _ANY_PARTITION, None, None, 0, [])
