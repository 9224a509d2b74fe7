"""Dead letters surveyed: which of them are meant, and by cause how many there are, of how many lanes, since when."""

from __future__ import annotations

import heapq
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from keylane.kafka.letter import Kind, Letter, Unreadable
from keylane.kafka.letters import Repeats

SHOWN_UNREADABLE = 20
_LIMIT = 300
_VARYING = re.compile(
    r"0[xX][0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"  # a UUID
    r"|\b(?=[a-fA-F]*[0-9])(?=[0-9]*[a-fA-F])[0-9a-fA-F]{8,}\b"
    r"|[0-9]+(?:[.,:][0-9]+)*"
)


def normalised(message: str) -> str:
    """The message with ``#`` for every number, hex number and UUID, its white space evened out, cut to one length.

    >>> normalised("timeout after 31 ms"), normalised("timeout after  32.5 ms")
    ('timeout after # ms', 'timeout after # ms')
    """
    return _VARYING.sub("#", " ".join(message.split()))[:_LIMIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why letters are dead. All None: not known, as when the letter of the one that failed is gone."""

    stage: str | None
    error: str | None
    message: str | None
    """Normalised."""


class Causes:
    """Knows why each letter is dead, when it is asked about all of them, each partition in its order."""

    def __init__(self) -> None:
        self._parks: dict[tuple[str, int, int], tuple[Cause, float | None]] = {}

    def of(self, letter: Letter) -> tuple[Cause, float | None]:
        """Its own, or that of the one it was parked behind, which lies before it in the partition; and the time."""
        park = None if letter.park is None else (letter.topic, letter.source_partition, letter.park)
        if letter.error is None and park in self._parks:
            cause, at = self._parks[park]
            return cause, at if letter.failed_at is None else letter.failed_at
        cause = Cause(
            stage=letter.stage,
            error=letter.error,
            message=None if letter.message is None else normalised(letter.message),
        )
        if letter.error is not None and park is not None:
            self._parks[park] = (cause, letter.failed_at)
        return cause, letter.failed_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which letters are meant; None: whichever. ``error`` is a class, with or without its module."""

    key: bytes | None = None
    stage: str | None = None
    error: str | None = None
    since: float | None = None
    until: float | None = None
    kind: Kind | None = None

    def takes(self, letter: Letter, cause: Cause, at: float | None) -> bool:
        """Whether this one is meant. One whose time is not known lies in no span of time."""
        return (
            (self.key is None or self.key == letter.key)
            and (self.kind is None or self.kind is letter.kind)
            and (self.stage is None or self.stage == cause.stage)
            and (self.error is None or f".{cause.error}".endswith(f".{self.error}"))
            and (self.since is None or (at is not None and at >= self.since))
            and (self.until is None or (at is not None and at < self.until))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One letter in a list: all but what is large."""

    position: str
    source: str
    kind: Kind
    key: bytes | None
    cause: Cause
    message: str | None
    attempts: int
    at: float | None
    park: int | None
    behind: bool
    """Parked behind the one that failed; the cause is that one's."""
    redrives: int
    redriven: bool


class Group:
    """The letters of one cause. Written by :class:`Survey` only."""

    __slots__ = ("behind", "cause", "count", "example", "first", "keys", "kinds", "last")

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        self.count = 0
        self.behind = 0  # of them, those that were parked behind one that failed
        self.kinds: dict[str, int] = {}
        self.keys: set[bytes] = set()
        self.first: float | None = None
        self.last: float | None = None
        self.example: Line | None = None  # the newest that failed itself, if any did

    def add(self, line: Line) -> None:
        """Count it."""
        self.count += 1
        self.behind += line.behind
        self.kinds[line.kind.value] = self.kinds.get(line.kind.value, 0) + 1
        if line.key is not None:
            self.keys.add(line.key)
        if line.at is not None:
            self.first = line.at if self.first is None else min(self.first, line.at)
            self.last = line.at if self.last is None else max(self.last, line.at)
        if self.example is None or _better(line, self.example):
            self.example = line


class Survey:
    """Made letter by letter, each partition in its order. Holds the causes, the lanes, and at most ``keep`` lines.

    ``redriven`` has the offsets of letters that were redriven, by partition of the dead-letter topic: they are left out
    unless ``every`` is given. A letter that stands there twice counts once.
    """

    def __init__(
        self,
        selection: Selection,
        redriven: Mapping[int, Container[int]],
        *,
        every: bool = False,
        keep: int = 0,
    ) -> None:
        self.letters = 0
        self.repeats = 0
        self.redriven = 0  # that were left out
        self.unreadable = 0
        self.examples: list[Unreadable] = []  # the first of those that cannot be read
        self.key_met = False  # whether any letter at all has the key that is looked for
        self._selection = selection
        self._redriven = redriven
        self._every = every
        self._keep = keep
        self._repeats = Repeats()
        self._causes = Causes()
        self._groups: dict[Cause, Group] = {}
        self._newest: list[tuple[float, int, int, Line]] = []

    def add(self, letter: Letter | Unreadable) -> None:
        """Take the next one."""
        if isinstance(letter, Unreadable):
            self.unreadable += 1
            if len(self.examples) < SHOWN_UNREADABLE:
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
        line = Line(
            position=letter.position,
            source=letter.source,
            kind=letter.kind,
            key=letter.key,
            cause=cause,
            message=letter.message,
            attempts=letter.attempts,
            at=at,
            park=letter.park,
            behind=letter.kind is Kind.PARKED and letter.error is None,
            redrives=letter.redrives,
            redriven=redriven,
        )
        group = self._groups.get(cause)
        if group is None:
            group = self._groups[cause] = Group(cause)
        group.add(line)
        if self._keep:
            push = heapq.heappush if len(self._newest) < self._keep else heapq.heappushpop
            push(self._newest, (at or 0.0, letter.partition, letter.offset, line))

    def groups(self) -> list[Group]:
        """By cause, the largest first."""
        return sorted(self._groups.values(), key=lambda group: (-group.count, -(group.last or 0.0)))

    def lines(self) -> list[Line]:
        """The newest letters, the newest first; letters of one time as they lie in the topic."""
        return [line for *_, line in sorted(self._newest, key=lambda each: (-each[0], each[1], each[2]))]

    def lanes(self) -> int:
        """How many different keys the letters have."""
        return len(set().union(*(group.keys for group in self._groups.values())))


def _better(line: Line, than: Line) -> bool:
    """As an example: one that failed itself, and then the newer one."""
    if line.behind != than.behind:
        return than.behind
    return (line.at or 0.0) >= (than.at or 0.0)
