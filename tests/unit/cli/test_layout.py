"""Tables on terminals of any width: nothing is cut, and no column is a few characters wide."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from keylane.cli.layout import cell, print_table, table


def shown(width: int) -> list[str]:
    made = table("LETTER", "SOURCE", "FAILED", "KEY", "STAGE", "CAUSE")
    for number in range(2):
        made.add_row(
            f"shop.dlq/3@{number}",
            "orders/3@182",
            "2026-11-20 00:36:03",
            cell("customer-0"),
            cell("check"),
            cell("Poison: an order without an amount"),
        )
    written = StringIO()
    print_table(made, Console(file=written, width=width))
    return [line.rstrip() for line in written.getvalue().splitlines()]


def test_table_that_fits_has_a_line_for_each_row() -> None:
    lines = shown(120)
    assert len(lines) == 3
    assert lines[1].endswith("customer-0  check  Poison: an order without an amount")


def test_narrow_table_has_its_long_columns_below_the_row() -> None:
    assert shown(80) == [
        "LETTER        SOURCE        FAILED",
        "    KEY  STAGE  CAUSE",
        "shop.dlq/3@0  orders/3@182  2026-11-20 00:36:03",
        "    customer-0  check  Poison: an order without an amount",
        "shop.dlq/3@1  orders/3@182  2026-11-20 00:36:03",
        "    customer-0  check  Poison: an order without an amount",
    ]


def test_line_below_a_row_is_folded_and_stays_indented() -> None:
    lines = shown(50)
    assert lines[3:5] == ["    customer-0  check  Poison: an order without an", "    amount"]
