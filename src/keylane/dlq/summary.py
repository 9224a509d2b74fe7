"""Summary of dead letters: filtered, and counted by cause with lanes and times."""

from __future__ import annotations

import heapq
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.dlq.disk_table import DiskTable
from keylane.dlq.reader import SeenDeadLetters
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

UNREADABLE_RECORDS_SHOWN = 20
_CAUSE_CHARACTERS_MAX = 300
_VARYING = re.compile(
    r"0[xX][0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"  # a UUID
    r"|\b(?=[a-fA-F]*[0-9])(?=[0-9]*[a-fA-F])[0-9a-fA-F]{8,}\b"
    r"|[0-9]+(?:[.,:][0-9]+)*"
)


def normalised(message: str) -> str:
    """Replace every number, hex number and UUID by ``#``, normalise white space, and cut to one length.

    >>> normalised("timeout after 31 ms"), normalised("timeout after  32.5 ms")
    ('timeout after # ms', 'timeout after # ms')
    """
    return _VARYING.sub("#", " ".join(message.split()))[:_CAUSE_CHARACTERS_MAX]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of dead letters. All None: unknown, for example when the dead letter that failed first was deleted."""

    stage: str | None
    error: str | None
    message: str | None
    """Normalised."""


CAUSES_MAX = 2000
"""How many causes are counted separately."""
OTHERS = Cause(stage=None, error=None, message="(further causes, counted together)")


class Causes:
    """Finds the cause of each dead letter. Needs to see all of them, each partition in order."""

    def __init__(self) -> None:
        self._parks = DiskTable()

    def of(self, letter: DeadLetter) -> tuple[Cause, float | None]:
        """Return the cause and time: its own, or those of the earlier dead letter that it was parked behind."""
        park = None if letter.park is None else (letter.topic, letter.source_partition, letter.park)
        if letter.error is None and park is not None and (found := self._parks.get(*park)) is not None:
            stage, error, message, at = json.loads(found)
            return Cause(stage=stage, error=error, message=message), letter.failed_at or at
        cause = Cause(
            stage=letter.stage,
            error=letter.error,
            message=None if letter.message is None else normalised(letter.message),
        )
        if letter.error is not None and park is not None:
            why = [cause.stage, cause.error, cause.message, letter.failed_at]
            self._parks.put(*park, text=json.dumps(why))
        return cause, letter.failed_at


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """A filter for dead letters; None matches all. ``error`` is a class, with or without its module."""

    key: bytes | None = None
    stage: str | None = None
    error: str | None = None
    since: float | None = None
    until: float | None = None
    kind: DeadLetterKind | None = None

    def takes(self, letter: DeadLetter, cause: Cause, at: float | None) -> bool:
        """Return whether this one matches. One without a known time matches no time filter."""
        return (
            (self.key is None or self.key == letter.key)
            and (self.kind is None or self.kind is letter.kind)
            and (self.stage is None or self.stage == cause.stage)
            and (self.error is None or f".{cause.error}".endswith(f".{self.error}"))
            and (self.since is None or (at is not None and at >= self.since))
            and (self.until is None or (at is not None and at < self.until))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseLine:
    """One dead letter in a list, without its large fields."""

    position: str
    source: str
    source_offset: int
    kind: DeadLetterKind
    key: bytes | None
    cause: Cause
    message: str | None
    attempts: int
    at: float | None
    park: int | None
    behind: bool
    """Whether it was parked behind the one that failed, whose cause it has."""
    redrives: int
    redriven: bool


class CauseGroup:
    """The dead letters of one cause. Written by :class:`DeadLetterSummary` only."""

    __slots__ = ("behind", "cause", "count", "example", "first", "kinds", "lanes", "last", "number")

    def __init__(self, cause: Cause, number: int) -> None:
        self.cause = cause
        self.number = number
        self.count = 0
        self.behind = 0  # of these, parked behind one that failed
        self.kinds: dict[str, int] = {}
        self.lanes = 0  # different keys; counted by the summary
        self.first: float | None = None
        self.last: float | None = None
        self.example: CauseLine | None = None  # the newest that failed itself, if any

    def add(self, line: CauseLine) -> None:
        """Count this dead letter."""
        self.count += 1
        self.behind += line.behind
        self.kinds[line.kind.value] = self.kinds.get(line.kind.value, 0) + 1
        if line.at is not None:
            self.first = line.at if self.first is None else min(self.first, line.at)
            self.last = line.at if self.last is None else max(self.last, line.at)
        if self.example is None or _better(line, self.example):
            self.example = line


class DeadLetterSummary:
    """A summary, built from one dead letter at a time, each partition in order.

    Keeps a few thousand causes and at most ``keep`` lines. The letters and keys seen are kept on disk, so memory does
    not grow with the number of dead letters. Counts are exact; causes beyond the first few thousand count as one.

    ``redriven`` has the offsets of redriven dead letters by partition of the dead-letter topic; they are left out
    unless ``every`` is given. A dead letter that was written twice counts once.
    """

    def __init__(
        self,
        selection: DeadLetterFilter,
        redriven: Mapping[int, Container[int]],
        *,
        every: bool = False,
        keep: int = 0,
    ) -> None:
        self.letters = 0
        self.repeats = 0
        self.redriven = 0  # left out
        self.unreadable = 0
        self.examples: list[UnreadableDeadLetter] = []  # the first unreadable ones
        self.key_met = False  # whether any dead letter has the requested key
        self._selection = selection
        self._redriven = redriven
        self._every = every
        self._keep = keep
        self.lanes = 0  # different keys
        self._repeats = SeenDeadLetters()
        self._keys = DiskTable()
        self._causes = Causes()
        self._groups: dict[Cause, CauseGroup] = {}
        self._newest: list[tuple[float, int, int, CauseLine]] = []

    def add(self, letter: DeadLetter | UnreadableDeadLetter) -> None:
        """Add the next dead letter."""
        if isinstance(letter, UnreadableDeadLetter):
            self.unreadable += 1
            if len(self.examples) < UNREADABLE_RECORDS_SHOWN:
                self.examples.append(letter)
            return
        cause, at = self._causes.of(letter)
        if self._repeats.seen(letter):
            self.repeats += 1
            return
        self.key_met = self.key_met or letter.key == self._selection.key
        if not self._selection.takes(letter, cause, at):
            return
        redriven = letter.offset in self._redriven.get(letter.partition, ())
        if redriven and not self._every:
            self.redriven += 1
            return
        self.letters += 1
        line = CauseLine(
            position=letter.position,
            source=letter.source,
            source_offset=letter.source_offset,
            kind=letter.kind,
            key=letter.key,
            cause=cause,
            message=letter.message,
            attempts=letter.attempts,
            at=at,
            park=letter.park,
            behind=letter.kind is DeadLetterKind.PARKED and letter.error is None,
            redrives=letter.redrives,
            redriven=redriven,
        )
        group = self._groups.get(cause)
        if group is None:
            if len(self._groups) >= CAUSES_MAX:
                cause = OTHERS
            group = self._groups.setdefault(cause, CauseGroup(cause, len(self._groups)))
        group.add(line)
        if letter.key is not None:
            group.lanes += self._keys.add(letter.key, group.number)
            self.lanes += self._keys.add(letter.key)
        if self._keep:
            push = heapq.heappush if len(self._newest) < self._keep else heapq.heappushpop
            push(self._newest, (at or 0.0, letter.partition, letter.offset, line))

    def groups(self) -> list[CauseGroup]:
        """Return the causes, the largest first."""
        return sorted(self._groups.values(), key=lambda group: (-group.count, -(group.last or 0.0)))

    def lines(self) -> list[CauseLine]:
        """Return the newest dead letters: each lane in order, the lane with the newest one first."""
        lanes: dict[object, list[tuple[float, int, int, CauseLine]]] = {}
        for each in self._newest:
            _, partition, offset, line = each
            lane = (partition, offset) if line.key is None else (partition, line.key)
            lanes.setdefault(lane, []).append(each)
        newest_first = sorted(
            lanes.values(), key=lambda lane: min((-at, p, offset) for at, p, offset, _ in lane)
        )
        return [
            line
            for lane in newest_first
            for *_, line in sorted(lane, key=lambda each: (each[3].source_offset, each[2]))
        ]


def _better(line: CauseLine, than: CauseLine) -> bool:
    """Prefer, as an example, one that failed itself, then the newer one."""
    if line.behind != than.behind:
        return than.behind
    return (line.at or 0.0) >= (than.at or 0.0)
