"""Records of telemetry, made up."""

from __future__ import annotations

from collections import Counter
from typing import Any

from keylane.histogram import Histogram
from keylane.outcome import Outcome
from keylane.telemetry.snapshot import LaneFigures, PartitionFigures, Snapshot


def snapshot(**given: Any) -> Snapshot:
    """``done`` messages; ``dead=…`` and the like are how many ended so, the rest is ok."""
    known: dict[str, Any] = {
        "app": "chat", "source": "chat.in", "run": "r1", "shard": "1/1", "epoch": 3, "task": 0, "plan": 0,
        "owner": "host:1/0",
        "life": "a", "began": 100.0, "at": 101.0, "interval": 1.0, "final": False, "progressed": 101.0, "done": 10,
        "order": "key", "retries": 4, "dropped": 0,
        "lanes": LaneFigures(all=5, running=2, blocked=1), "held": 7, "early": 0, "capacity": 100,
        "partitions": {
            0: PartitionFigures(watermark=5, position=12, end=20, held=7, away=0, paused=False, moved=101.0)
        },
    }  # fmt: skip
    others = {Outcome.DEAD: 1, Outcome.DUPLICATE: 2}
    others |= {outcome: given.pop(outcome.value) for outcome in Outcome if outcome.value in given}
    done = given.get("done", known["done"])
    outcomes = Counter({Outcome.OK: done - sum(others.values()), **others})
    return Snapshot(**{**known, "outcomes": outcomes, **given})


def histogram(*seconds: float) -> Histogram:
    made = Histogram()
    for one in seconds:
        made.add(one)
    return made
