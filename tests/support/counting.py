"""An app that counts the messages of each key in its lane state, and a process of its own that dies while it runs.

``python counting.py BOOTSTRAP NAME FOLDER DELIVERY NUMBER`` dies, as by ``kill -9``, in the stage's NUMBER-th call.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane import App, Message, Poison, Retry, State, Transient
from keylane.state.lane_values import decode_value, parse_key
from keylane.testing import HistoryWriter
from support.tasks import Runner
from support.topics import Log

if TYPE_CHECKING:
    from support.topics import Row


@dataclass(frozen=True)
class Count:
    """How many messages a key has had, and the newest of them."""

    count: int = 0
    last: tuple[int, ...] = ()

    def add(self, number: int) -> Count:
        return Count(self.count + 1, (*self.last[-4:], number))


def counting(name: str, folder: Path, *, dies_at: int = 0, sleep: float = 0.0, **settings: Any) -> App:
    """Its results are the counts. One message in ten fails at first, after it has changed the state."""
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        retry=Retry(wait_initial=0.01, wait_max=0.05),
        observer=HistoryWriter(folder / "history", owner=settings.pop("owner", None)),
        **settings,
    )
    calls = itertools.count(1)

    @app.stage
    async def count(msg: Message, seen: State[Count]) -> dict[str, Any]:
        if sleep:
            await asyncio.sleep(sleep)
        number = int(msg.value)
        seen.value = seen.value.add(number)
        if next(calls) == dies_at:
            os._exit(9)
        if number % 10 == 7 and msg.attempt == 1:
            raise Transient("not yet")
        if number % 100 == 42:
            raise Poison("never")
        return {"n": seen.value.count, "last": seen.value.last}

    return app


def folded(rows: list[Row]) -> dict[bytes, Count]:
    """The state of each key after these messages, in the order of the log."""
    found: defaultdict[bytes, Count] = defaultdict(Count)
    for row in sorted(rows, key=lambda row: (row.partition, row.offset)):
        number = int(row.value or b"")
        if number % 100 != 42:
            found[row.key or b""] = found[row.key or b""].add(number)
    return dict(found)


def stored(log: Log, name: str) -> dict[bytes, Count]:
    """The states in their topic. Only what was committed is read."""
    found: dict[bytes, Count] = {}
    for row in log.read(f"{name}.lane-state"):
        tag, lane = parse_key(row.key or b"")
        assert tag == "s/seen"
        if row.value is None:
            found.pop(lane, None)
        else:
            content = json.loads(decode_value(row.value).content or b"")
            found[lane] = Count(content["count"], tuple(content["last"]))
    return found


def counts_in_sink(rows: list[Row]) -> dict[bytes, list[int]]:
    """The counts of each key, in the order of the sink."""
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for row in rows:
        found[row.key or b""].append(json.loads(row.value or b"")["n"])
    return found


if __name__ == "__main__":
    bootstrap, name, folder, delivery, number = sys.argv[1:]
    dying = counting(name, Path(folder), dies_at=int(number), delivery=delivery, commit_interval=0.02)
    Runner(Log(bootstrap), name, Path(folder), dying).run()
