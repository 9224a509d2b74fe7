"""The app's state topic: what must outlive a task, and commands to running tasks.

``<app>.state`` is compacted and has as many partitions as the source. Records about source partition *p* are in state
partition *p*, whatever their key. A task reads its partitions to their end when it starts and follows them while it
runs, so it sees every command, wherever it runs and whenever it started.

========================  ==================================================================
key                       value
========================  ==================================================================
``progress``              the text of :mod:`keylane.offsets.metadata`, with its watermark before it
``epoch``                 progress that waits for Spark to commit the epoch: :class:`Proposal`
``range/<slots>``         progress of a range of a shared partition: :mod:`keylane.offsets.range_progress`
``grouped``               the generation of the group's offset: :mod:`keylane.offsets.range_progress`
``attempts``              of messages that failed and are not done: :mod:`keylane.lanes.lane_record`
``version/<key>``         the version an entity has reached: :class:`keylane.policies.versions.VersionMark`
``versions``              the number of partitions when the versions of this partition's entities were moved here
``lane-state``            the number of partitions when this partition's lane state was complete, for apps with states
``lane/<key>``            a lane that is blocked or parked (``keyless/<offset>`` for a message without a key)
``redriven``              the dead letters of this partition that were redriven: :mod:`keylane.offsets.offset_runs`
``run``                   ``{"run", "shard", …}``: the run that the partition belongs to; any other run ends
``load``                  ``[run, epoch, counts]``: messages seen, by bucket of :mod:`keylane.offsets.assignment`
``former``                in partition 0, the numbers of partitions that the source had before: ``[1, 2]``
``plan``                  in partition 0, or a shard's first, the current plan: ``{"run", "epoch", "at", "tasks"}``
``command/plan``          ``{"run": …, "number": …, "tasks": …}``: epochs that were planned before it end now
``owner/<id>``            the task with this transactional id owns slots here: :mod:`keylane.state.ownership`
``command/stop``          ``{"run": …}``: the tasks of this run drain and end
``command/guard``         ``{"run": …, "why": …}``: most messages failed; do not start this run again
``command/message/<id>``  an operator's: :mod:`keylane.state.commands` (``letters``, ``reset``, ``cancel`` too)
``audit/<id>``            who gave a command, and when; ``audit/<id>/done``: its result
``pause/<what>``          what an operator has paused: :mod:`keylane.state.pauses`
``watch``                 ``{"until": …}``: until then somebody looks at single lanes
``rest``                  ``{"run": …, "until": …}``: everything below is done, except messages of stopped lanes
========================  ==================================================================

Where several tasks share a partition, each owner has its own ``attempts``, ``redriven``, ``load``, ``rest``,
``versions`` and ``lane-state``: ``attempts/<slots>``.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from keylane import strict_json as wire
from keylane.denial import broker_error
from keylane.engine.version_store import VersionStore
from keylane.errors import BrokerError
from keylane.kafka.cluster import REQUEST_SECONDS, load_metadata
from keylane.kafka.partition_reader import PartitionReader
from keylane.lanes.lane_record import KEYLESS, LANE, decode_lane, decode_retries
from keylane.offsets.metadata import decode
from keylane.offsets.offset_runs import OffsetRuns
from keylane.offsets.range_progress import NEVER_MOVED, RangeProgress
from keylane.offsets.shard import WHOLE, Shard
from keylane.offsets.slots import ALL, Slots
from keylane.policies.versions import decode_mark
from keylane.rights import Operation, on_topic
from keylane.state import records
from keylane.state.commands import AUDIT, COMMAND, Command, decode_command
from keylane.state.pauses import PAUSE, PauseRecord, decode_pause
from keylane.strict_json import MalformedRecordError
from keylane.topic_names import state_topic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from keylane.kafka.client import Consumer
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_record import LaneRecord, RetryState
    from keylane.offsets.assignment import Load
    from keylane.offsets.metadata import Restored
    from keylane.offsets.range_progress import Generation
    from keylane.state.labels import Labels

log = logging.getLogger("keylane.kafka")

STOP = b"command/stop"
GUARD = b"command/guard"
PROGRESS = b"progress"
ATTEMPTS = b"attempts"
REDRIVEN = b"redriven"
REST = b"rest"
RANGE = b"range/"
GROUPED = b"grouped"
LOAD = b"load"
PLAN = b"plan"
REPLAN = b"command/plan"
RUN = b"run"
FORMER = b"former"
EPOCH = b"epoch"
VERSION = b"version/"
VERSIONS = b"versions"
LAYOUT = b"lane-state"
WATCH = b"watch"
OWNER = b"owner/"
_KINDS = (
    *(
        VERSION[:-1],
        VERSIONS,
        LAYOUT,
        PROGRESS,
        EPOCH,
        RANGE[:-1],
        GROUPED,
        ATTEMPTS,
        LANE[:-1],
        KEYLESS[:-1],
        REDRIVEN,
        RUN,
        FORMER,
        LOAD,
    ),
    *(PLAN, WATCH, OWNER[:-1], STOP, GUARD, REPLAN, COMMAND[:-1], AUDIT[:-1], PAUSE[:-1], REST),
)
_PARTS = (LOAD, REST, REDRIVEN, VERSIONS, LAYOUT)
ELSEWHERE = "kl1:@"
"""The metadata of a committed offset whose progress is in the state topic."""
NOTHING = "kl1:-"
"""The metadata of a committed offset above which nothing is done. Never empty: other tools write empty metadata."""
RANGES = "kl1:/"
"""The metadata of a committed offset in a shared partition: the progress of each range is in the state topic."""
WATCH_SECONDS_MAX = 60.0
"""Time for which single lanes are sent at most after a request; whoever looks asks again."""
_FETCH_WAIT_MS = 20
"""Time the broker waits for more data before it reports the end. Every restore takes at least this long."""
_RESTING_FETCH_WAIT_MS = 1
"""The same for a reader that rests between reads (``rests``)."""
_OPEN_TRANSACTION_SECONDS = 1.0
"""Time to wait for records behind an open transaction; a transaction that is being committed ends at once."""
_POLL_RECORDS = 1000
_POLLS_PER_TURN = 20
"""Records read per poll, and polls before the loop gets its turn; there may be thousands of versions."""


def order_stop(
    settings: KafkaSettings,
    topic: str,
    partitions: int,
    run: str,
    timeout: float = REQUEST_SECONDS,
    *,
    shard: Shard = WHOLE,
) -> None:
    """Tell the tasks of this run to drain and end. Raises BrokerError when the command could not be written."""
    _order(settings, topic, shard.of(range(partitions)), STOP, {"run": run}, timeout)


def order_plan(
    settings: KafkaSettings,
    topic: str,
    partitions: int,
    run: str,
    *,
    number: int,
    tasks: int,
    shard: Shard = WHOLE,
) -> None:
    """Tell the tasks of this run how many of them there should be from now on.

    Every epoch that was planned before the command with this ``number`` drains and ends, even if a later command
    restores the old number of tasks. Raises BrokerError when the command could not be written.
    """
    wanted = {"run": run, "number": number, "tasks": tasks}
    _order(settings, topic, shard.of(range(partitions)), REPLAN, wanted, REQUEST_SECONDS)


def order_watch(settings: KafkaSettings, topic: str, partitions: int, until: float) -> None:
    """Ask tasks to put every lane into their telemetry until then. Raises BrokerError."""
    _order(settings, topic, range(partitions), WATCH, {"until": until}, REQUEST_SECONDS)


def _order(
    settings: KafkaSettings,
    topic: str,
    partitions: Iterable[int],
    name: bytes,
    value: dict[str, Any],
    timeout: float,
) -> None:
    producer = settings.producer(**{"message.timeout.ms": int(timeout * 1000)})
    failed: list[Any] = []
    for partition in partitions:
        producer.produce(
            topic,
            json.dumps(value).encode(),
            name,
            partition=partition,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    left = producer.flush(timeout)
    check_written(topic, left, failed)


def check_written(topic: str, left: int, failed: Sequence[Any]) -> None:
    """Raise BrokerError if records of a command were not written: some are ``left``, or have ``failed``."""
    what = f"the command could not be written to topic {topic!r}"
    if failed:
        raise broker_error(what, failed[0], on_topic(topic, Operation.WRITE))
    if left:
        raise BrokerError(f"{what}: no answer")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Progress of a task in one epoch, for ``commit="epoch"``. It counts when Spark has committed the epoch."""

    epoch: int
    watermark: int
    text: str
    """Encoded by :mod:`keylane.offsets.metadata`."""
    redriven: str
    notes: tuple[tuple[str, str | None], ...] = ()
    """Records about operators' commands, by name: results, and the removal of commands that were carried out."""

    def encode(self) -> bytes:
        """Return the value of a record of the state topic."""
        return json.dumps([self.epoch, self.watermark, self.text, self.redriven, self.notes]).encode()

    @classmethod
    @wire.decoder
    def decode(cls, value: bytes) -> Proposal:
        """Decode such a value. Raises MalformedRecordError."""
        epoch, watermark, text, redriven, notes = wire.row(wire.loads(value), 5)
        if redriven:  # it becomes a record of its own when the epoch counts
            OffsetRuns.decode(wire.text(redriven, wire.MAX_BYTES).encode())
        return cls(
            wire.integer(epoch),
            wire.integer(watermark),
            wire.text(text, wire.MAX_BYTES),
            wire.text(redriven, wire.MAX_BYTES),
            tuple(map(_decode_note, wire.array(notes))),
        )


