"""The producer: results to the sink, records to the state topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from keylane.errors import Poison
from keylane.message import EVENT_ID

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from keylane.app import App
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Then
    from keylane.kafka.graveyard import Graveyard
    from keylane.kafka.seat import Seat
    from keylane.message import Headers

ANY_PARTITION = -1
RECORD_OVERHEAD = 128
"""Bytes a record takes in its batch besides key, value and headers, rounded up."""


class KafkaOutput:
    """An :class:`~keylane.engine.engine.Output`. Key, headers and timestamp go over as they came.

    With ``delivery="at_least_once"`` results go through the seat's idempotent producer, whose delivery reports call
    the deliveries, and records through the scribe's next transaction. With ``"exactly_once"`` everything goes into the
    open transaction and counts at once, for what follows is in it too or in a later one; should it be aborted, the
    task begins again from what was committed last.

    Used on the loop's thread only; :meth:`poll` serves the reports.
    """

    def __init__(self, seat: Seat, graveyard: Graveyard, app: App, *, limit: int) -> None:
        self._graveyard = graveyard
        self._scribe = seat.scribe
        self._exact = app.delivery == "exactly_once"
        self._producer = None if self._exact else seat.producer
        self._app = app
        self._sink = app.sink or ""
        self._limit = limit - RECORD_OVERHEAD

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Raises :class:`Poison` when the value is larger than the sink takes."""
        if not self._sink:  # it goes to Spark's sink, with the outcome
            delivery.value = value
            delivery.engine.acknowledge(delivery)
            return
        headers = delivery.headers
        for name, _ in headers:
            if name == EVENT_ID:
                break
        else:
            headers = [*headers, (EVENT_ID, delivery.position.encode())]
        if len(value) > self._limit - 1024 and self._size(delivery, value, headers) > self._limit:
            raise Poison(
                f"the result of {len(value):,} bytes is larger than topic {self._sink!r} takes "
                f"(max.message.bytes less overhead: {self._limit:,})"
            )
        if self._producer is None:
            self._scribe.put(self._sink, value, delivery.key, delivery.timestamp or 0, headers)
            delivery.engine.acknowledge(delivery)
        else:
            self._send(self._producer, value, delivery, headers)

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

    def _send(self, producer: Producer, value: bytes, delivery: Delivery, headers: Headers) -> None:
        produce: Any = producer.produce  # its stub asks for headers of a wider type, which lists are not
        while True:
            try:
                # By place (…, partition, callback, on_delivery, timestamp, headers): the hot path.
                produce(
                    self._sink,
                    value,
                    delivery.key,
                    ANY_PARTITION,
                    delivery,
                    None,
                    delivery.timestamp or 0,
                    headers,
                )
            except BufferError:
                # Gigabytes wait for a broker that does not answer: nothing else can go on either.
                producer.poll(0.1)
            else:
                return

    def poll(self) -> None:
        """Serve what has been acknowledged."""
        if self._producer is not None:
            self._producer.poll(0)
        self._graveyard.poll()

    @staticmethod
    def _size(delivery: Delivery, value: bytes, headers: Headers) -> int:
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        return len(value) + len(delivery.key or b"") + carried
