"""What the judge finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken promise."""

    rule: str
    detail: str
    key: bytes | None = None
    at: int = 0
    """When it showed (monotonic ns), if that is known."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """All that was found, and the facts of the run."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, int]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def rules(self) -> tuple[str, ...]:
        """The promises that were broken, each once."""
        return tuple(dict.fromkeys(finding.rule for finding in self.findings))