def _decode_note(found: object) -> tuple[str, str | None]:
    name, value = wire.row(found, 2)
    if not bytes.fromhex(wire.text(name)).startswith((COMMAND, AUDIT)):
        raise MalformedRecordError("expected a record about an operator's command")
    return name, None if value is None else wire.text(value)


@dataclass(frozen=True, slots=True)
class Claim:
    """A task's record that it owns slots of a partition."""

    place: int
    """Its offset in the state topic: of two claims the later one counts."""
    slots: Slots
    run: str
    who: str
    leaving: bool
    """It finishes what it has begun, and then releases the slots."""
    heard: float
    """When this was read, by the monotonic clock."""
    epoch: int = -1
    """The last epoch in which a Spark task was attached; -1 if the owner ends with its task."""
    task: int = -1
    """The number of that Spark task."""
    number: int = 0
    """Which of its owner's claims of this partition this is: an owner may release a partition and claim it again."""


def _consumer(settings: KafkaSettings, app: str, wait: int) -> Consumer:
    few = {"queued.min.messages": 1000, "queued.max.messages.kbytes": 16_384, "fetch.wait.max.ms": wait}
    # The app's own group: the client looks for its coordinator, and another group would need more rights.
    consumer = settings.consumer(app, **few, **{"isolation.level": "read_committed"})
    load_metadata(consumer, state_topic(app))
    return consumer


