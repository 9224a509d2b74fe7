"""One transactional producer, and what its errors mean."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.errors import AbortedError, BrokerError, FencedError
from keylane.kafka.cluster import TIMEOUT
from keylane.kafka.rejection import RejectedError, is_rejection
from keylane.kafka.settings import outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import TopicPartition

    from keylane.kafka.settings import KafkaSettings

LASTS = 60.0
"""Seconds after which the broker gives up on a transaction."""
_SOON = 2.0
_FENCED = (
    ClientError._FENCED,  # noqa: SLF001 - the client's public constant
    ClientError.PRODUCER_FENCED,
    ClientError.INVALID_PRODUCER_EPOCH,
    ClientError.INVALID_PRODUCER_ID_MAPPING,
)

Put = tuple[Any, ...]
"""A record, as the client's ``produce`` takes it."""


def is_fenced(error: KafkaException) -> bool:
    """Whether another producer of the same transactional id has come since."""
    found = error.args[0]
    return found.fatal() or found.code() in _FENCED


def transactional(settings: KafkaSettings, name: str, batch_limit: int = 0, **more: Any) -> Any:
    """A producer of this transactional id; whoever had it before is fenced. Blocks. Raises BrokerError."""
    producer = settings.producer(
        batch_limit=batch_limit,
        **{
            "transactional.id": name,
            "transaction.timeout.ms": int(LASTS * 1000),
            "message.timeout.ms": int(LASTS * 1000),
            # A transaction that follows another at once is told to come again; the client's 100 ms are long for that.
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 200,
            "socket.timeout.ms": int(TIMEOUT * 1000),
            **more,
        },
    )
    deadline = time.monotonic() + LASTS
    while True:
        try:
            # The client looks for its coordinator twice a second, unless it knows a broker when it begins.
            producer.list_topics(timeout=TIMEOUT)
            producer.init_transactions(TIMEOUT)
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise BrokerError(
                    f"transactional id {name!r} could not be had: {error.args[0].str()}. "
                    "Progress is written in transactions: the broker must allow ids that begin with the app's name"
                ) from error
        else:
            return producer


def leave(producer: Any, *, abort: bool = False) -> threading.Thread:
    """Hold a client that is of no use any more until nothing of it is on its way, in a thread of its own.

    One that was fenced must not be destroyed before: an answer that comes then and the destruction both free its error,
    and the process dies of it (librdkafka 2.16.0). ``abort``: first abort the open transaction, if that is done soon.
    """

    def last_words() -> None:
        if abort:
            with contextlib.suppress(KafkaException):
                producer.abort_transaction(_SOON)
        while len(producer):  # for as long as its message.timeout.ms at most
            with contextlib.suppress(KafkaException):  # what it has failed with, said once more
                producer.purge(in_flight=False)  # nor does it send anything again that got no answer
                producer.poll(0.1)

    leaving = threading.Thread(target=last_words, name="keylane-leave", daemon=True)
    leaving.start()
    return leaving


