"""Where dead letters go: their topic; a spool on this machine when the topic does not take them; else nowhere.

A letter that neither takes is answered with why, and its lane stops: it never counts as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Literal

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.errors import KeylaneError
from keylane.kafka.frames import Spooled
from keylane.kafka.letterhead import letter_headers
from keylane.kafka.spool import LetterRefusedError, Spool, default_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

    from keylane.app import App
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Then
    from keylane.kafka.scribe import Scribe
    from keylane.kafka.seat import Seat
    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Headers

log = logging.getLogger("keylane.kafka")

TIMEOUT = 10.0
"""Seconds that the topic has to take a letter."""
_SHIP_EVERY = 5.0
_FOR_ITSELF = (
    ClientError.MSG_SIZE_TOO_LARGE,
    ClientError.RECORD_LIST_TOO_LARGE,
    ClientError.INVALID_RECORD,
    ClientError.INVALID_MSG_SIZE,
)
"""What a topic says of a single letter."""

_NOT_TAKEN = (
    ClientError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's public constants
    ClientError._UNKNOWN_PARTITION,  # noqa: SLF001
    ClientError._MSG_TIMED_OUT,  # noqa: SLF001
)
"""What the client says of letters by itself when it could not write them; of others it says that it gave them up."""

_producers: dict[KafkaSettings, Producer] = {}
"""Spark uses a Python worker again for the next epoch: so is its producer. Made for the first letter only."""


def _producer(settings: KafkaSettings) -> Producer:
    if settings not in _producers:
        # Apart from the results' producer: a letter is given up after a while, a result never.
        _producers[settings] = settings.producer(
            **{"message.timeout.ms": int(TIMEOUT * 1000), "linger.ms": 1}
        )
    return _producers[settings]


class Graveyard:
    """One task's dead letters. Used on the loop's thread; :meth:`poll` serves the topic's answers.

    Letters of parked lanes do not go to the spool: their order in the topic is the lane's, and a spool of another
    machine cannot keep it.
    """

    def __init__(self, seat: Seat, app: App, refused: dict[tuple[int, int], str]) -> None:
        self._settings = seat.settings
        self._scribe = seat.scribe if app.delivery == "exactly_once" else None
        self._refused = refused  # messages whose letter was refused in a transaction, and why
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._made: Producer | None = None
        self._sour = ""  # why the topic took no letter when it was last asked
        self._sour_until = 0.0  # then it is asked again
        self._closed = False
        self._unanswered = 0  # letters of which nothing is known yet
        self._answered = asyncio.Event()  # there are none
        self._shipping: set[Future[None]] = set()
        self._spool = Spool(app.spool or default_folder(), app.name)

    def letter(
        self,
        delivery: Delivery,
        letter: DeadLetter | None,
        kind: Literal["dead", "archived", "parked"],
        park: int | None,
        then: Then,
    ) -> None:
        """Write the message as it came, with the failure's context in added headers.

        The letter is as old as the failure: as old as its message, retention could delete it as soon as it is there.
        """
        self._unanswered += 1
        self._answered.clear()

        def told(problem: str | None) -> None:
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
        headers += letter_headers(
            self._app.name,
            self._app.version,
            kind,
            delivery.topic,
            delivery.partition,
            delivery.offset,
            delivery.timestamp,
            letter,
            park,
            delivery.trouble.redrives if delivery.trouble is not None else 0,
            at=at,
            unreadable=unreadable,
        )
        entry = Spooled(
            topic=self._app.dlq,
            partition=delivery.partition,
            key=delivery.key,
            value=delivery.original,
            headers=tuple(headers),
            timestamp=int(at * 1000),
        )
        if self._scribe is not None:
            self._exactly(self._scribe, entry, (delivery.partition, delivery.offset), kind, told)
            return
        if self._sour and self._loop.time() < self._sour_until and kind != "parked":
            self._to_spool(entry, self._sour, told)
            return

        def answered(problem: str | None, alone: bool) -> None:
            self._sour = "" if alone else problem or ""
            self._sour_until = self._loop.time() + _SHIP_EVERY
            if problem is None or kind == "parked":
                told(problem)
            else:
                self._to_spool(entry, problem, told)

        self._send(entry, answered)

    def _exactly(
        self, scribe: Scribe, entry: Spooled, position: tuple[int, int], kind: str, then: Then
    ) -> None:
        """Into the open transaction; to the spool when the topic refused this letter, and the transaction with it."""
        problem = self._refused.get(position)
        if problem is not None and kind != "parked":
            self._to_spool(entry, problem, then)
            return
        if problem is not None:
            self._loop.call_soon(then, problem)
            return

        def report(error: Any, _message: Any) -> None:
            if error is not None and (error.code() > 0 or error.code() in _NOT_TAKEN):
                self._refused[position] = f"topic {entry.topic!r}: {error.str()}"

        scribe.put(
            entry.topic,
            entry.value,
            entry.key,
            entry.timestamp or 0,
            list(entry.headers),
            partition=entry.partition,
            report=report,
        )
        scribe.soon(then)

    def poll(self) -> None:
        """Serve what the topic has answered."""
        if self._made is not None:
            self._made.poll(0)

    async def rest(self, timeout: float) -> None:  # noqa: ASYNC109 - it ends in no exception
        """Wait until all letters are where they belong, while somebody polls; not longer than ``timeout`` seconds."""
        if self._unanswered:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), timeout)

    async def ship(self) -> None:
        """For ever: send what waits in the spool, now and then. Letters of processes that died come along."""
        while True:
            try:
                if await asyncio.to_thread(self._spool.waiting):
                    sent = await asyncio.to_thread(self._spool.ship, self._send_from_thread)
                    if sent:
                        self._sour = ""
                        log.info("%d dead letters from the spool are in topic %r now", sent, self._app.dlq)
            except (KeylaneError, OSError) as error:
                log.warning("dead letters wait in %s: %s", self._spool.folder, error)
            await asyncio.sleep(_SHIP_EVERY)

    def close(self) -> None:
        """Let go of the spool's file; what is in it waits for the next task, also what is being shipped now."""
        self._closed = True
        for sent in list(self._shipping):
            _give_up(sent)
        self._spool.close()

    def _send(self, entry: Spooled, then: Callable[[str | None, bool], None]) -> None:
        """``then(problem, alone)``: whether the letter itself was refused, not any letter."""
        if self._made is None:
            self._made = _producer(self._settings)
        produce: Any = self._made.produce

        def report(error: Any, _message: Any) -> None:
            then(None if error is None else error.str(), error is not None and error.code() in _FOR_ITSELF)

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
            alone = isinstance(error, KafkaException) and error.args[0].code() in _FOR_ITSELF
            self._loop.call_soon(then, str(error), alone)

    def _send_from_thread(self, entry: Spooled) -> Future[None]:
        sent: Future[None] = Future()
        self._shipping.add(sent)
        sent.add_done_callback(self._shipping.discard)
        if self._closed:  # nobody serves answers any more
            _give_up(sent)
            return sent

        def answered(problem: str | None, alone: bool) -> None:
            if sent.done():
                return
            if problem is None:
                sent.set_result(None)
            elif alone:
                sent.set_exception(LetterRefusedError(f"topic {entry.topic!r}: {problem}"))
            else:
                sent.set_exception(KeylaneError(f"topic {entry.topic!r} takes no letters: {problem}"))

        self._loop.call_soon_threadsafe(self._send, entry, answered)
        return sent

    def _to_spool(self, entry: Spooled, problem: str, then: Then) -> None:
        log.error("topic %r takes no letters: %s; they go to %s", entry.topic, problem, self._spool.folder)
        kept = self._loop.run_in_executor(None, self._spool.append, entry)

        def answered(kept: asyncio.Future[None]) -> None:
            error = kept.exception() if not kept.cancelled() else asyncio.CancelledError()
            if error is not None:
                self._sour = ""  # nothing waits that could be shipped, so only the next letter can find out
            then(None if error is None else f"{problem}; and {error}")

        kept.add_done_callback(answered)


def _give_up(sent: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # its answer came at the same moment
        sent.set_exception(KeylaneError("the task has ended"))
