"""What a check found: the verdict, and each violation with the timeline that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.audit.violation import Flaw, Violation


class CheckFailed(KeylaneError, AssertionError):  # noqa: N818 - reads as what happened in a test report
    """A verdict that is not ok. The message shows the first counterexample."""


class Sent(NamedTuple):
    """A message of the source topic."""

    key: bytes | None
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What every verdict has."""

    violations: tuple[Violation, ...]
    """The first ten of each kind, in the order in which they showed; those without an event come last."""
    tally: Mapping[Flaw, int] = field(default_factory=dict)
    """How many of each kind there were in all."""

    @property
    def ok(self) -> bool:
        """True when nothing was found. A check that could prove nothing is not ok."""
        return not self.violations

    def raise_if_bad(self) -> None:
        """Raises :class:`CheckFailed`, which shows the first counterexample, when the verdict is not ok."""
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
    """How much a history holds."""

    sent: int
    messages: int
    """Different messages that were started."""
    attempts: int
    keys: int
    owners: int
    retried: int
    """Messages with an attempt after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Judged):
    """What a history of attempts shows; made by :func:`keylane.testing.check`."""

    lost: tuple[Sent, ...]
    """Sent and never finished, all of them."""
    repeats: int
    """Times that a message finished again, over all messages."""
    counts: Counts
    affinity: float
    """The share of the keys that had exactly one owner: 1.0 when no lane ever moved."""

    def facts(self) -> str:
        """The counts, in one line."""
        c = self.counts
        return (
            f"{c.messages} of {c.sent} messages, {c.attempts} attempts, {c.keys} keys, {c.owners} owners, "
            f"{c.retried} retried, {self.repeats} repeats, {len(self.lost)} lost, affinity {self.affinity:.3f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsVerdict(Judged):
    """What an output topic shows; made by :func:`keylane.testing.check_results`."""

    inputs: int
    outputs: int
    keys: int
    duplicates: int
    """Results that were there more than once."""
    missing: int

    def facts(self) -> str:
        """The counts, in one line."""
        return (
            f"{self.outputs} results of {self.inputs} messages, {self.keys} keys, "
            f"{self.duplicates} duplicates, {self.missing} missing"
        )
