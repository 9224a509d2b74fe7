"""Views of dead letters: facts for JSON, and text."""

from __future__ import annotations

import re

import typer
from rich.table import Table
from rich.text import Text

from keylane.cli.layout import block, cell, fact, print_table, table
from keylane.dlq.facts import readable
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.dlq.summary import DeadLetterSummary
from keylane.key_text import printable, show_key
from keylane.safe_text import show_bytes
from keylane.wording import brief, counted, local

SHOWN_CHARACTERS = 4000
SHOWN_BYTES = 512
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_FATES = {
    DeadLetterKind.DEAD: "its lane continued",
    DeadLetterKind.ARCHIVED: "its lane is blocked at it",
    DeadLetterKind.PARKED: "with all messages behind it in its lane",
}


def print_list(name: str, survey: DeadLetterSummary, limit: int, *, letters: bool) -> None:
    """Print the result of ``dlq list`` as a table and a sentence."""
    if survey.letters:
        print_table(_letter_table(name, survey) if letters else _cause_table(name, survey, limit))
    notes = [f"{counted(survey.letters, 'dead letter')} of {counted(survey.lanes, 'lane')} in {name}.dlq"]
    left = survey.letters - len(survey.lines()) if letters else len(survey.groups()) - limit
    if left > 0:
        notes.append(f"{counted(left, 'dead letter' if letters else 'cause')} not shown (--limit)")
    if survey.redriven:
        notes.append(f"{survey.redriven:,} redriven, not shown (--all)")
    if survey.repeats:
        notes.append(f"{survey.repeats:,} repeated, counted once")
    typer.echo("; ".join(notes))
    if survey.unreadable:
        first = survey.examples[0]
        typer.echo(
            f"{counted(survey.unreadable, 'more record')} could not be read as a dead letter of this app, "
            f"the first at {name}.dlq/{first.position}: {printable(first.reason)}"
        )


def _cause_table(name: str, survey: DeadLetterSummary, limit: int) -> Table:
    groups = survey.groups()[:limit]
    behind = any(group.behind for group in groups)
    made = table(
        "LETTERS",
        *(["BEHIND"] if behind else []),
        "LANES",
        "FIRST",
        "LAST",
        "EXAMPLE",
        "STAGE",
        "CAUSE",
    )
    for group in groups:
        made.add_row(
            f"{group.count:,}",
            *([f"{group.behind:,}"] if behind else []),
            f"{group.lanes:,}",
            local(group.first),
            local(group.last),
            "-" if group.example is None else f"{name}.dlq/{group.example.position}",
            cell(group.cause.stage),
            _why(group.cause.error, (group.example and group.example.message) or group.cause.message),
        )
    return made


def _letter_table(name: str, survey: DeadLetterSummary) -> Table:
    made = table("LETTER", "SOURCE", "KEY", "KIND", "FAILED", "ATTEMPTS", "STAGE", "CAUSE")
    for line in survey.lines():
        why = _why(line.cause.error, line.message)
        made.add_row(
            f"{name}.dlq/{line.position}",
            line.source,
            cell(show_key(line.key)),
            f"{line.kind}{', redriven' if line.redriven else ''}",
            local(line.at),
            str(line.attempts),
            cell(line.cause.stage),
            Text(f"behind {line.source.partition('@')[0]}@{line.park}: ").append(why) if line.behind else why,
        )
    return made


def _why(error: str | None, message: str | None) -> Text:
    if error is None:
        return Text("unknown: not recorded, or parked behind a dead letter that is gone")
    return cell(brief(error, message))


def print_letter(
    name: str,
    found: DeadLetter | UnreadableDeadLetter,
    others: list[DeadLetter],
    *,
    redriven: bool,
    foreign: str | None,
) -> None:
    """Print one dead letter; a long value is cut."""
    fact("position", f"{name}.dlq/{found.position}")
    if foreign is not None:
        fact("no redrive", foreign)
    if isinstance(found, UnreadableDeadLetter):
        fact("unreadable", found.reason)
        fact("key", show_key(found.key))
    else:
        if others:
            fact("also at", ", ".join(f"{name}.dlq/{other.position}" for other in others))
        written = "" if found.timestamp is None else f", of {local(found.timestamp / 1000)}"
        fact("message", f"{found.source}{written}")
        fact("key", show_key(found.key))
        fact("app", f"{found.app} {found.app_version or ''}".rstrip())
        fact("kind", f"{found.kind}: {_FATES[found.kind]}")
        if found.park is not None:
            itself = found.park == found.source_offset
            fact(
                "parked",
                "its lane was parked at it"
                if itself
                else f"behind {found.topic}/{found.source_partition}@{found.park}",
            )
        if found.redrives or redriven:
            fact(
                "redriven",
                f"{counted(found.redrives, 'time')} before{'; this dead letter too' if redriven else ''}",
            )
        tries = f" after {counted(found.attempts, 'attempt')}" if found.attempts else ""
        fact("failed", f"{local(found.failed_at)}{f' in stage {found.stage}' if found.stage else ''}{tries}")
        if found.error is not None:
            fact("error", f"{found.error}: {found.message}" if found.message else found.error)
        for number, each in enumerate(found.failures):
            tried = f"{local(each.at, exact=True)}  {each.stage}, attempt {each.attempt}: {each.error}"
            fact("" if number else "attempts", tried)
        if found.traceback:
            block("traceback", found.traceback.rstrip())
        if found.headers_unreadable is not None:
            fact("headers", f"could not be read: {found.headers_unreadable}")
    if found.headers:
        width = max(len(header) for header, _ in found.headers)
        lines = [f"{header:<{width}}  {'-' if c is None else show_bytes(c)}" for header, c in found.headers]
        block("headers", "\n".join(lines))
    _print_value(found.value)


def _print_value(value: bytes | None) -> None:
    if value is None:
        typer.echo("value      none: a tombstone")
        return
    text = readable(value)
    if text is not None:
        more = len(text) - SHOWN_CHARACTERS
        block(f"value, {len(value):,} bytes", text[:SHOWN_CHARACTERS])
        unit = "characters"
    else:
        more = len(value) - SHOWN_BYTES
        block(f"value, {len(value):,} bytes that are not text", _dump(value[:SHOWN_BYTES]))
        unit = "bytes"
    if more > 0:
        typer.echo(f"  … {more:,} more {unit}; use --raw for all")


def _dump(content: bytes) -> str:
    lines = []
    for at in range(0, len(content), 16):
        row = content[at : at + 16]
        seen = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {seen}")
    return "\n".join(lines)
