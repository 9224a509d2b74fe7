"""Ownership: a run owns the app or a shard of it, and a worker owns partitions, or slots of them.

Both are records of the state topic, and the later one counts. A run writes its name into each of its partitions in one
transaction, and a run that loses one of them ends. A worker writes a claim into each of its partitions, under its
transactional id, and reads on until it sees that claim. Every earlier owner of any of its slots must then release them
or is fenced; only after that does the worker read progress. An owner releases its claim in the transaction that
contains its last progress. So at any time the broker accepts progress of a slot from one worker only: the one whose
claim is the last.

An owner that is alive is given time to leave. It finds the newer claim, or the name of the new run, says that it is
leaving, finishes the messages that have started, and releases. An owner that does not answer is dead or hangs, and is
fenced.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from keylane.denial import broker_error, is_denied
from keylane.errors import BrokerError, KeylaneError, TakenOverError
from keylane.kafka.client import KafkaException
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster
from keylane.kafka.transactional_client import discard, is_fenced, transactional_producer
from keylane.offsets.shard import WHOLE, Shard
from keylane.offsets.slots import ALL
from keylane.rights import Operation, on_topic
from keylane.state.fences import Fences
from keylane.state.labels import Labels
from keylane.state.topic import OWNER, RUN, StateTopic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_writer import StateRecord, TransactionalWriter
    from keylane.offsets.slots import Slots
    from keylane.state.topic import Claim

log = logging.getLogger("keylane.task")

ANSWER_SECONDS = 1.0
"""Time for an owner to say that it is leaving. After that it is fenced."""
LEAVING_EVERY_SECONDS = 1.0
"""Time between two claims in which an owner says that it is leaving."""
_SILENCE_SECONDS = 3.0
"""An owner that was leaving and says nothing for this time is dead."""
_LOOK_SECONDS = 0.2
_TAKE_OVER_TRIES = 3


def take_over(
    settings: KafkaSettings,
    app: str,
    topic: str,
    partitions: int,
    run: str,
    shard: Shard = WHOLE,
    *,
    commits: bool = False,
) -> dict[int, int]:
    """Make this run the owner of the app, or of a shard of it. Returns the offset of that record, by partition.

    Any other run that owns one of these partitions ends. ``commits``: runs of this app commit for their tasks
    (``commit="epoch"``), so those of other shards are fenced too. Raises TakenOverError, BrokerError.
    """
    for again in reversed(range(_TAKE_OVER_TRIES)):
        try:
            places = _take_over(settings, app, topic, partitions, run, shard, commits=commits)
        except KafkaException as error:
            if is_fenced(error):
                raise TakenOverError(f"another run of app {app!r} was started at the same moment") from error
            if not again:  # while the broker aborts for another client, its errors say nothing
                raise broker_error(
                    f"app {app!r} could not be taken over", error.args[0], on_topic(topic, Operation.WRITE)
                ) from error
        else:
            _taken[app, topic, shard] = places
            return places
    raise AssertionError("the last try returns or raises")


def run_id(app: str, shard: Shard) -> str:
    """The transactional id of a run: two runs of the same shard never commit at the same time."""
    return f"{app}.run" if shard.whole else f"{app}.run.{shard.number}"


_taken: dict[tuple[str, str, Shard], dict[int, int]] = {}
"""The offsets of the last ``run`` records of this process, or where the topic ended when the process started."""


def _take_over(
    settings: KafkaSettings, app: str, topic: str, partitions: int, run: str, shard: Shard, *, commits: bool
) -> dict[int, int]:
    found = {"run": run, "who": _who(), "at": time.time(), "shard": str(shard)}
    own = shard.of(range(partitions))
    producer = transactional_producer(
        settings, run_id(app, shard)
    )  # of two that start at the same time one is fenced here
    places: dict[int, int] = {}
    denied: list[Any] = []

    def placed(error: Any, message: Any) -> None:
        if error is not None and is_denied(error):
            denied.append(error)
        places[message.partition()] = message.offset()

    try:
        if commits:  # before the record: a run that finds it has nobody left to fence
            _fence_other_shards(settings, app, topic, own, shard)
        producer.begin_transaction()
        for partition in own:
            producer.produce(topic, json.dumps(found).encode(), RUN, partition=partition, on_delivery=placed)
        producer.commit_transaction(3 * REQUEST_SECONDS)
    except BaseException as error:
        discard(producer)
        if denied:
            what = f"app {app!r} could not be taken over"
            raise broker_error(what, denied[0], on_topic(topic, Operation.WRITE)) from error
        raise
    return places


def _fence_other_shards(
    settings: KafkaSettings, app: str, topic: str, partitions: list[int], shard: Shard
) -> None:
    """Fence the runs of another shard, or of all of the app, that own any of these partitions."""
    state = StateTopic(settings, app, topic, partitions, "", labels=Labels(None))
    try:
        state.restore()
    finally:
        state.close()
    owners = {run_id(app, Shard.parse(found["shard"])) for found in state.runs.values()}
    for owner in sorted(owners - {run_id(app, shard)}):
        discard(transactional_producer(settings, owner))


def remember_newest_run(cluster: Cluster, app: str, topic: str, shard: Shard = WHOLE) -> None:
    """Before a process takes an app over for the first time: no record written so far is a successor of its run.

    The first take-over may fail, and :func:`check_still_ours` is asked before the next one. Raises BrokerError.
    """
    ends = cluster.ends(topic, shard.of(range(cluster.partitions(topic))))
    _taken.setdefault((app, topic, shard), {p: end - 1 for p, end in ends.items()})


def check_still_ours(settings: KafkaSettings, app: str, topic: str, shard: Shard = WHOLE) -> None:
    """Raise TakenOverError if another process has started the app, or a shard that has any of these partitions.

    Call it before the app is started again. Raises BrokerError if that cannot be found out.
    """
    partitions = shard.of(range(Cluster(settings).partitions(topic)))
    since = _taken.get((app, topic, shard))
    state = StateTopic(settings, app, topic, partitions, "", since=since, labels=Labels(None))
    try:
        state.restore()
    finally:
        state.close()
    found = state.successor
    if found is not None and found.get("who") != _who():
        raise _taken_over(app, found)


def _who() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _taken_over(app: str, found: dict[str, Any]) -> TakenOverError:
    shard = found.get("shard", "1/1")
    taken = f"app {app!r} was taken over by another run"
    if shard != str(WHOLE):
        taken = f"partitions of app {app!r} were taken over by a run of shard {shard}"
    return TakenOverError(
        f"{taken}, started by {found.get('who')} at "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found.get('at', 0)))}; this one has ended"
    )


class ItemTakenError(KeylaneError):
    """Another Spark task of this epoch claimed the same part of the plan first."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """The Spark task that an owner serves, as its claims say. The defaults: an owner that ends with its task."""

    epoch: int = -1
    task: int = -1

    @property
    def outlives_task(self) -> bool:
        """Whether the owner may be alive although its task has ended."""
        return self.epoch >= 0

    def succeeds(self, claim: Claim) -> bool:
        """Whether the owner of this claim served an earlier attempt of the same task: Spark gave up on it."""
        return self.outlives_task and (claim.epoch, claim.task) == (self.epoch, self.task)

    def competes(self, claim: Claim) -> bool:
        """Whether the owner of this claim serves another task of the same epoch."""
        return self.outlives_task and claim.epoch == self.epoch and claim.task != self.task


class Turn(Enum):
    """What a claim waits for."""

    FREE = "free"
    """Nothing: all earlier owners have released or are fenced."""
    WAITS = "waits"
    """An earlier owner that may be alive, or its own record."""
    DEAD = "dead"
    """An earlier owner that has to be fenced."""
    TAKEN = "taken"
    """Another worker has the better right to it."""


class Ownership:
    """The claims of one worker: what it owns, and what it has claimed and waits for.

    :meth:`claim`, :meth:`settle` and :meth:`lost_by_now` block. Everything else is for the loop.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        state: StateTopic,
        writer: TransactionalWriter,
        run: str,
        who: str,
        patience: float,
        claimant: Claimant = Claimant(),  # noqa: B008 - a frozen value
    ) -> None:
        self._settings = settings
        self._app = app
        self._state = state
        self._writer = writer
        self._run = run
        self._who = who
        self._patience = patience
        self._claimant = claimant
        self._owned: dict[int, Slots] = {}
        self._waiting: dict[int, Slots] = {}  # claimed, and not owned yet
        self._leaving: set[int] = set()  # owned; it finishes what it has begun there
        self._numbers: dict[int, int] = {}  # of the newest claim of each partition
        self._silent: set[int] = set()  # their release is being committed: no claim may follow it

    @property
    def partitions(self) -> Collection[int]:
        """The partitions of which it owns slots."""
        return self._owned.keys()

    @property
    def owned(self) -> dict[int, Slots]:
        """The slots that it owns, by partition."""
        return dict(self._owned)

    @property
    def waiting(self) -> dict[int, Slots]:
        """The slots that it has claimed and does not own yet."""
        return dict(self._waiting)

    def claim(self, owned: Mapping[int, Slots], *, patient: bool = True) -> bool:
        """Own these slots of these partitions. Returns True if all are owned and no earlier owner had to be fenced.

        Unless it is ``patient``, partitions whose earlier owner may be alive are :attr:`waiting` afterwards.
        Each claim of an earlier owner is answered by one fence. Raises TakenOverError when the app belongs to another
        run, ItemTakenError when another task of this epoch was first (then nothing is owned), and BrokerError when
        claims stay unreadable although the broker had time to end every transaction in front of them.
        """
        self._owned, self._waiting, self._leaving = dict(owned), {}, set()
        self.check_run()
        self._writer.write_blocking(self._notes(self._owned))
        places = {p: self._writer.written[p] for p in self._owned}
        began = time.monotonic()
        fences = Fences(self._settings, self._app, self._state.topic)
        while True:
            seen = self._state.read_through(self._writer.written, _LOOK_SECONDS)
            self.check_run()
            before = self._before()
            if any(self._is_competitor(claim) for claim in before.values()):
                self._writer.write_blocking(self.release())
                self._owned = {}
                raise ItemTakenError(f"{self._who}: another task of this epoch owns these partitions")
            if seen and not before:
                fences.settle(self._writer.limits, self._writer.source, self._owned)
                return fences.none
            awaited = {owner: claim for owner, claim in before.items() if not fences.has(owner, claim)}
            if not awaited:  # only what nobody can read yet is missing
                awaited = self._hidden(fences, places)
            waited = time.monotonic() - began
            dead = {owner: claim for owner, claim in awaited.items() if self._is_over(claim, waited)}
            if dead:
                fences.fence(dead)
                self._writer.write_blocking(
                    (p, OWNER + owner.encode(), None)
                    for p in self._owned
                    for owner in dead
                    if owner not in before or owner in self._state.owners.get(p, {})
                )
            elif seen and awaited.keys() == before.keys() and not patient:
                fences.settle(self._writer.limits, self._writer.source, self._owned)
                occupied = [p for p in self._owned if self._before_in(p)]
                self._waiting = {p: self._owned.pop(p) for p in occupied}
                return False
            elif before:
                time.sleep(0.02)
                self._state.poll()

    def _hidden(self, fences: Fences, places: Mapping[int, int]) -> dict[str, Claim]:
        """Earlier claims that are in open transactions, or behind one, unless their owners are fenced."""
        return {
            owner: claim
            for partition, claims in fences.hidden(self._owned).claims.items()
            for owner, claim in claims.items()
            if claim.place < places[partition]
            and claim.slots.overlaps(self._owned[partition])
            and owner != self._writer.id
            and not self._is_competitor(claim)
            and not fences.has(owner, claim)
        }

    def check_run(self) -> None:
        """Raises TakenOverError when the app belongs to another run."""
        found = self._state.successor
        if found is not None:
            raise _taken_over(self._app, found)

    @property
    def asked_to_leave(self) -> bool:
        """Whether a later worker of this run claims some of the slots, and waits until they are released."""
        return bool(self.requested) and not self.overruled

    @property
    def requested(self) -> dict[int, list[Claim]]:
        """Later claims of this run for slots that it owns, by partition: they wait for the release."""
        found: dict[int, list[Claim]] = {}
        if self._claimant.outlives_task:
            for partition in self._owned:
                later = self._later(partition)
                if later and all(map(self._waits_for_us, later)):
                    found[partition] = later
        return found

    @property
    def overruled(self) -> list[int]:
        """Partitions for which another worker has fenced this one, or is about to."""
        polite = self._claimant.outlives_task
        return [
            partition
            for partition in self._owned.keys()
            - self._silent  # else its own release may have been read already
            if self._own(partition) is None
            or any(not (polite and self._waits_for_us(claim)) for claim in self._later(partition))
        ]

    def _later(self, partition: int) -> list[Claim]:
        """Later claims of slots that it owns."""
        own = self._own(partition)
        if own is None:
            return []
        rivals = self._rivals(partition).values()
        return [claim for claim in rivals if claim.place > own.place and not claim.leaving]

    def _waits_for_us(self, claim: Claim) -> bool:
        successor = self._state.successor
        if successor is not None and claim.run == successor["run"]:
            return True
        return claim.run == self._run and claim.epoch >= 0

    @property
    def lost(self) -> bool:
        """Whether another worker has claimed some of the slots since."""
        # Without its own claim it was fenced, by the worker that has deleted the claim.
        return any(self._own(p) is None or self._later(p) for p in self._owned.keys() - self._silent)

    def lost_by_now(self, cluster: Cluster) -> bool:
        """:attr:`lost`, after reading everything that is committed by now. False if that fails. Blocks."""
        try:
            ends = cluster.ends(self._state.topic, self._owned, committed=True)
            self._state.read_through({p: end - 1 for p, end in ends.items()}, REQUEST_SECONDS)
        except BrokerError:
            return False
        return self.lost

    # Ranges that are taken and released while others stay.

    def ask(self, ranges: Mapping[int, Slots]) -> None:
        """Claim these slots; :meth:`turn` says when they are free. None of these partitions may be owned."""
        self._waiting |= ranges
        for partition in ranges:
            self._numbers[partition] = self._numbers.get(partition, 0) + 1
        self._put(ranges)

    def turn(self, partition: int, waited: float) -> Turn:
        """What the claim of this partition waits for, ``waited`` seconds after it was made."""
        own, before = self._own(partition), self._before_in(partition)
        rivals = [claim for claim in self._rivals(partition).values() if claim.run == self._run]
        newer_plan = any(claim.epoch > self._claimant.epoch and not claim.leaving for claim in rivals)
        if newer_plan or any(map(self._is_competitor, before.values())):
            return Turn.TAKEN
        if any(self._is_over(claim, waited) for claim in before.values()):
            return Turn.DEAD
        return Turn.FREE if own is not None and not before else Turn.WAITS

    def dead(self, partition: int, waited: float) -> dict[str, Claim]:
        """Claims of earlier owners of this partition that do not answer, by their ids."""
        before = self._before_in(partition)
        return {owner: claim for owner, claim in before.items() if self._is_over(claim, waited)}

    def fences(self) -> Fences:
        """For the claim of one range."""
        return Fences(self._settings, self._app, self._state.topic)

    def settle(self, fences: Fences, partition: int) -> None:
        """End what the fenced owners left open. Blocks. Raises BrokerError."""
        fences.settle(self._writer.limits, self._writer.source, [partition])

    def is_visible(self, partition: int) -> bool:
        """Whether its own claim of this partition was read."""
        return self._own(partition) is not None

    def bury(self, partition: int, dead: Iterable[str]) -> None:
        """Delete the claims of owners that were fenced; then the claim's turn comes."""
        for owner in dead:
            if owner in self._state.owners.get(partition, {}):
                self._writer.put_state(partition, OWNER + owner.encode(), None)

    def own(self, partition: int) -> None:
        """What was claimed is owned: its turn has come."""
        self._owned[partition] = self._waiting.pop(partition)

    def withdraw(self, partition: int) -> None:
        """Give up a claim that waits."""
        self._waiting.pop(partition)
        self._writer.put_state(partition, OWNER + self._writer.id.encode(), None)

    def keep(self, partition: int) -> None:
        """The release of this partition was not committed."""
        self._silent.discard(partition)

    def released(self, partition: int) -> None:
        """The release of this partition is committed."""
        self._silent.discard(partition)
        del self._owned[partition]
        self._leaving.discard(partition)

    def leads(self, partition: int) -> bool:
        """Whether no other owner of this run has lower slots of this partition. One of the owners leads."""
        if partition not in self._owned:
            return False
        first = self._owned[partition].first
        return all(claim.slots.first >= first for claim in self._beside(partition))

    def others(self, partition: int) -> bool:
        """Whether other workers of this run own slots of this partition."""
        return bool(self._beside(partition))

    def _beside(self, partition: int) -> list[Claim]:
        ownership = self._state.owners.get(partition, {})
        return [
            claim for owner, claim in ownership.items() if owner != self._writer.id and claim.run == self._run
        ]

    def leaving(self, partition: int | None = None) -> None:
        """Say that what has begun will be finished, and nothing else: in this partition, or in all."""
        leaves = self._owned if partition is None else {partition: self._owned[partition]}
        self._leaving |= leaves.keys()
        self._put(leaves)

    def is_leaving(self, partition: int) -> bool:
        """Whether it has said so about this partition."""
        return partition in self._leaving

    def attached(self, claimant: Claimant, wanted: Mapping[int, Slots]) -> None:
        """Say which Spark task the owner serves from now on, and that it leaves what is not wanted any more.

        It says nothing in claims that it will withdraw.
        """
        self._claimant = claimant
        self._leaving |= {p for p, slots in self._owned.items() if wanted.get(p) != slots}
        self._put(self._owned | {p: slots for p, slots in self._waiting.items() if wanted.get(p) == slots})

    def release(self, partition: int | None = None) -> list[StateRecord]:
        """The records that release this partition, or all claims, when they are committed.

        Until :meth:`released` or :meth:`keep` nothing is said about a single partition.
        """
        name = OWNER + self._writer.id.encode()
        if partition is not None:
            self._silent.add(partition)
        released = (self._owned | self._waiting) if partition is None else [partition]
        return [(one, name, None) for one in released]

    def _put(self, ranges: Mapping[int, Slots]) -> None:
        for partition, name, value in self._notes(ranges):
            self._writer.put_state(partition, name, value)

    def _own(self, partition: int) -> Claim | None:
        found = self._state.owners.get(partition, {}).get(self._writer.id)
        # An earlier claim, which was released, says nothing about the place of the newest.
        return None if found is None or found.number != self._numbers.get(partition, 0) else found

    def _before(self) -> dict[str, Claim]:
        """Earlier claims of any of the slots that are not released."""
        found: dict[str, Claim] = {}
        for partition in self._owned:
            found |= self._before_in(partition)
        return found

    def _before_in(self, partition: int) -> dict[str, Claim]:
        own = self._own(partition)
        return {
            owner: claim
            for owner, claim in self._rivals(partition).items()
            if own is None or claim.place < own.place or claim.leaving
        }

    def _rivals(self, partition: int) -> dict[str, Claim]:
        """Claims of other workers that overlap this worker's slots."""
        slots = (self._owned | self._waiting)[partition]
        ownership = self._state.owners.get(partition, {})
        return {
            owner: claim
            for owner, claim in ownership.items()
            if owner != self._writer.id and claim.slots.overlaps(slots)
        }

    def _is_competitor(self, claim: Claim) -> bool:
        """Whether this earlier claim is of a live owner that serves another task of the same epoch."""
        return (
            claim.run == self._run
            and not claim.leaving
            and self._claimant.competes(claim)
            and may_be_alive(claim.who)
        )

    def _is_over(self, claim: Claim, waited: float) -> bool:
        """Whether to fence this owner now, after having ``waited`` seconds for it."""
        if claim.run == self._run and (
            claim.epoch < 0 or self._claimant.succeeds(claim) or not may_be_alive(claim.who)
        ):
            return True
        if claim.leaving:
            return waited > self._patience or time.monotonic() - claim.heard > _SILENCE_SECONDS
        return waited > ANSWER_SECONDS

    def _notes(self, ranges: Mapping[int, Slots]) -> list[StateRecord]:
        name = OWNER + self._writer.id.encode()
        notes: list[StateRecord] = []
        for partition, slots in ranges.items():
            if partition in self._silent:
                continue
            value: dict[str, Any] = {"run": self._run, "who": self._who}
            if self._claimant.outlives_task:
                value |= {"epoch": self._claimant.epoch, "task": self._claimant.task}
            if number := self._numbers.get(partition, 0):
                value["number"] = number
            if slots != ALL:
                value["slots"] = str(slots)
            if partition in self._leaving:
                value["leaving"] = True
            notes.append((partition, name, json.dumps(value).encode()))
        return notes


def may_be_alive(who: str) -> bool:
    """False if this owner was a process of this machine that does not exist any more."""
    host, _, rest = who.rpartition(":")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
