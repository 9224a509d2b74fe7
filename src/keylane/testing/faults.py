"""Faults and operator commands for a run of the harness, as values. A schedule is a list of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A crash at this virtual second: everything in memory is lost, and the run continues from the last commit.

    The seed decides which unacknowledged results the sink keeps. Unlike in a real crash, waiting stages get a
    CancelledError, and resources are closed.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The end of an epoch at this virtual second: it drains and commits, and the next epoch begins."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """A drain; from the next epoch on, ``tasks`` tasks share the keys of every partition."""

    at: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recreate:
    """The source topic is deleted and created again at this virtual second: with as many partitions, and empty.

    What runs is lost, as in a crash. So are messages that were not done, and all progress. Messages that are sent from
    this second on are in the new topic, from offset 0 on. Dead letters of the old topic stay, and no :class:`Redrive`
    includes them.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A slow broker: from this virtual second, the sink acknowledges nothing for ``for_`` seconds."""

    at: float
    for_: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An operator pauses the app, or only a partition, a stage or a key, and resumes it after ``for_`` seconds.

    A restart in between does not end the pause.
    """

    at: float
    for_: float
    partition: int | None = None
    stage: str | None = None
    key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """From this virtual second, dead letters cannot be written for ``for_`` seconds."""

    at: float
    for_: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """From this virtual second, the sink rejects each result with this chance, for ``for_`` seconds."""

    at: float
    for_: float
    chance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An operator releases the blocked lane of this key."""

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """An operator skips the message at which the lane of this key is blocked."""

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    """An operator redrives the lane of this key: all its dead letters, before newer messages.

    After a crash, the next task continues the redrive.
    """

    at: float
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """An operator sets the version of this key's entity: the one after ``to`` is next. With None, any version is."""

    at: float
    key: bytes
    to: int | None = None


Action = Release | Skip | Redrive | Reset
Break = Crash | Drain | Recut | Recreate
Fault = Break | Pause | Hold | Refuse | Reject | Action
"""An event of a run that is not a message."""
