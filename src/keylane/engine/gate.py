"""The gate before a stage with a breaker: counts how its calls end, and keeps lanes that must not call it now."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from keylane.core.breaker import Circuit, CircuitState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from keylane.core.breaker import Breaker
    from keylane.core.lane import Lane
    from keylane.engine.delivery import Delivery
    from keylane.message import Message


class GateShutError(Exception):
    """The stage may not be called now. Never seen outside the engine: it uses up no attempt."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(f"the breaker of stage {gate.stage!r} is open")
        self.gate = gate


class Gate:
    """One stage's breaker at work. Used on the loop's thread only.

    Lanes that come to a shut gate wait together. When it opens they go on a few at a time, as the circuit has room.
    """

    def __init__(
        self,
        stage: str,
        breaker: Breaker,
        *,
        loop: asyncio.AbstractEventLoop,
        transient: Callable[[BaseException], bool],
    ) -> None:
        self.stage = stage
        self.circuit = Circuit(breaker, self._changed)
        self._loop = loop
        self._transient = transient
        self._waiting: deque[Lane[Delivery]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._resume: Callable[[Lane[Delivery]], None] = lambda _lane: None
        self._tell: Callable[[str, CircuitState], None] = lambda _stage, _state: None

    def attach(
        self, *, resume: Callable[[Lane[Delivery]], None], tell: Callable[[str, CircuitState], None]
    ) -> None:
        """The engine: how a lane goes on, and whom to tell that the breaker changed."""
        self._resume, self._tell = resume, tell

    def guard(self, call: Callable[[Message], Awaitable[Any]]) -> Callable[[Message], Awaitable[Any]]:
        """The stage behind the gate. Raises :class:`GateShutError` when it may not be called now."""
        circuit, now = self.circuit, self._loop.time

        async def guarded(message: Message) -> Any:
            if not circuit.admit(now()):
                raise GateShutError(self)
            generation = circuit.generation
            try:
                value = await call(message)
            except BaseException as error:
                self.ended(generation, error)
                raise
            circuit.succeeded(now(), generation)
            if self._waiting:
                self._let_in()
            return value

        return guarded

    def admit(self) -> int | None:
        """Whether a call may start now: then its generation, to be handed back by :meth:`ended`."""
        return self.circuit.generation if self.circuit.admit(self._loop.time()) else None

    def ended(self, generation: int, error: BaseException | None) -> None:
        """A call that was admitted has ended."""
        now = self._loop.time()
        if error is None:
            self.circuit.succeeded(now, generation)
            if not self._waiting:
                return
        elif isinstance(error, Exception) and self._transient(error):
            self.circuit.failed(now, generation)
        else:
            self.circuit.dropped(now, generation)
        self._let_in()

    def wait(self, lane: Lane[Delivery]) -> None:
        """The lane came to the shut gate."""
        self._waiting.append(lane)
        self._let_in()

    @property
    def shut(self) -> bool:
        """Whether no call may start now."""
        return self.circuit.room(self._loop.time()) == 0

    @property
    def waiting(self) -> int:
        """Lanes that wait here."""
        return len(self._waiting)

    def close(self) -> None:
        """No timer is left behind."""
        if self._timer is not None:
            self._timer.cancel()

    def _let_in(self) -> None:
        """Let as many lanes go on as there is room for, and come back when there may be more."""
        waiting, circuit = self._waiting, self.circuit
        room = circuit.room(self._loop.time())
        while waiting and (room is None or room > 0):
            self._resume(waiting.popleft())
            if room is not None:
                room -= 1
        if not waiting:
            circuit.nobody_waits(self._loop.time())
        elif self._timer is None and (at := circuit.next_at) is not None:
            self._timer = self._loop.call_at(at, self._half_open)

    def _half_open(self) -> None:
        self._timer = None
        self._let_in()

    def _changed(self, _before: CircuitState, after: CircuitState) -> None:
        self._tell(self.stage, after)
