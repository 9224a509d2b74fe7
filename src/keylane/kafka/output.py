"""The producer: results to the sink, records to the state topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from keylane.engine.dispatch import with_event_id
from keylane.errors import Poison
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
_FEW = 1_500.0
"""Results per second of a task. So few are not gathered: there are none to wait for."""
_SHORT, _MIDDLE, _LONG = 0.003, 0.009, 0.05
"""Seconds for which results are gathered, before the client's own."""
_LONGER = 1e-6
"""Seconds longer for every result per second: from 3,000 on, up to the middle."""
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

    A request holds results of one partition, and costs the broker much more than one more result in it. So results are
    gathered for a few milliseconds, unless they are so few that most would go alone anyway; and while lanes queue for
    the loop, in a drain or where handlers compute, and while the task is far behind, for up to 50: those messages have
    waited longer than that, and the lanes go on meanwhile.

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
        self._hold = _SHORT
        """Seconds for which results are gathered; 0: they are not."""
        self._gathered: list[tuple[Any, ...]] = []  # as the client's produce takes them
        self._first = 0.0  # when the first of them came
        self._timer: asyncio.TimerHandle | None = None  # lets them go
        self._loop = asyncio.get_running_loop()
        self._served, self._looked = 0, time.monotonic()
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
        if not self._hold:
            self._produce(producer, record)
            return
        gathered = self._gathered
        gathered.append(record)
        count = len(gathered)
        if count == 1:
            self._first = time.monotonic()
            self._timer = self._loop.call_later(self._hold, self._due, producer, delivery.engine)
        # That comes late where handlers have the loop to themselves.
        elif not count % 32 and time.monotonic() - self._first > self._hold:
            self._let_go(producer)

    def _due(self, producer: Producer, engine: Engine) -> None:
        try:
            self._let_go(producer)
        except Exception as error:  # nobody hears of what a timer raises
            engine.fail(error)

    def close(self) -> None:
        """Send nothing more: what was gathered and not sent is not done."""
        if self._timer is not None:
            self._timer.cancel()
        self._gathered = []

    def _let_go(self, producer: Producer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        gathered, self._gathered = self._gathered, []
        produce: Any = producer.produce  # its stub asks for headers of a wider type, which lists are not
        for record in gathered:
            try:
                produce(*record)
            except BufferError:
                self._produce(producer, record)

    @staticmethod
    def _produce(producer: Producer, record: tuple[Any, ...]) -> None:
        while True:
            try:
                return producer.produce(*record)
            except BufferError:
                # Gigabytes wait for a broker that does not answer: nothing else can go on either.
                producer.poll(0.1)

    def look(self, waiting: int) -> None:
        """Decide now and then for how long results are gathered; ``waiting`` lanes or messages wait for their turn."""
        self._least = min(self._least, waiting)
        now = time.monotonic()
        if now - self._looked < _LOOK or self._producer is None:
            return
        rate, crowded = self._served / (now - self._looked), self._least > CROWDED
        self._served, self._looked, self._least = 0, now, waiting
        if crowded or rate > _FEW:
            self._hold = _LONG if crowded else min(max(_SHORT, rate * _LONGER), _MIDDLE)
        elif self._hold:
            self._let_go(self._producer)  # before anything overtakes them
            self._hold = 0.0

    def poll(self) -> None:
        """Serve what has been acknowledged."""
        if self._producer is not None:
            self._served += self._producer.poll(0)
        self._graveyard.poll()

    @staticmethod
    def _size(delivery: Delivery, value: bytes, headers: Headers) -> int:
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        return len(value) + len(delivery.key or b"") + carried
