"""The figures of one workload: a file in ``bench/results``, a table in the docs, lines in the picture.

A sheet is plain data, so that a report can be made from files of different days: each line says when it was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from bench.errors import BenchError
from bench.field import Spread

if TYPE_CHECKING:
    from pathlib import Path

NONE = "—"
SOUND = "in order, complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How one figure is shown. ``spread``: with its lowest and highest round."""

    figure: str
    title: str
    form: str = ",.0f"
    spread: bool = True

    def show(self, found: Spread | None) -> str:
        """The cell."""
        if found is None:
            return NONE
        text = f"{found.median:{self.form}}"
        if self.spread and found.low != found.high:
            text += f" ({found.low:{self.form}} to {found.high:{self.form}})"
        return text


@dataclass(slots=True, kw_only=True)
class ResultLine:
    """One row: a peer, or a peer at a rate or a size."""

    label: str
    peer: str
    measured: str
    at: float | None = None
    """The rate or the size, in a sheet that has several."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Every round's."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and no fault."""
    problems: list[str] = field(default_factory=list)
    """Whatever must not be: lost, twice, overtaken, failed."""

    def add(self, **figures: float | None) -> None:
        """Those of one round; None is left out."""
        for name, value in figures.items():
            if value is not None:
                self.figures.setdefault(name, []).append(round(float(value), 4))

    def spread(self, figure: str) -> Spread | None:
        """None when no round gave it."""
        found = self.figures.get(figure)
        return Spread.of(found) if found else None

    @property
    def verdict(self) -> str:
        """The last cell."""
        if self.problems:
            return f"**FAILED: {'; '.join(self.problems)}**"
        return "; ".join(dict.fromkeys(self.notes)) or (SOUND if self.figures else NONE)


@dataclass(slots=True, kw_only=True)
class ResultSheet:
    """One workload."""

    name: str
    title: str
    settings: dict[str, Any]
    """Lines that were measured with other settings are not comparable."""
    columns: list[Column]
    rounds: int
    machine: dict[str, str]
    left_out: dict[str, str]
    lines: list[ResultLine] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Sentences below the table."""
    problems: list[str] = field(default_factory=list)
    """Of the workload as a whole."""

    def line(self, label: str, peer: str, at: float | None = None) -> ResultLine:
        """The line of that name, which is made if it is not there."""
        for line in self.lines:
            if line.label == label:
                return line
        made = ResultLine(label=label, peer=peer, at=at, measured=self.machine["measured"])
        self.lines.append(made)
        return made

    @property
    def all_problems(self) -> list[str]:
        """Each with where it was."""
        found = [f"{self.name}: {problem}" for problem in self.problems]
        return found + [
            f"{self.name}, {line.label}: {problem}" for line in self.lines for problem in line.problems
        ]

    def merged(self, old: ResultSheet | None) -> ResultSheet:
        """This one, with the lines of an older one that it did not measure again; none if the settings were others."""
        if old is None or old.settings != self.settings or old.name != self.name:
            return self
        mine = {line.label for line in self.lines}
        kept = [line for line in old.lines if line.label not in mine]
        there = {line.peer for line in kept} | {line.peer for line in self.lines}
        self.left_out = {
            name: why for name, why in {**old.left_out, **self.left_out}.items() if name not in there
        }
        peers = list(dict.fromkeys(["keylane", *(line.peer for line in [*old.lines, *self.lines])]))
        self.lines = sorted([*self.lines, *kept], key=lambda line: (peers.index(line.peer), line.at or 0))
        return self

    def markdown(self) -> str:
        """A section: title, table, remarks, and where and when."""
        head = ["", *[column.title for column in self.columns], "results"]
        rows = []
        for line in self.lines:
            cells = [column.show(line.spread(column.figure)) for column in self.columns]
            when = "" if line.measured == self.machine["measured"] else f" *(measured {line.measured})*"
            rows.append([line.label + when, *cells, line.verdict])
        problems = [f"**FAILED: {problem}.**" for problem in self.problems]
        return "\n\n".join([f"### {self.title}", table(head, rows), *problems, *self.remarks, self._foot()])

    def _foot(self) -> str:
        facts = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        out = "".join(f" Left out: {name} ({why})." for name, why in self.left_out.items())
        return f"Median of {self.rounds} (lowest to highest). {facts[0].upper()}{facts[1:]}.{out}"

    def write(self, folder: Path) -> None:
        """To ``<folder>/<name>.json``, together with what is there and was not measured again."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        self.merged(ResultSheet.read(path) if path.is_file() else None)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BenchError for a file that is none."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            said["columns"] = [Column(**column) for column in said["columns"]]
            said["lines"] = [ResultLine(**line) for line in said["lines"]]
            return cls(**said)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{path} is not a sheet of figures ({error}): remove it and measure again"
            ) from error


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
