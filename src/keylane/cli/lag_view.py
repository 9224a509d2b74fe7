"""Views of an app's lag: facts for JSON, and text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from keylane.cli.layout import cell, table
from keylane.key_text import printable
from keylane.telemetry.lag_trend import LagTrend
from keylane.telemetry.lag_words import key_words, reasons, stopped_lanes
from keylane.wording import age, counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keylane.telemetry.lag_monitor import LagView, PartitionView

_COLOURS = {LagTrend.STUCK: "bold red", LagTrend.NOT_RUNNING: "bold red", LagTrend.FALLING_BEHIND: "yellow"}
_AGE_SECONDS_MAX = 366 * 86_400.0
_REASONS_SHOWN = 3
_FULL_TABLE_COLUMNS = 100
"""Columns that the full table needs."""


def shown(group: str, topic: str, view: LagView, width: int = _FULL_TABLE_COLUMNS) -> RenderableType:
    """Render for a terminal of this width; a narrow one shows the lag without its two offsets."""
    offsets = ["END", "COMMITTED"] if width >= _FULL_TABLE_COLUMNS else []
    made = table("PARTITION", *offsets, "LAG", "IN/S", "OUT/S", "CAUGHT UP IN", "OLDEST NOT DONE", "STATE")
    for column in made.columns[:-2]:
        column.justify = "right"
    made.columns[-2].no_wrap, made.columns[-1].no_wrap = False, True  # without room, cut the key
    for one in view.partitions:
        made.add_row(
            str(one.partition),
            *(
                [
                    f"{one.offsets.end:,}",
                    "-" if one.offsets.committed is None else f"{one.offsets.committed:,}",
                ]
                if offsets
                else []
            ),
            f"{one.offsets.lag:,}",
            f"{one.movement.rate_in:,.0f}",
            f"{one.movement.rate_out:,.0f}",
            _until(one),
            _cut(_oldest(view, one)),
            Text(one.pace.value, style=_COLOURS.get(one.pace, "")),
        )
    movement = view.movement
    head = Text(f"{printable(group)} on {printable(topic)}: ")
    head.append(view.pace.value, style=_COLOURS.get(view.pace, "green"))
    if view.silent is not None:
        head.append(f": last seen {age(view.silent)} ago")
    head.append(
        f", lag {view.lag:,}, in {movement.rate_in:,.0f}/s, out {movement.rate_out:,.0f}/s over "
        f"{movement.seconds:.0f} s"
    )
    if view.lag and movement.catch_up is not None:
        head.append(f", caught up in {_time(movement.catch_up)}")
    if view.tasks:
        head.append(f"; {counted(len(view.tasks), 'task')}, epoch {view.tasks[0].epoch}")
    if waiting := stopped_lanes(view):
        head.append(f"; {waiting}", style="yellow")
    if view.dead:
        head.append(f"; {counted(view.dead, 'dead letter')} in this epoch", style="yellow")
    if view.hidden:
        head.append(f"; {counted(view.hidden, 'offset')} in open transactions of other producers")
    lines: list[RenderableType] = [head, made]
    if view.skewed is not None:
        lines.append(Text(f"skew: partition {view.skewed[0]} has {view.skewed[1]:.0%} of the lag"))
    if view.malformed:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(view.malformed.items()))
        lines.append(Text(f"malformed records in the state topic, ignored: {kinds}"))
    for one in view.partitions:
        lines += [Text(f"partition {one.partition}: {why}") for why in reasons(view, one)[:_REASONS_SHOWN]]
    return Group(*lines)


def _cut(text: str | None) -> Text:
    made = cell(text)
    made.no_wrap, made.overflow = True, "ellipsis"
    return made


def _oldest(view: LagView, one: PartitionView) -> str | None:
    oldest = one.oldest
    if oldest is None:
        return None
    old = "" if oldest.at is None else f", {age(view.at - oldest.at)} old"
    return f"offset {oldest.offset}, key {key_words(oldest.key)}{old}"


def _until(one: PartitionView) -> str:
    """Return the time to catch up; unknown when nothing finished in this measurement."""
    slow = one.movement.done <= 0 and one.pace in (LagTrend.CATCHING_UP, LagTrend.KEEPING_UP)
    return "-" if slow else _time(one.movement.catch_up)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return "-" if not seconds else "over a year" if seconds > _AGE_SECONDS_MAX else age(max(1.0, seconds))
