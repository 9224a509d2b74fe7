"""The producer: results to the sink, records to the state topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from keylane.engine.dispatch import with_event_id
from keylane.errors import KafkaError, Poison
from keylane.message import EVENT_ID, with_origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Producer

    from keylane.app import App
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.dispatch import Result
    from keylane.engine.engine import Engine, Then
    from keylane.kafka.graveyard import Graveyard
    from keylane.kafka.seat import Seat
    from keylane.message import Headers

ANY_PARTITION = -1
RECORD_OVERHEAD = 128
"""Bytes a record takes in its batch besides key, value and headers, rounded up."""


CROWDED = 64
"""Lanes that wait for their turn. More than so many, and the loop is what there is too little of."""
_HOLD = 0.05
"""Seconds for which results are gathered then, before the client's own."""
_LOOK = 0.2
LINGER = 1
"""Milliseconds for which the client gathers by itself. Without it the client begins to send when it is given the first
of those that were gathered, and sends the others in bits."""

Report = Callable[[Any, Any], None]


def _identified(delivery: Delivery, headers: Headers) -> Headers:
    """With an event id: where the message has none, its position."""
    if any(name == EVENT_ID for name, _ in headers):
        return headers
    return [*headers, (EVENT_ID, delivery.position.encode())]


class _All:
    """The delivery report of several results of one message, which is told when all of them are durable."""

    __slots__ = ("_delivery", "_left")

    def __init__(self, delivery: Delivery, count: int) -> None:
        self._delivery = delivery
        self._left = count

    def __call__(self, error: Any, message: Any) -> None:
        self._left -= 1
        if error is not None or not self._left:
            self._delivery(error, message)


