"""Records of telemetry, made up."""

from __future__ import annotations

from typing import Any

from keylane.core.telemetry import Histogram, LaneFigures, PartitionFigures, Snapshot


def snapshot(**given: Any) -> Snapshot:
    known: dict[str, Any] = {
        "app": "chat", "source": "chat.in", "run": "r1", "epoch": 3, "task": 0, "plan": 0, "owner": "host:1/0",
        "life": "a", "began": 100.0, "at": 101.0, "interval": 1.0, "final": False, "done": 10, "dead": 1,
        "parked": 0, "duplicates": 2, "stale": 0, "ignored": 0, "retries": 4, "dropped": 0,
        "lanes": LaneFigures(all=5, running=2, blocked=1), "held": 7, "early": 0, "capacity": 100,
        "partitions": {0: PartitionFigures(watermark=5, position=12, end=20, held=7, away=0, paused=False)},
    }  # fmt: skip
    return Snapshot(**known | given)


def histogram(*seconds: float) -> Histogram:
    made = Histogram()
    for one in seconds:
        made.add(one)
    return made
