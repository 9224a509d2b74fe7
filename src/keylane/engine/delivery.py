"""Delivery: a message together with the engine's state of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.message import Message
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from keylane.engine.engine import Engine
    from keylane.engine.lane_state import MessageState, Name, StoredValue
    from keylane.engine.results import ResultRecord
    from keylane.engine.stages import Step
    from keylane.lanes.lane_record import RetryState
    from keylane.lanes.lane_table import Lane
    from keylane.message import Headers, Record
    from keylane.policies.failure_info import FailedAttempt


_OK = Outcome.OK


class FailureState:
    """The state of a message that has failed, has attempts from before a restart, or is redriven.

    Most messages have none. Written only on the engine's loop.
    """

    __slots__ = (
        "attempt",
        "due",
        "failures",
        "in_source",
        "letter",
        "lives",
        "redrives",
        "since",
        "stage",
        "waited",
    )

    def __init__(self) -> None:
        self.stage = ""  # the stage that failed last
        self.attempt = 1  # the number of the next attempt there
        self.since = 0.0  # unix time of that stage's first failure
        self.due = 0.0  # unix time, from before a restart: earliest next attempt
        self.waited = 0.0  # unix time, from before a restart: start of its wait for a lower version
        self.lives = 0  # the number of tasks in which it has waited
        self.failures: list[FailedAttempt] = []
        self.letter: int | None = None  # its offset in the dead-letter topic, if it is redriven from there
        self.in_source = True  # its letter names the current source topic, so its offset is valid there
        self.redrives = 0

    @classmethod
    def restored(cls, state: RetryState) -> FailureState:
        """The state persisted before a restart."""
        failure_state = cls()
        failure_state.stage, failure_state.attempt = state.stage, state.attempt
        failure_state.since, failure_state.due = state.since, state.due
        failure_state.waited, failure_state.lives = state.waited, state.lives
        return failure_state

    def attempt_at(self, stage: str) -> int:
        """The number of the next attempt at this stage."""
        return self.attempt if stage == self.stage else 1


class Delivery(Message):
    """A message with the engine's state of it. The lane table writes ``next``, ``lane`` and ``settled``.

    One object serves as the message, the lane's queue entry and the producer's delivery callback, instead of three.
    """

    timer: str | None = None
    """The timer that fires, if it is not a message of the source."""

    __slots__ = (
        "attempts",
        "decoded",
        "engine",
        "error",
        "failure_state",
        "finished",
        "lane",
        "next",
        "outcome",
        "settled",
        "stage",
        "started",
        "timestamp",
    )

    def __init__(self, record: Record, engine: Engine) -> None:  # no super().__init__(): the hot path
        self._record = record
        self._headers = None
        self.key = record.key()
        self.value = record.value()
        self.partition = record.partition()
        self.offset = record.offset()
        kind, milliseconds = record.timestamp()
        self.timestamp: int | None = milliseconds if kind else None
        self.attempt = 1
        self.engine = engine
        self.next: Delivery | None = None
        self.lane: Lane[Delivery] | None = None
        self.settled = False
        self.stage = 0  # the stage that runs next: a retry resumes there
        self.decoded = False
        self.attempts = 0  # attempts in all stages together
        self.started = 0.0  # wall clock, of the first attempt
        self.finished = 0.0
        self.outcome = _OK
        self.error: str | None = None
        self.failure_state: FailureState | None = None

    @property
    def begun(self) -> bool:
        """Whether it has run before, in this task or in an earlier one whose attempts were restored."""
        return self.attempts > 0 or self.stage > 0

    @property
    def redriven(self) -> bool:
        """Whether it comes from the dead letters."""
        return self.failure_state is not None and self.failure_state.letter is not None

    @property
    def record(self) -> Record:
        """The record that it was made from."""
        return self._record

    @property
    def source_id(self) -> str:
        """Kafka's id of the topic that it was in; empty if unknown. A dead letter may be of a former source."""
        letter = getattr(self._record, "letter", None)
        return self.engine.source_id if letter is None else str(letter.topic_id)

    @property
    def carried(self) -> Headers:
        """The headers for its results: like :attr:`headers`, but not a copy; do not change them."""
        headers = self._headers
        if headers is None:
            headers = self._record.headers() or []  # type: ignore[assignment]  # always a list
        return headers  # type: ignore[return-value]

    @property
    def original(self) -> bytes | None:
        """The value in the source topic."""
        return self._record.value()

    @property
    def version(self) -> int | None:
        """The version according to the app's ``versions``, or else the header ``event-version``."""
        versions = self.engine.versions
        known = None if versions is None else versions.known(self)
        return super().version if known is None else known

    def overtaken(self) -> None:
        """Others of its lane run before it, although it has begun. Without states nothing depends on that."""

    def __call__(self, error: Any, _message: Any) -> None:
        """The producer's delivery report: this message's results are acknowledged, or failed."""
        if error is None:
            self.engine.acknowledged.append(self)
        else:
            self.engine.refused(self, error)


class StatefulDelivery(Delivery):
    """A message of an app whose stages take states."""

    __slots__ = ("state",)

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__(record, engine)
        self.state: MessageState | None = None

    def overtaken(self) -> None:
        """It begins again at its first stage: it has read states that are not the lane's any more."""
        self.state = None
        self.stage, self.decoded, self.value = 0, False, self.original


class Routed(Delivery):
    """A message of an app with handlers."""

    __slots__ = ("handler", "kind", "results", "route")

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__(record, engine)
        self.route: tuple[Step, ...] | None = None  # the handlers of its type, once that is known
        self.handler = 0  # the handler that runs next: a retry resumes there
        self.kind: str | None = None
        self.results: list[ResultRecord] = []

    @property
    def type(self) -> str | None:
        """The type according to the app's ``event_type``; until that has run, the header ``event-type``."""
        return super().type if self.route is None else self.kind


class StatefulRouted(Routed):
    """A message of an app whose handlers take states."""

    __slots__ = ("state",)

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__(record, engine)
        self.state: MessageState | None = None

    def overtaken(self) -> None:
        """It begins again at its first handler: it has read states that are not the lane's any more."""
        self.state = None
        self.stage, self.decoded, self.value = 0, False, self.original
        self.handler, self.route, self.results = 0, None, []


class TimerDelivery(StatefulRouted):
    """A timer that fires: a message in its lane that is not in the source.

    Key and headers are its own, ``value`` is the timer's, and ``timestamp`` the time at which it was due. ``offset`` is
    that of the message which set it.
    """

    __slots__ = ("dropped", "name", "stored", "timer")

    def __init__(self, record: Record, engine: Engine, timer: str, name: Name, stored: StoredValue) -> None:
        super().__init__(record, engine)
        self.timer = timer
        self.name = name
        self.stored = stored
        self.decoded = True
        self.dropped = False  # it has left its lane without firing
