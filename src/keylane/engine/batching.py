"""Batcher: calls a batch stage with the heads of many lanes, and gives each message its own result.

For the engine it is a normal stage: a lane's runner calls it with its message and waits. The runner of a batch's first
message makes the call for all of them, so a batch is cancelled like any stage, with its runner.

Retried messages are batched separately, so that a message that makes its batch fail does not affect first attempts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from keylane.engine.breaker_gate import BreakerOpenError
from keylane.engine.lane_state import arguments_of
from keylane.handlers.batches import as_table, read_results

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from keylane.engine.breaker_gate import BreakerGate
    from keylane.engine.delivery import Delivery
    from keylane.handlers.batches import Batching
    from keylane.handlers.payloads import Read
    from keylane.lanes.lane_table import LaneTable
    from keylane.message import Message


class BatchWithStates(NamedTuple):
    """The argument of a batch stage that takes states."""

    items: Any
    states: dict[str, list[Any]]
    """By parameter, one for each message."""


class _Failure:
    """How a message of a batch failed. Several may share the exception, so its traceback is stored separately."""

    __slots__ = ("error", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.traceback: TracebackType | None = error.__traceback__


class _Batch:
    """The messages of one call. The first one's runner makes the call; the others wait for their results."""

    __slots__ = ("due", "go", "items", "line", "messages", "number", "others", "timer")

    def __init__(self, line: _BatchQueue, number: int, go: asyncio.Future[None]) -> None:
        self.line = line
        self.number = number
        self.go = go  # done when the first runner may call
        self.messages: list[Message] = []
        self.items: list[Any] = []  # the argument for each message
        self.others: list[asyncio.Future[Any]] = []  # the results of all but the first
        self.due = False  # it may start when it is its turn
        self.timer: asyncio.TimerHandle | None = None

    def answer(self, outcomes: Sequence[Any]) -> None:
        """Give all but the first their outcomes."""
        for future, outcome in zip(self.others, outcomes[1:], strict=True):
            if not future.done():
                future.set_result(outcome)

    def turn_away(self, admitted: int, gate: BreakerGate) -> None:
        """Reject all but the first ``admitted`` messages: the breaker does not admit them."""
        for future in self.others[max(0, admitted - 1) :]:
            if not future.done():
                future.set_result(_Failure(BreakerOpenError(gate)))
        del self.others[max(0, admitted - 1) :], self.messages[admitted:], self.items[admitted:]

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def cancel(self) -> None:
        """Cancel all messages, because the call was cancelled."""
        for future in self.others:
            future.cancel()


class _BatchQueue:
    """Batches of first attempts, or of retries: the full ones, oldest first, and the one that still grows."""

    __slots__ = ("full", "most", "open", "running")

    def __init__(self, most: float) -> None:
        self.most = most  # at once
        self.running = 0
        self.open: _Batch | None = None
        self.full: deque[_Batch] = deque()

    def next(self) -> _Batch | None:
        """The next batch that may start, or None."""
        if self.running >= self.most:
            return None
        if self.full:
            return self.full[0]
        return self.open if self.open is not None and self.open.due else None

    def take(self, batch: _Batch) -> None:
        """Remove the batch from the queue."""
        if batch is self.open:
            self.open = None
        elif batch in self.full:
            self.full.remove(batch)


