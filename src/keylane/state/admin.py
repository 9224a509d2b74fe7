"""The operator's side of the state topic: stopped lanes, commands, and their results."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Self

from keylane import strict_json as wire
from keylane.dlq.record import ExpectedOrigin
from keylane.engine.version_store import VersionStore
from keylane.errors import BrokerError
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster
from keylane.offsets.identity import TopicIdentity
from keylane.offsets.murmur2 import partition_of
from keylane.state.answers import CommandAnswer, decode_command_answer
from keylane.state.commands import (
    REASON_CHARACTERS_MAX,
    Command,
    audit_name,
    check_reason,
    new_command_id,
    operator_name,
)
from keylane.state.labels import Labels
from keylane.state.pauses import PauseRecord, scopes_of
from keylane.state.topic import Claim, StateTopic, check_written
from keylane.strict_json import MalformedRecordError
from keylane.topic_names import dead_letter_topic, state_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from keylane.kafka.client import Producer
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.offsets.offset_runs import OffsetRuns
    from keylane.policies.versions import VersionMark
    from keylane.state.commands import CommandKind

_POLLS_PER_TURN = 50
"""Polls of the state topic in one go; each returns up to 1,000 records."""
_ANSWER_GRACE_SECONDS = 3.0
"""Time within which the answer to a command must come once its record is gone."""


class NeverRanError(BrokerError):
    """The app has no state topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResults:
    """Results of commands, by their ids. Commands in neither field have no answer yet and are still open."""

    answers: Mapping[str, CommandAnswer]
    lost: frozenset[str]
    """Commands that are gone without an answer."""


AUDIT_KEY_BYTES = 16_384
"""Of a key in the audit. In full it would take twice the room of its message, which its topic may refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A command as it was recorded when it was given, and its result."""

    id: str
    do: str
    partition: int
    key: bytes | None
    """At most its first :data:`AUDIT_KEY_BYTES`."""
    offset: int | None
    """Offset of the message it is about; None for commands about dead letters."""
    letters: int | None
    """Number of dead letters named; None: all of the lane, or not a redrive."""
    withdraws: str
    """The id of the command that it cancels; empty if it is not a cancel."""
    scope: str = ""
    """Of a pause: what is paused."""
    stage: str = ""
    who: str
    at: float
    reason: str
    """Why it was given; empty if nobody said."""
    open: bool
    answer: CommandAnswer | None
    """None if no task has carried it out: it is still open, or its message is gone."""


