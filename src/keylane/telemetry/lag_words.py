"""An app's lag in words and as JSON facts: its state, and the reasons for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.key_text import printable, show_key
from keylane.state.stopped_lanes import lane_name
from keylane.telemetry.lag_trend import LagTrend
from keylane.wording import age, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.telemetry.lag_monitor import LagView, PartitionView
    from keylane.telemetry.snapshot import Snapshot


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


def health(view: LagView) -> str:
    """The app's health in one sentence: its state, and the most likely reason for it."""
    pace = view.pace
    held_up = [one for one in view.partitions if one.pace is pace and one.blocked is not None]
    if pace is LagTrend.STUCK and held_up:
        record = min((one.blocked for one in held_up if one.blocked is not None), key=lambda one: one.since)
        name = lane_name(record.key, f"{record.partition}@{record.offset}")
        others = len(held_up) - 1
        more = f", and {counted(others, 'more partition')} held up" if others else ""
        return (
            f"stuck on {name}: blocked at offset {record.offset} of partition {record.partition} "
            f"for {age(view.at - record.since)}{more}"
        )
    why = [reason for one in view.partitions if one.pace is pace for reason in reasons(view, one)]
    if pace in (LagTrend.IDLE, LagTrend.KEEPING_UP):
        stopped = stopped_lanes(view)
        return f"{pace.value}; {stopped}" if stopped else pace.value
    if pace is LagTrend.CATCHING_UP and view.movement.catch_up:
        return f"{pace.value}: about {age(max(1.0, view.movement.catch_up))} left"
    return f"{pace.value}: {why[0]}" if why else pace.value


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
    key = "" if one.oldest is None or one.oldest.key is None else f" (key {key_words(one.oldest.key)})"
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


def stopped_lanes(view: LagView) -> str:
    """``1 lane blocked, 2 lanes parked``; empty when there are none."""
    found = {"blocked": view.blocked, "parked": view.parked}
    return ", ".join(f"{counted(number, 'lane')} {name}" for name, number in found.items() if number)


def _brief(seconds: float) -> str:
    return age(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def key_words(key: bytes | None) -> str:
    """The key on one line, cut to 40 characters."""
    text = printable(show_key(key))
    return text if len(text) <= 40 else f"{text[:39]}…"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
