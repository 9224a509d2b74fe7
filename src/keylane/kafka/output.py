"""The producer: results to the sink, dead letters to ``<app>.dlq``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from keylane.errors import KafkaError, Poison
from keylane.kafka.state import PROGRESS
from keylane.message import EVENT_ID

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from keylane.app import App
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import DeadLetter
    from keylane.message import Headers

ANY_PARTITION = -1
RECORD_OVERHEAD = 128
"""Bytes a record takes in its batch besides key, value and headers, rounded up."""


class KafkaOutput:
    """An :class:`~keylane.engine.engine.Output` over one idempotent producer.

    Key, headers and timestamp go over as they came. Used on the loop's thread only; :meth:`poll` serves the delivery
    reports, which call the deliveries.
    """

    def __init__(self, producer: Producer, app: App, *, limit: int) -> None:
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

    def dead(self, delivery: Delivery, letter: DeadLetter) -> None:
        """The message as it came, with the failure's context in added headers."""
        context: Headers = [
            ("keylane-app", self._app.name.encode()),
            ("keylane-topic", delivery.topic.encode()),
            ("keylane-partition", str(delivery.partition).encode()),
            ("keylane-offset", str(delivery.offset).encode()),
            ("keylane-timestamp", str(delivery.timestamp or 0).encode()),
            ("keylane-stage", letter.stage.encode()),
            ("keylane-error", letter.error.encode()),
            ("keylane-message", letter.message.encode("utf-8", "replace")),
            ("keylane-traceback", letter.traceback.encode("utf-8", "replace")),
            ("keylane-attempts", str(letter.attempts).encode()),
            ("keylane-failed-at", f"{letter.failed_at:.3f}".encode()),
        ]
        try:
            headers = delivery.headers
        except UnicodeDecodeError as error:
            headers = []
            context.append(("keylane-headers-unreadable", str(error).encode()))
        self._send(self._app.dlq, delivery.original, delivery, headers + context)

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

    async def state(self, partition: int, value: bytes) -> None:
        """Write a task's progress to the state topic and wait until it is there. Raises KafkaError if refused."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def report(error: Any, _message: Any) -> None:
            if not written.done():
                written.set_exception(
                    KafkaError(f"topic {self._app.state!r}: {error.str()}")
                ) if error else written.set_result(None)

        self._produce(self._app.state, value, PROGRESS, partition=partition, on_delivery=report)
        while not written.done():  # the pump has ended when the last progress is written
            self._producer.poll(0)
            await asyncio.sleep(0.005)
        written.result()

    def poll(self) -> None:
        """Serve what has been acknowledged."""
        self._producer.poll(0)

    @staticmethod
    def _size(delivery: Delivery, value: bytes, headers: Headers) -> int:
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        return len(value) + len(delivery.key or b"") + carried
