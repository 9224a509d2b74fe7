"""How a look at an app's lag is shown: as facts for JSON, and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from keylane.cli.keys import printable, show_key
from keylane.cli.layout import age, cell, counted, table
from keylane.cli.stopped import lane_name
from keylane.core.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from keylane.kafka.lag_watch import LagView, PartitionView

_COLOURS = {Pace.STUCK: "bold red", Pace.FALLING_BEHIND: "yellow"}
_LONG = 366 * 86_400.0
_SHOWN = 3


def facts(group: str, topic: str, view: LagView) -> dict[str, Any]:
    """For JSON."""
    movement, skewed = view.movement, view.skewed
    return {
        "group": group,
        "topic": topic,
        "at": round(view.at, 3),
        "state": view.pace.value,
        "why": list(
            dict.fromkeys(
                why for one in view.partitions if one.pace is view.pace for why in reasons(view, one)
            )
        ),
        "lag": view.lag,
        "rate_in": round(movement.rate_in, 1),
        "rate_out": round(movement.rate_out, 1),
        "over_seconds": round(movement.seconds, 3),
        "catch_up_seconds": _rounded(movement.catch_up),
        "skew": None if skewed is None else {"partition": skewed[0], "share": round(skewed[1], 3)},
        "tasks": len(view.tasks),
        "partitions": [_partition(view, one) for one in view.partitions],
    }


def _partition(view: LagView, one: PartitionView) -> dict[str, Any]:
    oldest = one.oldest
    return {
        "partition": one.partition,
        "end": one.offsets.end,
        "committed": one.offsets.committed,
        "lag": one.offsets.lag,
        "rate_in": round(one.movement.rate_in, 1),
        "rate_out": round(one.movement.rate_out, 1),
        "catch_up_seconds": _rounded(one.movement.catch_up),
        "oldest": None
        if oldest is None
        else {
            "offset": oldest.offset,
            "key": None if oldest.key is None else show_key(oldest.key),
            "age_seconds": None if oldest.at is None else round(max(0.0, view.at - oldest.at), 3),
        },
        "state": one.pace.value,
        "why": reasons(view, one),
    }


def reasons(view: LagView, one: PartitionView) -> list[str]:
    """What is known of why the partition is where it is, in words; the most likely first."""
    return list(_reasons(view, one)) if one.offsets.lag else []


def _reasons(view: LagView, one: PartitionView) -> Iterator[str]:
    if view.silent is not None:
        yield f"no task of the app runs; the last one spoke {age(view.silent)} ago"
    if one.offsets.committed is None:
        yield "the group has no offset here: it has never finished anything of it, or its name is another"
    elif one.reached > one.offsets.at and one.movement.lag == 0:
        yield f"all is done, up to offset {one.reached}; the group's offset follows with the next commit"
    blocked = one.blocked
    if blocked is not None:
        name = lane_name(blocked.key, f"{blocked.partition}/{blocked.offset}")
        yield f"{name} blocked at offset {blocked.offset} since {age(view.at - blocked.since)}"
    if one.retried is not None:
        offset, kept = one.retried
        yield (
            f"offset {offset} failed in stage {printable(kept.stage)}, is retried since {age(view.at - kept.since)}, "
            f"attempt {kept.attempt} is next"
        )
    for task in view.tasks:
        if one.partition not in task.partitions:
            continue
        for stage, state in task.breakers.items():
            if state in ("open", "half_open"):
                yield f"the breaker of stage {printable(stage)} is {state.replace('_', ' ')}"
        for hot in task.hot:
            if hot.partition == one.partition and hot.waiting >= 100 and hot.share >= 0.05:
                yield (
                    f"key {printable(hot.key)} is hot: {hot.share:.0%} of what its task reads, "
                    f"{hot.waiting:,} wait in its lane"
                )
        if task.partitions[one.partition].paused:
            yield "paused: the task has no room for more of it"
    if one.pace is Pace.STUCK and view.silent is None and blocked is None and one.retried is None:
        going = " while others go on" if any(task.lanes.running for task in view.tasks) else ""
        key = "" if one.oldest is None or one.oldest.key is None else f" (key {_key(one.oldest.key)})"
        at = one.reached if one.oldest is None else one.oldest.offset
        yield f"nothing moved past offset {at}{key} in {one.movement.seconds:.0f} s{going}"


def shown(group: str, topic: str, view: LagView) -> RenderableType:
    """For a terminal."""
    made = table(
        "PARTITION", "END", "COMMITTED", "LAG", "IN/S", "OUT/S", "CAUGHT UP IN", "OLDEST NOT DONE", "STATE"
    )
    for column in made.columns[:7]:
        column.justify = "right"
    for one in view.partitions:
        made.add_row(
            str(one.partition),
            f"{one.offsets.end:,}",
            "-" if one.offsets.committed is None else f"{one.offsets.committed:,}",
            f"{one.offsets.lag:,}",
            f"{one.movement.rate_in:,.0f}",
            f"{one.movement.rate_out:,.0f}",
            _time(one.movement.catch_up),
            cell(_oldest(view, one)),
            Text(one.pace.value, style=_COLOURS.get(one.pace, "")),
        )
    movement = view.movement
    head = Text(f"{printable(group)} on {printable(topic)}: ")
    head.append(view.pace.value, style=_COLOURS.get(view.pace, "green"))
    head.append(
        f", lag {view.lag:,}, in {movement.rate_in:,.0f}/s, out {movement.rate_out:,.0f}/s over "
        f"{movement.seconds:.0f} s"
    )
    if view.lag and movement.catch_up is not None:
        head.append(f", caught up in {_time(movement.catch_up)}")
    if view.tasks:
        head.append(f"; {counted(len(view.tasks), 'task')}, epoch {view.tasks[0].epoch}")
    lines: list[RenderableType] = [head, made]
    if view.skewed is not None:
        lines.append(Text(f"skew: partition {view.skewed[0]} has {view.skewed[1]:.0%} of the lag"))
    for one in view.partitions:
        lines += [Text(f"partition {one.partition}: {why}") for why in reasons(view, one)[:_SHOWN]]
    return Group(*lines)


def _oldest(view: LagView, one: PartitionView) -> str | None:
    oldest = one.oldest
    if oldest is None:
        return None
    old = "" if oldest.at is None else f", {age(view.at - oldest.at)} old"
    return f"offset {oldest.offset}, key {_key(oldest.key)}{old}"


def _key(key: bytes | None) -> str:
    text = printable(show_key(key))
    return text if len(text) <= 40 else f"{text[:39]}…"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return "-" if not seconds else "over a year" if seconds > _LONG else age(max(1.0, seconds))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
