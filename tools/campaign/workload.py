"""The workload of a campaign: the messages, the app, and the observer that records what its tasks do.

Everything is a function of the seed and the message's number, so that a replay does the same work, and the judge knows
without asking which messages must become dead letters.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import random
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane import App, Message, Poison, Retry, Transient
from keylane.testing import HistoryWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.testing.history import ObservedDelivery

COMMIT_INTERVAL_SECONDS = 1.0
_COMMIT_INTERVAL_EXACTLY_ONCE_SECONDS = (
    0.2  # results become visible with their commit, so it must not take a second
)
PARTITIONS = int(os.environ.get("KEYLANE_CAMPAIGN_PARTITIONS", "4"))
_SLOWEST_SECONDS = 0.03
_FLAKY_SHARE = 0.03
_POISON_SHARE = 0.005
_SLOW_CALL_SECONDS, _SLOW_CALL_SHARE = 2.0, 0.004
_SHADES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """A task that began: which process, which epoch, which try."""

    at: int
    pid: int
    owner: str
    epoch: int
    task: int
    attempt: int
    number: int
    """Spark's own number for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the driver has to know to start the app; travels as JSON."""

    name: str
    seed: int
    folder: str
    bootstrap: str
    epoch: float
    delivery: str
    slow: bool = False
    """Whether a few calls take seconds."""
    breaks: str = ""
    """A fault of Keylane's own, put in to try the judge: see :mod:`campaign.controls`."""

    @property
    def source(self) -> str:
        return f"{self.name}.in"

    @property
    def sink(self) -> str:
        return f"{self.name}.out"

    @property
    def history(self) -> Path:
        return Path(self.folder) / "history"

    def tasks(self) -> list[TaskLine]:
        """Tasks that began so far, in that order."""
        try:
            lines = (Path(self.folder) / "tasks.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [TaskLine(**json.loads(line)) for line in lines if line.endswith("}")]

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoint"


def chance(seed: int, number: int, what: str) -> float:
    """Between 0 and 1, the same every time: of this message, for this question."""
    return zlib.crc32(f"{seed} {what} {number}".encode()) % _SHADES / _SHADES


def is_poison(seed: int, number: int) -> bool:
    """Whether this message must become a dead letter."""
    return chance(seed, number, "poison") < _POISON_SHARE


def messages(seed: int, count: int, keys: int) -> Iterator[tuple[bytes, int]]:
    """Keys, some busier than others, and numbers."""
    rng = random.Random(f"load {seed}")
    weights = [1 / (place + 8) for place in range(keys)]
    for number, place in enumerate(rng.choices(range(keys), weights, k=count)):
        yield b"k%d" % place, number


class Recorder:
    """The app's observer: a history whose owners are tasks, not processes, and a line for every task that begins.

    Spark uses a worker process again; a task that is tried again in the same process is another owner and may go
    back to the last commit. Each task unpickles the app, so each has a recorder of its own.
    """

    def __init__(self, folder: str, breaks: str = "", owner: str | None = None) -> None:
        self._folder = folder
        self._breaks = breaks
        self._writer = HistoryWriter(Path(folder) / "history", owner)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return _in_task, (self._folder, self._breaks)

    def started(self, message: ObservedDelivery, attempt: int) -> None:
        self._writer.started(message, attempt)

    def ended(self, message: ObservedDelivery, attempt: int, outcome: str) -> None:
        self._writer.ended(message, attempt, outcome)

    def began_again(self) -> None:
        """After a transaction that was not taken: from the last commit, as another owner."""
        self._writer.began_again()


def _in_task(folder: str, breaks: str) -> Recorder:
    """Where the app is unpickled: in a task, before it begins."""
    from pyspark import TaskContext  # noqa: PLC0415 - not needed by those who only send messages

    from campaign.controls import apply  # noqa: PLC0415 - by name, so that the process knows one of it

    context = TaskContext.get()
    if context is None:
        return Recorder(folder, breaks)
    apply(breaks)
    batch = context.getLocalProperty("streaming.sql.batchId")
    task, again, number = context.partitionId(), context.attemptNumber(), context.taskAttemptId()
    owner = f"epoch{batch}.task{task}" + (f".again{again}" if again else "") + f".{os.urandom(2).hex()}"
    line = {
        "at": time.monotonic_ns(),
        "pid": os.getpid(),
        "owner": f"{owner}@{os.getpid()}",
        "epoch": int(batch or 0),
        "task": task,
        "attempt": again,
        "number": number,
    }
    with (Path(folder) / "tasks.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    stacks = (Path(folder) / f"stacks-{os.getpid()}").open("a")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    return Recorder(folder, breaks, owner)


def make_app(spec: Spec) -> App:
    """Two stages that take their time, fail now and then, and refuse a few messages for good."""
    seed = spec.seed
    more: dict[str, Any] = {}
    if "delivery" in inspect.signature(App).parameters:
        more["delivery"] = spec.delivery
    once = spec.delivery == "exactly_once"
    app = App(
        spec.name,
        source=spec.source,
        sink=spec.sink,
        retry=Retry(attempts=5, wait_initial=0.05, wait_max=0.4),
        commit_interval=_COMMIT_INTERVAL_EXACTLY_ONCE_SECONDS if once else COMMIT_INTERVAL_SECONDS,
        drain_timeout=10.0,
        observer=Recorder(spec.folder, spec.breaks),
        spool=Path(spec.folder) / "spool",
        **more,
    )

    @app.stage
    async def look(msg: Message) -> bytes:
        number = int(msg.value)
        await asyncio.sleep(chance(seed, number, "look") * _SLOWEST_SECONDS)
        if is_poison(seed, number):
            raise Poison("nobody can answer this")
        if msg.attempt == 1 and chance(seed, number, "look fails") < _FLAKY_SHARE / 2:
            raise Transient("not now")
        return bytes(msg.value)

    @app.stage
    async def answer(msg: Message) -> bytes:
        number = int(msg.value)
        await asyncio.sleep(chance(seed, number, "answer") * _SLOWEST_SECONDS)
        if spec.slow and chance(seed, number, "slow") < _SLOW_CALL_SHARE:
            await asyncio.sleep(_SLOW_CALL_SECONDS)
        # Now and then twice: the second backoff is a longer one.
        if msg.attempt < 3 and chance(seed, number, f"answer fails {msg.attempt}") < _FLAKY_SHARE / 2:
            raise Transient("still not")
        return bytes(msg.value)

    return app
