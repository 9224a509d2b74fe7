"""Asynchronous side of a task's transactional producer.

Everything that a task records is in transactions, so each of them is written as a whole or not at all. A task owns its
partitions until another one fences its transactional id. From then on the broker refuses its progress, its records of
the state topic and, with ``delivery="exactly_once"``, its results.
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
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import TopicPartition

    from keylane.engine.output import Then
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_client import ProduceArgs
    from keylane.message import Headers
    from keylane.rights import Right

log = logging.getLogger("keylane.kafka")

COMMIT_SECONDS = 12.0
"""Time for the client to commit. After a broker's restart it may wait for a response that never comes."""
PROGRESS_CHARACTERS_MAX = 900_000
"""Characters of progress in one record, below a topic's usual limit of 1 MiB."""
_RECORD_OVERHEAD_BYTES = 2_000
"""Bytes of a large record besides its text: key, labels, batch."""
_ANY_PARTITION = -1

PlacedRecord = tuple[
    str,
    "bytes | None",
    "bytes | None",
    int,
    "Sequence[tuple[str, bytes | None]]",
    "Callable[[Any, Any], None] | None",
]
"""Topic, value, key, partition (-1: by the key), headers and delivery report of a record."""
StateRecord = tuple[int, bytes, bytes | None]
"""Partition, key and value of a record of the state topic."""


class RecordLabels(Protocol):
    """The headers that say which topic's offsets a record of the state topic contains."""

    def of(self, name: bytes) -> Headers:
        """The headers of the record with this key."""


