"""What the campaign says: a line for each run, the story of a bad one, a table in the end."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from keylane.testing import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from campaign.runner import Outcome

_EVENTS_AROUND = 12
_FINDINGS_SHOWN = 6


def line(number: int, of: int, outcome: Outcome) -> str:
    """One run in one line."""
    facts = ", ".join(f"{count} {what}" for what, count in outcome.ruling.facts.items() if count)
    verdict = "ok " if outcome.ruling.ok else "BAD"
    broken = "" if outcome.ruling.ok else f"  {', '.join(outcome.ruling.rules)}"
    return (
        f"[{number}/{of}] {verdict} seed {outcome.plan.seed:<5} {outcome.delivery:<13} "
        f"{outcome.plan.label:<24} {outcome.seconds:5.1f} s  {facts}{broken}"
    )


def story(outcome: Outcome) -> str:
    """The plan, the findings, everything that happened in order, and how to repeat it."""
    plan, ruling = outcome.plan, outcome.ruling
    load = f"{plan.messages} messages over {plan.keys} keys at {plan.rate:g}/s"
    lines = [
        f"seed {plan.seed}, {outcome.delivery}: {load}, epochs of {plan.epoch:g} s",
        *(f"  fault: {shot}" for shot in plan.shots),
        *(f"  {label} took {seconds:.1f} s" for label, seconds in outcome.phases.items()),
        "found:" if ruling.findings else "found nothing",
        *(f"  {_indented(str(finding))}" for finding in ruling.findings[:_FINDINGS_SHOWN]),
    ]
    if len(ruling.findings) > _FINDINGS_SHOWN:
        lines.append(f"  … and {len(ruling.findings) - _FINDINGS_SHOWN} more")
    lines += ["what happened:", *_timeline(outcome)]
    if not ruling.ok:
        lines.append(f"folder: {outcome.folder}")
    lines.append(f"replay: {outcome.replay}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _timeline(outcome: Outcome) -> list[str]:
    scene, evidence = outcome.scene, outcome.evidence
    if scene is None:
        return []
    story: list[tuple[int, str]] = [(note.at, note.text) for note in [*scene.notes, *outcome.ownership]]
    story += [
        (task.at, f"task {task.task} of epoch {task.epoch} begins: {task.owner}") for task in outcome.tasks
    ]
    if evidence is not None:
        before: dict[int, str] = {}
        for sample in evidence.samples:
            changed = []
            for partition, progress in sorted(sample.progress.items()):
                owner = f" {sample.raw[partition][:24]}…" if sample.raw[partition] else ""
                text = f"{partition}: {progress.watermark}+{len(progress.pending)} pending of {progress.position}"
                if before.get(partition) != text + owner:
                    changed.append(text)
                before[partition] = text + owner
            if changed:
                story.append((sample.at, f"progress {'; '.join(changed)}"))
        ends: dict[str, int] = {}
        for event in evidence.history:
            ends[event.owner] = event.seq
        story += [(at, f"the last word of {owner}") for owner, at in ends.items()]
        story += _attempts(outcome)
    story.sort()
    return [f"  {(at - scene.began) / 1e9:+9.3f} s  {text}" for at, text in story]


def _attempts(outcome: Outcome) -> list[tuple[int, str]]:
    """The attempts of the first key that something is wrong with, around the moment it showed."""
    found = next((finding for finding in outcome.ruling.findings if finding.key is not None), None)
    if found is None or outcome.evidence is None:
        return []
    events = [event for event in outcome.evidence.history if event.key == found.key]
    place = next((place for place, event in enumerate(events) if event.seq >= found.at), 0)
    shown = []
    for event in events[max(0, place - _EVENTS_AROUND) : place + _EVENTS_AROUND]:
        what = "starts" if event.kind is EventKind.START else "ends"
        which = f"{event.partition}/{event.offset} attempt {event.attempt} {event.outcome or ''}"
        shown.append((event.seq, f"    key {event.key!r} {what} {which} ({event.owner})"))
    return shown


def table(outcomes: Sequence[Outcome]) -> str:
    """Per fault and delivery: how many runs, how many were bad, how often what."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        label = "pairs" if len(outcome.plan.shots) > 1 else outcome.plan.label
        groups[label, outcome.delivery].append(outcome)
    rows = [f"{'fault':<16}{'delivery':<15}{'runs':>5}{'bad':>5}{'s/run':>7}{'repeats':>9}  broken promises"]
    for (label, delivery), group in groups.items():
        broken: dict[str, int] = defaultdict(int)
        for outcome in group:
            for rule in outcome.ruling.rules:
                broken[rule] += 1
        bad = sum(not outcome.ruling.ok for outcome in group)
        repeats = sum(outcome.ruling.facts.get("repeats", 0) for outcome in group)
        seconds = sum(outcome.seconds for outcome in group) / len(group)
        what = ", ".join(f"{count}x {rule}" for rule, count in broken.items())
        rows.append(
            f"{label:<16}{delivery:<15}{len(group):>5}{bad:>5}{seconds:>7.1f}{repeats:>9}  {what}".rstrip()
        )
    return "\n".join(rows)


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "runs": len(outcomes),
        "bad": sum(not outcome.ruling.ok for outcome in outcomes),
        "outcomes": [
            {
                "seed": outcome.plan.seed,
                "delivery": outcome.delivery,
                "faults": [str(shot) for shot in outcome.plan.shots],
                "ok": outcome.ruling.ok,
                "seconds": round(outcome.seconds, 1),
                "facts": dict(outcome.ruling.facts),
                "findings": [str(finding) for finding in outcome.ruling.findings],
                "phases": {label: round(seconds, 2) for label, seconds in outcome.phases.items()},
                "replay": outcome.replay,
                "folder": None if outcome.ruling.ok else str(outcome.folder),
            }
            for outcome in outcomes
        ],
    }
