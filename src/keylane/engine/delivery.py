"""A message while the engine holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.core.outcome import Outcome
from keylane.message import Message

if TYPE_CHECKING:
    from keylane.core.lane import Lane
    from keylane.core.letter import Failed
    from keylane.core.record import Kept
    from keylane.engine.dispatch import Result
    from keylane.engine.engine import Engine
    from keylane.engine.pipeline import Step
    from keylane.message import Headers, Record


_OK = Outcome.OK


class Trouble:
    """What is known of a message that has failed, came back with attempts from before, or is redriven.

    Most messages have none. Written on the engine's loop.
    """

    __slots__ = ("attempt", "due", "failures", "letter", "redrives", "since", "stage", "wakes")

    def __init__(self) -> None:
        self.stage = ""  # that failed last
        self.attempt = 1  # the next one there
        self.since = 0.0  # unix time of its first failure
        self.due = 0.0  # unix time, from before a restart: it does not run before
        self.wakes = 0.0  # unix time: when its backoff will end, to be written down
        self.failures: list[Failed] = []
        self.letter: int | None = None  # its place in the dead-letter topic: it is redriven from there
        self.redrives = 0

    @classmethod
    def kept(cls, kept: Kept) -> Trouble:
        """From before a restart."""
        trouble = cls()
        trouble.stage, trouble.attempt, trouble.since, trouble.due = (
            kept.stage,
            kept.attempt,
            kept.since,
            kept.due,
        )
        return trouble

    def attempt_at(self, stage: str) -> int:
        """The number of the next attempt at this stage."""
        return self.attempt if stage == self.stage else 1


class Delivery(Message):
    """A message with what the engine knows about it. The lane table writes ``next``, ``lane`` and ``settled``.

    One object serves as the message, the lane's queue entry and the producer's delivery callback, to make one object
    per message instead of three.
    """

    __slots__ = (
        "attempts",
        "decoded",
        "engine",
        "error",
        "finished",
        "lane",
        "next",
        "outcome",
        "settled",
        "stage",
        "started",
        "timestamp",
        "trouble",
    )

    def __init__(self, record: Record, engine: Engine) -> None:  # all in one: the hot path
        self._record = record
        self._headers = None
        self.key = record.key()
        self.value = record.value()
        self.partition = record.partition()
        self.offset = record.offset()
        kind, milliseconds = record.timestamp()
        self.timestamp: int | None = milliseconds if kind else None  # kept: it is asked for twice
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
        self.trouble: Trouble | None = None

    @property
    def begun(self) -> bool:
        """Whether it was run before, in this task or, with attempts from then, in an earlier one."""
        return self.attempts > 0 or self.stage > 0

    @property
    def redriven(self) -> bool:
        """Whether it came from the dead letters."""
        return self.trouble is not None and self.trouble.letter is not None

    @property
    def record(self) -> Record:
        """What it was made of."""
        return self._record

    @property
    def carried(self) -> Headers:
        """Its headers for its results, to be read only: as :attr:`headers`, without a list of their own."""
        headers = self._headers
        if headers is None:
            headers = self._record.headers() or []  # type: ignore[assignment]  # every log's are a list
        return headers  # type: ignore[return-value]

    @property
    def original(self) -> bytes | None:
        """The value as it was in the source topic."""
        return self._record.value()

    @property
    def version(self) -> int | None:
        """As the app's ``versions`` say; without them the header ``event-version``."""
        versions = self.engine.versions
        known = None if versions is None else versions.known(self)
        return super().version if known is None else known

    def __call__(self, error: Any, _message: Any) -> None:
        """The producer's delivery report: what this message caused is acknowledged, or cannot be."""
        if error is None:
            self.engine.acknowledged.append(self)
        else:
            self.engine.refused(self, error)


class Routed(Delivery):
    """A message of an app with handlers."""

    __slots__ = ("handler", "kind", "results", "route")

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__(record, engine)
        self.route: tuple[Step, ...] | None = None  # the handlers of its type, when that is known
        self.handler = 0  # the one that runs next: a retry resumes there
        self.kind: str | None = None
        self.results: list[Result] = []

    @property
    def type(self) -> str | None:
        """As the app's ``event_type`` says; while that is being found out, the header ``event-type``."""
        return super().type if self.route is None else self.kind
