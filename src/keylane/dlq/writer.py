"""Writes dead letters to their topic; to a spool on this machine when the topic does not take them.

If neither takes a letter, the caller learns why, and its lane stops: the message never counts as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keylane.dlq.headers import dead_letter_headers
from keylane.dlq.record import DeadLetterMessage
from keylane.dlq.spool import DeadLetterRefusedError, Spool, default_folder, foreign
from keylane.dlq.spool_format import SpooledDeadLetter
from keylane.errors import KeylaneError
from keylane.kafka.client import ClientError, KafkaException
from keylane.kafka.rejection import Rejections, is_rejection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.engine.delivery import Delivery
    from keylane.engine.output import Then
    from keylane.kafka.client import Producer
    from keylane.kafka.transactional_writer import TransactionalWriter
    from keylane.message import Headers
    from keylane.offsets.identity import AppIdentity, TopicIdentity
    from keylane.policies.failure_info import FailureInfo
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.kafka")

_SHIP_INTERVAL_SECONDS = 5.0
_NOT_TAKEN = (
    ClientError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's public constants
    ClientError._UNKNOWN_PARTITION,  # noqa: SLF001
    ClientError._MSG_TIMED_OUT,  # noqa: SLF001
)
"""The client's own errors for records it did not write; with other errors it gave up records."""


_mentioned: set[Path] = set()
"""Folders with letters of other clusters that this process has logged."""


class DeadLetterClients(Protocol):
    """The clients of a worker process that write dead letters."""

    identity: AppIdentity
    writer: TransactionalWriter
    alone: bool

    def producer(self, use: Literal["letters", "letter"]) -> Producer:
        """The producer for dead letters, or the one for letters that are sent alone."""

    def poll(self) -> None:
        """Serve the delivery reports of all clients."""

    def replace(self, use: Literal["letters", "letter"], client: Producer) -> None:
        """Replace a client that has failed for good."""


