"""Stage that is called with consecutive messages of one lane, in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from keylane.engine.admission import NotAdmittedError
from keylane.engine.breaker_gate import BreakerOpenError
from keylane.handlers.batches import as_table, read_results

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from keylane.engine.breaker_gate import BreakerGate
    from keylane.engine.rate_gate import RateGate
    from keylane.handlers.payloads import Read
    from keylane.message import Message


class LaneBatchStage:
    """The stage: what is called with a batch. Used on the loop's thread only.

    ``call`` is the function with its time-out or thread. At most ``limit`` calls run at once, of which retries take at
    most ``retry_share``. ``gate`` counts messages. ``read`` makes the payload of a value; with ``table`` the stage gets
    a table.
    """

    def __init__(
        self,
        stage: str,
        call: Callable[[Any], Awaitable[Any]],
        *,
        max_size: int,
        limit: int | None,
        retry_share: float,
        read: Read | None,
        table: bool,
        gate: BreakerGate | None,
        rate: RateGate | None,
    ) -> None:
        self.max_size = max_size
        self.read = read
        self.name = stage
        self._call = call
        self._as_table = table
        self._gate = gate
        self._rate = rate
        self._room = None if limit is None else asyncio.Semaphore(limit)
        self._room_for_retries = (
            None if limit is None else asyncio.Semaphore(max(1, int(limit * retry_share)))
        )

    async def outcomes(self, messages: Sequence[Message]) -> list[Any]:
        """What became of the first messages of these: results and exceptions, in order, at least one.

        Raises what the call raised, and :class:`BreakerOpenError` when the breaker admits none.
        """
        if self._room is None or self._room_for_retries is None:
            return await self._guarded(messages)
        if messages[0].attempt > 1:
            async with self._room_for_retries, self._room:
                return await self._guarded(messages)
        async with self._room:
            return await self._guarded(messages)

    async def _guarded(self, messages: Sequence[Message]) -> list[Any]:
        gate = self._gate
        if self._rate is not None and (gate is None or not gate.shut):
            admitted = self._rate.admitted(messages)
            if not admitted:
                raise NotAdmittedError(self._rate, f"stage {self.name!r} is at its rate")
            messages = messages[:admitted]
        given, count = self._argument(messages)
        if gate is None:
            return read_results(self.name, await self._call(given), count)
        generations: list[int] = []
        while len(generations) < count and (found := gate.admit()) is not None:
            generations.append(found)
        if not generations:
            raise BreakerOpenError(gate)
        try:
            returned = await self._call(given[: len(generations)])
            outcomes = read_results(self.name, returned, len(generations))
        except BaseException as error:
            for generation in generations:
                gate.ended(generation, error)
            raise
        for generation, outcome in zip(generations, outcomes, strict=True):
            gate.ended(generation, outcome if isinstance(outcome, BaseException) else None)
        return outcomes

    def _argument(self, messages: Sequence[Message]) -> tuple[Any, int]:
        """What the function is called with, and of how many messages: those before the first that does not fit.

        Raises why the first one does not fit.
        """
        if self._as_table:
            count = len(messages)
            given, failed = as_table(messages)
            while failed and (count := min(failed)):
                given, failed = as_table(messages[:count])
            if failed and len(messages) > 1:  # the first one does not fit with the others
                count = 1
                given, failed = as_table(messages[:1])
            if failed:
                raise failed[0]
            return given, count
        if self.read is None:
            return list(messages), len(messages)
        payloads: list[Any] = []
        for message in messages:
            try:
                payloads.append(self.read(message.value))
            except Exception:
                if not payloads:
                    raise
                break  # it is the first of the next batch
        return payloads, len(payloads)
