"""Collects violations while a check runs: counts all, keeps the first of each kind, adds their timelines."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.audit.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from keylane.audit.violation import Flaw, HistoryEvent
    from keylane.testing.verdict import Sent

_KEPT = 10  # of each kind; a broken run has thousands, and one shows the bug
_BEFORE, _AFTER = 8, 4  # events that a timeline shows on either side


class Findings:
    """What a check has found so far."""

    def __init__(self) -> None:
        self.tally: dict[Flaw, int] = {}
        self._kept: list[tuple[int | None, Violation]] = []  # with the index of its event

    def add(
        self,
        flaw: Flaw,
        detail: str,
        index: int | None = None,
        event: HistoryEvent | None = None,
        message: Sent | None = None,
        *,
        key: bytes | None = None,
    ) -> None:
        """Notes a violation at an event (whose index in the history is given), or about a message, or about a key."""
        count = self.tally[flaw] = self.tally.get(flaw, 0) + 1
        if count > _KEPT:
            return
        where = message or event
        violation = (
            Violation(flaw=flaw, detail=detail, key=key)
            if where is None
            else Violation(
                flaw=flaw,
                detail=detail,
                key=where.key,
                partition=where.partition,
                offset=where.offset,
                event=event,
            )
        )
        self._kept.append((index, violation))

    def violations(self) -> tuple[Violation, ...]:
        """Those that were kept, as they came."""
        return tuple(violation for _, violation in self._kept)

    def with_timelines(
        self, events: Sequence[HistoryEvent], line_of: Callable[[HistoryEvent], Hashable]
    ) -> tuple[Violation, ...]:
        """Those that were kept, in the order of their events, each with the events of the same line around it."""
        lines: dict[Hashable, list[int]] = {
            line_of(v.event): [] for _, v in self._kept if v.event is not None
        }
        if lines:
            for place, event in enumerate(events):
                line = lines.get(line_of(event))
                if line is not None:
                    line.append(place)
        found = []
        for index, violation in sorted(
            self._kept, key=lambda kept: len(events) if kept[0] is None else kept[0]
        ):
            if index is None or violation.event is None:
                found.append(violation)
                continue
            line = lines[line_of(violation.event)]
            at = bisect_left(line, index)
            timeline = tuple(events[i] for i in line[max(0, at - _BEFORE) : at + _AFTER + 1])
            found.append(replace(violation, timeline=timeline))
        return tuple(found)
