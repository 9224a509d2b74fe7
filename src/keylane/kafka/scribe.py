"""The owner's transactional producer: what a task writes down is there whole or not at all.

A task owns its partitions as long as nobody has fenced its transactional id. From then on the broker takes nothing
from it: neither progress nor a record of the state topic and, with ``delivery="exactly_once"``, no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from keylane.errors import AbortedError, FencedError, KafkaError
from keylane.kafka.transactions import Transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from confluent_kafka import TopicPartition

    from keylane.engine.engine import Then
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactions import Put
    from keylane.message import Headers

PATIENCE = 12.0
"""Seconds that the client has to commit one. After a broker's restart it may wait for an answer that never comes."""
_ANY_PARTITION = -1

Note = tuple[int, bytes, bytes | None]
"""Partition, name and value of a record of the state topic."""


class Scribe:
    """Used on the loop's thread, but for :meth:`write`. A transaction is open from the first :meth:`put` on.

    ``fail`` is told what makes it useless. While one transaction is being committed, what is put waits for the next.
    ``exact``: results are in it too; after an abort the task begins again, and nothing else may follow.
    """

    def __init__(
        self, settings: KafkaSettings, app: str, topic: str, group: Any, *, exact: bool = False
    ) -> None:
        self.id = f"{app}.{uuid.uuid4().hex}"
        self.written: dict[int, int] = {}
        """By partition of the state topic: where the last record lies that was committed."""
        self.fail: Callable[[BaseException], None] = lambda _error: None
        self._topic = topic
        self._exact = exact
        self._connect = partial(Transactions, settings, self.id, group, exact=exact)
        self._client = self._connect()
        self._committing = False
        self._waiting: list[Put] = []
        self._thens: list[Then] = []
        self._soon: list[Then] = []
        self._sent: list[Put] = []  # in the open transaction; empty when it is exact: that is not sent again
        self._mended: Transactions
        self._lock: asyncio.Lock
        self._stirred: asyncio.Event

    def attach(self) -> None:
        """Work for the running loop: a worker's scribe outlives the loops of its epochs."""
        self._lock, self._stirred = asyncio.Lock(), asyncio.Event()
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
        self._stirred.set()
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
            client = self._client
            if not client.open and not positions:
                return
            client.begin()
            thens, self._thens = self._thens, []
            sent, self._sent = self._sent, []
            self._committing = True
            try:
                places = await self._aside(client, lambda: client.commit(positions))
            except asyncio.CancelledError:
                raise  # the loop ends, and the thread still commits: what waits must not get in behind its progress
            except BaseException as error:
                if self.useless and not self._exact:  # held until it is mended, and then written
                    self._waiting[:0], self._thens[:0] = sent, thens
                    raise
                self._go_on()
                for then in thens:
                    then(str(error))
                raise
            self.written |= places
            self._go_on()
            for then in thens:
                then(None)

    @staticmethod
    async def _aside(client: Transactions, call: Callable[[], dict[int, int]]) -> dict[int, int]:
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
        """Make a new client of the same id in place of one that is of no use. Blocks. Raises KafkaError.

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

    def _send(self, record: Put) -> None:
        try:
            self._client.put(record)
        except (FencedError, KafkaError) as error:
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
            client.put((self._topic, value, name, partition, client.placed, None, 0, []))
        self.written |= client.commit([])
