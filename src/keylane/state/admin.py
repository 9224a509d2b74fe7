"""An operator's side of the state topic: what lanes have stopped, orders, and what came of them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Self

from keylane import strict_json as wire
from keylane.dlq.record import ExpectedOrigin
from keylane.engine.version_store import VersionStore
from keylane.errors import BrokerError
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster
from keylane.offsets.identity import TopicIdentity
from keylane.state.answers import CommandAnswer, decode_command_answer
from keylane.state.commands import Command, audit_name, new_command_id, operator_name
from keylane.state.labels import Labels
from keylane.state.topic import StateTopic
from keylane.strict_json import MalformedRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
    from types import TracebackType

    from keylane.kafka.client import Producer
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.offsets.offset_runs import OffsetRuns
    from keylane.policies.versions import VersionMark
    from keylane.state.commands import CommandKind

_AT_A_TIME = 50
"""How often the state is polled in one go: it hands over a hundred records each time."""
_GRACE = 3.0
"""Seconds in which the answer must have come to an order that stands no more."""


class NeverRanError(BrokerError):
    """The app has no state topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResults:
    """What came of orders, by their ids. Those in neither were not answered, and stand."""

    answers: Mapping[str, CommandAnswer]
    lost: frozenset[str]
    """They stand no more, and nobody said what came of them."""


AUDIT_KEY_BYTES = 16_384
"""Of a key in the audit. In full it would take twice the room of its message, which its topic may refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An order as it was written down when it was given, and what came of it."""

    id: str
    do: str
    partition: int
    key: bytes | None
    """At most its first :data:`AUDIT_KEY_BYTES`."""
    offset: int | None
    """Of the message that it is about; None: it is about letters."""
    letters: int | None
    """How many were named; None: all of the lane, or it was no redrive."""
    withdraws: str
    """The id of the order that it cancels, if it does."""
    who: str
    at: float
    stands: bool
    answer: CommandAnswer | None
    """None when nobody has carried it out: it stands, or what it is about is gone."""


