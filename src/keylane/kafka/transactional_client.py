"""Blocking client for one transactional id, and the meaning of its errors."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicCollection, TopicPartition

from keylane.denial import TOPIC_DENIED, broker_error, is_denied
from keylane.errors import AbortedError, BrokerError, FencedError
from keylane.kafka.cluster import REQUEST_SECONDS
from keylane.kafka.lost_requests import LostRequests
from keylane.kafka.rejection import RejectedError, is_rejection
from keylane.kafka.settings import client_log, outage
from keylane.rights import ResourceKind, on_transactional_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keylane.kafka.settings import KafkaSettings
    from keylane.rights import Right

TRANSACTION_SECONDS = 60.0
"""``transaction.timeout.ms``: the broker aborts a transaction that is open for longer."""
_ABORT_SECONDS = 2.0
"""Time to abort the open transaction of a client that is given up."""
_FENCED_CODES = (
    ClientError._FENCED,  # noqa: SLF001 - the client's public constant
    ClientError.PRODUCER_FENCED,
    ClientError.INVALID_PRODUCER_EPOCH,
    ClientError.INVALID_PRODUCER_ID_MAPPING,
)

ProduceArgs = tuple[Any, ...]
"""The arguments of the client's ``produce``."""


def is_fenced(error: KafkaException) -> bool:
    """Whether another producer has taken the transactional id since."""
    found = error.args[0]
    return found.fatal() or found.code() in _FENCED_CODES


def transactional_producer(
    settings: KafkaSettings,
    transactional_id: str,
    batch_limit: int = 0,
    *,
    lost: LostRequests | None = None,
    **more: Any,
) -> Any:
    """A producer with this transactional id; its previous holder is fenced. Blocks. Raises BrokerError.

    ``lost`` learns of requests that got no answer from now on.
    """
    if lost is None:
        lost = LostRequests(client_log)
    producer = settings.watched_producer(
        lost,
        batch_limit=batch_limit,
        **{
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(TRANSACTION_SECONDS * 1000),
            "message.timeout.ms": int(TRANSACTION_SECONDS * 1000),
            # The broker answers back-to-back transactions with "retry"; the default backoff of 100 ms is long for that.
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 200,
            "socket.timeout.ms": int(REQUEST_SECONDS * 1000),
            **more,
        },
    )
    deadline = time.monotonic() + TRANSACTION_SECONDS
    while True:
        try:
            # Without a known broker the client looks for its coordinator only twice a second.
            producer.list_topics(timeout=REQUEST_SECONDS)
            producer.init_transactions(REQUEST_SECONDS)
        except KafkaException as error:
            what = f"the broker did not grant transactional id {transactional_id!r}"
            if (refused := settings.refused_for_good(what)) is not None:
                raise refused from error
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise broker_error(
                    f"{what}, and progress is written in transactions",
                    error.args[0],
                    on_transactional_ids(transactional_id.rpartition(".")[0]),
                ) from error
        else:
            producer.poll(0)
            lost.any = False  # what was lost before belongs to no transaction
            return producer


def discard(producer: Any, *, abort: bool = False) -> threading.Thread:
    """Keep a producer alive until nothing of it is in flight, in a thread of its own, then destroy it.

    A fenced producer must not be destroyed earlier: librdkafka 2.16.0 frees its error twice if a response arrives
    during the destruction, and the process crashes. ``abort``: first abort the open transaction, within
    :data:`_ABORT_SECONDS`.
    """

    def drain() -> None:
        if abort:
            with contextlib.suppress(KafkaException):
                producer.abort_transaction(_ABORT_SECONDS)
        while len(producer):  # for message.timeout.ms at most
            with contextlib.suppress(KafkaException):  # repeats the error that it failed with
                producer.purge(in_flight=False)  # so that it sends nothing again
                producer.poll(0.1)

    thread = threading.Thread(target=drain, name="keylane-discard", daemon=True)
    thread.start()
    return thread


def fence(settings: KafkaSettings, transactional_id: str) -> None:
    """Take the transactional id from its holder; the broker aborts its open transaction. Blocks. Raises BrokerError."""
    discard(transactional_producer(settings, transactional_id))