class TransactionalWriter:
    """Puts records into transactions and commits them. Used on the loop's thread, except :meth:`write_blocking`.

    The first :meth:`put` opens a transaction. Records that are put during a commit wait for the next transaction.
    ``fail`` is called with the error that makes the writer useless. ``exact``: results are in the transactions too;
    after an abort the task starts over and no transaction may follow. ``limit``: the state topic's
    ``max.message.bytes``, 0 if unknown. ``batch_limit``, ``alone``, ``rights``: see :class:`TransactionalClient`.
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
        rights: Sequence[Right] = (),
    ) -> None:
        self.id = f"{app}.{uuid.uuid4().hex}"
        self.written: dict[int, int] = {}
        """By partition of the state topic: the offset of the last committed record."""
        self.fail: Callable[[BaseException], None] = lambda _error: None
        self.limit = limit
        self.limits: Mapping[str, int] = {}
        """By topic of its records: ``max.message.bytes``, 0 if unknown."""
        self.source = ""
        """The topic whose offsets it commits."""
        self._topic = topic
        self._labels = labels
        self._exact = exact
        self._connect = partial(
            TransactionalClient,
            settings,
            self.id,
            group,
            exact=exact,
            batch_limit=batch_limit,
            alone=alone,
            rights=rights,
        )
        self._client = self._connect()
        self._committing = False
        self._waiting: list[ProduceArgs] = []  # for the next transaction
        self._callbacks: list[tuple[bytes, Then]] = []  # with the keys of their records
        self._rejected: dict[bytes, str] = {}  # keys of records in the open transaction, and the reasons
        self._confirmations: list[Then] = []
        self._sent: list[
            ProduceArgs
        ] = []  # in the open transaction; empty if exact: then nothing is sent again
        self._new_client: TransactionalClient
        self._lock: asyncio.Lock
        self._was_put: asyncio.Event

    def attach(self) -> None:
        """Work for the running loop. A worker's writer outlives the loops of its epochs."""
        self._lock, self._was_put = asyncio.Lock(), asyncio.Event()
        self._confirmations, self._callbacks, self._sent, self._rejected = [], [], [], {}

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
        """Add a record to the open transaction, or to the next one. Never raises: an error ends the task."""
        record = (topic, value, key, partition, report, None, timestamp, headers or [])
        self._was_put.set()
        if self._committing:
            self._waiting.append(record)
        else:
            self._send(record)

    def put_state(self, partition: int, name: bytes, value: bytes | None, then: Then | None = None) -> None:
        """Add a record of the state topic. ``then`` is called when it is committed, or with the reason why it never is.

        ``exact``: it is called as :meth:`confirm_soon` does.
        """
        labels = self._labels.of(name)
        problem = _too_large(self._topic, self.limit, name, value, labels)
        if problem is not None:
            if then is not None:
                asyncio.get_running_loop().call_soon(then, problem)
            return
        if then is not None and not self._exact:
            self._callbacks.append((name, then))
        self.put(self._topic, value, name, headers=labels, partition=partition, report=self._on_delivery)
        if then is not None and self._exact:
            self.confirm_soon(then)

    def confirm_soon(self, then: Then) -> None:
        """Call ``then(None)`` soon, and before the open transaction collects its progress."""
        if not self._confirmations:
            asyncio.get_running_loop().call_soon(self._confirm)
        self._confirmations.append(then)

    def _confirm(self) -> None:
        while self._confirmations:
            confirmations, self._confirmations = self._confirmations, []
            for then in confirmations:
                then(None)

    @property
    def room(self) -> int:
        """Characters that a large record of the state topic may have."""
        if not self.limit:
            return PROGRESS_CHARACTERS_MAX
        return min(PROGRESS_CHARACTERS_MAX, max(0, self.limit - _RECORD_OVERHEAD_BYTES))

    @property
    def failed(self) -> bool:
        """Whether the client can write nothing more; see :meth:`reconnect`. It may fail after it has committed."""
        return self._client.failure is not None

    def check(self) -> None:
        """Raise the error because of which the client can write nothing more, if there is one."""
        if (failure := self._client.failure) is not None:
            raise type(failure)(*failure.args)

    @property
    def has_records(self) -> bool:
        """Whether records wait for a commit."""
        return self._client.open or bool(self._waiting)

    async def wait_for_record(self, seconds: float) -> None:
        """Return when a record is put, or after this time."""
        self._was_put.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._was_put.wait()

    async def commit(self) -> None:
        """Commit what was put. Raises FencedError, or AbortedError if nothing was committed.

        If the caller is cancelled, the commit continues.
        """
        committing = asyncio.ensure_future(self._commit())
        committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(committing)

    async def _commit(self) -> None:
        async with self.exclusive():
            await self.commit_with()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """No other commit runs inside this context. All callbacks of :meth:`confirm_soon` are called before it."""
        async with self._lock:
            self._confirm()
            yield

    async def commit_with(
        self,
        offsets: Sequence[TopicPartition] = (),
        state_records: Iterable[StateRecord] = (),
        records: Iterable[PlacedRecord] = (),
    ) -> None:
        """Commit what was put together with these offsets and records. Only inside :meth:`exclusive`.

        ``records``: records of other topics. Records that their topic never takes are left
        out, or no transaction could be committed any more. Raises as :meth:`commit` does. After an abort the
        records that were put are in the next transaction, the arguments are not: the caller collects them again. The
        caller must not be cancelled unless the loop ends.
        """
        batch = [*self._state_records(state_records), *self._other_records(records)]
        client = self._client
        if not client.open and not offsets and not batch:
            return
        client.begin()
        callbacks, self._callbacks = self._callbacks, []
        sent, self._sent = self._sent, []
        self._committing = True
        try:
            for record in batch:
                client.put(record)
            written = await self._call_in_thread(client, lambda: client.commit(list(offsets)))
        except asyncio.CancelledError:
            raise  # the loop ends while the thread commits: waiting records must not get in behind its progress
        except BaseException:
            if not self._exact:
                self._requeue(sent, callbacks)
            if self._exact or not self.failed:  # else resume() sends what waits
                self._send_waiting()
            raise
        self.written |= written
        self._rejected.clear()
        if not self.failed:  # else resume() sends what waits
            self._send_waiting()
        for _, then in callbacks:
            then(None)

    def _state_records(self, state_records: Iterable[StateRecord]) -> Iterator[ProduceArgs]:
        for partition, name, value in state_records:
            labels = self._labels.of(name)
            if _too_large(self._topic, self.limit, name, value, labels) is None:
                yield (self._topic, value, name, partition, self._on_delivery, None, 0, labels)

    def _other_records(self, records: Iterable[PlacedRecord]) -> Iterator[ProduceArgs]:
        for topic, value, key, partition, headers, report in records:
            if _too_large(topic, self.limits.get(topic, 0), key, value, None) is None:
                yield (topic, value, key, partition, report, None, 0, list(headers))

    def _requeue(self, sent: list[ProduceArgs], callbacks: list[tuple[bytes, Then]]) -> None:
        """Put the records of an aborted transaction into the next one, except those that the broker rejected."""
        rejected, self._rejected = self._rejected, {}
        self._waiting[:0] = [record for record in sent if record[2] not in rejected]
        for name, then in callbacks:
            if name in rejected:
                asyncio.get_running_loop().call_soon(then, rejected[name])
        self._callbacks[:0] = [(name, then) for name, then in callbacks if name not in rejected]

    @staticmethod
    async def _call_in_thread(
        client: TransactionalClient, call: Callable[[], dict[int, int]]
    ) -> dict[int, int]:
        """Call in a thread of its own and wait :data:`COMMIT_SECONDS` at most, so that a hanging client hangs no task.

        An abandoned thread may return when another client is in use. It knows only its own client.
        """
        ended: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
        loop = ended.get_loop()

        def finish(result: dict[int, int] | BaseException) -> None:
            if ended.done():
                return
            if isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)

        def main() -> None:
            result: dict[int, int] | BaseException
            try:
                result = call()
            except BaseException as error:
                result = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, result)

        threading.Thread(target=main, name="keylane-commit", daemon=True).start()
        try:
            return await asyncio.wait_for(ended, COMMIT_SECONDS)
        except TimeoutError:
            # Whether it was committed is known when the next client has fenced this one.
            client.failure = AbortedError(f"transaction not committed: no answer within {COMMIT_SECONDS:g} s")
            raise client.failure from None

    def reconnect(self) -> None:
        """Create a new client with the same id to replace one that has failed. Blocks. Raises BrokerError.

        The writer writes nothing until :meth:`resume`. If another task has fenced the id, the new client takes it back,
        so the caller must first check that its task is still the owner.
        """
        self._new_client = self._connect()

    def learn_partitions(self) -> None:
        """Refresh what the client knows of its topics: partitions were added. Blocks. Raises BrokerError."""
        self._client.learn_partitions()

    def resume(self) -> None:
        """Continue with the new client."""
        self._client.discard()
        self._client = self._new_client
        self._send_waiting()

    def _send_waiting(self) -> None:
        self._committing = False
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._send(record)

    def _on_delivery(self, error: Any, message: Any) -> None:
        # Bound to the writer: when the record was put, its client was not known yet.
        self._client.on_delivery(error, message)
        if error is not None and is_rejection(error):
            self._rejected[message.key()] = f"topic {self._topic!r} rejects the record: {error.str()}"

    def _send(self, record: ProduceArgs) -> None:
        try:
            self._client.put(record)
        except (FencedError, BrokerError) as error:
            self.fail(error)
        else:
            if not self._exact:
                self._sent.append(record)

    def close(self) -> None:
        """Close the client. Blocks for a few seconds at most."""
        self._client.close()

    def write_blocking(self, state_records: Iterable[StateRecord]) -> None:
        """Write records of the state topic in a transaction of their own, while nothing else is put. Blocks."""
        client = self._client
        client.begin()
        for partition, name, value in state_records:
            labels = self._labels.of(name)
            client.put((self._topic, value, name, partition, client.on_delivery, None, 0, labels))
        self.written |= client.commit([])


def _too_large(
    topic: str, limit: int, key: bytes | None, value: bytes | None, headers: Headers | None
) -> str | None:
    """What is wrong with the size of a record, or None. Logs it."""
    size = record_size(key, value, headers)
    if not 0 < limit < size:
        return None
    problem = (
        f"the record of {size:,} bytes is larger than topic {topic!r} takes "
        f"(max.message.bytes: {limit:,}); raise the topic's limit"
    )
    log.error("%s key=%r", problem, (key or b"")[:200])
    return problem