class AdminClient:
    """Reads an app's state topic to its end, follows it, and writes orders. One thread uses it; close it at the end.

    Raises :class:`NeverRanError` when the app has no state topic, :class:`BrokerError` when that cannot be read.
    """

    def __init__(self, settings: KafkaSettings, app: str, *, versions: bool = False) -> None:
        self.app = app
        self._settings = settings
        self._topic = f"{app}.state"
        self._producer: Producer | None = None
        cluster = Cluster(settings)
        partitions = cluster.topics().get(self._topic)
        if partitions is None:
            raise NeverRanError(
                f"app {app!r} never ran at {settings.bootstrap}: topic {self._topic!r} does not exist"
            )
        # First which topic the app reads, then what is about that topic as it is now.
        self._state = StateTopic(settings, app, self._topic, [0], run="", labels=Labels(None))
        self._state.restore()
        source = self._state.plan.get("source")
        self.source = source if isinstance(source, str) else ""
        if not self.source and self._state.malformed["plan"]:
            self._state.close()
            raise BrokerError(
                f"expected the app's plan in topic {self._topic!r}, found a malformed record: which topic the app "
                "reads is not known. Start the app: its next epoch writes the plan again"
            )
        """Empty until the first epoch is planned: then nothing is known about any lane either."""
        self._cluster, self._versions = cluster, versions
        self.partitions = partitions
        self._restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the consumer."""
        self._state.close()

    @property
    def home(self) -> ExpectedOrigin:
        """Which letters in the app's dead-letter topic count."""
        identity = self._labels.identity
        assert identity is not None  # noqa: S101 - set above
        return ExpectedOrigin(app=self.app, source=identity.source)

    # What there is.

    def plan(self) -> dict[str, Any] | None:
        """The plan of the epoch that runs, or ran last: ``run``, ``epoch``, ``at`` and ``tasks``; None before that."""
        self._follow()
        return self._state.plan or None

    def started(self) -> float | None:
        """Unix time when the newest run took the app over; None before the first."""
        self._follow()
        return max((float(found.get("at", 0.0)) for found in self._state.runs.values()), default=None)

    def lanes(self) -> list[LaneRecord]:
        """The lanes that do not go on by themselves, those that stopped first at the front."""
        self._follow()
        return sorted(self._state.lanes.values(), key=lambda record: record.since)

    def attempts(self) -> Mapping[int, Mapping[int, RetryState]]:
        """Messages that have failed and are not done, by partition and offset, as tasks wrote them down last."""
        self._follow()
        return {
            partition: {offset: kept for record in records.values() for offset, kept in record.items()}
            for partition, records in self._state.attempts.items()
        }

    def marks(self, key: bytes) -> dict[int, VersionMark]:
        """How far this entity is, by the partitions that know of it. Only with ``versions``."""
        self._follow()
        store = self._state.versions
        assert store is not None  # noqa: S101 - asked for when this was made
        found = {partition: store.get((partition, key)) for partition in range(self.partitions)}
        return {partition: mark for partition, mark in found.items() if mark is not None}

    def standing(self) -> list[Command]:
        """Orders that no task has carried out yet, but for those that somebody has cancelled."""
        self._follow()
        withdrawn = {command.withdraws for command in self._state.commands.values()}
        return sorted(
            (o for o in self._state.commands.values() if o.do != "cancel" and o.id not in withdrawn),
            key=lambda command: command.at,
        )

    def redriven(self) -> Mapping[int, OffsetRuns]:
        """Letters that were redriven: their offsets among the dead letters, by partition."""
        self._follow()
        return self._state.redriven

    @property
    def malformed(self) -> Mapping[str, int]:
        """Records of the state topic that could not be read, by kind."""
        return self._state.malformed

    def audit(self) -> list[AuditEntry]:
        """Every order ever given, oldest first, with what came of it. What makes no sense is left out."""
        self._follow()
        stand = {command.id for command in self._state.commands.values()}
        actions = []
        for name, (partition, value) in self._state.audits.items():
            if _by_the_app(name):
                continue
            with suppress(MalformedRecordError):  # anybody may have written into the topic
                actions.append(self._action(partition, value, stand))
        return sorted(actions, key=lambda action: action.at)

    # Orders.

    def command(
        self,
        do: CommandKind,
        *,
        partition: int,
        key: bytes | None,
        offset: int | None = None,
        letters: Sequence[int] | None = None,
    ) -> Command:
        """Give an order and write down who gave it. It is carried out by the running app, or when it starts."""
        command = new_command(do, partition=partition, key=key, offset=offset, letters=letters)
        self.give([command])
        return command

    def give(self, commands: Iterable[Command]) -> None:
        """Write these orders. Raises BrokerError when one of them was not taken."""
        self._follow()
        if not self.source:
            raise BrokerError(
                f"app {self.app!r} has not planned its first epoch yet: there is nothing to give a command for. "
                "Try again in a moment"
            )
        if self._producer is None:  # it takes half a second to be ready: made once, for the first order
            self._producer = self._settings.producer(
                batch_limit=self._cluster.rules([self._topic])[self._topic].limit,
                **{"message.timeout.ms": int(REQUEST_SECONDS * 1000)},
            )
        producer = self._producer
        failed: list[str] = []

        def report(error: object, _message: object) -> None:
            if error is not None:
                failed.append(str(error))

        for command in commands:
            deed = {
                "do": command.do,
                "key": None if command.key is None else command.key[:AUDIT_KEY_BYTES].hex(),
                "partition": command.partition,
                "offset": command.offset,
                "letters": None if command.letters is None else len(command.letters),
                "to": command.to,
                "withdraws": command.withdraws,
                "who": command.who,
                "at": command.at,
                "id": command.id,
            }
            for name, value in (
                (audit_name(command.id), json.dumps(deed).encode()),
                (command.name, command.encode()),
            ):
                while True:
                    try:
                        producer.produce(
                            self._topic,
                            value,
                            name,
                            partition=command.partition,
                            headers=[*self._labels.of(name)],
                            on_delivery=report,
                        )
                    except BufferError:  # a million records wait: the broker is slower than this loop
                        producer.poll(0.1)
                    else:
                        break
                producer.poll(0)
        left = producer.flush(REQUEST_SECONDS)
        if left or failed:
            raise BrokerError(
                f"the order could not be written to topic {self._topic!r}: {failed[0] if failed else 'no answer'}"
            )

    def answer(self, command: Command, timeout: float) -> CommandAnswer | None:
        """What came of an order; None when no task has answered within ``timeout`` seconds: the app does not run."""
        return self.wait([command], timeout=timeout).answers.get(command.id)

    def wait(
        self,
        commands: Iterable[Command],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        tell: Callable[[int], None] = lambda _answered: None,
    ) -> CommandResults:
        """Follow these orders until all are answered; ``tell`` is told how many are.

        Ends sooner after ``timeout`` seconds, or when in the first ``silence`` seconds nothing at all came from the
        app.
        """
        began = time.monotonic()
        deadline = inf if timeout is None else began + timeout
        left = {command.id: command for command in commands}
        answers: dict[str, CommandAnswer] = {}
        lost: set[str] = set()
        gone: dict[str, float] = {}  # since when they stand no more
        at_first = self._signs()
        while True:
            self._follow()
            now = time.monotonic()
            for command in list(left.values()):
                answer = self._answer(command.id)
                if answer is not None:
                    answers[command.id] = answer
                    del left[command.id]
                elif (command.partition, command.name) in self._state.commands:
                    gone.pop(command.id, None)
                elif audit_name(command.id) not in self._state.audits:
                    pass  # not read so far: it was given just now
                elif now - gone.setdefault(command.id, now) > _GRACE:
                    lost.add(command.id)
                    del left[command.id]
            tell(len(answers))
            if silence is not None and (answers or self._signs() != at_first):
                silence = None
            if not left or now > deadline or (silence is not None and now - began > silence):
                return CommandResults(answers=answers, lost=frozenset(lost))
            time.sleep(0.02 if len(left) < 500 else 0.25)

    def _answer(self, command_id: str) -> CommandAnswer | None:
        found = self._state.audits.get(audit_name(command_id, done=True))
        if found is None:
            return None
        try:
            return decode_command_answer(found[1])
        except MalformedRecordError:
            return None

    @wire.decoder
    def _action(self, partition: int, value: bytes, stand: Collection[str]) -> AuditEntry:
        command_id, do, key, offset, letters, withdraws, who, at = wire.fields(
            wire.loads(value), "id", "do", "key", "offset", "letters", "withdraws", "who", "at"
        )
        return AuditEntry(
            id=wire.text(command_id),
            do=wire.text(do),
            partition=partition,
            key=None if key is None else bytes.fromhex(wire.text(key, wire.MAX_BYTES)),
            offset=None if offset is None else wire.integer(offset),
            letters=None if letters is None else wire.integer(letters),
            withdraws=wire.text(withdraws, 200),
            who=wire.text(who),
            at=wire.seconds(at),
            stands=command_id in stand,
            answer=self._answer(command_id),
        )

    def _signs(self) -> object:
        """Of life: what only a running app changes."""
        state = self._state
        said = sum(map(_by_the_app, state.audits))
        redriven = {partition: len(ranges) for partition, ranges in state.redriven.items()}
        return said, redriven, dict(state.lanes), {p: dict(found) for p, found in state.attempts.items()}

    def _restore(self) -> None:
        """Read the state of the source as it is now."""
        self._labels = Labels(self._cluster.identity(self.source, f"{self.app}.dlq"))
        versions = VersionStore() if self._versions else None
        self._state = self._state.reopen(range(self.partitions), "", versions, labels=self._labels)
        self._state.restore()

    def _follow(self) -> None:
        for _ in range(_AT_A_TIME):
            self._state.poll()
        source = self._state.plan.get("source")
        if isinstance(source, str) and source not in ("", self.source):
            # A run that reads this source has planned its first epoch since. Records of another source do not count.
            self.source = source
            self._restore()


