"""Layout for the terminal: tables, labelled lines, indented blocks, times and ages."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keylane.key_text import printable
from keylane.logs import as_json
from keylane.redaction import redact
from keylane.safe_text import printable_lines

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import RenderableType
    from rich.table import Column

_RIGHT = {"LETTERS", "BEHIND", "LANES", "ATTEMPTS"}
_WIDE = {"CAUSE", "KEY", "STAGE", "STATE", "LANE", "RESULT", "SOURCE, IN THIS ORDER"}
_LONG_COLUMN = 24
"""Characters that a long column gets at least, unless its content is shorter."""


def table(*headings: str) -> Table:
    """Return an empty table; long columns are folded, not cut."""
    made = Table(box=None, pad_edge=False)
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in _RIGHT else "left",
            overflow="fold",
            no_wrap=heading not in _WIDE,
        )
    return made


def print_table(made: Table, console: Console | None = None) -> None:
    """Print a table as wide as the terminal, or 200 characters without one.

    When there is no room for its long columns, they are on a line of their own below each row.
    """
    console = console or Console(width=None if sys.stdout.isatty() else 200)
    long = [column for column in made.columns if not column.no_wrap]
    short = [column for column in made.columns if column.no_wrap]
    widths = {id(column): _width(column, console) for column in made.columns}
    room = console.width - sum(widths[id(column)] + 2 for column in short)
    enough = sum(min(widths[id(column)], _LONG_COLUMN) + 2 for column in long)
    if not short or room >= enough - 2:
        console.print(made)
        return
    rows = Table(box=None, pad_edge=False)
    rows.columns = short
    rows.rows = made.rows
    with console.capture() as captured:
        console.print(rows)
    below = zip(*([column.header, *column.cells] for column in long), strict=True)
    for line, cells in zip(captured.get().splitlines(), below, strict=True):
        console.print(line.rstrip(), markup=False, highlight=False, no_wrap=True, overflow="crop")
        console.print(Padding(Text("  ").join(_text(each) for each in cells), (0, 0, 0, 4)))


def _width(column: Column, console: Console) -> int:
    return max(
        Measurement.get(console, console.options, _text(each)).maximum
        for each in [column.header, *column.cells]
    )


def _text(content: RenderableType) -> Text:
    return content if isinstance(content, Text) else Text(str(content))


def cell(text: str | None) -> Text:
    """Return text for a table cell, never as markup; ``-`` for None."""
    return Text("-" if text is None else printable(text))


def fact(label: str, text: str) -> None:
    """Print one labelled line."""
    typer.echo(f"{label:<10} {printable(text)}")


def block(title: str, text: str) -> None:
    """Print a title, and a text indented below it."""
    typer.echo(title)
    for line in text.split("\n"):
        typer.echo(f"  {printable(line.expandtabs())}")


class JsonConsole(Console):
    """Writer of lines as JSON objects to stderr, like the logs."""

    def __init__(self) -> None:
        super().__init__(stderr=True, force_terminal=False)

    def print(self, *lines: Any, **_: Any) -> None:
        """Write one object per line."""
        for line in lines:
            typer.echo(json.dumps(as_json("INFO", "keylane.run", str(line))), err=True)


def safe(text: str) -> str:
    """Make quoted text safe for a terminal: no secrets, no control sequences."""
    return printable_lines(redact(text))


class StatusLine:
    """A status line, rewritten in place while other processes write to the same terminal.

    The cursor waits at the line's start, so their output replaces it instead of following it. Without a terminal
    nothing is shown.
    """

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._text = text

    def __enter__(self) -> Self:
        self.update(self._text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clear_line(self._console)

    def update(self, text: str) -> None:
        """Show this text from now on."""
        if self._console.is_terminal and not self._console.quiet:
            line = " ".join(safe(text).split())[: self._console.width - 1]
            self._console.file.write(f"\r\x1b[2K{line}\r")
            self._console.file.flush()


def clear_line(console: Console) -> None:
    """Erase what a :class:`StatusLine` left on the terminal."""
    if console.is_terminal and not console.quiet:
        console.file.write("\r\x1b[2K")
        console.file.flush()


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print one safe line: no markup from its content, no wrapping at the terminal's edge."""
    clear_line(console)
    console.print(safe(line), style=style, markup=False, highlight=False, soft_wrap=True)
