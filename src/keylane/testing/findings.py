"""Violations that a check has found: it counts all, and keeps the first of each kind with their timelines."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.audit.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from keylane.audit.violation import Flaw, HistoryEvent
    from keylane.testing.verdict import Sent

_KEPT_PER_FLAW = 10
_EVENTS_BEFORE, _EVENTS_AFTER = 8, 4
"""Events of a timeline around the violation."""


class Findings:
    """Violations found so far."""

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
        """Add a violation at an event, with its index in the history, or about a message, or about a key."""
        count = self.tally[flaw] = self.tally.get(flaw, 0) + 1
        if count > _KEPT_PER_FLAW:
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
        """The kept violations, in the order they were added."""
        return tuple(violation for _, violation in self._kept)

    def with_timelines(
        self, events: Sequence[HistoryEvent], line_of: Callable[[HistoryEvent], Hashable]
    ) -> tuple[Violation, ...]:
        """The kept violations, in the order of their events, each with the events around it in the same line."""
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
            timeline = tuple(events[i] for i in line[max(0, at - _EVENTS_BEFORE) : at + _EVENTS_AFTER + 1])
            found.append(replace(violation, timeline=timeline))
        return tuple(found)
