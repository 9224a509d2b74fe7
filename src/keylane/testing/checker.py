"""Checker of histories: one message of a lane at a time, in order, nothing lost, nothing done twice.

The rules for every lane:

* **No overlap.** No attempt starts while another attempt of the lane is open, by any owner. An attempt without an end
  ended with the crash of its owner, which came after the owner's last event in the history.
* **No overtaking.** A message starts only when every earlier message of its lane is finished: it ended with a final
  outcome, or the caller names it as a dead letter (``finished``). So a failed message runs again before a later one.
* **Duplicates do not run.** A duplicate is finished when the earlier message that it repeats is finished.
* **Only a new owner goes back.** After a crash the next owner may repeat finished messages. Repeats are counted. One
  owner never starts an offset of a lane that is before an offset it has started.

In a lane with versions (``versions``), *earlier* means a lower version instead of a lower offset, in every rule. And:

* **Stale messages are outdated.** A stale message did not finish, and a message of its lane with the same version or a
  higher one is finished.
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
    """Check a history of attempts against the messages that were sent.

    ``sent``: every message of the source topic.

    ``finished``: messages that are known to be finished although no attempt ended with a final outcome, such as dead
    letters. A stage cannot see that its failed attempt was the last one.

    ``waiting``: messages that may be unfinished and are not lost, because they wait in a blocked lane or among the dead
    letters of a parked lane.

    ``duplicates``: messages that were sent twice, each with the earlier message of its lane. Only the earlier one runs.

    ``versions``: the versions of messages, for an app with ``versions=``. A message without a version has no order.

    ``stale``: messages that did not run because a newer version of their entity had run.

    ``redriven``: dead letters that were redriven. They may run after later messages, because their lanes continued
    without them. They start when all messages before them are finished, as all messages do.

    ``allow_repeats``: how often one message may finish again.

    ``order``: the app's order. Keyless messages have no lane with ``"key"``, and no message has one with ``"none"``.

    ``lanes``: the lane of every message that was sent, ``ordering.lane_key(message)``. An ordering that reads messages
    (``ByHeader``, ``ByField``) needs it, because a history does not contain what it reads.

    ``min_seen``: the share of messages that the history must contain. With fewer, or without two messages in one lane,
    the history proves nothing, and the verdict is not ok.

    Raises ValueError for an unknown order, and for an order that needs ``lanes`` without them.
    """
    by = ordering(order)
    if by is None:
        raise ValueError(f"order must be 'key', 'partition', 'global', 'none' or an Ordering, got {order!r}")
    if by.reads_messages and lanes is None:
        raise ValueError(f"order={by!r} needs lanes=, the lane of every message by partition and offset")
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
        judge.check_stale()
        judge.check_loss_and_repeats(allow_repeats, frozenset(waiting))
        judge.check_evidence(min_seen, frozenset(waiting))
        return judge.verdict()


_BEGAN_AGAIN = -1
"""A message that was passed began again: its further attempts belong to the repeat."""

Rank = tuple[int, int]
"""A message's place in its lane: version and offset. The version is 0 without ``versions``."""


class _LaneHistory:
    """The messages of one lane in one partition, and their progress."""

    __slots__ = ("blamed", "finished", "last", "low", "passed", "ranks", "started")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.finished: set[int] = set()  # indices at or above `low`
        self.low = 0  # index of the first message that is not finished
        self.blamed = -1  # the unfinished message that was reported last; it is reported once
        self.last: dict[str, Rank] = {}  # by owner, the rank that it started last
        self.passed: dict[int, int] = {}  # finished only by declaration: offset, and attempts until then
        self.started = 0  # distinct messages that were started

    def finish(self, index: int) -> None:
        if index >= self.low:
            self.finished.add(index)
            while self.low in self.finished:
                self.finished.remove(self.low)
                self.low += 1