class TransactionalClient:
    """Transactions one after another. Blocks when it is made and in :meth:`commit`; used by one thread at a time.

    ``over`` is what made it useless: from then on it takes nothing. ``exact``: what was in a transaction that was
    aborted is missing from then on, so no other may follow it. ``batch_limit``: as :meth:`KafkaSettings.producer`
    takes it. ``alone``: every record is a batch of its own, so that a rejection names its record.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        group: Any,
        *,
        exact: bool,
        batch_limit: int = 0,
        alone: bool = False,
    ) -> None:
        self.over: FencedError | BrokerError | None = None
        self.open = False
        self._began = 0.0  # when the transaction was opened that is or was open last
        self._group = group
        self._exact = exact
        single = {"batch.num.messages": 1} if alone else {}
        self._producer = transactional(settings, name, batch_limit, **single)
        self._produce = self._producer.produce
        self._places: dict[int, int] = {}

    def begin(self) -> None:
        """Unless one is open. Raises what made it useless."""
        if self.over is not None:
            raise type(self.over)(*self.over.args)
        if not self.open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self._useless(error) from error
            self.open = True
            self._began = time.monotonic()

    def put(self, record: Put) -> None:
        """Into the open transaction, or a new one. Raises what made it useless."""
        self.begin()
        while True:
            try:
                return self._produce(*record)  # type: ignore[no-any-return]
            except BufferError:
                # Gigabytes wait for a broker that does not answer: nothing else can go on either.
                self._producer.poll(0.1)
            except KafkaException as error:
                found = error.args[0]
                if found.code() != ClientError._STATE:  # noqa: SLF001 - the client's public constant
                    raise self._useless(error) from error
                if self._exact:
                    self.over = self._not_taken(found)
                    raise self.over from error
                return None  # the transaction has failed before, and who commits it will be told

    def placed(self, error: Any, message: Any) -> None:
        """A report, for records whose places :meth:`commit` is to tell."""
        if error is None:
            partition = message.partition()
            self._places[partition] = max(self._places.get(partition, -1), message.offset())

    def commit(self, offsets: list[TopicPartition]) -> dict[int, int]:
        """Commit what was put, and these offsets; where the last records lie, by partition.

        Raises AbortedError when nothing of it was taken, or what made it useless.
        """
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
            outage.answered()
        finally:
            self.open = False
            places, self._places = self._places, {}
        return places

    def _insist(self, call: Callable[[], None], deadline: float, *, again: bool) -> None:
        """Call until it succeeds, or once. Else nothing of the transaction counts."""
        while True:
            try:
                return call()
            except KafkaException as error:
                found = error.args[0]
                if found.fatal():
                    raise self._useless(error) from error
                if not found.txn_requires_abort() and found.retriable():
                    if not again:
                        self.over = AbortedError(f"a transaction was not taken: {found.str()}")
                        raise self.over from error
                    if time.monotonic() < deadline:
                        continue
                aborted = self._not_taken(found)
                self.abort()
                if self._exact:
                    self.over = aborted
                raise aborted from error

    def abort(self) -> None:
        """Nothing of the open transaction counts. Raises what made it useless."""
        deadline = time.monotonic() + LASTS
        while True:
            try:
                return self._producer.abort_transaction(TIMEOUT)  # type: ignore[no-any-return]
            except KafkaException as error:
                if error.args[0].fatal() or not error.args[0].retriable() or time.monotonic() > deadline:
                    raise self._useless(error) from error

    def give_up(self) -> None:
        """Abort what is open, if that can be done soon: until it times out, nobody can read past it."""
        leave(self._producer, abort=self.open).join(2 * _SOON)  # a client that hangs is left behind

    def hand_over(self) -> None:
        """Another client takes its place."""
        leave(self._producer)

    def _not_taken(self, error: Any) -> AbortedError:
        """What went wrong before, when the client says only that something did."""
        if error.code() == ClientError._STATE:  # noqa: SLF001 - the client's public constant
            try:
                self._producer.commit_transaction(TIMEOUT)  # refused in this state, with the reason
            except KafkaException as reason:
                error = reason.args[0]
        kind = RejectedError if is_rejection(error) else AbortedError
        return kind(f"a transaction was not taken: {error.str()}")

    def _useless(self, error: KafkaException) -> FencedError | BrokerError:
        found = error.args[0]
        leave(self._producer)  # now, whoever lets go of it, and whether or not it is told
        lasted = time.monotonic() - self._began
        if self.open and lasted > LASTS:
            # The broker has fenced it by itself. Who begins again looks whether anybody else has, too.
            self.over = AbortedError(
                f"the transaction timed out: it was open for {lasted:.0f} s, and the broker allows {LASTS:g} s. "
                "Either the event loop was blocked (a stage that computes or waits without await: declare it with "
                "def, not async def), or the machine stood still, or the broker did not answer"
            )
        elif found.code() in _FENCED:
            self.over = FencedError("another task has taken over; nothing that this one does counts any more")
        else:
            kind = (
                AbortedError if self._exact else BrokerError
            )  # nothing of it counts: all of it can run again
            self.over = kind(f"a transaction was not taken, and none will be: {found.str()}")
        return self.over