class DeadLetterWriter:
    """One task's dead letters. Used on the loop's thread; the session's ``poll`` serves the delivery reports.

    Letters of parked lanes do not go to the spool: their order in the topic must be the lane's, and the spool of
    another machine cannot keep it.
    """

    def __init__(self, clients: DeadLetterClients, app: AppSpec, rejections: Rejections) -> None:
        self._clients = clients
        self._identity = clients.identity
        self._writer = clients.writer if app.delivery == "exactly_once" else None
        self._rejections = rejections
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._sour = ""  # why the topic refused letters the last time
        self._sour_until = 0.0  # then it is tried again
        self._closed = False
        self._unanswered = 0  # letters in flight
        self._answered = asyncio.Event()  # set when none is in flight
        self._shipping: set[Future[None]] = set()
        self._spool = Spool(app.spool or default_folder(), app.name, clients.identity.source.cluster)

    def letter(
        self,
        delivery: Delivery,
        letter: FailureInfo | None,
        kind: Literal["dead", "archived", "parked"],
        park: int | None,
        then: Then,
    ) -> None:
        """Write the message as it came, with the failure's context in added headers.

        The letter's timestamp is that of the failure: with the message's own, retention could delete it at once.
        """
        self._unanswered += 1
        self._answered.clear()

        def recorded(problem: str | None) -> None:
            self._unanswered -= 1
            if not self._unanswered:
                self._answered.set()
            then(problem)

        at = delivery.engine.wall()
        unreadable = None
        try:
            headers: Headers = list(delivery.headers)
        except UnicodeDecodeError as error:
            headers, unreadable = [], str(error)
        headers += dead_letter_headers(
            self._app.name,
            self._app.version,
            kind,
            self._source_of(delivery),
            delivery.partition,
            delivery.offset,
            delivery.timestamp,
            letter,
            park,
            delivery.failure_state.redrives if delivery.failure_state is not None else 0,
            at=at,
            unreadable=unreadable,
        )
        entry = SpooledDeadLetter(
            topic=self._app.dlq,
            partition=delivery.partition,
            key=delivery.key,
            value=delivery.original,
            headers=tuple(headers),
            timestamp=int(at * 1000),
        )
        if self._writer is not None:
            self._exactly(self._writer, entry, (delivery.partition, delivery.offset), kind, recorded)
            return
        if self._sour and self._loop.time() < self._sour_until and kind != "parked":
            self._to_spool(entry, self._sour, recorded)
            return

        def answered(problem: str | None, alone: bool) -> None:
            self._sour = "" if alone else problem or ""
            self._sour_until = self._loop.time() + _SHIP_INTERVAL_SECONDS
            if problem is None or kind == "parked":
                recorded(problem)
            else:
                self._to_spool(entry, problem, recorded)

        self._send(entry, answered)

    def _source_of(self, delivery: Delivery) -> TopicIdentity:
        """The message's topic; for a redriven message perhaps a topic that no longer exists."""
        record = delivery.record
        return record.letter.identity if isinstance(record, DeadLetterMessage) else self._identity.source

    def _exactly(
        self,
        writer: TransactionalWriter,
        entry: SpooledDeadLetter,
        position: tuple[int, int],
        kind: str,
        then: Then,
    ) -> None:
        """Put it into the open transaction; into the spool if the topic refused this letter and so the transaction."""
        problem = self._rejections.letters.get(position)
        if problem is not None and kind != "parked":
            self._to_spool(entry, problem, then)
            return
        if problem is not None:
            self._loop.call_soon(then, problem)
            return

        def report(error: Any, _message: Any) -> None:
            if error is None or (is_rejection(error) and not self._clients.alone):
                return  # the whole batch was rejected; next time every letter is a batch of its own
            if error.code() > 0 or error.code() in _NOT_TAKEN:
                self._rejections.set_letter_reason(position, f"topic {entry.topic!r}: {error.str()}")

        writer.put(
            entry.topic,
            entry.value,
            entry.key,
            entry.timestamp or 0,
            list(entry.headers),
            partition=entry.partition,
            report=report,
        )
        writer.confirm_soon(then)

    async def rest(self, timeout: float) -> None:  # noqa: ASYNC109 - it ends in no exception
        """Wait until all letters are durable, while another coroutine polls; ``timeout`` seconds at most."""
        if self._unanswered:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), timeout)

    async def ship(self) -> None:
        """Send the spool's letters at intervals, until cancelled; also those of dead processes."""
        with contextlib.suppress(OSError):
            self._mention_foreign()
        while True:
            try:
                if await asyncio.to_thread(self._spool.waiting):
                    sent = await asyncio.to_thread(self._spool.ship, self._send_from_thread)
                    if sent:
                        self._sour = ""
                        log.info("%d dead letters from the spool are in topic %r now", sent, self._app.dlq)
            except (KeylaneError, OSError) as error:
                log.warning("dead letters wait in %s: %s", self._spool.folder, error)
            await asyncio.sleep(_SHIP_INTERVAL_SECONDS)

    def _mention_foreign(self) -> None:
        own = self._spool.folder
        for folder in {path.parent for path in foreign(own)}:
            if folder not in _mentioned:
                _mentioned.add(folder)
                log.warning(
                    "dead letters of another cluster, or of an unknown one, stay in %s: an app %r that runs there "
                    "ships them. If they belong to this cluster, move the files to %s",
                    folder,
                    self._app.name,
                    own,
                )

    async def end(self, seconds: float) -> None:
        """Wait up to ``seconds`` for letters in flight, and close."""
        deadline = self._loop.time() + seconds
        while (self._unanswered or self._shipping) and self._loop.time() < deadline:
            with contextlib.suppress(KafkaException):  # a client of results that has failed
                self._clients.poll()
            await asyncio.sleep(0.01)
        self.close()

    def close(self) -> None:
        """Close the spool's file; its letters wait for the next task, even those that are being shipped."""
        self._closed = True
        for sent in list(self._shipping):
            _give_up(sent)
        self._spool.close()

    def _send(
        self,
        entry: SpooledDeadLetter,
        then: Callable[[str | None, bool], None],
        use: Literal["letters", "letter"] = "letters",
    ) -> None:
        """Send a letter. ``then(problem, alone)``: ``alone`` if this letter was refused, not any letter."""
        if self._closed:
            return
        client = self._clients.producer(use)
        produce: Any = client.produce

        def report(error: Any, _message: Any) -> None:
            if (
                self._closed
            ):  # the loop may have ended too: the message runs again, or its letter is in the spool
                return
            if error is None:
                then(None, False)
            elif is_rejection(error) and use == "letters":  # perhaps because of another letter in its batch
                self._send(entry, then, "letter")
            else:
                if _is_fatal(error):
                    self._clients.replace(use, client)
                then(error.str(), is_rejection(error))

        try:
            produce(
                entry.topic,
                entry.value,
                entry.key,
                partition=entry.partition,
                on_delivery=report,
                timestamp=entry.timestamp or 0,
                headers=list(entry.headers),
            )
        except (BufferError, KafkaException) as error:
            found = error.args[0] if isinstance(error, KafkaException) else None
            if found is not None and _is_fatal(found):
                self._clients.replace(use, client)
            self._loop.call_soon(then, str(error), found is not None and is_rejection(found))

    def _send_from_thread(self, entry: SpooledDeadLetter) -> Future[None]:
        sent: Future[None] = Future()
        self._shipping.add(sent)
        sent.add_done_callback(self._shipping.discard)
        if self._closed:  # no more delivery reports are served
            _give_up(sent)
            return sent

        def answered(problem: str | None, alone: bool) -> None:
            if sent.done():
                return
            if problem is None:
                sent.set_result(None)
            elif alone:
                sent.set_exception(DeadLetterRefusedError(f"topic {entry.topic!r}: {problem}"))
            else:
                sent.set_exception(KeylaneError(f"topic {entry.topic!r} takes no letters: {problem}"))

        self._loop.call_soon_threadsafe(self._send, entry, answered)
        return sent

    def _to_spool(self, entry: SpooledDeadLetter, problem: str, then: Then) -> None:
        log.error(
            "topic %r takes no dead letters: %s; they go to %s", entry.topic, problem, self._spool.folder
        )
        kept = self._loop.run_in_executor(None, self._spool.append, entry)

        def answered(kept: asyncio.Future[None]) -> None:
            error = kept.exception() if not kept.cancelled() else asyncio.CancelledError()
            if error is not None:
                self._sour = ""  # nothing waits to be shipped, so only the next letter can find out
            then(None if error is None else f"{problem}; and {error}")

        kept.add_done_callback(answered)


def _give_up(sent: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # its answer came at the same moment
        sent.set_exception(KeylaneError("the task has ended"))


def _is_fatal(error: Any) -> bool:
    return bool(error.fatal()) or error.code() == ClientError._FATAL  # noqa: SLF001 - the client's public constant
