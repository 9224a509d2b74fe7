"""Rate gate of a stage: admits its calls at the stage's rate, and queues the lanes that have to wait."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from keylane.engine.admission import NotAdmittedError
from keylane.policies.rate import KeyRates, RateLimit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from keylane.engine.breaker_gate import BreakerGate
    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import Lane
    from keylane.message import Message
    from keylane.policies.rate import Rate

_MAY_NOT_COME_SECONDS = 1.0
"""A lane that was let in and does not come within this time, because it was stopped, gives its place to another."""


class RateGate:
    """The gate of one stage in one task. Used only on the loop's thread.

    ``rate`` is the stage's for the whole app; the task has the share that :meth:`attach` is given. ``per_key`` is the
    rate of each key. Lanes wait in the order in which they came; one that waits for its key delays no other.
    """

    def __init__(
        self,
        stage: str,
        rate: Rate | None,
        per_key: Rate | None,
        *,
        loop: asyncio.AbstractEventLoop,
        breaker: BreakerGate | None = None,
    ) -> None:
        self.stage = stage
        self._rate = rate
        self._limit = None if rate is None else RateLimit(rate)
        self._keys = None if per_key is None else KeyRates(per_key)
        self._loop = loop
        self._breaker = breaker
        self._waiting: deque[Lane[Delivery]] = deque()
        self._for_key: list[
            tuple[float, int, Lane[Delivery]]
        ] = []  # a heap, by the time of the key's next call
        self._let_in: dict[Lane[Delivery] | None, float] = {}  # resumed and not here yet, with the time
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._resume: Callable[[Lane[Delivery]], None] = lambda _lane: None

    def attach(self, *, resume: Callable[[Lane[Delivery]], None], share: float) -> None:
        """Connect the engine: ``resume`` resumes a lane, ``share`` is the task's part of the rate."""
        self._resume = resume
        if self._rate is not None:
            self._limit = RateLimit(self._rate, share)

    def set_share(self, share: float) -> None:
        """The task has another part of the rate from now on."""
        if self._limit is not None:
            self._limit.set_share(share, self._loop.time())
            self._arm()

    def guard(self, call: Callable[[Message], Awaitable[Any]]) -> Callable[[Message], Awaitable[Any]]:
        """Wrap the stage's call. The wrapper raises :class:`NotAdmittedError` if no call may start now."""

        async def guarded(message: Message) -> Any:
            if self._breaker is not None and self._breaker.shut:
                return await call(message)  # it raises, and nothing was called
            if not self.admit(message):
                raise NotAdmittedError(self, f"stage {self.stage!r} is at its rate")
            return await call(message)

        return guarded

    def admit(self, message: Message) -> bool:
        """Whether a call with this message may start now; if so, it counts."""
        now, key, keys = self._loop.time(), message.key, self._keys
        if keys is not None and key is not None and not keys.admits(key, now):
            return False
        lane: Lane[Delivery] | None = getattr(message, "lane", None)
        if self._limit is not None:
            if (self._waiting or self._let_in) and lane not in self._let_in:
                return False  # others came first
            admitted = self._limit.admit(now)
            self._let_in.pop(lane, None)
            if self._waiting and not self._let_in:
                self._arm()  # for the next one
            if not admitted:
                return False
        if keys is not None and key is not None:
            keys.started(key, now)
        return True

    def admitted(self, messages: Sequence[Message]) -> int:
        """How many of these messages of one lane, from the first on, may be in a call that starts now; they count."""
        if not self.admit(messages[0]):
            return 0
        now, keys = self._loop.time(), self._keys
        most = len(messages) - 1
        if self._limit is not None:
            most = min(most, max(0, self._limit.room(now) - len(self._let_in) - len(self._waiting)))
        place = 1
        while place <= most:
            key = messages[place].key
            if keys is not None and key is not None:
                if not keys.admits(key, now):
                    break
                keys.started(key, now)
            if self._limit is not None:
                self._limit.admit(now)
            place += 1
        return place

    def wait(self, lane: Lane[Delivery]) -> None:
        """Queue a lane that was not admitted."""
        head, keys = lane.head, self._keys
        if (
            keys is not None
            and head is not None
            and head.key is not None
            and not keys.admits(head.key, self._loop.time())
        ):
            heapq.heappush(self._for_key, (keys.due(head.key), next(self._numbers), lane))
        else:
            self._waiting.append(lane)
        self._arm()

    @property
    def waiting(self) -> int:
        """The number of waiting lanes."""
        return len(self._waiting) + len(self._for_key)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        now = self._loop.time()
        at = self._for_key[0][0] if self._for_key else inf
        if self._waiting:
            wait = 0.0 if self._limit is None else self._limit.wait(now)
            if not wait and self._let_in:  # those who were let in come first, or never
                wait = max(0.0, min(self._let_in.values()) + _MAY_NOT_COME_SECONDS - now)
            at = min(at, now + wait)
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look) if at < inf else None

    def _look(self) -> None:
        """Resume as many lanes as may call now, and set a timer for the next ones."""
        # The loop's clock may be a little before the time of the timer.
        now = max(self._loop.time(), self._timer_at)
        self._timer, self._timer_at = None, inf
        while self._for_key and self._for_key[0][0] <= now:
            self._waiting.append(heapq.heappop(self._for_key)[2])
        for lane, since in list(self._let_in.items()):
            if now >= since + _MAY_NOT_COME_SECONDS:
                del self._let_in[lane]
        room = inf if self._limit is None else self._limit.room(now) - len(self._let_in)
        while self._waiting and room > 0:
            lane = self._waiting.popleft()
            if self._limit is not None:
                self._let_in[lane] = now
            self._resume(lane)
            room -= 1
        self._arm()
