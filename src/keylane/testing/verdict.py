"""Verdicts: the result of a check, with its violations and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.audit.violation import Flaw, Violation


class CheckFailed(KeylaneError, AssertionError):  # noqa: N818 - reads well in a test report
    """The verdict is not ok. The message shows the first violation."""


class Sent(NamedTuple):
    """A message of the source topic."""

    key: bytes | None
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Base of all verdicts."""

    violations: tuple[Violation, ...]
    """The first ten of each kind, in the order of their events; violations without an event come last."""
    tally: Mapping[Flaw, int] = field(default_factory=dict)
    """The number of violations of each kind."""

    @property
    def ok(self) -> bool:
        """True if there are no violations. Too little evidence is a violation too."""
        return not self.violations

    def raise_if_bad(self) -> None:
        """Raise :class:`CheckFailed`, which shows the first violation, if the verdict is not ok."""
        if not self.ok:
            raise CheckFailed(str(self))

    def __str__(self) -> str:
        if self.ok:
            return f"ok: {self.facts()}"
        found = ", ".join(f"{count} {flaw}" for flaw, count in self.tally.items())
        return f"found {found} ({self.facts()})\n{self.violations[0]}"

    def facts(self) -> str:
        """The counts, in one line."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sizes of a history."""

    sent: int
    messages: int
    """Distinct messages that were started."""
    attempts: int
    keys: int
    owners: int
    retried: int
    """Messages with an attempt after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Judged):
    """Verdict on a history of attempts; the result of :func:`keylane.testing.check`."""

    lost: tuple[Sent, ...]
    """All messages that were sent and never finished."""
    repeats: int
    """How often a message finished again, summed over all messages."""
    counts: Counts
    affinity: float
    """The share of keys that had exactly one owner; 1.0 if no lane ever moved."""

    def facts(self) -> str:
        """The counts, in one line."""
        c = self.counts
        return (
            f"{c.messages} of {c.sent} messages, {c.attempts} attempts, {c.keys} keys, {c.owners} owners, "
            f"{c.retried} retried, {self.repeats} repeats, {len(self.lost)} lost, affinity {self.affinity:.3f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsVerdict(Judged):
    """Verdict on an output topic; the result of :func:`keylane.testing.check_results`."""

    inputs: int
    outputs: int
    keys: int
    duplicates: int
    """Results that repeat an earlier one."""
    missing: int

    def facts(self) -> str:
        """The counts, in one line."""
        return (
            f"{self.outputs} results of {self.inputs} messages, {self.keys} keys, "
            f"{self.duplicates} duplicates, {self.missing} missing"
        )
