"""One report from all sheets that are there: a summary, a picture, every table. And its place in the docs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.picture import draw
from bench.results import NONE, ResultLine, ResultSheet, table
from bench.workloads import ALL, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PICTURE = "benchmarks.svg"


def read_all(folder: Path) -> list[ResultSheet]:
    """The sheets of a folder, in the order of the workloads. Raises BenchError for a file that is none."""
    found = {path.stem: ResultSheet.read(path) for path in folder.glob("*.json") if path.stem != "report"}
    return [found[name] for name in (*(one.name for one in ALL), "endurance") if name in found]


def write(folder: Path) -> list[ResultSheet]:
    """``report.md``, ``report.json`` and ``benchmarks.svg`` from the sheets of the folder."""
    sheets = read_all(folder)
    if not sheets:
        raise BenchError(f"{folder} has no figures yet: measure something first")
    said = {"summary": _summary(sheets), "sheets": [asdict(sheet) for sheet in sheets]}
    (folder / "report.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(sheets) + "\n", encoding="utf-8")
    (folder / PICTURE).write_text(draw(sheets), encoding="utf-8")
    return sheets


def markdown(sheets: Sequence[ResultSheet]) -> str:
    """The picture, the summary, and a section for every sheet."""
    head, *rows = _summary(sheets)
    parts = [f"![Drain rates and latencies beside the peers]({PICTURE})"] if _drawable(sheets) else []
    if rows:
        parts += [
            "### Summary",
            table(head, rows),
            "Medians; the sections below have the spread and the date.",
        ]
    return "\n\n".join([*parts, *[sheet.markdown() for sheet in sheets]])


def update_docs(folder: Path, path: Path = DOCS) -> None:
    """Put the report of the folder's sheets between the markers; its picture and its figures go beside the docs."""
    sheets = write(folder)
    fill(path, "results", markdown(sheets))
    for name, beside in ((PICTURE, PICTURE), ("report.json", "benchmarks.json")):
        (path.parent / beside).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")


def fill(path: Path, name: str, content: str) -> None:
    """Put something between the markers of this name."""
    text = path.read_text(encoding="utf-8")
    found = re.search(f"<!-- begin {name} -->(.*?)<!-- end {name} -->", text, re.DOTALL)
    if found is None:
        raise BenchError(f"{path} has no '<!-- begin {name} -->' … '<!-- end {name} -->' to fill")
    path.write_text(text[: found.start(1)] + f"\n{content}\n" + text[found.end(1) :], encoding="utf-8")


def _drawable(sheets: Sequence[ResultSheet]) -> bool:
    return any(line.figures for sheet in sheets for line in sheet.lines)


def _summary(sheets: Sequence[ResultSheet]) -> list[list[str]]:
    """A row for each contestant, a column for each workload's main figure."""
    by_name = {sheet.name: sheet for sheet in sheets}
    columns: list[tuple[str, dict[str, str]]] = []
    labels: list[str] = []
    for workload in ALL:
        sheet = by_name.get(workload.name)
        if sheet is None or workload.alone:
            continue
        for title, cells in _columns(workload, sheet):
            columns.append((title, cells))
            labels += [label for label in cells if label not in labels]
    return [
        ["", *[title for title, _ in columns]],
        *[[label, *[cells.get(label, NONE) for _, cells in columns]] for label in labels],
    ]


def _columns(workload: Workload, sheet: ResultSheet) -> list[tuple[str, dict[str, str]]]:
    made = []
    for at in dict.fromkeys(line.at for line in sheet.lines if line.figures):
        for figure, title in workload.headline:
            cells = {}
            for line in sheet.lines:
                spread = line.spread(figure)
                if line.at == at and spread is not None:
                    behind = "does not keep up" if any("keep up" in note for note in line.notes) else ""
                    form = ",.1f" if figure.startswith("p") and spread.median < 100 and at else ",.0f"
                    cells[base(line)] = behind if behind and at else f"{spread.median:{form}}"
            made.append((f"{title} at {at:,.0f}/s" if at else title, cells))
    return made


def base(line: ResultLine) -> str:
    """The contestant's name, without the rate."""
    return line.label if line.at is None else line.label.removesuffix(f", {line.at:,.0f}/s")
