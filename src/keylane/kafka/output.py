"""The producer: results to the sink, records to the state topic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from keylane.errors import KafkaError, Poison
from keylane.message import EVENT_ID

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from keylane.app import App
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Then
    from keylane.kafka.graveyard import Graveyard
    from keylane.message import Headers

ANY_PARTITION = -1
RECORD_OVERHEAD = 128
"""Bytes a record takes in its batch besides key, value and headers, rounded up."""


class KafkaOutput:
    """An :class:`~keylane.engine.engine.Output` over one idempotent producer.

    Key, headers and timestamp go over as they came. Used on the loop's thread only; :meth:`poll` serves the delivery
    reports, which call the deliveries.
    """

    def __init__(self, producer: Producer, graveyard: Graveyard, app: App, *, limit: int) -> None:
        self._graveyard = graveyard
        self._producer = producer
        self._produce: Any = (
            producer.produce
        )  # its stub asks for headers of a wider type, which lists are not
        self._app = app
        self._sink = app.sink or ""
        self._limit = limit - RECORD_OVERHEAD

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Raises :class:`Poison` when the value is larger than the sink takes."""
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
        self._send(self._sink, value, delivery, headers)

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

        def report(error: Any, _message: Any) -> None:
            then(None if error is None else f"topic {self._app.state!r}: {error.str()}")

        self._produce(self._app.state, value, name, partition=partition, on_delivery=report)

    def _send(self, topic: str, value: bytes | None, delivery: Delivery, headers: Headers) -> None:
        while True:
            try:
                # By place (…, partition, callback, on_delivery, timestamp, headers): the hot path.
                self._produce(
                    topic,
                    value,
                    delivery.key,
                    ANY_PARTITION,
                    delivery,
                    None,
                    delivery.timestamp or 0,
                    headers,
                )
            except (
                BufferError
            ):  # gigabytes wait for a broker that does not answer: nothing else can go on either
                self._producer.poll(0.1)
            else:
                return

    async def state(self, partition: int, name: bytes, value: bytes | None) -> None:
        """Write a record of the state topic and wait until it is there. Raises KafkaError if refused."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(problem: str | None) -> None:
            if not written.done():
                written.set_exception(KafkaError(problem)) if problem else written.set_result(None)

        self.note(partition, name, value, answered)
        while not written.done():  # the pump has ended when the last progress is written
            self._producer.poll(0)
            await asyncio.sleep(0.005)
        written.result()

    def poll(self) -> None:
        """Serve what has been acknowledged."""
        self._producer.poll(0)
        self._graveyard.poll()

    @staticmethod
    def _size(delivery: Delivery, value: bytes, headers: Headers) -> int:
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        return len(value) + len(delivery.key or b"") + carried
