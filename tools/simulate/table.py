"""Text tables for measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Row = dict[str, object]


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows with the same columns, as Markdown."""
    print(f"\n{title}\n")
    if not rows:
        return
    columns = list(rows[0])
    widths = [max(len(column), *(len(_text(row[column])) for row in rows)) for column in columns]
    for cells in (
        columns,
        ["-" * width for width in widths],
        *([_text(row[c]) for c in columns] for row in rows),
    ):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
    print(flush=True)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
