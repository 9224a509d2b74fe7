"""Sink in memory: results, dead letters and the state topic of a run of the harness."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.engine.result_ids import result_headers, result_id_prefix
from keylane.engine.results import ResultRecord
from keylane.errors import Poison
from keylane.lanes.lane_record import KEYLESS, LANE
from keylane.message import with_origin

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.output import Then
    from keylane.message import Headers
    from keylane.policies.failure_info import FailureInfo
    from keylane.spec import AppSpec
    from keylane.testing.faults import Pause, Refuse, Reject
    from keylane.testing.log import MemoryLog

    Place = tuple[str, int]  # a topic and a partition

_LAST_ANSWERS_SECONDS = 2.0
"""How long a task that ends waits for the answers of its dead letters; a worker waits as long."""
_STATE = "state", 0
"""One client writes all records of the state topic, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A result in the sink."""

    key: bytes | None
    value: Any
    """Bytes, or None for a tombstone. The type is Any, so that tests of apps without tombstones need no check."""
    headers: Headers
    partition: int
    offset: int
    timestamp: int | None = None
    """The timestamp of its message, if the result has none of its own."""
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A dead letter: the original message, its position in the history, and the failure."""

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
    """``dead``, ``archived`` or ``parked``. A parked one may have no ``stage`` and failure."""
    park: int | None = None
    """The offset at which its lane was parked."""
    redrives: int = 0
    """The number of earlier redrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOver:
    """A write that is not durable yet, and the callback for when it is."""

    write: Callable[[], None]
    tell: Callable[[], None]


class MemorySink:
    """The sink, the dead-letter topic and the state topic, as an output of the engine.

    It acknowledges after a time drawn from ``latency``, for dead letters from ``letters``, for commits and records of
    the state topic from ``commits`` (without it, commits are durable at once). Acknowledgements of one partition come
    in order, and not during a pause. With ``exactly_once`` writes are acknowledged at once, and durable when they are
    committed. Each task has a sink of its own (:meth:`of_task`).
    """

    def __init__(
        self,
        app: AppSpec,
        log: MemoryLog,
        *,
        rng: random.Random,
        latency: tuple[float, float],
        letters: tuple[float, float] | None = None,
        commits: tuple[float, float] | None = None,
        pauses: Sequence[Pause] = (),
        refusals: Sequence[Refuse] = (),
        rejections: Sequence[Reject] = (),
    ) -> None:
        self.results: list[Written] = []
        self.dead_letters: list[Dead] = []
        self.notes: dict[tuple[int, bytes], bytes] = {}  # the state topic
        self.first = 0
        """The number of the source's first partition in the history."""
        self.undone: set[tuple[int, int]] = (
            set()
        )  # messages whose dead letters may be in an aborted transaction
        self._app, self._sink, self._dlq = app.name, app.sink or "", app.dlq
        self._exact = app.delivery == "exactly_once"
        self._origin = bool(app.origin_time)
        self._log = log
        self._rng = rng
        self._latency = latency
        self._letters = latency if letters is None else letters
        self._notes = latency if commits is None else commits
        self._commits = commits or (0.0, 0.0)
        self._refusals = refusals
        self._rejections = rejections
        self._pauses = sorted(pauses, key=lambda pause: pause.at)
        self._begin()

    def _begin(self) -> None:
        self._closed = False
        self._waiting: dict[Place, deque[_HandedOver]] = {}
        self._last: dict[Place, float] = {}  # by place, when its newest write will be acknowledged
        self._open: list[Callable[[], None]] = []  # in the open transaction
        self._batch: list[Callable[[], None]] = []  # in the transaction that is being committed
        self._committing: asyncio.Event | None = None
        self._callbacks: deque[Callable[[], None]] = deque()  # callbacks of the open transaction

    def of_task(self) -> MemorySink:
        """A sink for one task, with the same topics. What it has not written yet can be lost separately."""
        own = copy.copy(self)
        own._begin()  # noqa: SLF001 - its own class
        return own

    def recreated(self, first: int) -> None:
        """The source topic was created again: records of stopped lanes no longer apply."""
        self.first = first
        for partition, name in list(self.notes):
            if name.startswith((LANE, KEYLESS)):
                del self.notes[partition, name]

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Write a result with the key and headers of its message and its own event id. Raises Poison if rejected."""
        if self._rejections:
            self._reject()
        record = ResultRecord(
            topic=self._sink,
            key=delivery.key,
            value=value,
            headers=result_headers(delivery, result_id_prefix(self._app)),
            timestamp=delivery.timestamp,
            plain=True,
        )
        self._write(delivery, record, [1])

    def all_results(self, delivery: Delivery, records: Sequence[ResultRecord]) -> None:
        """Write several results, as :meth:`result`, each with its own event id."""
        if self._rejections:
            self._reject()
        left = [len(records)]
        for record in records:
            self._write(delivery, record, left)

    def _reject(self) -> None:
        now = asyncio.get_running_loop().time()
        for rejection in self._rejections:
            within = rejection.at <= now < rejection.at + rejection.for_
            if within and self._rng.random() < rejection.chance:
                raise Poison("the sink rejected the result")

    def _write(self, delivery: Delivery, record: ResultRecord, left: list[int]) -> None:
        """Write one result. ``left``: how many of the message's results are not durable, shared by all of them."""
        key, topic, at, value = record.key, record.topic, record.timestamp, record.value
        partition = self._log.choose(topic, key)
        headers = with_origin(delivery, record.headers) if self._origin else record.headers

        def write() -> None:
            offset = self._log.append(
                topic, key=key, value=value, headers=headers, partition=partition, timestamp=at
            ).offset()
            self.results.append(
                Written(
                    key=key,
                    value=value,
                    headers=headers,
                    partition=partition,
                    offset=offset,
                    timestamp=at,
                    topic=topic,
                )
            )

        def tell() -> None:
            left[0] -= 1
            if not left[0]:
                delivery(None, None)
                delivery.engine.settle()

        self._hand_over((topic, partition), _HandedOver(write=write, tell=tell))

    def letter(
        self, delivery: Delivery, letter: FailureInfo | None, kind: str, park: int | None, then: Then
    ) -> None:
        """Write a dead letter."""
        dead = Dead(
            key=delivery.key,
            value=delivery.original,
            headers=list(delivery.headers),
            partition=self.first + delivery.partition,
            offset=delivery.offset,
            stage=letter.stage if letter else "",
            error=letter.error if letter else "",
            message=letter.message if letter else "",
            traceback=letter.traceback if letter else "",
            attempts=letter.attempts if letter else 0,
            kind=kind,
            park=park,
            redrives=delivery.failure_state.redrives if delivery.failure_state is not None else 0,
        )
        if self._exact and kind == "dead":
            self.undone.add((dead.partition, dead.offset))
        now = asyncio.get_running_loop().time()
        refused = any(refusal.at <= now < refusal.at + refusal.for_ for refusal in self._refusals)
        problem = "refused by the fault schedule" if refused else None

        def write() -> None:
            if problem is None:
                self.dead_letters.append(dead)

        handed_over = _HandedOver(write=write, tell=lambda: then(problem))
        self._hand_over((self._dlq, delivery.partition), handed_over, self._letters)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """Write a record of the state topic."""

        def write() -> None:
            if value is None:
                self.notes.pop((partition, name), None)
            else:
                self.notes[partition, name] = value

        self._hand_over(_STATE, _HandedOver(write=write, tell=lambda: then(None)), self._notes)

    def put(self, write: Callable[[], None]) -> None:
        """Make another write to the state topic, after all earlier ones."""
        self._hand_over(_STATE, _HandedOver(write=write, tell=lambda: None), self._notes)

    def delete(self, partition: int, name: bytes, value: bytes) -> None:
        """Delete a record of the state topic, unless it has another value by then."""

        def write() -> None:
            if self.notes.get((partition, name)) == value:
                del self.notes[partition, name]

        self._hand_over(_STATE, _HandedOver(write=write, tell=lambda: None), self._notes)

    async def commit(self, close: Callable[[], Callable[[], None]]) -> None:
        """Write progress after everything that it counts as done, and return when it is durable.

        ``close`` returns the write, when no more will be added. With ``exactly_once`` all of it is written at once.
        """
        if not self._exact:
            written = asyncio.Event()
            self._hand_over(_STATE, _HandedOver(write=close(), tell=written.set), self._commits)
            await written.wait()
            return
        while self._committing is not None:
            await self._committing.wait()
        self._serve()
        batch = [*self._open, close()]
        self._open = []
        committed = self._committing = asyncio.Event()
        self._batch = batch

        def taken() -> None:
            if self._batch is batch:  # else a crash came first
                self._write_batch()
            committed.set()

        # The caller may be cancelled; the commit continues.
        asyncio.get_running_loop().call_later(self._rng.uniform(*self._commits), taken)
        await committed.wait()

    def _write_batch(self) -> None:
        batch, self._batch, self._committing = self._batch, [], None
        for write in batch:
            write()

    async def letters_answered(self) -> None:
        """Wait for the answers of dead letters that are on their way, as a worker does at the end of its epoch.

        One that became durable later would be there twice: its message runs again, in the next epoch.
        """
        loop, places = asyncio.get_running_loop(), [(self._dlq, each) for each in range(self._log.partitions)]
        deadline = loop.time() + _LAST_ANSWERS_SECONDS
        while any(self._waiting.get(place) for place in places) and loop.time() < deadline:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """End the task: its writes may still become durable, without callbacks."""
        self._closed = True

    def crash(self) -> None:
        """End the task in a crash: no more callbacks; of each partition some of the oldest writes become durable.

        With ``exactly_once``, a transaction that is being committed becomes durable completely or not at all.
        """
        if self._rng.random() < 0.5:
            self._write_batch()
        for waiting in self._waiting.values():
            for handed_over in list(waiting)[: self._rng.randint(0, len(waiting))]:
                handed_over.write()
            waiting.clear()
        self._begin()  # timers from before the crash refer to the emptied queues
        self._closed = True

    def _hand_over(
        self, place: Place, handed_over: _HandedOver, latency: tuple[float, float] | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        if self._exact:
            self._open.append(handed_over.write)
            if not self._callbacks:
                loop.call_soon(self._serve)
            self._callbacks.append(handed_over.tell)
            return
        due = max(loop.time() + self._rng.uniform(*latency or self._latency), self._last.get(place, 0.0))
        for pause in self._pauses:
            if pause.at <= due < pause.at + pause.for_:
                due = pause.at + pause.for_
        self._last[place] = due
        waiting = self._waiting.setdefault(place, deque())
        waiting.append(handed_over)
        loop.call_at(due, self._acknowledge, waiting)

    def _serve(self) -> None:
        while self._callbacks:
            tell = self._callbacks.popleft()
            if not self._closed:
                tell()

    def _acknowledge(self, waiting: deque[_HandedOver]) -> None:
        if waiting:
            handed_over = waiting.popleft()
            handed_over.write()
            if not self._closed:
                handed_over.tell()
