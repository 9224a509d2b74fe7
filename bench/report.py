"""Figures as Markdown and as JSON, and their place in the docs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError
from bench.field import Spread

if TYPE_CHECKING:
    from bench.chat import Report as ChatReport
    from bench.drain import Report as DrainReport
    from bench.stuck import Report as StuckReport
    from bench.stuck import Run as StuckRun

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_NONE = "—"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run of the bench, as far as it went."""

    machine: dict[str, str]
    rounds: int
    left_out: dict[str, str]
    drain: DrainReport | None = None
    chat: ChatReport | None = None
    stuck: StuckReport | None = None

    @property
    def problems(self) -> list[str]:
        """Whatever must not be: a peer that failed, lost, repeated or overtook; others that a stuck key held back."""
        found = [problem for part in (self.drain, self.chat, self.stuck) if part for problem in part.problems]
        if self.stuck and self.stuck.changes and not self.stuck.kept:
            found.append(f"stuck: the other keys are worse by more than allowed: {_changes(self.stuck)}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, every round."""
        found: dict[str, Any] = {"machine": self.machine, "rounds": self.rounds, "left_out": self.left_out}
        if self.drain:
            found["drain"] = asdict(self.drain) | {"ratios": self.drain.ratios}
        if self.chat:
            found["chat"] = asdict(self.chat) | {"own_ms": self.chat.own_ms}
        if self.stuck:
            found["stuck"] = asdict(self.stuck) | {"changes": self.stuck.changes, "kept": self.stuck.kept}
        return found | {"problems": self.problems}

    def sections(self) -> dict[str, str]:
        """Markdown for each workload that was run, by its name."""
        made = {}
        if self.drain:
            made["drain"] = _drain(self.drain)
        if self.chat:
            made["chat"] = _chat(self.chat)
        if self.stuck:
            made["stuck"] = _stuck(self.stuck)
        foot = f"Median of {self.rounds} (lowest to highest). " + self._facts()
        return {name: f"{text}\n\n{foot}" for name, text in made.items()}

    def _facts(self) -> str:
        shown = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        out = "".join(f" Left out: {name} ({why})." for name, why in self.left_out.items())
        return f"{shown[0].upper()}{shown[1:]}.{out}"


def update_docs(results: Results, path: Path = DOCS) -> None:
    """Put each section in its place between the markers; sections that were not measured now stay as they are."""
    text = path.read_text(encoding="utf-8")
    whole = _between(text, "results")
    if whole is None:
        raise BenchError(f"{path} has no '<!-- begin results -->' … '<!-- end results -->' to fill")
    old = {name: _between(whole, name) for name in ("drain", "chat", "stuck")}
    new = {name: body for name, body in old.items() if body is not None} | results.sections()
    order = [name for name in old if name in new]
    filled = "\n\n".join(f"<!-- begin {name} -->\n{new[name].strip()}\n<!-- end {name} -->" for name in order)
    path.write_text(text.replace(whole, f"\n{filled}\n", 1), encoding="utf-8")


def _between(text: str, name: str) -> str | None:
    found = re.search(f"<!-- begin {name} -->(.*?)<!-- end {name} -->", text, re.DOTALL)
    return found[1] if found else None


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _spread(spread: Spread | None, form: str = ",.0f") -> str:
    if spread is None:
        return _NONE
    return f"{spread.median:{form}} ({spread.low:{form}} to {spread.high:{form}})"


def _verdict(problems: list[str]) -> str:
    return f"**FAILED: {'; '.join(problems)}**" if problems else "in order, complete"


def _drain(report: DrainReport) -> str:
    rows = []
    for row in report.rows:
        cpu = [run.cpu_per_million for run in row.runs if run.cpu_per_million is not None]
        cores = [run.cores for run in row.runs if run.cores is not None]
        rows.append(
            [
                row.label,
                _spread(row.per_second),
                f"{median(cpu):.1f}" if cpu else _NONE,
                f"{median(cores):.2f}" if cores else _NONE,
                _verdict(row.problems),
            ]
        )
    head = ["peer", "messages per second", "CPU seconds per million", "cores", "results"]
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in report.ratios.items())
    title = f"### Drain: {report.settings.n:,} messages, {report.settings.keys:,} keys, no-op handler"
    return f"{title}\n\n{_table(head, rows)}" + (f"\n\nRatios of the medians: {ratios}." if ratios else "")


def _chat(report: ChatReport) -> str:
    settings, rows = report.settings, []
    for row in report.rows:
        if not row.runs:
            rows.append([row.label, *[_NONE] * 7, _verdict(row.problems)])
            continue
        clean = row.spread("clean", "p99")
        over = Spread(**{name: value - report.own_ms for name, value in asdict(clean).items()})
        backlog = Spread.of([run.backlog for run in row.runs])
        rows.append(
            [
                row.label,
                *[_spread(row.spread("all", figure)) for figure in ("p50", "p95", "p99", "max")],
                _spread(over),
                f"{backlog.median:,.0f}",
                f"{Spread.of([run.cores for run in row.runs]).median:.2f}",
                _verdict(row.problems),
            ]
        )
    own = f"clean p99 less {report.own_ms} ms"
    head = ["peer", "p50 ms", "p95 ms", "p99 ms", "max ms", own, "left at the end", "cores", "results"]
    stages = " + ".join(map(str, settings.stages))
    title = (
        f"### Chat: stages of {stages} ms, {settings.keys:,} keys, {settings.rate:,.0f}/s for {settings.seconds:g} s, "
        f"{settings.fail}% fail at first{', keys in turns' if settings.rotate else ''}"
    )
    return f"{title}\n\n{_table(head, rows)}"


def _stuck(report: StuckReport) -> str:
    settings, rows = report.settings, []
    for label, runs in (("no key is stuck", report.free), ("one more key is stuck", report.held)):
        if runs:
            rows.append([label, *_others(runs)])
    head = ["", "the others' results per second", "p50 ms", "p99 ms", "p99 ms of the whole load"]
    title = (
        f"### Stuck: {settings.keys:,} keys, {settings.rate:,.0f}/s for {settings.seconds:g} s, a stage of "
        f"{settings.stage_ms} ms; a key fails for {settings.window:g} s"
    )
    worse = f"Worse with a stuck key (median): {_changes(report)}; below 10% is kept: " + (
        "yes" if report.kept else "**NO**"
    )
    foot = f"{worse}. Two loads of each kind a round. Results: {_verdict(report.problems)}."
    return f"{title}\n\n{_table(head, rows)}\n\n{foot}"


def _others(runs: list[StuckRun]) -> list[str]:
    return [
        _spread(Spread.of([run.window_per_second for run in runs])),
        _spread(Spread.of([run.window.p50 for run in runs]), ".1f"),
        _spread(Spread.of([run.window.p99 for run in runs]), ".1f"),
        _spread(Spread.of([run.all.p99 for run in runs]), ".1f"),
    ]


def _changes(report: StuckReport) -> str:
    return ", ".join(f"{name} {change:+.1%}" for name, change in report.changes.items()) or "not measured"
