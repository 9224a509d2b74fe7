"""How dead letters look on the command line: as facts for JSON, and as text."""

from __future__ import annotations

import re
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from keylane.cli.keys import printable, show_key
from keylane.cli.layout import block, brief, cell, counted, fact, local, print_table, table
from keylane.cli.survey import Group, Line, Survey
from keylane.core.text import show_bytes
from keylane.kafka.letter import Kind, Letter, Unreadable

SHOWN_CHARACTERS = 4000
SHOWN_BYTES = 512
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_FATES = {
    Kind.DEAD: "its lane went on",
    Kind.ARCHIVED: "its lane stands still at it",
    Kind.PARKED: "with all that stood behind it in its lane",
}


def list_facts(name: str, survey: Survey, limit: int, *, letters: bool) -> dict[str, Any]:
    """What ``dlq list`` says, for JSON."""
    groups = survey.groups()
    shown: dict[str, Any]
    if letters:
        lines = [_line(line) for line in survey.lines()]
        shown = {"list": lines, "left_out": survey.letters - len(lines)}
    else:
        shown = {
            "causes": [_group(group) for group in groups[:limit]],
            "left_out": max(0, len(groups) - limit),
        }
    return {
        "app": name,
        "topic": f"{name}.dlq",
        "letters": survey.letters,
        "lanes": survey.lanes(),
        **shown,
        "redriven": survey.redriven,
        "repeats": survey.repeats,
        "unreadable": survey.unreadable,
        "unreadable_examples": [{"position": u.position, "reason": u.reason} for u in survey.examples],
    }


def _group(group: Group) -> dict[str, Any]:
    example = group.example
    return {
        "stage": group.cause.stage,
        "error": group.cause.error,
        "message": group.cause.message,
        "count": group.count,
        "behind": group.behind,
        "lanes": len(group.keys),
        "kinds": group.kinds,
        "first": group.first,
        "last": group.last,
        "example": example and example.position,
        "example_source": example and example.source,
        "example_message": example and example.message,
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "position": line.position,
        "source": line.source,
        "kind": line.kind.value,
        "key": None if line.key is None else show_key(line.key),
        "stage": line.cause.stage,
        "error": line.cause.error,
        "message": line.message,
        "attempts": line.attempts,
        "failed_at": line.at,
        "park": line.park,
        "behind": line.behind,
        "redrives": line.redrives,
        "redriven": line.redriven,
    }


def print_list(name: str, survey: Survey, limit: int, *, letters: bool) -> None:
    """What ``dlq list`` says, as a table and a sentence."""
    if survey.letters:
        print_table(_letter_table(survey) if letters else _cause_table(survey, limit))
    notes = [f"{counted(survey.letters, 'letter')} of {counted(survey.lanes(), 'lane')} in {name}.dlq"]
    left = survey.letters - len(survey.lines()) if letters else len(survey.groups()) - limit
    if left > 0:
        notes.append(f"{left:,} {'letters' if letters else 'causes'} not shown (--limit)")
    if survey.redriven:
        notes.append(f"{survey.redriven:,} redriven left out (--all)")
    if survey.repeats:
        notes.append(f"{survey.repeats:,} repeated, counted once")
    typer.echo("; ".join(notes))
    if survey.unreadable:
        first = survey.examples[0]
        typer.echo(
            f"{survey.unreadable:,} more {'are' if survey.unreadable > 1 else 'is'} no letter, "
            f"the first at {first.position}: {printable(first.reason)}"
        )


def _cause_table(survey: Survey, limit: int) -> Table:
    groups = survey.groups()[:limit]
    behind = any(group.behind for group in groups)
    made = table(
        "LETTERS", *(["BEHIND"] if behind else []), "LANES", "FIRST", "LAST", "EXAMPLE", "STAGE", "CAUSE"
    )
    for group in groups:
        made.add_row(
            f"{group.count:,}",
            *([f"{group.behind:,}"] if behind else []),
            f"{len(group.keys):,}",
            local(group.first),
            local(group.last),
            "-" if group.example is None else group.example.position,
            cell(group.cause.stage),
            _why(group.cause.error, group.cause.message),
        )
    return made