def _by_the_app(name: bytes) -> bool:
    """Whether this record of the audit is about an order that a task has taken: ``audit/<id>/…``."""
    return name.count(b"/") > 1


def new_command(
    do: CommandKind,
    *,
    partition: int,
    key: bytes | None,
    offset: int | None = None,
    letters: Sequence[int] | None = None,
    to: int | None = None,
) -> Command:
    """An order by whoever runs this program, now. It is not given yet."""
    return Command(
        do=do,
        partition=partition,
        key=key,
        offset=offset,
        letters=None if letters is None else tuple(letters),
        to=to,
        id=new_command_id(),
        who=operator_name(),
        at=time.time(),
    )


def cancel_command(command: Command) -> Command:
    """An order that withdraws this one. It is not given yet."""
    return Command(
        do="cancel",
        partition=command.partition,
        key=command.key,
        offset=command.offset,
        withdraws=command.id,
        id=new_command_id(),
        who=operator_name(),
        at=time.time(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDeadLetters:
    """What the state topic says about an app's dead letters."""

    home: ExpectedOrigin
    redriven: Mapping[int, Container[int]]
    """Offsets in the dead-letter topic, by partition."""


def known_dead_letters(settings: KafkaSettings, app: str) -> KnownDeadLetters:
    """Which dead letters count and which were redriven; of an app that never ran only its name is known."""
    try:
        with AdminClient(settings, app) as operator:
            return KnownDeadLetters(home=operator.home, redriven=operator.redriven())
    except NeverRanError:
        return KnownDeadLetters(
            home=ExpectedOrigin(app=app, source=TopicIdentity(cluster="", topic="", id="")), redriven={}
        )
