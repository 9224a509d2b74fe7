"""Judges a history: one message of a lane at a time, in order, nothing lost, nothing done twice.

The rules, for every lane:

* **No overlap.** No attempt starts while another one of the lane is open, whoever runs it. An attempt that never ended
  was ended by the death of its owner, which happened after the owner's last event anywhere in the history.
* **Nothing overtakes.** A message starts only when every earlier message of its lane is finished: it ended with a
  final outcome, or the caller says (``finished``) that it became a dead letter. A failed message therefore runs again
  before a later one starts.
* **A duplicate never runs.** It is finished when the earlier message that it repeats is.
* **Going back is for a new owner.** After a crash the next owner may repeat what was finished already. That is counted.
  From there it has to go forward again: the same owner never starts an earlier offset of a lane than it did before.

For a lane whose messages carry versions (``versions``), *earlier* means a lower version instead of a lower offset, in
every rule: what an app promises there is the order of versions, whatever the order of the log. And:

* **Stale is what is behind.** A message that was passed over as stale did not run to its end, and some message of its
  lane with the same version or a higher one is finished.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keylane.audit.violation import EventKind, Flaw
from keylane.lanes.ordering import ordering
from keylane.testing.findings import Findings
from keylane.testing.history import FINAL, collector_paused
from keylane.testing.verdict import Counts, Sent, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from keylane.audit.violation import HistoryEvent
    from keylane.lanes.ordering import Ordering, OrderName
    from keylane.testing.history import History

Position = tuple[int, int]
"""Partition and offset."""


def check(
    history: History,
    *,
    sent: Mapping[Position, bytes | None] | Iterable[Sent],
    finished: Collection[Position] = (),
    waiting: Collection[Position] = (),
    duplicates: Mapping[Position, Position] | None = None,
    versions: Mapping[Position, int] | None = None,
    stale: Collection[Position] = (),
    redriven: Collection[Position] = (),
    allow_repeats: int = 0,
    order: OrderName | Ordering = "key",
    lanes: Mapping[Position, bytes | None] | None = None,
    min_seen: float = 0.5,
) -> Verdict:
    """Judges what a history shows about the messages that were sent.

    ``sent`` is every message of the source topic. ``finished`` are those that are known to be finished by other
    evidence than a final end, because a stage cannot see that its failed attempt was the last one: dead letters in
    their topic. ``waiting`` are those that may not be finished, and are not lost: they wait in a blocked lane, or among
    the letters of a parked one. ``duplicates`` are messages that were sent twice, each with the earlier one of its lane
    that it repeats: only that one runs. ``allow_repeats`` is how often *one* message may finish again.

    ``versions`` are those of the messages of an app that runs by them; a message without one is held to no order.
    ``stale`` are those that were passed over because of theirs.

    ``redriven`` are dead letters that were redriven: their lanes had gone on, so they may run after later messages. As
    every other they start when all before them are finished, and nothing that is not redriven goes back behind them.

    ``order`` is the app's: keyless messages have no lane under ``"key"``, nothing has one under ``"none"``. ``lanes``
    is the lane of every message that was sent, ``ordering.lane_key(message)``: an ordering that reads messages
    (``ByHeader``, ``ByField``) needs it, because a history does not show what it reads. A history that shows
    fewer than the share ``min_seen`` of the messages, or no two messages of one lane, proves nothing and is not ok.

    Raises ValueError for an order that does not exist, or one that needs ``lanes``.
    """
    by = ordering(order)
    if by is None:
        raise ValueError(f"order is key, partition, global, none or an Ordering, not {order!r}")
    if by.reads_messages and lanes is None:
        raise ValueError(f"order={by!r} needs lanes: the lane of every message, by partition and offset")
    keys = (
        dict(sent)
        if isinstance(sent, Mapping)
        else {(partition, offset): key for key, partition, offset in sent}
    )
    with collector_paused():
        judge = _Judge(
            history.events,
            keys,
            frozenset(finished),
            duplicates or {},
            by,
            lanes,
            versions,
            frozenset(stale),
            frozenset(redriven),
        )
        judge.run()
        judge.look_for_stale()
        judge.look_for_loss_and_repeats(allow_repeats, frozenset(waiting))
        judge.look_for_proof(min_seen, frozenset(waiting))
        return judge.verdict()


Rank = tuple[int, int]
"""Where a message stands in its lane: version and offset; the version is 0 where there are none."""


class _Lane:
    """The messages of one lane in one partition, and how far they are."""

    __slots__ = ("blamed", "finished", "last", "low", "passed", "ranks", "started")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.finished: set[int] = set()  # indices at or above `low`
        self.low = 0  # index of the first message that is not finished
        self.blamed = -1  # the unfinished message that was reported last: once is enough
        self.last: dict[str, Rank] = {}  # per owner, what it started last
        self.passed: dict[int, int] = {}  # finished by declaration only: offset -> attempts by then
        self.started = 0  # different messages that were started

    def finish(self, index: int) -> None:
        if index >= self.low:
            self.finished.add(index)
            while self.low in self.finished:
                self.finished.remove(self.low)
                self.low += 1


class _Judge:
    """One pass over the events. Everything it keeps is written by `run` and read by the steps after it."""

    def __init__(
        self,
        events: tuple[HistoryEvent, ...],
        sent: dict[Position, bytes | None],
        declared: frozenset[Position],
        duplicates: Mapping[Position, Position],
        order: Ordering,
        lanes: Mapping[Position, bytes | None] | None,
        versions: Mapping[Position, int] | None,
        stale: frozenset[Position],
        redriven: frozenset[Position],
    ) -> None:
        self.events = events
        self.sent = sent
        self.duplicates = duplicates
        self.versions = versions
        self.stale = stale
        self.redriven = redriven
        self.declared = declared | duplicates.keys() | stale
        self.order = order
        self.given = lanes
        self.alive_until = {event.owner: event.seq for event in events}
        self.lanes = self._make_lanes()
        self.starts: dict[Position, int] = {}  # the highest attempt that was started
        self.finals: dict[Position, int] = {}
        self.again: dict[Position, int] = {}  # repeats of messages that are finished by declaration
        self.open: dict[Hashable, list[HistoryEvent]] = {}
        self.owner_of: dict[bytes, str | None] = {}  # None: more than one
        self.attempts = 0
        self.retried: set[Position] = set()
        self.findings = Findings()

    def _make_lanes(self) -> dict[Hashable, _Lane]:
        lanes: dict[Hashable, _Lane] = {}
        for position in sorted(self.sent):
            partition, offset = position
            key = self.sent[position]
            name = self._name(key, partition, offset), partition
            if name[0] is None or (self.versions is not None and position not in self.versions):
                continue
            lane = lanes.get(name)
            if lane is None:
                lane = lanes[name] = _Lane()
            lane.ranks.append(self._rank(partition, offset))
        if self.versions is not None:
            for lane in lanes.values():
                lane.ranks.sort()
        return lanes

    def _name(self, key: bytes | None, partition: int, offset: int) -> bytes | None:
        """The message's lane, which may have messages of other partitions, or None."""
        if self.given is not None:
            return self.given.get((partition, offset))
        return key if self.order.by_key else self.order.lane_of(key, partition)

    def _rank(self, partition: int, offset: int) -> Rank:
        return 0 if self.versions is None else self.versions[partition, offset], offset

    def _told(self, rank: Rank) -> str:
        return f"offset {rank[1]}" if self.versions is None else f"version {rank[0]} (offset {rank[1]})"

    def _lane(self, event: HistoryEvent) -> _Lane | None:
        if self.versions is not None and (event.partition, event.offset) not in self.versions:
            return None
        return self.lanes.get((self._name(event.key, event.partition, event.offset), event.partition))

    def _alone(self, event: HistoryEvent) -> Hashable:
        """What may have one open attempt only. Two events without a lane share nothing but their own position."""
        lane = self._name(event.key, event.partition, event.offset)
        return lane if lane is not None else (event.partition, event.offset, event.attempt, event.owner)

    def run(self) -> None:
        start = EventKind.START
        for index, event in enumerate(self.events):
            if event.kind is start:
                self._start(index, event)
            else:
                self._end(index, event)

    def _start(self, index: int, event: HistoryEvent) -> None:
        key, owner = event.key, event.owner
        position = (event.partition, event.offset)
        self.attempts += 1
        if event.attempt > 1:
            self.retried.add(position)
        if key is not None and self.owner_of.setdefault(key, owner) != owner:
            self.owner_of[key] = None
        if self.sent.get(position, b"" if key is None else None) != key:
            self.findings.add(Flaw.UNKNOWN, "no such message was sent under this key", index, event)
            return
        if position in self.duplicates:
            first = self.duplicates[position][1]
            self.findings.add(Flaw.DUPLICATE, f"it repeats offset {first} and ran all the same", index, event)

        opened = self.open.setdefault(self._alone(event), [])
        if opened:
            alive = [other for other in opened if self.alive_until[other.owner] >= event.seq]
            if alive:
                other = alive[0]
                self.findings.add(
                    Flaw.OVERLAP,
                    f"started while attempt {other.attempt} at {other.partition}@{other.offset} was open"
                    f" (owner {other.owner})",
                    index,
                    event,
                )
            opened[:] = alive  # the others died with their owner

        lane = self._lane(event)
        if lane is not None:
            self._check_order(lane, index, event, opened)
            rank = self._rank(event.partition, event.offset)
            if position not in self.redriven:
                lane.last[owner] = rank
            else:
                lane.last[owner] = max(rank, lane.last.get(owner, rank))
            if position not in self.starts:
                lane.started += 1
        opened.append(event)
        if event.attempt >= self.starts.get(position, 0):
            self.starts[position] = event.attempt

    def _check_order(self, lane: _Lane, index: int, event: HistoryEvent, opened: list[HistoryEvent]) -> None:
        offset = event.offset
        rank = self._rank(event.partition, offset)
        own = lane.last.get(event.owner)
        late = (event.partition, offset) in self.redriven
        if own is not None and rank < own and not late:
            self.findings.add(
                Flaw.ORDER,
                f"owner {event.owner} went back: it had started {self._told(own)} before",
                index,
                event,
            )
        if lane.passed and offset in lane.passed and not late:
            before = lane.passed[offset]
            if event.attempt == before + 1:
                self.findings.add(
                    Flaw.ORDER,
                    f"attempt {event.attempt} came after a later message had started",
                    index,
                    event,
                )
            else:
                position = (event.partition, offset)
                self.again[position] = self.again.get(position, 0) + (event.attempt == 1)
        place = lane.low
        if lane.ranks[place : place + 1] == [rank]:
            return  # the usual case: the first that is not finished
        place = bisect_left(lane.ranks, rank)
        while lane.low < place:
            waiting = (event.partition, lane.ranks[lane.low][1])
            if waiting not in self.declared or any((o.partition, o.offset) == waiting for o in opened):
                break
            lane.passed[waiting[1]] = self.starts.get(waiting, 0)
            lane.finish(lane.low)
        if lane.low < place and lane.blamed != lane.low:
            lane.blamed = lane.low
            self.findings.add(
                Flaw.ORDER,
                f"started while {self._told(lane.ranks[lane.low])} was not finished",
                index,
                event,
            )

    def _end(self, index: int, event: HistoryEvent) -> None:
        alone = self._alone(event)
        opened = self.open.get(alone, [])
        for place, other in enumerate(opened):
            if other[1:6] == event[1:6]:  # key, partition, offset, attempt, owner
                del opened[place]
                break
        else:
            position = (event.partition, event.offset)
            if self.sent.get(position, b"" if event.key is None else None) == event.key:
                self.findings.add(Flaw.STRAY, "an end without a start", index, event)
            return
        if not opened and isinstance(alone, tuple):
            del self.open[alone]  # of no lane: nothing will ask for it again
        if event.outcome in FINAL:
            position = (event.partition, event.offset)
            if event.outcome != "dead" or position not in self.redriven:  # else its end is still to come
                self.finals[position] = self.finals.get(position, 0) + 1
            lane = self._lane(event)
            if lane is not None:
                lane.finish(bisect_left(lane.ranks, self._rank(event.partition, event.offset)))

    def look_for_stale(self) -> None:
        """Those that are called stale must be."""
        if not self.stale:
            return
        versions = self.versions or {}
        newest: dict[tuple[bytes | None, int], int] = {}
        for position in self.finals.keys() | (self.declared - self.stale - self.duplicates.keys()):
            lane = self.sent.get(position), position[0]
            newest[lane] = max(newest.get(lane, -1), versions.get(position, -1))
        for position in sorted(self.stale):
            message = Sent(self.sent.get(position), *position)
            version = versions.get(position)
            if version is None:
                self.findings.add(Flaw.STALE, "passed over as stale, and has no version", message=message)
            elif position in self.finals:
                self.findings.add(Flaw.STALE, "passed over as stale, and ran all the same", message=message)
            elif newest.get((message.key, message.partition), -1) < version:
                self.findings.add(
                    Flaw.STALE,
                    f"version {version} was passed over as stale, and nothing as new is finished",
                    message=message,
                )

    def look_for_loss_and_repeats(self, allow_repeats: int, waiting: frozenset[Position]) -> None:
        self.lost = tuple(
            Sent(self.sent[position], *position)
            for position in sorted(self.sent.keys() - self.finals.keys() - self.declared - waiting)
        )
        more = {position: count - 1 for position, count in self.finals.items() if count > 1}
        for position, count in self.again.items():
            more[position] = more.get(position, 0) + count
        self.repeats = sum(more.values())
        too_often = {position for position, count in more.items() if count > allow_repeats}
        if not self.lost and not too_often:
            return
        last: dict[Position, int] = {}
        wanted = too_often.union((partition, offset) for _, partition, offset in self.lost)
        for index, event in enumerate(self.events):
            if (event.partition, event.offset) in wanted:
                last[event.partition, event.offset] = index
        for key, partition, offset in self.lost:
            found = last.get((partition, offset))
            message = Sent(key, partition, offset)
            if found is None:
                self.findings.add(Flaw.LOST, "sent and never started", message=message)
            else:
                self.findings.add(Flaw.LOST, "started and never finished", found, self.events[found], message)
        for position in sorted(too_often):
            index = last[position]
            detail = f"finished {more[position] + 1} times, {allow_repeats + 1} allowed"
            self.findings.add(Flaw.REPEAT, detail, index, self.events[index])

    def look_for_proof(self, min_seen: float, waiting: frozenset[Position]) -> None:
        seen = sum(
            1 for position in self.sent if position in self.starts or position in self.declared | waiting
        )
        if not self.sent or not self.events:
            self.findings.add(
                Flaw.THIN, f"{len(self.sent)} messages sent, {len(self.events)} events in the history"
            )
        elif seen < min_seen * len(self.sent):
            self.findings.add(
                Flaw.THIN,
                f"{seen} of {len(self.sent)} messages were seen, at least {min_seen:.0%} are needed",
            )
        elif self.order.has_lanes and all(lane.started < 2 for lane in self.lanes.values()):
            self.findings.add(
                Flaw.THIN, "no lane has two messages that were started: order was never put to the test"
            )

    def verdict(self) -> Verdict:
        one_owner = sum(1 for owner in self.owner_of.values() if owner is not None)
        return Verdict(
            violations=self.findings.with_timelines(self.events, self._line),
            tally=self.findings.tally,
            lost=self.lost,
            repeats=self.repeats,
            counts=Counts(
                sent=len(self.sent),
                messages=len(self.starts),
                attempts=self.attempts,
                keys=len(self.owner_of),
                owners=len(self.alive_until),
                retried=len(self.retried),
            ),
            affinity=one_owner / len(self.owner_of) if self.owner_of else 1.0,
        )

    def _line(self, event: HistoryEvent) -> Hashable:
        """What belongs on one timeline: the lane, or without one the message."""
        alone = self._alone(event)
        return alone if not isinstance(alone, tuple) else alone[:2]