def _letter_table(survey: Survey) -> Table:
    made = table("LETTER", "SOURCE", "KEY", "KIND", "FAILED", "ATTEMPTS", "STAGE", "CAUSE")
    for line in survey.lines():
        why = _why(line.cause.error, line.message)
        made.add_row(
            line.position,
            line.source,
            cell(show_key(line.key)),
            f"{line.kind}{', redriven' if line.redriven else ''}",
            local(line.at),
            str(line.attempts),
            cell(line.cause.stage),
            Text(f"behind {line.source.partition('/')[0]}/{line.park}: ").append(why) if line.behind else why,
        )
    return made


def _why(error: str | None, message: str | None) -> Text:
    if error is None:
        return Text("unknown: the letter does not say, or it was parked behind one that is gone")
    return cell(brief(error, message))


def letter_facts(found: Letter | Unreadable, others: list[Letter], *, redriven: bool) -> dict[str, Any]:
    """All about one letter, for JSON; ``others`` are letters of the same message."""
    text = None if found.value is None else _readable(found.value)
    headers = found.headers or ()
    facts: dict[str, Any] = {
        "position": found.position,
        "readable": isinstance(found, Letter),
        "key": None if found.key is None else show_key(found.key),
        "value": text,
        "value_hex": found.value.hex() if found.value is not None and text is None else None,
        "headers": [{"name": n, "value": None if c is None else show_bytes(c)} for n, c in headers],
    }
    if isinstance(found, Unreadable):
        return {**facts, "reason": found.reason}
    return {
        **facts,
        "headers_unreadable": found.headers_unreadable,
        "app": found.app,
        "app_version": found.app_version,
        "kind": found.kind.value,
        "topic": found.topic,
        "source": found.source,
        "timestamp": found.timestamp,
        "stage": found.stage,
        "error": found.error,
        "message": found.message,
        "traceback": found.traceback,
        "attempts": found.attempts,
        "failures": [
            {"stage": f.stage, "attempt": f.attempt, "at": f.at, "error": f.error} for f in found.failures
        ],
        "failed_at": found.failed_at,
        "park": found.park,
        "redrives": found.redrives,
        "redriven": redriven,
        "also_at": [other.position for other in others],
    }


def print_letter(name: str, found: Letter | Unreadable, others: list[Letter], *, redriven: bool) -> None:
    """All about one letter; a long value is cut."""
    fact("letter", f"{found.position} in {name}.dlq")
    if isinstance(found, Unreadable):
        fact("unreadable", found.reason)
        fact("key", show_key(found.key))
    else:
        if others:
            fact("also at", ", ".join(other.position for other in others))
        written = "" if found.timestamp is None else f", of {local(found.timestamp / 1000)}"
        fact("message", f"{found.source} in {found.topic}{written}")
        fact("key", show_key(found.key))
        fact("app", f"{found.app} {found.app_version or ''}".rstrip())
        fact("kind", f"{found.kind}: {_FATES[found.kind]}")
        if found.park is not None:
            itself = found.park == found.source_offset
            fact(
                "parked",
                "its lane was parked at it" if itself else f"behind {found.source_partition}/{found.park}",
            )
        if found.redrives or redriven:
            fact("redriven", f"{found.redrives} times before{'; this letter too' if redriven else ''}")
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
    text = _readable(value)
    if text is not None:
        more = len(text) - SHOWN_CHARACTERS
        block(f"value, {len(value):,} bytes", text[:SHOWN_CHARACTERS])
        unit = "characters"
    else:
        more = len(value) - SHOWN_BYTES
        block(f"value, {len(value):,} bytes that are no text", _dump(value[:SHOWN_BYTES]))
        unit = "bytes"
    if more > 0:
        typer.echo(f"  … {more:,} more {unit}; --raw writes them all")


def _readable(value: bytes) -> str | None:
    """As text, when it is one."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def _dump(content: bytes) -> str:
    lines = []
    for at in range(0, len(content), 16):
        row = content[at : at + 16]
        seen = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {seen}")
    return "\n".join(lines)