class AdminClient:
    """Reads an app's state topic to its end, follows it, and writes commands. One thread uses it; close it at the end.

    Raises :class:`NeverRanError` when the app has no state topic, :class:`BrokerError` when that cannot be read.
    """

    def __init__(self, settings: KafkaSettings, app: str, *, versions: bool = False) -> None:
        self.app = app
        self._settings = settings
        self._topic = state_topic(app)
        self._producer: Producer | None = None
        cluster = Cluster(settings)
        partitions = cluster.topics().get(self._topic)
        if partitions is None:
            raise NeverRanError(
                f"app {app!r} never ran at {settings.bootstrap}: topic {self._topic!r} does not exist"
            )
        # First find out which topic the app reads, then read the records about that topic as it is now.
        self._state = StateTopic(settings, app, self._topic, [0], run="", labels=Labels(None))
        self._state.restore()
        if not self._state.plan and partitions > 1:  # only shards without partition 0 have run
            self._state = self._state.reopen(range(partitions), "", labels=Labels(None))
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
        """Close the consumer."""
        self._state.close()

    @property
    def home(self) -> ExpectedOrigin:
        """The source that the app's dead letters must come from to count."""
        identity = self._labels.identity
        assert identity is not None  # noqa: S101 - set above
        return ExpectedOrigin(app=self.app, source=identity.source)

    # What the topic contains.

    def plan(self) -> dict[str, Any] | None:
        """The plan of the current or last epoch: ``run``, ``epoch``, ``at`` and ``tasks``; None before the first."""
        self._follow()
        return self._state.plan or None

    def plans(self) -> list[dict[str, Any]]:
        """The plans of all runs that own partitions now: one of each shard. Before they plan: :meth:`plan`."""
        newest = self.plan()
        return self._state.current_plans or ([] if newest is None else [newest])

    def claims(self) -> dict[int, list[Claim]]:
        """Who owns which slots, by partition, as the owners said last. An owner that has died still has its claim."""
        self._follow()
        return {partition: list(found.values()) for partition, found in self._state.owners.items() if found}

    def started(self) -> float | None:
        """Unix time when the newest run took the app over; None before the first."""
        return max(self.started_by_partition().values(), default=None)

    def started_by_partition(self) -> dict[int, float]:
        """Unix time when the run that owns a partition took it over, by partition."""
        self._follow()
        return {partition: float(found.get("at", 0.0)) for partition, found in self._state.runs.items()}

    def lanes(self) -> list[LaneRecord]:
        """Return the lanes that wait for an operator, in the order in which they stopped."""
        self._follow()
        return sorted(self._state.lanes.values(), key=lambda record: record.since)

    def attempts(self) -> Mapping[int, Mapping[int, RetryState]]:
        """Messages that have failed and are not done, by partition and offset, as tasks recorded them last."""
        self._follow()
        return {
            partition: {offset: kept for record in records.values() for offset, kept in record.items()}
            for partition, records in self._state.attempts.items()
        }

    def marks(self, key: bytes) -> dict[int, VersionMark]:
        """Versions that this entity has reached, by the partitions that know it. Only with ``versions``."""
        self._follow()
        store = self._state.versions
        assert store is not None  # noqa: S101 - asked for when this was made
        found = {partition: store.get((partition, key)) for partition in range(self.partitions)}
        return {partition: mark for partition, mark in found.items() if mark is not None}

    def open_commands(self) -> list[Command]:
        """Return the commands about lanes that no task has carried out yet, without the cancelled ones.

        A pause holds without a task: see :meth:`pauses`.
        """
        self._follow()
        withdrawn = {command.withdraws for command in self._state.commands.values()}
        return sorted(
            (
                one
                for one in self._state.commands.values()
                if one.do not in ("cancel", "pause", "resume") and one.id not in withdrawn
            ),
            key=lambda command: command.at,
        )

    def redriven(self) -> Mapping[int, OffsetRuns]:
        """Offsets in the dead-letter topic of the dead letters that were redriven, by partition."""
        self._follow()
        return self._state.redriven

    @property
    def malformed(self) -> Mapping[str, int]:
        """Records of the state topic that could not be read, by kind."""
        return self._state.malformed

    def audit(self) -> list[AuditEntry]:
        """Return every command ever given, oldest first, with its result. Malformed records are left out."""
        self._follow()
        open_ids = {command.id for command in self._state.commands.values()}
        actions = []
        for name, (partition, value) in self._state.audits.items():
            if _by_the_app(name):
                continue
            with suppress(MalformedRecordError):  # any client may have written into the topic
                actions.append(self._action(partition, value, open_ids))
        return sorted(actions, key=lambda action: action.at)

    def pauses(self) -> list[PauseRecord]:
        """What operators have paused, the oldest first."""
        self._follow()
        return sorted(scopes_of(self._state.pauses.values()).values(), key=lambda record: record.at)

    # Commands.

    def pause(self, record: PauseRecord, *, timeout: float) -> CommandAnswer | None:
        """Pause, and wait for a task to say that it knows; None if none does: then the app does not run."""
        return self._pause("pause", record, record.encode(), timeout)

    def resume(self, record: PauseRecord, *, timeout: float) -> CommandAnswer | None:
        """End a pause. As :meth:`pause`."""
        return self._pause("resume", record, None, timeout)

    def withdraw_pause(self, record: PauseRecord) -> None:
        """Delete a pause that cannot be carried out."""
        self._write((partition, record.name, None) for partition in self._paused_in(record))

    def _pause(
        self, do: CommandKind, record: PauseRecord, value: bytes | None, timeout: float
    ) -> CommandAnswer | None:
        self._check_planned()
        partitions = self._paused_in(record)
        place = partition_of(record.key, self.partitions) if record.key is not None else partitions[0]
        command = Command(
            do=do,
            partition=place,
            key=record.key,
            scope=record.kind,
            stage=record.stage,
            reason=record.reason,
            id=new_command_id(),
            who=record.who,
            at=record.at,
        )
        # Before the command: a task that answers it has read the pause.
        self._write((partition, record.name, value) for partition in partitions)
        self.give([command])
        return self.answer(command, timeout)

    def _paused_in(self, record: PauseRecord) -> list[int]:
        return list(range(self.partitions)) if record.partition is None else [record.partition]

    def command(
        self,
        do: CommandKind,
        *,
        partition: int,
        key: bytes | None,
        offset: int | None = None,
        letters: Sequence[int] | None = None,
    ) -> Command:
        """Write a command and record who gave it. The app carries it out now, or when it starts."""
        command = new_command(do, partition=partition, key=key, offset=offset, letters=letters)
        self.give([command])
        return command

    def give(self, commands: Iterable[Command]) -> None:
        """Write these commands. Raises BrokerError when one of them could not be written."""
        self._check_planned()
        login = self._settings.login
        if login:
            commands = [replace(command, who=f"{command.who} (login {login})") for command in commands]
        self._write(record for command in commands for record in _records_of(command))

    def _check_planned(self) -> None:
        self._follow()
        if not self.source:
            raise BrokerError(
                f"app {self.app!r} has not planned its first epoch yet: there is nothing to give a command for. "
                "Try again in a moment"
            )

    def _write(self, records: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        """Write these records: partition, name and value. Raises BrokerError when one could not be written."""
        if self._producer is None:  # created with the first command: it takes half a second to be ready
            self._producer = self._settings.producer(
                batch_limit=self._cluster.rules([self._topic])[self._topic].limit,
                **{"message.timeout.ms": int(REQUEST_SECONDS * 1000)},
            )
        producer = self._producer
        failed: list[Any] = []

        def report(error: object, _message: object) -> None:
            if error is not None:
                failed.append(error)

        for partition, name, value in records:
            while True:
                try:
                    producer.produce(
                        self._topic,
                        value,
                        name,
                        partition=partition,
                        headers=[*self._labels.of(name)],
                        on_delivery=report,
                    )
                except BufferError:  # a million records wait: the broker is slower than this loop
                    producer.poll(0.1)
                else:
                    break
            producer.poll(0)
        check_written(self._topic, producer.flush(REQUEST_SECONDS), failed)

    def answer(self, command: Command, timeout: float) -> CommandAnswer | None:
        """Wait for the result of a command; None if no task answers in ``timeout`` seconds: the app does not run."""
        return self.wait([command], timeout=timeout).answers.get(command.id)

    def wait(
        self,
        commands: Iterable[Command],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        tell: Callable[[int], None] = lambda _answered: None,
    ) -> CommandResults:
        """Follow these commands until all are answered. ``tell`` gets the number of answers.

        Ends early after ``timeout`` seconds, or when the app gives no sign of life in the first ``silence`` seconds.
        """
        began = time.monotonic()
        deadline = inf if timeout is None else began + timeout
        left = {command.id: command for command in commands}
        answers: dict[str, CommandAnswer] = {}
        lost: set[str] = set()
        gone: dict[str, float] = {}  # when their records disappeared
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
                    pass  # given just now, and not read yet
                elif now - gone.setdefault(command.id, now) > _ANSWER_GRACE_SECONDS:
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
    def _action(self, partition: int, value: bytes, open_ids: Collection[str]) -> AuditEntry:
        found = wire.loads(value)
        command_id, do, key, offset, letters, withdraws, who, at = wire.fields(
            found, "id", "do", "key", "offset", "letters", "withdraws", "who", "at"
        )
        return AuditEntry(
            id=wire.text(command_id),
            do=wire.text(do),
            partition=partition,
            key=None if key is None else bytes.fromhex(wire.text(key, wire.MAX_BYTES)),
            offset=None if offset is None else wire.integer(offset),
            letters=None if letters is None else wire.integer(letters),
            withdraws=wire.text(withdraws, 200),
            scope=wire.text(found.get("scope", ""), 20),  # commands of earlier versions have none
            stage=wire.text(found.get("stage", "")),
            who=wire.text(who),
            at=wire.seconds(at),
            reason=wire.text(found.get("reason", ""), REASON_CHARACTERS_MAX),
            open=command_id in open_ids,
            answer=self._answer(command_id),
        )

    def _signs(self) -> object:
        """Return what only a running app changes."""
        state = self._state
        said = sum(map(_by_the_app, state.audits))
        redriven = {partition: len(ranges) for partition, ranges in state.redriven.items()}
        return said, redriven, dict(state.lanes), {p: dict(found) for p, found in state.attempts.items()}

    def _restore(self) -> None:
        """Read the state of the source as it is now."""
        self._labels = Labels(self._cluster.identity(self.source, dead_letter_topic(self.app)))
        versions = VersionStore() if self._versions else None
        self._state = self._state.reopen(range(self.partitions), "", versions, labels=self._labels)
        self._state.restore()

    def _follow(self) -> None:
        for _ in range(_POLLS_PER_TURN):
            self._state.poll()
        source = self._state.plan.get("source")
        if isinstance(source, str) and source not in ("", self.source):
            # A run that reads this source has planned its first epoch since then. Records of another source do not
            # count.
            self.source = source
            self._restore()


def _records_of(command: Command) -> Iterator[tuple[int, bytes, bytes | None]]:
    """The audit of a command, and the command."""
    deed = {
        "do": command.do,
        "key": None if command.key is None else command.key[:AUDIT_KEY_BYTES].hex(),
        "partition": command.partition,
        "offset": command.offset,
        "letters": None if command.letters is None else len(command.letters),
        "to": command.to,
        "withdraws": command.withdraws,
        "scope": command.scope,
        "stage": command.stage,
        "reason": command.reason,
        "who": command.who,
        "at": command.at,
        "id": command.id,
    }
    yield command.partition, audit_name(command.id), json.dumps(deed).encode()
    yield command.partition, command.name, command.encode()


def _by_the_app(name: bytes) -> bool:
    """True if this audit record was written by a task that took the command: ``audit/<id>/…``."""
    return name.count(b"/") > 1


def new_command(
    do: CommandKind,
    *,
    partition: int,
    key: bytes | None,
    offset: int | None = None,
    letters: Sequence[int] | None = None,
    to: int | None = None,
    reason: str = "",
    who: str | None = None,
) -> Command:
    """Make a command. ``who`` gives it; by default the user who runs this program. It is not written yet.

    Raises SettingsError for a reason that is too long.
    """
    return Command(
        do=do,
        partition=partition,
        key=key,
        offset=offset,
        letters=None if letters is None else tuple(letters),
        to=to,
        id=new_command_id(),
        who=operator_name() if who is None else who,
        at=time.time(),
        reason=check_reason(reason),
    )


def cancel_command(command: Command, *, reason: str = "", who: str | None = None) -> Command:
    """Make a command that withdraws another one. It is not written yet."""
    return Command(
        do="cancel",
        partition=command.partition,
        key=command.key,
        offset=command.offset,
        withdraws=command.id,
        id=new_command_id(),
        who=operator_name() if who is None else who,
        at=time.time(),
        reason=check_reason(reason),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDeadLetters:
    """What the state topic records about an app's dead letters."""

    home: ExpectedOrigin
    redriven: Mapping[int, Container[int]]
    """Offsets in the dead-letter topic, by partition."""


def known_dead_letters(settings: KafkaSettings, app: str) -> KnownDeadLetters:
    """Return which dead letters count and which were redriven; for an app that never ran only its name is known."""
    try:
        with AdminClient(settings, app) as operator:
            return KnownDeadLetters(home=operator.home, redriven=operator.redriven())
    except NeverRanError:
        return KnownDeadLetters(
            home=ExpectedOrigin(app=app, source=TopicIdentity(cluster="", topic="", id="")), redriven={}
        )
