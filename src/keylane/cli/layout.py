"""How facts look on a terminal: tables, labelled lines, indented blocks, times and ages."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keylane.cli.keys import printable
from keylane.core.redact import redact
from keylane.logs import as_json

_RIGHT = {"LETTERS", "BEHIND", "LANES", "ATTEMPTS"}
_WIDE = {"CAUSE", "KEY", "STAGE", "STATE", "LANE", "RESULT", "IN THIS ORDER"}


def table(*headings: str) -> Table:
    """An empty table; what may be long is folded, not cut."""
    made = Table(box=None, pad_edge=False)
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in _RIGHT else "left",
            overflow="fold",
            no_wrap=heading not in _WIDE,
        )
    return made


def print_table(made: Table) -> None:
    """As wide as the terminal; 200 characters when there is none."""
    Console(width=None if sys.stdout.isatty() else 200).print(made)


def cell(text: str | None) -> Text:
    """For a table: taken as it is, never as markup; ``-`` for nothing."""
    return Text("-" if text is None else printable(text))


def fact(label: str, text: str) -> None:
    """Print one labelled line."""
    typer.echo(f"{label:<10} {printable(text)}")


def block(title: str, text: str) -> None:
    """Print a title and below it, indented, the lines of a text."""
    typer.echo(title)
    for line in text.split("\n"):
        typer.echo(f"  {printable(line.expandtabs())}")


def brief(error: str, message: str | None) -> str:
    """An error as its class without the module, and its message."""
    short = error.rpartition(".")[2]
    return f"{short}: {message}" if message else short


def counted(number: int, noun: str) -> str:
    """``1 letter``, ``2,000 letters``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def local(seconds: float | None, *, exact: bool = False) -> str:
    """Unix seconds as local time; ``-`` for none."""
    if seconds is None:
        return "-"
    try:
        at = datetime.fromtimestamp(seconds, UTC).astimezone()
        return at.replace(tzinfo=None).isoformat(" ", "milliseconds" if exact else "seconds")
    except (ValueError, OverflowError, OSError):  # a message may claim any time
        return f"{seconds:g} s"


def age(seconds: float) -> str:
    """How long ago, in its two largest units: ``3 d 4 h``. Never below 0: clocks differ."""
    whole = max(0, int(seconds))
    parts = [(whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number or unit == parts[0][1])


class JsonConsole(Console):
    """Says every line as a JSON object, to the standard error, as the logs beside it."""

    def __init__(self) -> None:
        super().__init__(stderr=True, force_terminal=False)

    def print(self, *lines: Any, **_: Any) -> None:
        """One object for each."""
        for line in lines:
            typer.echo(json.dumps(as_json("INFO", "keylane.run", str(line))), err=True)


def say(console: Console, line: str, style: str | None = None) -> None:
    """One line as it is, but without secrets: not coloured by what is in it, not broken where the terminal ends."""
    console.print(redact(line), style=style, markup=False, highlight=False, soft_wrap=True)