class KafkaOutput:
    """An :class:`~keylane.engine.engine.Output`. Key, headers and timestamp go over as they came.

    ``stamps``: the sink gives records a time of its own, so the origin's goes into a header.

    With ``delivery="at_least_once"`` results go through the seat's idempotent producer, whose delivery reports call
    the deliveries, and records through the scribe's next transaction. With ``"exactly_once"`` everything goes into the
    open transaction and counts at once, for what follows is in it too or in a later one; should it be aborted, the
    task begins again from what was committed last.

    A request holds results of one partition, and costs the broker much more than one more result in it. So while lanes
    queue for the loop, in a drain or where handlers compute, and while the task is far behind, results are gathered for
    up to 50 ms: those messages have waited longer than that, and the lanes go on meanwhile.

    Used on the loop's thread only; :meth:`poll` serves the reports.
    """

    def __init__(
        self, seat: Seat, graveyard: Graveyard, app: App, *, limit: int, stamps: bool = False
    ) -> None:
        self._graveyard = graveyard
        self._scribe = seat.scribe
        self._exact = app.delivery == "exactly_once"
        self._producer = None if self._exact else seat.producer
        self._app = app
        self._sink = app.sink or ""
        self._limit = limit - RECORD_OVERHEAD
        self._gathers = False
        self._gathered: list[tuple[Any, ...]] = []  # as the client's produce takes them
        self._first = 0.0  # when the first of them came
        self._timer: asyncio.TimerHandle | None = None  # lets them go
        self._loop = asyncio.get_running_loop()
        self._looked = time.monotonic()
        self._least = 0  # lanes that waited for their turn, at every look since
        self._origin = stamps if app.origin_time is None else app.origin_time

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Raises :class:`Poison` when the value is larger than the sink takes."""
        if not self._sink:  # it goes to Spark's sink, with the outcome
            delivery.value = value
            delivery.engine.acknowledge(delivery)
            return
        headers = delivery.carried
        if not headers or headers[-1][0] != EVENT_ID:  # it almost always is: the hot path
            headers = _identified(delivery, headers)
        if self._origin:
            headers = with_origin(delivery, headers)
        if len(value) > self._limit - 1024:
            self._check_size(delivery, value, headers)
        if self._producer is None:
            self._scribe.put(self._sink, value, delivery.key, delivery.timestamp or 0, headers)
            delivery.engine.acknowledge(delivery)
        else:
            self._send(self._producer, value, delivery, headers, delivery)

    def handled(self, delivery: Delivery, values: Sequence[Result]) -> None:
        """Raises :class:`Poison` when one of them is larger than the sink takes; then none is written."""
        if not self._sink:
            if len(values) > 1:
                raise Poison(
                    f"{len(values)} handlers returned a result; commit='epoch' has one row for a message, with one "
                    "result: let only one of the handlers of a type return something"
                )
            self.result(delivery, values[0][0])
            return
        all_headers = [with_event_id(delivery, handler) for _, handler in values]
        if self._origin:
            all_headers = [with_origin(delivery, headers) for headers in all_headers]
        for (value, _), headers in zip(values, all_headers, strict=True):
            self._check_size(delivery, value, headers)
        report = delivery if len(values) == 1 else _All(delivery, len(values))
        for (value, _), headers in zip(values, all_headers, strict=True):
            if self._producer is None:
                self._scribe.put(self._sink, value, delivery.key, delivery.timestamp or 0, headers)
            else:
                self._send(self._producer, value, delivery, headers, report)
        if self._producer is None:
            delivery.engine.acknowledge(delivery)

    def _check_size(self, delivery: Delivery, value: bytes, headers: Headers) -> None:
        if self._size(delivery, value, headers) > self._limit:
            raise Poison(
                f"the result of {len(value):,} bytes is larger than topic {self._sink!r} takes "
                f"(max.message.bytes less overhead: {self._limit:,})"
            )

    def letter(
        self,
        delivery: Delivery,
        letter: DeadLetter | None,
        kind: Literal["dead", "archived", "parked"],
        park: int | None,
        then: Then,
    ) -> None:
        """To the dead letters: see :class:`Graveyard`."""
        self._graveyard.letter(delivery, letter, kind, park, then)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """A record of the state topic."""
        if self._exact:
            self._scribe.note(partition, name, value)
            self._scribe.soon(then)
        else:
            self._scribe.note(partition, name, value, then)

    def _send(
        self, producer: Producer, value: bytes, delivery: Delivery, headers: Headers, report: Report
    ) -> None:
        # By place (…, partition, callback, on_delivery, timestamp, headers): the hot path.
        record = (
            self._sink,
            value,
            delivery.key,
            ANY_PARTITION,
            report,
            None,
            delivery.timestamp or 0,
            headers,
        )
        engine = delivery.engine
        if not self._gathers:
            self._give(producer, (record,), engine)
            return
        gathered = self._gathered
        gathered.append(record)
        count = len(gathered)
        if count == 1:
            self._first = time.monotonic()
            self._timer = self._loop.call_later(_HOLD, self._let_go, producer, engine)
        # That comes late where handlers have the loop to themselves.
        elif not count % 32 and time.monotonic() - self._first > _HOLD:
            self._let_go(producer, engine)

    def close(self) -> None:
        """Send nothing more: what was gathered and not sent is not done."""
        if self._timer is not None:
            self._timer.cancel()
        self._gathered = []

    def _let_go(self, producer: Producer, engine: Engine) -> None:
        if self._timer is not None:
            self._timer.cancel()
        gathered, self._gathered = self._gathered, []
        self._give(producer, gathered, engine)

    def _give(self, producer: Producer, records: Sequence[tuple[Any, ...]], engine: Engine) -> None:
        """To the client. One that takes no more ends the task, and nothing may overtake what it did not take."""
        if engine.failure.done():
            return
        produce: Any = producer.produce  # its stub asks for headers of a wider type, which lists are not
        try:
            for record in records:
                while True:
                    try:
                        produce(*record)
                        break
                    except BufferError:
                        # Gigabytes wait for a broker that does not answer: nothing else can go on either.
                        producer.poll(0.1)
                        if engine.failure.done():  # one that was taken before could not be written
                            return
        except Exception as error:
            engine.fail(
                KafkaError(
                    f"topic {self._sink!r} takes no results: {error}. What was not written runs again."
                )
            )

    def look(self, engine: Engine) -> None:
        """Decide now and then whether results are gathered: by how many lanes or messages wait for their turn."""
        waiting = engine.held if engine.behind else len(engine.table.ready)
        self._least = min(self._least, waiting)
        now = time.monotonic()
        if now - self._looked < _LOOK or self._producer is None:
            return
        gathered, self._gathers = self._gathers, self._least > CROWDED
        self._looked, self._least = now, waiting
        if gathered and not self._gathers:
            self._let_go(self._producer, engine)  # before anything overtakes them

    def poll(self) -> None:
        """Serve what has been acknowledged."""
        if self._producer is not None:
            self._producer.poll(0)
        self._graveyard.poll()

    @staticmethod
    def _size(delivery: Delivery, value: bytes, headers: Headers) -> int:
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        return len(value) + len(delivery.key or b"") + carried