def end_hanging_transaction(
    settings: KafkaSettings,
    transactional_id: str,
    places: Iterable[tuple[str, int]],
    group: Any,
    known_topic: str,
) -> None:
    """End a transaction of this id that is open in these partitions, but which the broker's coordinator has forgotten.

    The coordinator writes markers only where it knows of a transaction. So this aborts another transaction of the same
    producer in each of these partitions and in the group's offsets, and its markers end both. The holder of the id is
    fenced. ``known_topic``: any topic that the group may read. Blocks. Raises BrokerError.
    """
    producer = transactional_producer(settings, transactional_id)
    try:
        producer.begin_transaction()
        for topic, partition in places:
            producer.produce(topic, None, b"aborted", partition=partition)
        producer.flush(REQUEST_SECONDS)
        producer.send_offsets_to_transaction([TopicPartition(known_topic, 0, 0)], group, REQUEST_SECONDS)
        producer.abort_transaction(REQUEST_SECONDS)
    except KafkaException as error:
        raise BrokerError(
            f"a transaction of {transactional_id!r} could not be aborted: {error.args[0].str()}"
        ) from error
    finally:
        discard(producer)


class TransactionalClient:
    """Runs transactions one after another. The constructor and :meth:`commit` block. Used by one thread at a time.

    ``failure`` is the error that made the client useless; every later call raises it. A client is useless after a
    transaction in which a request got no answer at its first try, also if that was committed or aborted in the end: the
    request may still be on its way, and would end, or change, the next transaction of the same producer epoch.

    ``exact``: results are in the transaction, so an aborted transaction loses them and no other may follow.
    ``batch_limit``: see :meth:`KafkaSettings.producer`. ``alone``: every record is a batch of its own, so that a
    rejection names its record.
    ``rights``: what its transactions need, for errors.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        transactional_id: str,
        group: Any,
        *,
        exact: bool,
        batch_limit: int = 0,
        alone: bool = False,
        rights: Sequence[Right] = (),
    ) -> None:
        self.failure: FencedError | BrokerError | None = None
        self.open = False
        self._began = 0.0  # of the open transaction, or of the last one
        self._group = group
        self._rights = rights
        self._settings = settings
        self._exact = exact
        single = {"batch.num.messages": 1} if alone else {}
        self._lost = LostRequests(client_log)
        self._producer = transactional_producer(
            settings, transactional_id, batch_limit, lost=self._lost, **single
        )
        self._produce = self._producer.produce
        self._last_offsets: dict[int, int] = {}
        self._unwritable: str | None = None  # the topic of a record that the broker denied

    def learn_partitions(self) -> None:
        """Refresh what the client knows of all topics. Blocks. From any thread. Raises BrokerError."""
        try:
            self._producer.list_topics(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise BrokerError(f"the cluster cannot be asked: {error.args[0].str()}") from error

    def begin(self) -> None:
        """Begin a transaction unless one is open. Raises :attr:`failure`."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        if not self.open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self._fail(error) from error
            self.open = True
            self._began = time.monotonic()

    def put(self, record: ProduceArgs) -> None:
        """Add a record to the open transaction, or to a new one. Raises :attr:`failure`."""
        self.begin()
        while True:
            try:
                return self._produce(*record)  # type: ignore[no-any-return]
            except BufferError:
                # Gigabytes wait for a broker that does not answer, so nothing else can continue either.
                self._producer.poll(0.1)
            except KafkaException as error:
                found = error.args[0]
                if found.code() != ClientError._STATE:  # noqa: SLF001 - the client's public constant
                    raise self._fail(error) from error
                if self._exact:
                    self.failure = self._aborted(found)
                    raise self.failure from error
                return None  # the transaction has failed already, and commit() raises it

    def on_delivery(self, error: Any, message: Any) -> None:
        """Delivery report of the records whose offsets :meth:`commit` returns."""
        if error is not None:
            if is_denied(error):
                self._unwritable = message.topic()
        else:
            partition = message.partition()
            self._last_offsets[partition] = max(self._last_offsets.get(partition, -1), message.offset())

    def commit(self, offsets: list[TopicPartition]) -> dict[int, int]:
        """Commit the records and these offsets. Returns the last offset of the reported records by partition.

        Raises AbortedError if nothing of the transaction was committed, or :attr:`failure`. :attr:`failure` may be set
        although it returns.
        """
        deadline = time.monotonic() + TRANSACTION_SECONDS
        try:
            if offsets:
                # No retry: after a lost connection the client's second call never returns (2.16.1).
                self._call(
                    lambda: self._producer.send_offsets_to_transaction(offsets, self._group, REQUEST_SECONDS),
                    deadline,
                    retry=False,
                )
            self._call(lambda: self._producer.commit_transaction(REQUEST_SECONDS), deadline, retry=True)
            outage.answered()
            self._check_lost()
        finally:
            self.open = False
            last_offsets, self._last_offsets = self._last_offsets, {}
        return last_offsets

    def _call(self, call: Callable[[], None], deadline: float, *, retry: bool) -> None:
        """Call, with retries if asked for. If it fails, abort the transaction and raise."""
        while True:
            try:
                return call()
            except KafkaException as error:
                found = error.args[0]
                if found.fatal():
                    raise self._fail(error) from error
                if not found.txn_requires_abort() and found.retriable():
                    if not retry:
                        self.failure = AbortedError(f"transaction not committed: {found.str()}")
                        raise self.failure from error
                    if time.monotonic() < deadline:
                        self._lost.any = True
                        continue
                aborted = self._aborted(found)
                if not isinstance(aborted, AbortedError):  # denied: not even the abort may be allowed
                    self.failure = aborted
                    discard(self._producer)
                    raise aborted from error
                self.abort()
                if self._exact:
                    self.failure = aborted
                raise aborted from error

    def _check_lost(self) -> None:
        """Use the client no more if a request of the transaction that has just ended may arrive late."""
        self._producer.poll(0)  # delivers the client's log
        if self._lost.any:
            self.failure = AbortedError(
                "a request of the last transaction got no answer at its first try, and may still reach the broker"
            )

    def abort(self) -> None:
        """Abort the open transaction. Raises :attr:`failure`."""
        deadline = time.monotonic() + TRANSACTION_SECONDS
        while True:
            try:
                self._producer.abort_transaction(REQUEST_SECONDS)
                return self._check_lost()
            except KafkaException as error:
                if error.args[0].fatal() or not error.args[0].retriable() or time.monotonic() > deadline:
                    raise self._fail(error) from error
                self._lost.any = True

    def close(self) -> None:
        """Abort the open transaction if that is quick: until it times out, readers cannot pass it. Blocks briefly."""
        discard(self._producer, abort=self.open).join(
            2 * _ABORT_SECONDS
        )  # does not wait for a client that hangs

    def discard(self) -> None:
        """Give up the producer without an abort, because another client has taken its transactional id."""
        discard(self._producer)

    def _aborted(self, error: Any) -> BrokerError:
        """The error that failed the transaction, also if the client only says that one did.

        An AbortedError, unless a right is missing: then no other transaction succeeds either.
        """
        if error.code() == ClientError._STATE:  # noqa: SLF001 - the client's public constant
            try:
                self._producer.commit_transaction(REQUEST_SECONDS)  # refused in this state, with the reason
            except KafkaException as reason:
                error = reason.args[0]
        if is_denied(error):
            return self._denied(error)
        kind = RejectedError if is_rejection(error) else AbortedError
        return kind(f"transaction not committed: {error.str()}")

    def _denied(self, error: Any) -> BrokerError:
        rights = self._rights
        if error.code() == TOPIC_DENIED:
            unwritable = {self._unwritable} if self._unwritable is not None else self._find_unwritable()
            rights = [right for right in rights if right.name in unwritable] or rights
        return broker_error("transaction not committed", error, *rights)

    def _find_unwritable(self) -> set[str]:
        """Topics that this user may not write to, as far as the broker tells: its error names none."""
        topics = [right.name for right in self._rights if right.kind is ResourceKind.TOPIC]
        admin = self._settings.admin()  # kept: the futures of a garbage-collected client never complete
        asked = admin.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=REQUEST_SECONDS
        )
        found = set()
        for topic, answer in asked.items():
            try:
                operations = answer.result(REQUEST_SECONDS).authorized_operations or ()
            except (KafkaException, TimeoutError) as error:
                if isinstance(error, KafkaException) and is_denied(error.args[0]):
                    found.add(topic)
            else:
                if not any(each.name == "WRITE" for each in operations):
                    found.add(topic)
        return found

    def _fail(self, error: KafkaException) -> FencedError | BrokerError:
        """Discard the producer, set :attr:`failure` and return it."""
        found = error.args[0]
        discard(self._producer)  # now, so that it does not depend on who drops the last reference
        seconds = time.monotonic() - self._began
        if self.open and seconds > TRANSACTION_SECONDS:
            # The broker itself has fenced it. The task starts over, and checks whether another task has too.
            self.failure = AbortedError(
                f"the transaction timed out: it was open for {seconds:.0f} s, and the broker allows "
                f"{TRANSACTION_SECONDS:g} s. Either the event loop was blocked (declare a stage that computes or waits "
                "without await with def, not async def), or the machine was suspended, or the broker did not answer"
            )
        elif found.code() in _FENCED_CODES:
            self.failure = FencedError(
                "another task has taken over; nothing that this task writes counts any more"
            )
        elif is_denied(found):
            self.failure = self._denied(found)
        else:
            # With exactly_once nothing of it counts, so all of it can run again.
            kind = AbortedError if self._exact else BrokerError
            self.failure = kind(f"transaction not committed, and the client cannot continue: {found.str()}")
        return self.failure
