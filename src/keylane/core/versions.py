"""Versions of entities: which message of a lane is next, by the number that its producer gave it.

An entity's messages are numbered one after another. The next one runs; one that is behind is stale; one that is ahead
waits for what is missing between. The log decides in which order they come, the numbers in which order they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 2**63 - 1


class Fits(Enum):
    """How a message's version fits what its lane has seen."""

    NEXT = "next"
    STALE = "stale"
    GAP = "gap"


class Mark(NamedTuple):
    """How far an entity is: ``passed`` went by, dead letters included; ``applied`` ran to its end (-1: none has).

    A named tuple where others are dataclasses: a restart makes a million of them.
    """

    passed: int
    applied: int

    def encode(self, offset: int) -> bytes:
        """For the state topic, with the offset of the message that set it."""
        return b"%d %d %d" % (self.passed, self.applied, offset)


def decode_mark(value: bytes) -> tuple[Mark, int]:
    """A mark and the offset of its message. Raises ValueError when it makes no sense."""
    passed, applied, offset = map(int, value.split())
    return Mark(passed, applied), offset


@dataclass(frozen=True, slots=True)
class Versioned:
    """The messages of a key carry versions, and run in their order: see docs/events.md.

    ``read`` says where the version is: the name of a header, :class:`keylane.Field`, or a function of the message,
    which may answer None for one that has no version and runs in its turn.

    ``on_stale`` is for a version that has passed: ``"skip"`` it, with an outcome of its own, or ``"fail"``. ``on_gap``
    is for one that comes before those below it: ``"wait"`` for them up to ``wait`` seconds, ``"process"`` it as if
    nothing were missing, or ``"fail"``. ``then`` is what follows a wait in vain: ``"fail"`` or ``"process"``. ``hold``
    is how many messages of a key wait at most: with one more, the lowest has waited enough.

    ``first`` is the version that an entity begins with; None when it may begin with any, because the log no longer has
    the first ones. Raises :class:`SettingsError` for values that make no sense.
    """

    read: str | Callable[[Any], Any] = "event-version"
    on_stale: Literal["skip", "fail"] = "skip"
    on_gap: Literal["wait", "process", "fail"] = "wait"
    wait: float = 30.0
    then: Literal["fail", "process"] = "fail"
    hold: int = 100
    first: int | None = 1

    def __post_init__(self) -> None:
        read: object = self.read
        if not callable(read) and (not isinstance(read, str) or not read):
            raise SettingsError(f"Versioned({self.read!r}): needs a header's name or a function of a message")
        _one_of("on_stale", self.on_stale, "skip", "fail")
        _one_of("on_gap", self.on_gap, "wait", "process", "fail")
        _one_of("then", self.then, "fail", "process")
        if type(self.wait) not in (int, float) or not 0 < self.wait < inf:
            raise SettingsError(f"Versioned(wait={self.wait!r}): needs seconds, more than 0")
        if type(self.hold) is not int or self.hold < 1:
            raise SettingsError(
                f"Versioned(hold={self.hold!r}): needs a whole number of messages, at least 1"
            )
        if self.first is not None and (type(self.first) is not int or not 0 <= self.first <= LARGEST):
            raise SettingsError(f"Versioned(first={self.first!r}): needs a version, from 0 on, or None")

    def judge(self, version: int, mark: Mark | None, *, redriven: bool = False) -> Fits:
        """How this version fits. A letter that is redriven is stale only when what is newer was applied."""
        if mark is None:
            return Fits.GAP if self.first is not None and version > self.first else Fits.NEXT
        if version <= (mark.applied if redriven else mark.passed):
            return Fits.STALE
        return Fits.GAP if version > mark.passed + 1 else Fits.NEXT

    def missing(self, mark: Mark | None) -> int | None:
        """The version that is next."""
        return self.first if mark is None else mark.passed + 1


def parse_version(found: object) -> int:
    """A version from what was read. Raises ValueError, in words, when it is none."""
    number = found
    if isinstance(found, str | bytes):
        text = found.decode("ascii", "replace") if isinstance(found, bytes) else found
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
    if type(number) is not int or not 0 <= number <= LARGEST:
        raise ValueError(f"the version {found!r:.80} is no whole number from 0 on")
    return number


def after(mark: Mark | None, version: int, *, applied: bool) -> Mark:
    """The mark when this version has gone by."""
    passed, ran = (mark.passed, mark.applied) if mark is not None else (-1, -1)
    return Mark(max(passed, version), max(ran, version) if applied else ran)


def _one_of(name: str, value: object, *known: str) -> None:
    if value not in known:
        raise SettingsError(f"Versioned({name}={value!r}): it is {' or '.join(map(repr, known))}")
