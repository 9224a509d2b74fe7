"""Prometheus text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from keylane.histogram import BOUNDS

if TYPE_CHECKING:
    from keylane.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: name, help, type, and values by their labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    lines: list[str] = field(default_factory=list)

    def add(self, value: float, *labels: tuple[str, object]) -> None:
        """Add one value."""
        self.lines.append(_line(self.name, value, labels))

    def observe(self, found: Histogram, *labels: tuple[str, object]) -> None:
        """Add one histogram."""
        for bound, count in zip((*BOUNDS, None), accumulate(found.counts), strict=True):
            le = "+Inf" if bound is None else f"{bound:.6g}"
            self.lines.append(_line(f"{self.name}_bucket", count, (*labels, ("le", le))))
        self.lines.append(_line(f"{self.name}_sum", found.sum, labels))
        self.lines.append(_line(f"{self.name}_count", found.count, labels))


def render(families: Sequence[Family]) -> str:
    """The whole page."""
    lines = []
    for one in families:
        lines += [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {one.kind}", *one.lines]
    return "\n".join([*lines, ""])


def _line(name: str, value: float, labels: Labels) -> str:
    shown = ",".join(f'{label}="{_escaped(str(content))}"' for label, content in labels)
    return f"{name}{{{shown}}} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
