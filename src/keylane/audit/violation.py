"""Violations of an app's promises, and the attempt events that prove them.

The audit finds them in a ledger, :mod:`keylane.testing` in a history.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from keylane.safe_text import cut, printable, printable_lines

_SHOWN_CHARACTERS = 200
"""The length at which a key, an owner or an outcome is cut: a history may contain anything."""


class EventKind(StrEnum):
    """The two events of an attempt."""

    START = "start"
    END = "end"


class HistoryEvent(NamedTuple):
    """The start or the end of one attempt."""

    # A named tuple, not a dataclass: a history has millions of events, and tuples are made several times faster.
    kind: EventKind
    key: bytes | None
    partition: int
    offset: int
    attempt: int
    owner: str
    """The process that ran it: a name and its pid. A new process, or a new run inside one, is a new owner."""
    at: float
    """Wall clock, in seconds since 1970. For people only; no decision uses it."""
    seq: int
    """The machine's monotonic clock, in nanoseconds. It decides which event came first."""
    outcome: str | None = None
    """None for a start. A value of :class:`keylane.testing.Ended`, or the caller's own word."""


class Flaw(StrEnum):
    """The kinds of violation."""

    OVERLAP = "overlap"
    """Two attempts of one lane ran at the same time."""
    ORDER = "order"
    """A message started before an earlier one of its lane was finished, or an owner went back."""
    LOST = "lost"
    """A message was sent and never finished."""
    REPEAT = "repeat"
    """A message finished more often than allowed."""
    DUPLICATE = "duplicate"
    """A message ran that repeats an earlier one of its lane."""
    STALE = "stale"
    """A message ran although its lane had passed its version, or was skipped as stale although it had not."""
    UNKNOWN = "unknown"
    """Something was processed that was not sent, or under another key."""
    STRAY = "stray"
    """An end without a start: the history itself is broken."""
    THIN = "too thin"
    """The history is too small to prove anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One counterexample. ``str()`` shows it with its timeline."""

    flaw: Flaw
    detail: str
    key: bytes | None = None
    partition: int | None = None
    offset: int | None = None
    event: HistoryEvent | None = None
    """The event that shows the violation."""
    timeline: tuple[HistoryEvent, ...] = ()
    """The events of the same lane around it."""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at partition {self.partition} offset {self.offset}"
        detail = printable_lines(self.detail, "")
        whose = "" if self.key is None else f" in the lane of key {cut(repr(self.key), _SHOWN_CHARACTERS)}"
        lines = [f"{self.flaw}{whose}{where}: {detail}"]
        if self.timeline:
            zero = self.timeline[0].seq
            owners = [printable(cut(event.owner, _SHOWN_CHARACTERS)) for event in self.timeline]
            width = max(map(len, owners))
            for owner, event in zip(owners, self.timeline, strict=True):
                mark = ">" if event is self.event else " "
                clock = f"{(event.seq - zero) / 1e9:+12.6f} s"
                what = f"{event.kind:<5}  {event.partition}@{event.offset} attempt {event.attempt}"
                outcome = printable(cut(event.outcome or "", _SHOWN_CHARACTERS))
                lines.append(f"  {mark} {clock}  {owner:<{width}}  {what}  {outcome}".rstrip())
        return "\n".join(lines)
