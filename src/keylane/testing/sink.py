"""Where results and dead letters go in a run of the harness."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.engine.dispatch import with_event_id
from keylane.message import EVENT_ID, with_origin

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from keylane.app import App
    from keylane.core.letter import DeadLetter
    from keylane.engine.delivery import Delivery
    from keylane.engine.dispatch import Result
    from keylane.engine.engine import Then
    from keylane.message import Headers
    from keylane.testing.faults import Pause, Refuse
    from keylane.testing.log import MemoryLog

    Place = tuple[str, int]  # a topic and a partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A result in the sink."""

    key: bytes | None
    value: bytes
    headers: Headers
    partition: int
    offset: int
    timestamp: int | None = None
    """Its message's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A dead letter: the message as it came, its place in the source, and why."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int
    offset: int
    stage: str
    error: str
    message: str
    traceback: str
    attempts: int
    kind: str = "dead"
    """``dead``, ``archived``, or ``parked``: then ``stage`` and all about the failure may be empty."""
    park: int | None = None
    """Where its lane was parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOver:
    """What the sink will make durable: the write, and who is told."""

    write: Callable[[], None]
    tell: Callable[[], None]


class MemorySink:
    """The sink and the dead-letter topic: an :class:`~keylane.engine.engine.Output` that keeps what it is given.

    Acknowledges after a while drawn from ``latency``, in order in each partition of a topic, and not during a pause.
    """

    def __init__(
        self,
        app: App,
        log: MemoryLog,
        *,
        rng: random.Random,
        latency: tuple[float, float],
        pauses: Sequence[Pause] = (),
        refusals: Sequence[Refuse] = (),
    ) -> None:
        self.results: list[Written] = []
        self.dead_letters: list[Dead] = []
        self.notes: dict[tuple[int, bytes], bytes] = {}  # the state topic
        self._sink, self._dlq = app.sink or "", app.dlq
        self._origin = bool(app.origin_time)
        self._log = log
        self._rng = rng
        self._latency = latency
        self._refusals = refusals
        self._pauses = sorted(pauses, key=lambda pause: pause.at)
        self._waiting: dict[Place, deque[_HandedOver]] = {}
        self._last: dict[Place, float] = {}  # when the newest of a place will be acknowledged

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Key and headers go over as they came; an event id is added where there is none."""
        headers = list(delivery.headers)
        if all(name != EVENT_ID for name, _ in headers):
            headers.append((EVENT_ID, delivery.position.encode()))
        self._write(delivery, value, headers, last=True)

    def handled(self, delivery: Delivery, values: Sequence[Result]) -> None:
        """As :meth:`result`; each has an event id of its own."""
        for number, (value, handler) in enumerate(values, 1):
            self._write(delivery, value, with_event_id(delivery, handler), last=number == len(values))

    def _write(self, delivery: Delivery, value: bytes, headers: Headers, *, last: bool) -> None:
        key, topic, at = delivery.key, self._sink, delivery.timestamp
        partition = self._log.choose(topic, key)
        if self._origin:
            headers = with_origin(delivery, headers)

        def write() -> None:
            offset = self._log.append(
                topic, key=key, value=value, headers=headers, partition=partition, timestamp=at
            ).offset()
            self.results.append(
                Written(
                    key=key, value=value, headers=headers, partition=partition, offset=offset, timestamp=at
                )
            )

        def tell() -> None:
            if last:  # those before it are durable by now: all go to one partition
                delivery(None, None)
                delivery.engine.settle()

        self._hand_over((topic, partition), _HandedOver(write=write, tell=tell))

    def letter(
        self, delivery: Delivery, letter: DeadLetter | None, kind: str, park: int | None, then: Then
    ) -> None:
        """The message as it came, and why it is here."""
        dead = Dead(
            key=delivery.key,
            value=delivery.original,
            headers=list(delivery.headers),
            partition=delivery.partition,
            offset=delivery.offset,
            stage=letter.stage if letter else "",
            error=letter.error if letter else "",
            message=letter.message if letter else "",
            traceback=letter.traceback if letter else "",
            attempts=letter.attempts if letter else 0,
            kind=kind,
            park=park,
        )
        now = asyncio.get_running_loop().time()
        refused = any(refusal.at <= now < refusal.at + refusal.for_ for refusal in self._refusals)
        problem = "refused by the test" if refused else None

        def write() -> None:
            if problem is None:
                self.dead_letters.append(dead)

        self._hand_over((self._dlq, delivery.partition), _HandedOver(write=write, tell=lambda: then(problem)))

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """A record of the state topic."""

        def write() -> None:
            if value is None:
                self.notes.pop((partition, name), None)
            else:
                self.notes[partition, name] = value

        self._hand_over(("state", partition), _HandedOver(write=write, tell=lambda: then(None)))

    def crash(self) -> None:
        """Nothing handed over so far is acknowledged; of each partition some, the oldest, is there all the same."""
        for waiting in self._waiting.values():
            for handed_over in list(waiting)[: self._rng.randint(0, len(waiting))]:
                handed_over.write()
            waiting.clear()
        self._waiting, self._last = {}, {}  # timers of before the crash hold on to the empty queues

    def _hand_over(self, place: Place, handed_over: _HandedOver) -> None:
        loop = asyncio.get_running_loop()
        due = max(loop.time() + self._rng.uniform(*self._latency), self._last.get(place, 0.0))
        for pause in self._pauses:
            if pause.at <= due < pause.at + pause.for_:
                due = pause.at + pause.for_
        self._last[place] = due
        waiting = self._waiting.setdefault(place, deque())
        waiting.append(handed_over)
        loop.call_at(due, self._acknowledge, waiting)

    @staticmethod
    def _acknowledge(waiting: deque[_HandedOver]) -> None:
        if waiting:
            handed_over = waiting.popleft()
            handed_over.write()
            handed_over.tell()
