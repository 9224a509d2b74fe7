"""Which of an epoch's plans a task takes: the one that its worker had in the epoch before.

Spark gives a task whichever of its Python workers is idle, so every other epoch the two of ``local[2]`` would change
places. Each would then begin as if it were new: read the state of its partitions, and ten thousand messages of each for
their event ids. Instead they change plans. The tasks of a local master are on one machine and find out in a file, under
a lock, who has taken what; elsewhere a task has its own plan only.
"""

from __future__ import annotations

import fcntl
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def choose(folder: Path, run: str, planned: float, task: int, plans: int, wanted: Sequence[int]) -> int:
    """The number of the plan for this task: one that is ``wanted`` and free, else its own, else any that is free.

    ``planned`` is when they were made. A task that runs again gets what it had; no two have the same. Raises OSError.
    """
    with (folder / f"keylane-{run}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / f"keylane-{run}.json"
        known: dict[str, Any] = {"planned": 0.0, "taken": {}}
        if file.exists():
            known = json.loads(file.read_text())
        if known["planned"] > planned:  # Spark has given up on it
            return task
        taken = known["taken"] if known["planned"] == planned else {}
        if str(task) not in taken:
            free = [plan for plan in (*wanted, task, *range(plans)) if plan not in taken.values()]
            taken[str(task)] = free[0]
            new = file.with_suffix(".new")
            new.write_text(json.dumps({"planned": planned, "taken": taken}))
            new.replace(file)  # as a whole: a worker may be killed at any time
        return int(taken[str(task)])
