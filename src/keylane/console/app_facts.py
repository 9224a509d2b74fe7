"""An app's figures as JSON facts for the page."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from keylane.console.history import RECENT_SECONDS, quantile
from keylane.offsets.metadata import decode
from keylane.safe_text import cut
from keylane.state.topic import NOTHING
from keylane.telemetry.lag_words import facts as lag_facts
from keylane.telemetry.lag_words import health

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keylane.console.history import Step
    from keylane.state.stopped_lanes import StoppedLane
    from keylane.state.topic import Claim
    from keylane.telemetry.lag import PartitionLag
    from keylane.telemetry.lag_monitor import LagView

_SPARK_POINTS = 60
SENTENCE_CHARACTERS_MAX = 400
_REASONS_MAX = 5
_PICTURES_MAX = 64
"""Partitions whose single offsets are shown."""
_CELLS_MAX = 48
_STATES = ("running", "ready", "retrying", "waiting")


def app_facts(
    app: str,
    source: str,
    view: LagView,
    stopped: Sequence[StoppedLane],
    *,
    recent: Step,
    spark: Mapping[str, Any],
    dead_today: int | None,
) -> dict[str, Any]:
    """One line of the overview."""
    facts = lag_facts(app, source, view)
    tasks = view.tasks
    return {
        "app": app,
        "source": source,
        "at": round(view.at, 3),
        "state": view.pace.value,
        "sentence": cut(health(view), SENTENCE_CHARACTERS_MAX),
        "why": [cut(why, SENTENCE_CHARACTERS_MAX) for why in facts["why"][:_REASONS_MAX]],
        "lag": facts["lag"],
        "rate_in": facts["rate_in"],
        "rate_out": facts["rate_out"],
        "done_rate": round(recent.done / RECENT_SECONDS, 1) if tasks else None,
        "retry_rate": round(recent.retries / RECENT_SECONDS, 2) if tasks else None,
        "catch_up": facts["catch_up_seconds"],
        "p50": quantile(recent, 0.5),
        "p99": quantile(recent, 0.99),
        "lanes": {
            **{state: sum(getattr(task.lanes, state) for task in tasks) for state in _STATES},
            "blocked": view.blocked,
            "parked": view.parked,
            "all": sum(task.lanes.all for task in tasks),
        },
        "stopped": len(stopped),
        "dead_today": dead_today,
        "tasks": len(tasks),
        "epoch": tasks[0].epoch if tasks else None,
        "last_seen": facts["last_seen_seconds"],
        "spark": {
            "in": spark["in"][-_SPARK_POINTS:],
            "out": spark["out"][-_SPARK_POINTS:],
            "p99": spark["latency"]["p99"][-_SPARK_POINTS:],
            "lag": _sums(list(spark["lag"].values()))[-_SPARK_POINTS:],
        },
    }


def detail_facts(
    view: LagView, plan: dict[str, Any] | None, claims: Mapping[int, Sequence[Claim]]
) -> dict[str, Any]:
    """The rest of an app's page."""
    breakers: dict[str, Counter[str]] = {}
    for task in view.tasks:
        for stage, state in task.breakers.items():
            breakers.setdefault(stage, Counter())[state] += 1
    facts = lag_facts("", "", view)["partitions"]
    owners: dict[int, list[int]] = {}
    for task in view.tasks:
        for partition in task.partitions:
            owners.setdefault(partition, []).append(task.task)
    return {
        "partitions": [
            {
                **one,
                "why": [cut(why, SENTENCE_CHARACTERS_MAX) for why in one["why"][:_REASONS_MAX]],
                "reached": seen.reached,
                "begin": seen.offsets.begin,
                "cells": _cells(seen.offsets) if number < _PICTURES_MAX else None,
                "tasks": owners.get(seen.partition, []),
                "held": sum(
                    t.partitions[seen.partition].held for t in view.tasks if seen.partition in t.partitions
                ),
                "position": max(
                    (
                        t.partitions[seen.partition].position
                        for t in view.tasks
                        if seen.partition in t.partitions
                    ),
                    default=None,
                ),
            }
            for number, (one, seen) in enumerate(zip(facts, view.partitions, strict=True))
        ],
        "tasks": [
            {
                "task": task.task,
                "owner": task.owner,
                "epoch": task.epoch,
                "began": task.began,
                "done": task.done,
                "held": task.held,
                "capacity": task.capacity,
                "lanes": asdict(task.lanes),
                "partitions": sorted(task.partitions),
            }
            for task in view.tasks
        ],
        "plan": None
        if plan is None
        else {"run": plan["run"], "epoch": plan["epoch"], "at": plan["at"], "tasks": plan["tasks"]},
        "run": view.tasks[0].run if view.tasks else None,
        "order": view.tasks[0].order if view.tasks else None,
        "breakers": {stage: dict(states) for stage, states in breakers.items()},
        "hot": [
            {
                "key": hot.key,
                "partition": hot.partition,
                "share": hot.share,
                "waiting": hot.waiting,
                "task": task.task,
            }
            for task in view.tasks
            for hot in task.hot
        ],
        "skew": None if view.skewed is None else {"partition": view.skewed[0], "share": view.skewed[1]},
        "malformed": dict(view.malformed),
        "claims": [
            {
                "partition": partition,
                "first": claim.slots.first,
                "last": claim.slots.last,
                "who": cut(claim.who, 200),
                "leaving": claim.leaving,
            }
            for partition, found in claims.items()
            for claim in found
            if claim.run == (plan or {}).get("run")
        ],
    }


def _cells(offsets: PartitionLag) -> str | None:
    """The first offsets from the committed one on, as the app wrote them beside it: ``d`` is done, ``p`` is not.

    None if that is not in the offset's metadata: for ranges of a partition, and when there is too much of it.
    """
    if offsets.committed is None or not offsets.text:
        return None
    if offsets.text == NOTHING:
        return ""
    restored = decode(offsets.committed, offsets.text)
    if restored.problem is not None:
        return None
    progress = restored.progress
    last = min(progress.position, progress.watermark + _CELLS_MAX)
    return "".join("d" if progress.is_done(offset) else "p" for offset in range(progress.watermark, last))


def _sums(columns: list[list[int | None]]) -> list[int | None]:
    return [
        sum(known) if (known := [value for value in row if value is not None]) else None
        for row in zip(*columns, strict=True)
    ]
