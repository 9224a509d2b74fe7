"""Views of an app's lag: facts for JSON, and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from keylane.cli.keys import printable, show_key
from keylane.cli.layout import age, cell, counted, table
from keylane.cli.stopped_lanes import lane_name
from keylane.telemetry.lag_trend import LagTrend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from keylane.telemetry.lag_monitor import LagView, PartitionView
    from keylane.telemetry.snapshot import Snapshot

_COLOURS = {LagTrend.STUCK: "bold red", LagTrend.NOT_RUNNING: "bold red", LagTrend.FALLING_BEHIND: "yellow"}
_AGE_SECONDS_MAX = 366 * 86_400.0
_REASONS_SHOWN = 3
_FULL_TABLE_COLUMNS = 100
"""Columns that the full table needs."""


def facts(group: str, topic: str, view: LagView) -> dict[str, Any]:
    """Return the lag as JSON facts."""
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
        "last_seen_seconds": _rounded(view.silent),
        "lanes": {"blocked": view.blocked, "parked": view.parked},
        "dead_letters": view.dead,
        "open_transactions": view.hidden,
        "malformed_records": dict(view.malformed),
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
    """Return the reasons for the partition's state, the most likely first."""
    return list(_reasons(view, one)) if one.offsets.lag else []


def _reasons(view: LagView, one: PartitionView) -> Iterator[str]:
    if view.silent is not None:
        yield f"no task of the app is running; the last one was seen {age(view.silent)} ago"
    if view.starting is not None:
        yield f"the app was started {age(view.starting)} ago; its tasks have not reported yet"
    if view.members == 0:
        yield "the group has no consumer"
    if one.offsets.committed is None:
        yield "the group has no committed offset here: it has finished nothing yet, or the name is wrong"
    elif one.reached > one.offsets.at and one.movement.lag == 0:
        yield f"everything up to offset {one.reached} is done; the next commit moves the group's offset"
    yield from _lane_reasons(view, one)
    for task in view.tasks:
        if one.partition in task.partitions:
            yield from _task_reasons(task, one.partition)
    if one.movement.lag and one.movement.done <= 0 and one.pace is not LagTrend.NOT_RUNNING:
        known = one.blocked is not None or one.retried is not None or view.starting is not None
        yield from _stalled(one, known=known)


def _lane_reasons(view: LagView, one: PartitionView) -> Iterator[str]:
    """Yield the lanes that hold the partition's offset back."""
    if one.blocked is not None:
        name = lane_name(one.blocked.key, f"{one.blocked.partition}@{one.blocked.offset}")
        yield f"{name} blocked at offset {one.blocked.offset} since {age(view.at - one.blocked.since)}"
    if one.retried is not None:
        offset, kept = one.retried
        yield (
            f"offset {offset} failed in stage {printable(kept.stage)}, retrying for {age(view.at - kept.since)}, "
            f"next is attempt {kept.attempt}"
        )


def _task_reasons(task: Snapshot, partition: int) -> Iterator[str]:
    """Yield what slows down the partition's task: open breakers, rates, pauses, hot keys, a full buffer."""
    for stage, state in task.breakers.items():
        if state in ("open", "half_open"):
            yield f"the breaker of stage {printable(stage)} is {state.replace('_', ' ')}"
    for what, waiting in task.holds.items():
        if what.startswith("partition ") and what != f"partition {partition} paused":
            continue
        yield f"{printable(what)}: {counted(waiting, 'lane')} of its task {'waits' if waiting == 1 else 'wait'}"
    for hot in task.hot:
        if hot.partition == partition and hot.waiting >= 100 and hot.share >= 0.05:
            yield (
                f"key {printable(hot.key)} is hot: {hot.share:.0%} of its task's messages, "
                f"{hot.waiting:,} waiting in its lane"
            )
    if task.partitions[partition].paused:
        yield "paused: the task's buffer is full"


def _stalled(one: PartitionView, *, known: bool) -> Iterator[str]:
    """Yield why nothing moves: a hanging message, slow work, or too short a measurement to tell."""
    key = "" if one.oldest is None or one.oldest.key is None else f" (key {_key(one.oldest.key)})"
    at = one.reached if one.oldest is None else one.oldest.offset
    work = one.work
    if work is not None and not work.hangs:
        if work.in_flight and work.idle >= 1:
            took = "" if work.slowest is None else f"; the slowest message took {_brief(work.slowest)}"
            yield f"{counted(work.in_flight, 'message')} in flight, none finished in {age(work.idle)}{took}"
    elif one.pace is LagTrend.STUCK and not known:
        seconds = one.stalled if work is None else work.stalled
        others = " while other messages finish" if work is not None and work.idle < work.patience else ""
        yield f"nothing moved past offset {at}{key} for {age(seconds)}{others}"
    elif work is None and not known:
        yield (
            f"nothing moved past offset {at}{key} in {one.movement.seconds:.0f} s: too short to tell slow from stuck; "
            "measure longer with --over 60"
        )


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


def stopped_lanes(view: LagView) -> str:
    """``1 lane blocked, 2 lanes parked``; empty when there are none."""
    found = {"blocked": view.blocked, "parked": view.parked}
    return ", ".join(f"{counted(number, 'lane')} {name}" for name, number in found.items() if number)


def _cut(text: str | None) -> Text:
    made = cell(text)
    made.no_wrap, made.overflow = True, "ellipsis"
    return made


def _brief(seconds: float) -> str:
    return age(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def _oldest(view: LagView, one: PartitionView) -> str | None:
    oldest = one.oldest
    if oldest is None:
        return None
    old = "" if oldest.at is None else f", {age(view.at - oldest.at)} old"
    return f"offset {oldest.offset}, key {_key(oldest.key)}{old}"


def _key(key: bytes | None) -> str:
    text = printable(show_key(key))
    return text if len(text) <= 40 else f"{text[:39]}…"


def _until(one: PartitionView) -> str:
    """Return the time to catch up; unknown when nothing finished in this measurement."""
    slow = one.movement.done <= 0 and one.pace in (LagTrend.CATCHING_UP, LagTrend.KEEPING_UP)
    return "-" if slow else _time(one.movement.catch_up)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return "-" if not seconds else "over a year" if seconds > _AGE_SECONDS_MAX else age(max(1.0, seconds))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