class _Judge:
    """One pass over the events. ``run`` writes its fields, the later steps only read them."""

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

    def _make_lanes(self) -> dict[Hashable, _LaneHistory]:
        lanes: dict[Hashable, _LaneHistory] = {}
        for position in sorted(self.sent):
            partition, offset = position
            key = self.sent[position]
            name = self._name(key, partition, offset), partition
            if name[0] is None or (self.versions is not None and position not in self.versions):
                continue
            lane = lanes.get(name)
            if lane is None:
                lane = lanes[name] = _LaneHistory()
            lane.ranks.append(self._rank(partition, offset))
        if self.versions is not None:
            for lane in lanes.values():
                lane.ranks.sort()
        return lanes

    def _name(self, key: bytes | None, partition: int, offset: int) -> bytes | None:
        """The message's lane, which may span partitions, or None."""
        if self.given is not None:
            return self.given.get((partition, offset))
        return key if self.order.by_key else self.order.lane_of(key, partition)

    def _rank(self, partition: int, offset: int) -> Rank:
        return 0 if self.versions is None else self.versions[partition, offset], offset

    def _shown(self, rank: Rank) -> str:
        return f"offset {rank[1]}" if self.versions is None else f"version {rank[0]} (offset {rank[1]})"

    def _lane(self, event: HistoryEvent) -> _LaneHistory | None:
        if self.versions is not None and (event.partition, event.offset) not in self.versions:
            return None
        return self.lanes.get((self._name(event.key, event.partition, event.offset), event.partition))

    def _alone(self, event: HistoryEvent) -> Hashable:
        """The unit that may have only one open attempt: the lane, or without a lane the attempt itself."""
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
            self.findings.add(Flaw.UNKNOWN, "no message with this key was sent at this offset", index, event)
            return
        if position in self.duplicates:
            first = self.duplicates[position][1]
            self.findings.add(Flaw.DUPLICATE, f"a duplicate of offset {first} ran", index, event)

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
            opened[:] = alive  # the others ended with the crash of their owner

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

    def _check_order(
        self, lane: _LaneHistory, index: int, event: HistoryEvent, opened: list[HistoryEvent]
    ) -> None:
        offset = event.offset
        rank = self._rank(event.partition, offset)
        own = lane.last.get(event.owner)
        late = (event.partition, offset) in self.redriven
        if own is not None and rank < own and not late:
            self.findings.add(
                Flaw.ORDER,
                f"owner {event.owner} went back: it had already started {self._shown(own)}",
                index,
                event,
            )
        if lane.passed and offset in lane.passed and not late:
            before = lane.passed[offset]
            if event.attempt == before + 1:
                self.findings.add(
                    Flaw.ORDER,
                    f"attempt {event.attempt} started after a later message",
                    index,
                    event,
                )
            elif event.attempt == 1:
                position = (event.partition, offset)
                self.again[position] = self.again.get(position, 0) + 1
                lane.passed[offset] = _BEGAN_AGAIN
        place = lane.low
        if lane.ranks[place : place + 1] == [rank]:
            return  # the usual case: the first unfinished message
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
                f"started while {self._shown(lane.ranks[lane.low])} was not finished",
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
                self.findings.add(Flaw.STRAY, "end without a start", index, event)
            return
        if not opened and isinstance(alone, tuple):
            del self.open[alone]  # without a lane, no later event looks it up
        if event.outcome in FINAL:
            position = (event.partition, event.offset)
            if (
                event.outcome != "dead" or position not in self.redriven
            ):  # the end of a redriven dead letter comes later
                self.finals[position] = self.finals.get(position, 0) + 1
            lane = self._lane(event)
            if lane is not None:
                lane.finish(bisect_left(lane.ranks, self._rank(event.partition, event.offset)))

    def check_stale(self) -> None:
        """Check that every message of ``stale`` is outdated."""
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
                self.findings.add(Flaw.STALE, "counted as stale without a version", message=message)
            elif position in self.finals:
                self.findings.add(Flaw.STALE, "counted as stale, but it ran", message=message)
            elif newest.get((message.key, message.partition), -1) < version:
                self.findings.add(
                    Flaw.STALE,
                    f"version {version} was counted as stale, but no version as high is finished",
                    message=message,
                )

    def check_loss_and_repeats(self, allow_repeats: int, waiting: frozenset[Position]) -> None:
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
                self.findings.add(Flaw.LOST, "sent but never started", message=message)
            else:
                self.findings.add(Flaw.LOST, "started but never finished", found, self.events[found], message)
        for position in sorted(too_often):
            index = last[position]
            detail = f"finished {more[position] + 1} times, {allow_repeats + 1} allowed"
            self.findings.add(Flaw.REPEAT, detail, index, self.events[index])

    def check_evidence(self, min_seen: float, waiting: frozenset[Position]) -> None:
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
                f"the history has {seen} of {len(self.sent)} messages, at least {min_seen:.0%} are needed",
            )
        elif self.order.has_lanes and all(lane.started < 2 for lane in self.lanes.values()):
            self.findings.add(
                Flaw.THIN, "no lane has two started messages, so the history proves nothing about order"
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
        """The key of a timeline: the lane, or without a lane the message."""
        alone = self._alone(event)
        return alone if not isinstance(alone, tuple) else alone[:2]
