"""Lane state of one engine: what stages have changed and is not committed yet, above a store of what is.

A value has three ages. It is *passed* when its message has passed all stages: the next message of the lane sees it. It
is *done* when its message is done: the next commit contains it. It is *written* when that commit is durable: then the
store has it. Messages become done in lane order, so a commit never contains a change without those before it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from keylane.engine.delivery import TimerDelivery
from keylane.errors import Poison
from keylane.handlers.state import State, StateCodec
from keylane.handlers.timers import Timers, timer_of
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.timers import TimerQueue
    from keylane.handlers.state import StateParameter
    from keylane.handlers.timers import Timer
    from keylane.message import Message
    from keylane.spec import AppSpec

_COUNTS = (Outcome.OK, Outcome.IGNORED)
VALUE, TIMER = "s/", "t/"
"""Prefixes of the tags of states and timers."""
KEY_BYTES_ROOM = 2_000
"""Bytes of a record besides its content and key: labels, batch."""

Name = tuple[int, bytes, str]
"""Partition, lane and tag: the kind and the name of the value."""


class StoredValue:
    """A value of a lane, or its removal. It is compared by identity: each change is an object of its own."""

    __slots__ = ("content", "due", "offset")

    def __init__(self, content: bytes | None, due: int, offset: int) -> None:
        self.content = content
        """JSON; None if the value was removed."""
        self.due = due
        """Milliseconds since 1970 when a state expires (0: never), or when a timer is due."""
        self.offset = offset
        """The message that set it."""

    def __repr__(self) -> str:
        return f"<StoredValue {self.content!r} due={self.due} offset={self.offset}>"


class ValueStore(Protocol):
    """What is committed. Used on the loop; it answers at once."""

    def get(self, name: Name) -> StoredValue | None:
        """The value, expired or not; None if there is none."""

    def lane(self, partition: int, lane: bytes) -> Mapping[str, StoredValue]:
        """All values of a lane, by tag."""

    def put(self, changes: Mapping[Name, StoredValue]) -> None:
        """These changes were committed."""

    def due(self, until: int, prefix: str, limit: int, *, after: int = 0) -> list[tuple[Name, StoredValue]]:
        """Values of this kind with a time above ``after`` and up to ``until``, the earliest first."""

    def next_due(self, prefix: str, *, after: int = 0) -> int | None:
        """The earliest time above ``after`` of a value of this kind."""


class MemoryValues:
    """A store in memory, for tests and DataFrames. ``owns``: whose timers fire here, when others share the values."""

    def __init__(
        self,
        values: dict[Name, StoredValue] | None = None,
        owns: Callable[[int, bytes], bool] = lambda _partition, _lane: True,
    ) -> None:
        self.values = {} if values is None else values
        self._owns = owns

    def get(self, name: Name) -> StoredValue | None:
        """The value, or None."""
        return self.values.get(name)

    def lane(self, partition: int, lane: bytes) -> Mapping[str, StoredValue]:
        """All values of a lane, by tag."""
        return {name[2]: value for name, value in self.values.items() if name[:2] == (partition, lane)}

    def put(self, changes: Mapping[Name, StoredValue]) -> None:
        """Take these changes over."""
        for name, value in changes.items():
            if value.content is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def due(self, until: int, prefix: str, limit: int, *, after: int = 0) -> list[tuple[Name, StoredValue]]:
        """Values of this kind with a time above ``after`` and up to ``until``, the earliest first."""
        found = [
            (name, value)
            for name, value in self.values.items()
            if name[2].startswith(prefix) and after < value.due <= until and self._owns(name[0], name[1])
        ]
        return sorted(found, key=lambda item: item[1].due)[:limit]

    def next_due(self, prefix: str, *, after: int = 0) -> int | None:
        """The earliest time above ``after`` of a value of this kind."""
        times = (
            value.due
            for name, value in self.values.items()
            if name[2].startswith(prefix) and value.due > after and self._owns(name[0], name[1])
        )
        return min(times, default=None)


class Attempt:
    """The states of one attempt at one stage, and the lane's timers if it takes them, by parameter."""

    __slots__ = ("arguments", "timers")

    def __init__(self, arguments: dict[str, Any], timers: Timers | None) -> None:
        self.arguments = arguments
        self.timers = timers


class MessageState:
    """What the stages of one message have changed so far."""

    __slots__ = ("attempt", "changes", "lane", "partition")

    def __init__(self, partition: int, lane: bytes) -> None:
        self.partition = partition
        self.lane = lane
        self.changes: dict[str, StoredValue] = {}
        """By tag: changes of stages that have ended well."""
        self.attempt: Attempt | None = None