class Batcher:
    """One batch stage. Used on the loop's thread only.

    A batch is closed when it has ``max_size`` messages, or when its first has waited for ``max_wait``. It is closed at
    once if only messages that have not arrived yet could join it and its lanes have more to do. In a drain no batch
    waits. While ``limit`` batches run, a batch that is due keeps growing.

    ``call`` is the stage itself, with its time-out or thread. ``read`` converts a value for the list; with ``table``
    the stage gets a table instead. ``states`` are parameters that take states. ``gate`` counts messages, not
    batches: in an outage their attempts run out, however few batches there are.
    """

    def __init__(
        self,
        stage: str,
        batching: Batching,
        call: Callable[[Any], Awaitable[Any]],
        *,
        limit: int | None,
        retry_share: float,
        read: Read | None,
        table: bool,
        gate: BreakerGate | None,
        states: Sequence[str] = (),
    ) -> None:
        self._stage = stage
        self._states = states
        self._size, self._wait = batching.max_size, batching.max_wait
        self._call = call
        self._limit = inf if limit is None else limit
        self._read = read
        self._as_table = table
        self._gate = gate
        self._running = 0
        self._first = _BatchQueue(inf)
        self._again = _BatchQueue(inf if limit is None else max(1, int(limit * retry_share)))
        self._numbers = count()
        self._waiting = 0  # messages in batches that have not started
        self._looking = False
        self._loop = asyncio.get_running_loop()
        self._lanes: LaneTable[Delivery] | None = None

    def attach(self, lanes: LaneTable[Delivery], *, alone: bool) -> None:
        """Connect the engine's lanes; ``alone``: there is only one lane, so no batch has two messages."""
        self._lanes = lanes
        if alone:
            self._size = 1

    def hurry(self) -> None:
        """For the drain: no new messages will arrive, so no batch waits for them."""
        self._check_soon()

    async def call(self, message: Message) -> Any:
        """The message's result, once its batch has run. Raises the message's failure."""
        if self._gate is not None and self._gate.shut:
            raise BreakerOpenError(self._gate)
        item = message if self._read is None else self._read(message.value)
        outcome = await self._outcome(message, item)
        if type(outcome) is _Failure:
            try:
                raise outcome.error.with_traceback(outcome.traceback)
            finally:
                del outcome  # avoids a reference cycle with the traceback
        return outcome

    async def _outcome(self, message: Message, item: Any) -> Any:
        line = self._again if message.attempt > 1 else self._first
        batch = line.open
        if batch is None:
            batch = line.open = _Batch(line, next(self._numbers), self._loop.create_future())
            self._join(batch, message, item)
            return await self._lead(batch)
        future = self._loop.create_future()
        batch.others.append(future)
        self._join(batch, message, item)
        return await future

    async def _lead(self, batch: _Batch) -> Any:
        """Make the batch's call once it may start; returns the first message's outcome."""
        try:
            await batch.go
            outcomes = await self._run(batch)
        except BaseException:  # cancelled
            batch.cancel()
            raise
        finally:
            self._ended(batch)
        batch.answer(outcomes)
        return outcomes[0]

    async def _run(self, batch: _Batch) -> list[Any]:
        """The outcomes of the messages still in the batch. Raises only if the call is cancelled."""
        gate = self._gate
        if gate is None:
            return await self._outcomes(batch.messages, batch.items)
        generations = [found for _ in batch.messages if (found := gate.admit()) is not None]
        admitted = len(generations)
        if admitted < len(batch.messages):  # the others wait before the gate, not for this call
            batch.turn_away(admitted, gate)
            if not admitted:
                return [_Failure(BreakerOpenError(gate))]
        try:
            outcomes = await self._outcomes(batch.messages, batch.items)
        except BaseException as error:
            for generation in generations:
                gate.ended(generation, error)
            raise
        for generation, outcome in zip(generations, outcomes, strict=True):
            gate.ended(generation, outcome.error if type(outcome) is _Failure else None)
        return outcomes

    async def _outcomes(self, messages: Sequence[Message], items: Sequence[Any]) -> list[Any]:
        failed: dict[int, Exception] = {}
        given: Any = list(items)
        if self._as_table:
            given, failed = as_table(messages)
        outcomes: list[Any] = [_Failure(failed[p]) if p in failed else None for p in range(len(messages))]
        asked = [p for p in range(len(messages)) if p not in failed]
        if not asked:
            return outcomes
        try:
            if self._states:
                of_each = [arguments_of(messages[p]) for p in asked]
                given = BatchWithStates(
                    given, {name: [one[name] for one in of_each] for name in self._states}
                )
            results = read_results(self._stage, await self._call(given), len(asked))
        except (Exception, SystemExit) as error:
            # Without this frame, which holds on to the outcomes.
            results = [error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)] * len(asked)
        for place, result in zip(asked, results, strict=True):
            outcomes[place] = _Failure(result) if isinstance(result, BaseException) else result
        return outcomes

    # When a batch starts.

    def _join(self, batch: _Batch, message: Message, item: Any) -> None:
        batch.messages.append(message)
        batch.items.append(item)
        self._waiting += 1
        if len(batch.messages) >= self._size:
            batch.line.open = None
            batch.line.full.append(batch)
            self._start()
        elif not batch.due:
            if batch.timer is None and self._wait:
                batch.timer = self._loop.call_later(self._wait, self._due, batch)
            self._check_soon()

    def _check_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        """Close the growing batch if waiting for more messages is useless."""
        self._looking = False
        lanes = self._lanes
        growing = [line.open for line in (self._first, self._again) if line.open is not None]
        if lanes is None or not growing or all(batch.due for batch in growing):
            return
        if lanes.startable:  # a runner is on its way to them
            self._check_soon()
        elif (
            lanes.closed
            or not self._wait
            or (lanes.running <= self._waiting and any(_followed(batch) for batch in growing))
        ):
            for batch in growing:
                self._due(batch)

    def _due(self, batch: _Batch) -> None:
        batch.due = True
        self._start()

    def _start(self) -> None:
        """Start as many batches as allowed, the oldest first."""
        while self._running < self._limit:
            able = [batch for line in (self._first, self._again) if (batch := line.next()) is not None]
            if not able:
                return
            batch = min(able, key=lambda one: one.number)
            batch.line.take(batch)
            if batch.go.done():  # its runner was cancelled
                continue
            self._running += 1
            batch.line.running += 1
            self._waiting -= len(batch.messages)
            batch.stop_timer()
            batch.go.set_result(None)

    def _ended(self, batch: _Batch) -> None:
        if batch.go.cancelled():  # before it began
            batch.stop_timer()
            batch.line.take(batch)
            self._waiting -= len(batch.messages)
            return
        self._running -= 1
        batch.line.running -= 1
        self._start()


def _followed(batch: _Batch) -> bool:
    """Whether its lanes have more to do, so that waiting delays them."""
    return any(message.next is not None for message in batch.messages)  # type: ignore[attr-defined]
