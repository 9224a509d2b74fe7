"""The judge: what a run left behind, against every promise. It knows nothing of how the evidence was made.

It reads three witnesses that do not know of each other: the history that the tasks wrote, the group's progress as it
was seen from outside while they ran, and the topics as they are in the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from campaign.finding import Finding, Ruling
from campaign.ledger import Ledger
from campaign.workload import COMMIT_INTERVAL_SECONDS
from keylane.offsets.slots import slot_of
from keylane.testing import EventKind, History, check, check_results

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from campaign.watch import Position, Sample

EXACTLY_ONCE = "exactly_once"
_COMMIT_GRACE_SECONDS = 2.5
"""Seconds that a commit may take on a busy machine, beyond its interval."""
_ENDS_WITHIN_SECONDS = 5.0
"""Seconds for the broker to write that a transaction is over."""
_VIOLATIONS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence. Moments are monotonic ns of one machine."""

    delivery: str
    sent: Mapping[Position, tuple[bytes, int]]
    """The source position of each message, its key and number."""
    poison: frozenset[int]
    """Numbers that must become dead letters."""
    history: History
    samples: Sequence[Sample]
    results: Sequence[tuple[bytes, int]]
    """Key and number of every result, read committed, in the order of the sink's log."""
    letters: Sequence[Position]
    """The source positions of the dead letters' messages, in the order of their log."""
    zombies: Mapping[str, int] = field(default_factory=dict)
    """Owners that were stopped, and when."""
    forgotten: Sequence[int] = ()
    """When progress was deleted from outside: earlier messages may run again, and the offset may go back."""
    outages: Sequence[tuple[int, int]] = ()
    """From when to when commits could not be made in time."""
    left_open: float = 0.0
    """Seconds for which a transaction among results or letters stayed open when the app had ended."""
    caught_up: bool = True
    peaceful: bool = False
    """Nothing was killed, cut or deleted: nothing may run again."""


def judge(evidence: Evidence) -> Ruling:
    """Every rule, whatever the others found."""
    cuts = fences(evidence)
    history = without(evidence.history, cuts)
    ledger = Ledger(history, evidence.sent, evidence.samples, evidence.forgotten)
    findings = [
        *_history(evidence, history),
        *_results(evidence),
        *_letters(evidence),
        *ledger.commits_ahead(),
        *ledger.going_back(),
        *ledger.repeats_of_committed(),
        *ledger.needless_repeats(peaceful=evidence.peaceful),
        *ledger.late_commits(
            evidence.outages, evidence.zombies, COMMIT_INTERVAL_SECONDS + _COMMIT_GRACE_SECONDS
        ),
    ]
    if evidence.left_open > _ENDS_WITHIN_SECONDS:
        detail = (
            f"for {evidence.left_open:.1f} s after the app's end nobody could read all that it had committed"
        )
        findings.append(Finding(rule="left open", detail=detail))
    if not evidence.caught_up:
        findings.append(Finding(rule="stuck", detail="not everything was done in time"))
    findings += [
        Finding(rule="thin", detail=f"nobody replaced {owner} after it was stopped")
        for owner in sorted(evidence.zombies.keys() & {event.owner for event in evidence.history})
        if owner not in cuts
    ]
    after = sum(1 for event in evidence.history if event.seq >= cuts.get(event.owner, event.seq + 1))
    facts = {
        "sent": len(evidence.sent),
        "attempts": sum(1 for event in history if event.kind is EventKind.START),
        "owners": len({event.owner for event in evidence.history}),
        "repeats": len(ledger.repeats),
        "duplicates": len(evidence.results) - len(set(evidence.results)),
        "samples": len(evidence.samples),
        "by zombies": after,
        "ms standstill": max((b.seq - a.seq for a, b in pairwise(history.events)), default=0) // 1_000_000,
    }
    return Ruling(findings=tuple(findings), facts=facts)


def fences(evidence: Evidence) -> dict[str, int]:
    """From when on nothing that a zombie does counts: another owner has begun in one of its partitions.

    Where tasks share a partition the others were there all along: then it is one that begins among its slots.
    """
    found: dict[str, int] = {}
    for owner, stopped in evidence.zombies.items():
        own = [event for event in evidence.history if event.owner == owner]
        mine = {event.partition for event in own}
        others = [
            event
            for event in evidence.history
            if event.owner != owner
            and event.owner not in evidence.zombies
            and event.kind is EventKind.START
            and event.partition in mine
        ]
        slots = {slot_of(event.key, event.offset) for event in own if event.key is not None}
        shared = any(own[0].seq < event.seq < stopped for event in others)
        for event in others:
            among = not shared or min(slots) <= slot_of(event.key, event.offset) <= max(slots)
            if event.seq > stopped and among:
                found[owner] = event.seq
                break
    return found


def without(history: History, cuts: Mapping[str, int]) -> History:
    """The history without what zombies did after their fence, and nothing else."""
    if not cuts:
        return history
    kept = tuple(event for event in history if event.seq < cuts.get(event.owner, event.seq + 1))
    return History(events=kept, torn=history.torn)


def _history(evidence: Evidence, history: History) -> list[Finding]:
    verdict = check(
        history,
        sent={position: key for position, (key, _) in evidence.sent.items()},
        finished=set(evidence.letters),
        allow_repeats=len(evidence.sent),  # repeats have rules of their own, which know about commits
    )
    return [
        Finding(
            rule=str(violation.flaw),
            detail=str(violation),
            key=violation.key,
            at=0 if violation.event is None else violation.event.seq,
        )
        for violation in verdict.violations
    ]


def _results(evidence: Evidence) -> list[Finding]:
    once = evidence.delivery == EXACTLY_ONCE and not evidence.forgotten
    expected = [
        (key, number) for _, (key, number) in sorted(evidence.sent.items()) if number not in evidence.poison
    ]
    verdict = check_results(expected, evidence.results, allow_duplicates=not once)
    findings = [
        Finding(rule=f"sink {violation.flaw}", detail=str(violation), key=violation.key)
        for violation in verdict.violations
    ]
    if not once and evidence.outages:
        return (
            findings  # a client that got no answer sends again, and not every broker remembers the first time
        )
    at = {number: position for position, (_, number) in evidence.sent.items()}
    tries = Counter(
        (event.partition, event.offset) for event in evidence.history if event.kind is EventKind.START
    )
    for (key, number), count in Counter(evidence.results).items():
        if number in at and count > tries[at[number]]:
            detail = f"{count} results of message {number}, which was tried {tries[at[number]]} times"
            findings.append(Finding(rule="sink invented", detail=detail, key=key))
    return findings[: _VIOLATIONS_SHOWN * 4]


def _letters(evidence: Evidence) -> list[Finding]:
    once = evidence.delivery == EXACTLY_ONCE and not evidence.forgotten
    count = Counter(evidence.letters)
    findings = []
    for position, (key, number) in sorted(evidence.sent.items()):
        found, due = count.pop(position, 0), number in evidence.poison
        where = f"message {number} of key {key!r} at {position[0]}/{position[1]}"
        if due and not found:
            findings.append(Finding(rule="letter lost", detail=f"no dead letter of {where}", key=key))
        elif found and not due:
            findings.append(Finding(rule="letter too many", detail=f"a dead letter of {where}", key=key))
        elif found > 1 and once:
            findings.append(Finding(rule="letter repeated", detail=f"{found} of {where}", key=key))
    findings += [Finding(rule="letter unknown", detail=f"of {position}, never sent") for position in count]
    return findings[: _VIOLATIONS_SHOWN * 4]
