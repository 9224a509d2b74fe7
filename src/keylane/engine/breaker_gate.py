"""Breaker gate: reports a stage's calls to its circuit breaker, and queues lanes while the breaker is open."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from keylane.engine.admission import NotAdmittedError
from keylane.policies.breaker import Circuit, CircuitState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import Lane
    from keylane.message import Message
    from keylane.policies.breaker import Breaker


class BreakerOpenError(NotAdmittedError):
    """The stage may not be called now, because its breaker is open."""

    def __init__(self, gate: BreakerGate) -> None:
        super().__init__(gate, f"the breaker of stage {gate.stage!r} is open")


class BreakerGate:
    """The gate of one stage. Used only on the loop's thread.

    Lanes that reach a closed gate wait together. When it opens, they resume a few at a time, as the circuit allows.
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
        self._open_for = breaker.open_for
        self._loop = loop
        self._transient = transient
        self._waiting: deque[Lane[Delivery]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._resume: Callable[[Lane[Delivery]], None] = lambda _lane: None
        self._tell: Callable[[str, CircuitState], None] = lambda _stage, _state: None

    def attach(
        self, *, resume: Callable[[Lane[Delivery]], None], tell: Callable[[str, CircuitState], None]
    ) -> None:
        """Connect the engine: ``resume`` resumes a lane, ``tell`` is called when the breaker changes its state."""
        self._resume, self._tell = resume, tell

    def guard(self, call: Callable[[Message], Awaitable[Any]]) -> Callable[[Message], Awaitable[Any]]:
        """Wrap the stage's call. The wrapper raises :class:`BreakerOpenError` if no call may start now."""
        circuit, now = self.circuit, self._loop.time

        async def guarded(message: Message) -> Any:
            if not circuit.admit(now()):
                raise BreakerOpenError(self)
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
        """The call's generation, to be passed to :meth:`ended`; None if no call may start now."""
        return self.circuit.generation if self.circuit.admit(self._loop.time()) else None

    def ended(self, generation: int, error: BaseException | None) -> None:
        """Report the end of an admitted call."""
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
        """Queue a lane that reached the closed gate."""
        self._waiting.append(lane)
        self._let_in()

    @property
    def shut(self) -> bool:
        """Whether no call may start now."""
        return self.circuit.room(self._loop.time()) == 0

    @property
    def waiting(self) -> int:
        """The number of waiting lanes."""
        return len(self._waiting)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _let_in(self) -> None:
        """Resume as many lanes as the circuit admits, and set a timer for the next ones.

        A lane that was let in may not come: it is held for a redrive, or its message is passed over. Without a call
        nothing ends that would let others in, so after ``open_for`` as many others are let in.
        """
        waiting, circuit = self._waiting, self.circuit
        now, may_not_come = self._loop.time(), False
        room = circuit.room(now)
        while waiting and (room is None or room > 0):
            self._resume(waiting.popleft())
            if room is not None:
                room -= 1
                may_not_come = True
        if not waiting:
            circuit.nobody_waits(now)
        elif self._timer is None:
            at = now + self._open_for if may_not_come else circuit.next_at
            if at is not None:
                self._timer = self._loop.call_at(at, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._let_in()

    def _changed(self, _before: CircuitState, after: CircuitState) -> None:
        self._tell(self.stage, after)
