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
    from collections.abc import Collection, Mapping

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


class Ownership:
    """The claims of one worker. Blocks, except :meth:`leaving`, :meth:`attached` and :meth:`release`."""

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

    @property
    def partitions(self) -> Collection[int]:
        """The partitions of which it owns slots."""
        return self._owned.keys()

    def claim(self, owned: Mapping[int, Slots]) -> bool:
        """Own these slots of these partitions. Returns True if no earlier owner had to be fenced.

        Each claim of an earlier owner is answered by one fence. Raises TakenOverError when the app belongs to another
        run, ItemTakenError when another task of this epoch was first (then nothing is owned), and BrokerError when
        claims stay unreadable although the broker had time to end every transaction in front of them.
        """
        self._owned = dict(owned)
        self.check_run()
        self._writer.write_blocking(self._notes())
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
        if not self._claimant.outlives_task:
            return False
        rivals: list[Claim] = []
        for partition in self._owned:
            own = self._own(partition)
            if own is None:  # it was fenced
                return False
            later = [claim for claim in self._rivals(partition).values() if claim.place > own.place]
            rivals += [claim for claim in later if not claim.leaving]
        return bool(rivals) and all(claim.run == self._run and claim.epoch >= 0 for claim in rivals)

    @property
    def lost(self) -> bool:
        """Whether another worker has claimed some of the slots since."""
        for partition in self._owned:
            own = self._own(partition)
            if own is None:  # deleted by the worker that has fenced this one
                return True
            ownership = self._rivals(partition).values()
            if any(claim.place > own.place and not claim.leaving for claim in ownership):
                return True
        return False

    def lost_by_now(self, cluster: Cluster) -> bool:
        """:attr:`lost`, after reading everything that is committed by now. False if that fails. Blocks."""
        try:
            ends = cluster.ends(self._state.topic, self._owned, committed=True)
            self._state.read_through({p: end - 1 for p, end in ends.items()}, REQUEST_SECONDS)
        except BrokerError:
            return False
        return self.lost

    def leads(self, partition: int) -> bool:
        """Whether no other owner of this run has lower slots of this partition. One of the owners leads."""
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

    def leaving(self) -> None:
        """Say that what has begun will be finished, and nothing else."""
        for partition, name, value in self._notes(leaving=True):
            self._writer.put_state(partition, name, value)

    def attached(self, claimant: Claimant) -> None:
        """Say which Spark task the owner serves from now on."""
        self._claimant = claimant
        for partition, name, value in self._notes():
            self._writer.put_state(partition, name, value)

    def release(self) -> list[StateRecord]:
        """The records that release all claims when they are committed."""
        return [(partition, name, None) for partition, name, _ in self._notes()]

    def _own(self, partition: int) -> Claim | None:
        return self._state.owners.get(partition, {}).get(self._writer.id)

    def _before(self) -> dict[str, Claim]:
        """Earlier claims of any of the slots that are not released."""
        found: dict[str, Claim] = {}
        for partition in self._owned:
            own = self._own(partition)
            found |= {
                owner: claim
                for owner, claim in self._rivals(partition).items()
                if own is None or claim.place < own.place or claim.leaving
            }
        return found

    def _rivals(self, partition: int) -> dict[str, Claim]:
        """Claims of other workers that overlap this worker's slots."""
        slots = self._owned[partition]
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

    def _notes(self, *, leaving: bool = False) -> list[StateRecord]:
        name = OWNER + self._writer.id.encode()
        notes: list[StateRecord] = []
        for partition, slots in self._owned.items():
            value: dict[str, Any] = {"run": self._run, "who": self._who}
            if self._claimant.outlives_task:
                value |= {"epoch": self._claimant.epoch, "task": self._claimant.task}
            if slots != ALL:
                value["slots"] = str(slots)
            if leaving:
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