class StateTopic:
    """One task's view of the state topic. After :meth:`restore`, :meth:`poll` never blocks.

    ``labels`` decide which records are about the app's topics as they are now; others are ignored. Used by one thread
    at a time: the one that restores, then the loop's. ``rests`` is for a reader that looks only now and then, with
    :meth:`catch_up` and :meth:`rest`.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        topic: str,
        partitions: Iterable[int],
        run: str,
        consumer: Consumer | None = None,
        versions: VersionStore | None = None,
        since: Mapping[int, int] | None = None,
        *,
        labels: Labels,
        rests: bool = False,
    ) -> None:
        self._labels = labels
        self.versions = versions
        """Where the versions of entities are stored while somebody needs them: there may be very many."""
        self._versions_only = False
        self._settings = settings
        self._app = app
        self.topic = topic
        self._partitions = list(partitions)
        self._run = run
        self._since = since or {}
        self._consumer = consumer or _consumer(
            settings, app, _RESTING_FETCH_WAIT_MS if rests else _FETCH_WAIT_MS
        )
        self._read_with(self._consumer)
        self._next: dict[int, int] = dict.fromkeys(self._partitions, 0)
        self._progress: dict[int, tuple[int, str]] = {}  # a watermark and its metadata
        self.malformed: Counter[str] = Counter()
        """Records that could not be read, by kind. Earlier records with the same names still count."""
        self._fresh: list[Command] = []
        self.pauses: dict[tuple[int, bytes], PauseRecord] = {}
        """What operators have paused, by partition and name."""
        self.pause_changes = 0
        """How often :attr:`pauses` has changed."""
        self.stopped = False
        self.watched_until = 0.0  # unix time: until then, telemetry has every lane
        self.guard_reason = ""  # why the run was stopped
        self.runs: dict[int, dict[str, Any]] = {}  # the run that the app belongs to, by partition
        self.owners: dict[int, dict[str, Claim]] = {}  # by partition and transactional id
        self.proposals: dict[int, Proposal] = {}
        self.range_progresses: dict[int, dict[Slots, RangeProgress]] = {}  # by partition
        self.grouped: defaultdict[int, Generation] = defaultdict(lambda: NEVER_MOVED)
        self.layouts: dict[
            int, dict[Slots, int]
        ] = {}  # by partition: the number of partitions its versions are complete for
        self.state_layouts: dict[int, dict[Slots, int]] = {}  # the same for lane state
        self.loads: dict[
            int, dict[Slots, tuple[int, Load]]
        ] = {}  # of this run: epoch and counts, by partition
        self.former: tuple[int, ...] = ()  # numbers of partitions that the source had before
        self.plans: dict[int, dict[str, Any]] = {}  # by partition: a shard's is in its first one
        self.wanted: dict[str, Any] = {}  # of this run: the number of tasks there should be
        self.attempts: dict[int, dict[bytes, dict[int, RetryState]]] = {}  # by partition and record
        self.lanes: dict[tuple[int, bytes], LaneRecord] = {}
        self.redriven: dict[int, OffsetRuns] = {}
        self.commands: dict[tuple[int, bytes], Command] = {}  # without an answer
        self.audits: dict[bytes, tuple[int, bytes]] = {}  # name: partition and value
        self.parts: dict[int, set[bytes]] = {}  # by partition: names of records that belong to one range
        self.rests: dict[
            int, dict[Slots, int]
        ] = {}  # of this run: everything below is done, except in stopped lanes

    def _read_with(self, consumer: Consumer) -> None:
        self._reader = PartitionReader(consumer, self.topic, missing_seconds=0)
        # A broker that has just come back may not know the topic yet. If the topic was deleted, the task's commits
        # fail.
        self._follower = PartitionReader(consumer, self.topic, missing_seconds=inf)

    def restore(self) -> None:
        """Read the whole topic. Raises BrokerError when it cannot be read."""
        # 0 instead of OFFSET_BEGINNING, which the client needs three quarters of a second to resolve. A compacted topic
        # always begins at 0; any other one is read from its beginning all the same.
        self._reader.assign(dict.fromkeys(self._partitions, 0))
        self._read_to_the_end()

    def restore_versions(self) -> None:
        """Read the versions again, into a new store; everything else is known. Raises BrokerError."""
        self.versions = VersionStore()
        self._versions_only = True
        try:
            self._reader.assign(dict.fromkeys(self._partitions, 0))
            self._read_to_the_end()
        finally:
            self._versions_only = False

    def _read_to_the_end(self) -> None:
        left = set(self._partitions)
        self._reader.progressed()
        while left:
            for message in self._reader.read(0.05):
                self._reader.progressed()
                if self._read(message):
                    left.discard(message.partition())
            self._reader.check_silence(
                3 * REQUEST_SECONDS,
                f"partitions {sorted(left)} of topic {self.topic!r} were not read to their ends",
            )

    def rest(self) -> None:
        """Fetch nothing until the next :meth:`catch_up`: for a reader that looks only now and then."""
        self._consumer.unassign()

    def catch_up(self, ends: Mapping[int, int]) -> None:
        """Read what was written since the last :meth:`rest`, up to these ends. Raises BrokerError when that fails.

        Records committed a moment ago may still be hidden for a few milliseconds. Records behind the open transaction
        of a task that died are not waited for.
        """
        self._reader.assign(self._next)
        if not self.read_through({p: end - 1 for p, end in ends.items()}, _OPEN_TRANSACTION_SECONDS):
            self._reader.assign(self._next)
            self._read_to_the_end()

    def read_through(self, places: Mapping[int, int], timeout: float) -> bool:
        """Read until these positions, by partition, are reached. False if that took longer than ``timeout``."""
        deadline = time.monotonic() + timeout
        while any(self._next.get(p, place + 1) <= place for p, place in places.items()):
            if time.monotonic() > deadline:
                return False
            for message in self._reader.read(0.02):
                self._read(message)
        return True

    def reopen(
        self,
        partitions: Iterable[int],
        run: str,
        versions: VersionStore | None = None,
        since: Mapping[int, int] | None = None,
        *,
        labels: Labels,
    ) -> StateTopic:
        """A view of other partitions, or for another run, with the same consumer. Don't use this one afterwards."""
        return StateTopic(
            self._settings,
            self._app,
            self.topic,
            partitions,
            run,
            self._consumer,
            versions,
            since,
            labels=labels,
        )

    def _read(self, message: Any) -> bool:
        """Take a record. True if the message is the partition's end instead."""
        if message.error() is not None:
            if message.partition() in self._next:
                self._next[message.partition()] = message.offset()
            return True
        self._take(message)
        return False

    def progress(self, partition: int, watermark: int, text: str | None) -> Restored:
        """Return the progress at a committed offset: from its metadata, or from the topic if that refers to it."""
        if text in (NOTHING, RANGES):
            return decode(watermark, None)
        if text != ELSEWHERE:
            return decode(watermark, text)
        begins, text = self._progress.get(partition, (-1, ""))
        # The record is written before the offset that refers to it, so it may be newer. What it calls done is done.
        if begins >= watermark:
            return decode(begins, text)
        return decode(watermark, "kl1:the record in the state topic is missing or older")

    def poll(self) -> bool:
        """Read the available records. True if this run was told to stop."""
        for _ in range(_POLLS_PER_TURN):
            messages = self._follower.read(0, _POLL_RECORDS)
            for message in messages:
                self._read(message)
            if len(messages) < _POLL_RECORDS:
                break
        return self.stopped

    def has_read(self, ends: Mapping[int, int]) -> bool:
        """True if everything below these offsets was read."""
        return all(self._next.get(p, end) >= end for p, end in ends.items())

    def repeat_commands(self) -> None:
        """For the next epoch: :meth:`take_commands` returns all pending commands again."""
        self._fresh = list(self.commands.values())

    @property
    def successor(self) -> dict[str, Any] | None:
        """Return the other run that the app now belongs to; None if it still belongs to this one.

        Runs older than this one do not count: they are all that is visible while a dead task's transaction is open.
        """
        for partition, found in self.runs.items():
            if found["run"] != self._run and found["place"] > self._since.get(partition, -1):
                return found
        return None

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that was made last; empty before the first. With shards it is that of one of them."""
        return max(self.plans.values(), key=lambda plan: float(plan["at"]), default={})

    @property
    def current_plans(self) -> list[dict[str, Any]]:
        """The last plan of every run that owns partitions now: one, or one for each shard."""
        owners = {found["run"] for found in self.runs.values()}
        return [plan for _, plan in sorted(self.plans.items()) if plan["run"] in owners]

    def take_commands(self) -> list[Command]:
        """Return the commands that came in since the last call."""
        fresh, self._fresh = self._fresh, []
        return [
            command for command in fresh if self.commands.get((command.partition, command.name)) == command
        ]

    @property
    def partitions(self) -> Collection[int]:
        """The partitions that it follows."""
        return self._partitions

    def adopt(self, other: StateTopic) -> None:
        """Follow the other view's partitions too, from where it has read to. Close that one afterwards. Never blocks.

        The two change their consumers: the other one's is newer, and so knows partitions that were added to the topic.
        Pending commands of those partitions are not returned by :meth:`take_commands`: see :meth:`commands_of`.
        """
        partitions = [p for p in other._partitions if p not in self._next]
        for mine, theirs in zip(self._by_partition(), other._by_partition(), strict=True):
            mine.update({p: theirs[p] for p in partitions if p in theirs})
        self.lanes |= other.lanes
        self.commands |= other.commands
        self.audits |= other.audits
        self.pauses |= other.pauses
        self.pause_changes += 1
        self._next |= {p: other._next[p] for p in partitions}
        self._partitions += partitions
        self.stopped = self.stopped or other.stopped
        self.guard_reason = self.guard_reason or other.guard_reason
        if other.wanted.get("number", 0) > self.wanted.get("number", 0):
            self.wanted = other.wanted
        self._consumer, other._consumer = other._consumer, self._consumer
        self._read_with(self._consumer)
        self._reader.add({p: place for p, place in self._next.items() if p not in partitions})

    def drop(self, partition: int) -> None:
        """Do not follow this partition any more: another worker owns it. Never blocks."""
        self._partitions.remove(partition)
        del self._next[partition]
        self._reader.remove([partition])
        for mine in self._by_partition():
            mine.pop(partition, None)
        self.lanes = {place: lane for place, lane in self.lanes.items() if place[0] != partition}
        self.commands = {place: one for place, one in self.commands.items() if place[0] != partition}
        self.audits = {name: audit for name, audit in self.audits.items() if audit[0] != partition}
        self.pauses = {place: one for place, one in self.pauses.items() if place[0] != partition}
        self.pause_changes += 1
        self._fresh = [command for command in self._fresh if command.partition != partition]

    def _by_partition(self) -> tuple[dict[int, Any], ...]:
        """What is known about each partition."""
        return (
            *(self.runs, self.owners, self.proposals, self.range_progresses, self.grouped, self.rests),
            *(self.layouts, self.state_layouts, self.plans, self.loads, self.attempts, self.redriven),
            *(self.parts, self._progress),
        )

    def commands_of(self, partition: int) -> list[Command]:
        """All pending commands about this partition: for a worker that has just taken it."""
        return [command for command in self.commands.values() if command.partition == partition]

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _take(self, message: Any) -> None:
        name, value, partition = message.key() or b"", message.value(), message.partition()
        if partition not in self._next:  # fetched before it was dropped
            return
        self._next[partition] = message.offset() + 1
        if (self.versions is None and name.startswith(VERSION)) or (
            self._versions_only and not name.startswith(VERSION)
        ):
            return
        try:
            self._apply(message, name, value)
        except MalformedRecordError as error:
            kind = kind_of(name)
            self.malformed[kind] += 1
            if self.malformed[kind] == 1:
                log.warning(
                    "ignoring malformed state records kind=%s first=%s/%d@%d: %s",
                    kind,
                    self.topic,
                    partition,
                    message.offset(),
                    error,
                )

    @wire.decoder
    def _apply(self, message: Any, name: bytes, value: bytes | None) -> None:
        partition = message.partition()
        if value is None or not self._labels.accepts(name, message):
            # The last record of a name counts, even if it is useless here.
            self._take_back(partition, name)
        elif name.startswith(OWNER):
            self._take_claim(partition, name.removeprefix(OWNER).decode(), message.offset(), value)
        elif name == RUN:
            self.runs[partition] = records.decode_run(value) | {"place": message.offset()}
        else:
            self._put(partition, name, value)
            if name.startswith(_PARTS):
                self.parts.setdefault(partition, set()).add(name)
            if name == EPOCH and not self._labels.letters_match(message):
                self.proposals[partition] = replace(self.proposals[partition], redriven="")

    def _take_claim(self, partition: int, owner: str, place: int, value: bytes) -> None:
        if not owner.startswith(f"{self._app}."):  # its id may be fenced, so it must be one of this app's
            raise MalformedRecordError(f"expected a transactional id of the app, got {owner[:60]!r}")
        ownership = self.owners.setdefault(partition, {})
        heard = time.monotonic()
        try:
            found = records.decode_claim(value)
            known = ownership.get(owner)
            if known is not None and known.number == found.number:  # it says more about the same claim
                place = known.place
        except MalformedRecordError:
            # Someone may own slots here. Put it before all others, so that the next task to claim fences this id, and
            # no task that has already claimed takes it for a successor.
            ownership.setdefault(owner, Claim(-1, ALL, "", "a malformed claim", leaving=False, heard=heard))
            raise
        ownership[owner] = Claim(
            *(place, found.slots, found.run, found.who, found.leaving, heard),
            *(found.epoch, found.task, found.number),
        )

    def _put(self, partition: int, name: bytes, value: bytes) -> None:
        if name.startswith(VERSION):
            if self.versions is not None:
                self.versions.put((partition, name.removeprefix(VERSION)), decode_mark(value))
        elif _is_part(name, VERSIONS):
            self.layouts.setdefault(partition, {})[_part(name, VERSIONS)] = int(value)
        elif _is_part(name, LAYOUT):
            self.state_layouts.setdefault(partition, {})[_part(name, LAYOUT)] = int(value)
        elif name == PROGRESS:
            self._progress[partition] = records.decode_progress(value)
        elif name.startswith(RANGE):
            standing = RangeProgress.decode(name.removeprefix(RANGE).decode(), value)
            self.range_progresses.setdefault(partition, {})[standing.slots] = standing
        elif _is_part(name, LOAD):
            run, epoch, counts = records.decode_load(value)
            if run == self._run:
                self.loads.setdefault(partition, {})[_part(name, LOAD)] = epoch, counts
        elif name == FORMER:
            self.former = records.decode_former(value)
        elif name == PLAN:
            self.plans[partition] = records.decode_plan(value)
        elif name == REPLAN:
            wanted = records.decode_replan(value)
            if wanted["run"] == self._run:
                self.wanted = wanted
        elif name == GROUPED:
            self.grouped[partition] = records.decode_grouped(value)
        elif _is_part(name, ATTEMPTS):
            self.attempts.setdefault(partition, {})[name] = decode_retries(value)
        elif _is_part(name, REDRIVEN):  # a redriven dead letter stays redriven, whichever task recorded it
            found = OffsetRuns.decode(value)
            self.redriven[partition] = self.redriven.get(partition, OffsetRuns()).union(found)
        elif name.startswith((LANE, KEYLESS)):
            self.lanes[partition, name] = decode_lane(name, partition, value)
        elif name == EPOCH:
            self.proposals[partition] = Proposal.decode(value)
        elif name == STOP:
            self.stopped = records.decode_stop(value) == self._run or self.stopped
        elif name == GUARD:
            run, why = records.decode_guard_stop(value)
            if run == self._run:
                self.guard_reason = why
        elif name == WATCH:
            self.watched_until = min(records.decode_watch(value), time.time() + WATCH_SECONDS_MAX)
        elif _is_part(name, REST):
            run, until = records.decode_rest(value)
            if run == self._run:
                self.rests.setdefault(partition, {})[_part(name, REST)] = until
        elif name.startswith(COMMAND):
            command = decode_command(name, partition, value)
            self.commands[partition, name] = command
            self._fresh.append(command)
        elif name.startswith(AUDIT):
            self.audits[name] = partition, value
        elif name.startswith(PAUSE):
            self.pauses[partition, name] = decode_pause(name, partition, value)
            self.pause_changes += 1

    def _take_back(self, partition: int, name: bytes) -> None:
        if name.startswith(VERSION) and self.versions is not None:
            self.versions.forget((partition, name.removeprefix(VERSION)))
        if name.startswith(OWNER):
            self.owners.get(partition, {}).pop(name.removeprefix(OWNER).decode(), None)
        self.lanes.pop((partition, name), None)
        self.commands.pop((partition, name), None)
        self.audits.pop(name, None)
        self.pause_changes += self.pauses.pop((partition, name), None) is not None
        self.parts.get(partition, set()).discard(name)
        if _is_part(name, LOAD):
            self.loads.get(partition, {}).pop(_part(name, LOAD), None)
        if _is_part(name, REST):
            self.rests.get(partition, {}).pop(_part(name, REST), None)
        if _is_part(name, VERSIONS):
            self.layouts.get(partition, {}).pop(_part(name, VERSIONS), None)
        if _is_part(name, LAYOUT):
            self.state_layouts.get(partition, {}).pop(_part(name, LAYOUT), None)
        if name.startswith(RANGE):
            self.range_progresses.get(partition, {}).pop(Slots.parse(name.removeprefix(RANGE).decode()), None)
        if _is_part(name, ATTEMPTS):
            self.attempts.get(partition, {}).pop(name, None)


def kind_of(name: bytes) -> str:
    """Return the kind of a record by its name: one of a few, whatever the name is."""
    known = next((kind for kind in _KINDS if name == kind or name.startswith(kind + b"/")), None)
    return "other" if known is None else known.decode()


def part_of(name: bytes, slots: Slots) -> bytes:
    """Return the name of the record that the owner of these slots writes."""
    return name if slots == ALL else name + b"/" + str(slots).encode()


def stale_parts(names: Iterable[bytes], record: bytes, slots: Slots) -> dict[bytes, Slots]:
    """Return those of ``names`` that overlap these slots but belong to another range, from before the slots were owned.

    Slots have one owner at a time, so no task writes under such a name any more.
    """
    found: dict[bytes, Slots] = {}
    for name in names:
        if _is_part(name, record):
            with suppress(ValueError):  # any client may have written into the topic
                other = _part(name, record)
                if other != slots and other.overlaps(slots):
                    found[name] = other
    return found


def _is_part(name: bytes, record: bytes) -> bool:
    return name == record or name.startswith(record + b"/")


def _part(name: bytes, record: bytes) -> Slots:
    return ALL if name == record else Slots.parse(name.removeprefix(record + b"/").decode())