class LaneStates:
    """The lane state of one engine; used on its ``loop`` only, except by stages in threads that list timers.

    ``record_limit`` is the largest record of the topic.
    """

    def __init__(
        self,
        app: AppSpec,
        store: ValueStore,
        *,
        wall: Callable[[], float],
        record_limit: int = 0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._store = store
        self._wall = wall
        self._record_limit = record_limit
        self._one_partition = app.order.max_tasks == 1  # a lane spans partitions: its values are in the first
        self._codecs = {name: spec.codec() for name, spec in app.states.items()}
        self._timer_names = frozenset(app.timers)
        self._loop = loop
        self.timers: TimerQueue | None = None  # written by the engine, once
        self._passed: dict[Name, StoredValue] = {}  # of messages that have passed, until it is written
        self._done: dict[Name, StoredValue] = {}  # of messages that are done, until it is written

    # For stages.

    def begin(self, delivery: Delivery, taken: Sequence[_Taken], timers: str | None = None) -> MessageState:
        """Begin an attempt: read the states that its stage takes. Raises :class:`Poison` without a lane."""
        state: MessageState | None = delivery.state  # type: ignore[attr-defined]  # of the class for apps with states
        if state is None:
            lane: bytes | None = delivery.lane.key  # type: ignore[union-attr,assignment]  # it runs
            if lane is None:
                raise Poison(
                    f"message {delivery.position} has no key, so it has no lane and no state; send it with a key, or "
                    "handle it in an app whose stages take no State"
                )
            state = MessageState(0 if self._one_partition else delivery.partition, lane)
            delivery.state = state  # type: ignore[attr-defined]
        arguments: dict[str, Any] = {}
        for parameter, tag, codec in taken:
            value = state.changes.get(tag) or self.current((state.partition, state.lane, tag))
            content = None if value is None else value.content
            arguments[parameter] = State(codec, delivery.key, content)
        given = None
        if timers is not None:
            given = arguments[timers] = Timers(self._timer_names, partial(self._timers_of, state), self._wall)
        state.attempt = Attempt(arguments, given)
        return state

    def _timers_of(self, state: MessageState) -> Mapping[str, Timer]:
        """The lane's timers as its next message sees them, from any thread."""
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if not on_loop and self._loop is not None:
            return asyncio.run_coroutine_threadsafe(self._timers_on_loop(state), self._loop).result()
        values = dict(self._store.lane(state.partition, state.lane))
        values |= {
            name[2]: value
            for name, value in self._passed.items()
            if name[:2] == (state.partition, state.lane)
        }
        values |= state.changes
        return {
            name: timer_of(name, value.due, value.content)
            for tag, value in values.items()
            if tag.startswith(TIMER) and value.content is not None and (name := tag.removeprefix(TIMER))
        }

    async def _timers_on_loop(self, state: MessageState) -> Mapping[str, Timer]:
        return self._timers_of(state)

    def keep(self, delivery: Delivery, state: MessageState, taken: Sequence[_Taken]) -> None:
        """The attempt ended well: keep what it has changed. Raises :class:`Poison` for what cannot be stored."""
        arguments = state.attempt.arguments if state.attempt is not None else {}
        found: list[tuple[str, StoredValue]] = []
        for parameter, tag, codec in taken:
            content = arguments[parameter].close()
            if content is False:
                continue
            due = 0
            if content is not None:
                if codec.spec.ttl is not None:
                    due = int((self._wall() + codec.spec.ttl) * 1000)
                self._check_record(codec, state.lane, content)
            found.append((tag, StoredValue(content, due, delivery.offset)))
        if state.attempt is not None and state.attempt.timers is not None:
            for timer, change in state.attempt.timers.close().items():
                found.append((TIMER + timer, StoredValue(change.content, change.due, delivery.offset)))
        state.attempt = None
        state.changes.update(found)

    def current(self, name: Name) -> StoredValue | None:
        """The value that the next message of the lane sees."""
        value = self._passed.get(name)
        if value is None:
            value = self._store.get(name)
        if value is not None and value.due and name[2].startswith(VALUE) and value.due <= self._wall() * 1000:
            return None
        return value

    def _check_record(self, codec: StateCodec, lane: bytes, content: bytes) -> None:
        size = len(content) + len(lane) + len(codec.spec.name) + KEY_BYTES_ROOM
        if 0 < self._record_limit < size:
            raise Poison(
                f"state {codec.spec.name!r} needs a record of {size:,} bytes, and its topic takes "
                f"{self._record_limit:,} (max.message.bytes): keep less in it, or raise the topic's limit"
            )

    # For the engine.

    def taken(self, parameters: Sequence[StateParameter]) -> tuple[_Taken, ...]:
        """What a stage takes, ready for :meth:`begin`."""
        return tuple((one.parameter, VALUE + one.state, self._codecs[one.state]) for one in parameters)

    def passed(self, delivery: Delivery) -> None:
        """The message has passed all stages: the next one of its lane sees its changes."""
        if isinstance(delivery, TimerDelivery):
            self._remove(delivery)
        state: MessageState | None = delivery.state  # type: ignore[attr-defined]
        if state is not None and state.changes:
            partition, lane = state.partition, state.lane
            for tag, value in state.changes.items():
                self._passed[partition, lane, tag] = value

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """These messages are done: the next commit contains their changes. One that failed for good has none."""
        for delivery in deliveries:
            state: MessageState | None = delivery.state  # type: ignore[attr-defined]
            counts = delivery.outcome in _COUNTS or delivery.timer is not None
            if state is not None and state.changes and counts:
                partition, lane = state.partition, state.lane
                for tag, value in state.changes.items():
                    self._done[partition, lane, tag] = value

    def timer_failed(self, delivery: TimerDelivery) -> None:
        """The timer's handler failed for good: nothing of it counts, except that the timer has fired."""
        delivery.state = None
        self.passed(delivery)

    def _remove(self, delivery: TimerDelivery) -> None:
        """The timer has fired: it is removed, unless its handler has set it again."""
        partition, lane, tag = delivery.name
        if delivery.state is None:
            delivery.state = MessageState(partition, lane)
        delivery.state.changes.setdefault(tag, StoredValue(None, 0, delivery.stored.offset))

    # For timers.

    def due(self, until: int, limit: int, *, after: int) -> list[tuple[Name, StoredValue]]:
        """Committed timers, the earliest first."""
        return self._store.due(until, TIMER, limit, after=after)

    def next_due(self, *, after: int) -> int | None:
        """The time of the next committed timer."""
        return self._store.next_due(TIMER, after=after)

    # For commits.

    def changed(self) -> dict[Name, StoredValue]:
        """What the next commit must contain."""
        return dict(self._done)

    def written(self, changes: Mapping[Name, StoredValue]) -> None:
        """These changes are durable."""
        self._store.put(changes)
        for name, value in changes.items():
            if self._done.get(name) is value:
                del self._done[name]
            if self._passed.get(name) is value:
                del self._passed[name]
        if self.timers is not None:
            self.timers.written(changes)

    def is_pending(self, name: Name) -> bool:
        """Whether a change of this value is not durable yet."""
        return name in self._passed or name in self._done


_Taken = tuple[str, str, StateCodec]
"""Parameter, tag and codec."""


class StatefulCall:
    """A stage that takes states: reads them before each attempt, and keeps what a successful one has changed."""

    __slots__ = ("_call", "_parameters", "_taken", "_timers")

    def __init__(
        self,
        call: Callable[[Message], Awaitable[Any]],
        parameters: Sequence[StateParameter],
        timers: str | None = None,
    ) -> None:
        self._call = call
        self._parameters = parameters
        self._timers = timers
        self._taken: tuple[LaneStates, tuple[_Taken, ...]] | None = None  # of the engine that was seen last

    async def __call__(self, message: Message) -> Any:
        """Run one attempt."""
        delivery: Delivery = message  # type: ignore[assignment]  # the engine passes its own objects
        states = delivery.engine.states
        assert states is not None  # noqa: S101 - the app takes states
        if self._taken is None or self._taken[0] is not states:
            self._taken = states, states.taken(self._parameters)
        taken = self._taken[1]
        state = states.begin(delivery, taken, self._timers)
        try:
            result = await self._call(message)
        except BaseException:
            _discard(state)
            raise
        try:
            states.keep(delivery, state, taken)
        except BaseException:
            _discard(state)
            raise
        return result


def _discard(state: MessageState) -> None:
    if state.attempt is not None:
        for argument in state.attempt.arguments.values():
            argument.discard()
        state.attempt = None


def arguments_of(message: Message) -> dict[str, Any]:
    """The states of the running attempt at this message, by parameter."""
    state: MessageState | None = getattr(message, "state", None)
    if state is None or state.attempt is None:
        raise RuntimeError(
            "a stage that takes a State got another message than its engine's: middleware must pass on its own message"
        )
    return state.attempt.arguments
