"""Pauses at the end of epochs, beside a key that is slow: ``python -m bench.pauses [--epoch 15] [--seconds 60]``.

A steady load of 500 messages per second over 100 keys with a handler of 10 ms, and one more key whose handler takes
12 s and is always busy. Two runs of the same load: with an epoch every few seconds, and with a single one. Reported for
the other keys: the longest time in which no message of a partition began, and the latency from when a message was due
to when its handler began. The history is judged: order, no overlap, nothing lost, nothing twice.

``--master`` names another Spark than ``local[2,4]``, ``--executors 2`` starts a standalone cluster of two for the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bench.delivery import Ground
from bench.errors import BenchError
from bench.process import Process
from bench.standalone import Standalone
from keylane import Publisher
from keylane.broker import Broker
from keylane.kafka.settings import KafkaSettings
from keylane.state.admin import AdminClient
from keylane.testing import EventKind, Sent, check, read_history

if TYPE_CHECKING:
    from collections.abc import Callable

PARTITIONS = 8
KEYS = 100
SLOW_KEY = b"slow"
SLOW_SECONDS, QUICK_SECONDS = 12.0, 0.01
_START_SECONDS_MAX = 120.0
_WARM_SECONDS = 12.0
_BEHIND_SECONDS = 2.5
"""How far the group's offsets are behind at the most when lanes keep up: tasks commit once a second."""
_STEP_SECONDS = 0.02

_APP = """
import asyncio
from keylane import App, Message
from keylane.testing import HistoryWriter

app = App(
    {name!r},
    source={name!r} + ".in",
    sink={name!r} + ".out",
    delivery={delivery!r},
    observer=HistoryWriter({history!r}),
)

@app.stage
async def call(msg: Message) -> bytes:
    await asyncio.sleep({slow_seconds} if msg.key == {slow_key!r} else {quick_seconds})
    return bytes(msg.value)
"""
"""The app, as long calls to another system as constants say. A file of its own: a cluster's executors have neither this
process's environment nor the checkout on their path, so it is shipped to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run, in milliseconds."""

    epochs: int
    gap: float
    p50: float
    p99: float
    worst: float


class Load:
    """Sends evenly, in the background. A message's value is when it was due.

    Before that ``slow`` messages of the slow key.
    """

    def __init__(
        self, bootstrap: str, topic: str, rate: float, *, slow: int = int(4 * _WARM_SECONDS)
    ) -> None:
        self.sent = 0
        self.ready = threading.Event()
        """Set by the caller: from then on it sends evenly."""
        self._slow = slow
        self._bootstrap, self._topic, self._rate = bootstrap, topic, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        with Publisher(self._topic, bootstrap=self._bootstrap) as publisher:
            for n in range(self._slow):
                publisher.send(b"0", key=SLOW_KEY, event_id=f"slow-{n}")
                self.sent += 1
            while not (self.ready.is_set() or self._over.wait(_STEP_SECONDS)):
                pass
            began, number = time.time(), 0
            while not self._over.wait(_STEP_SECONDS):
                while (due := began + number / self._rate) <= time.time():
                    publisher.send(b"%.6f" % due, key=b"key-%d" % (number % KEYS), event_id=f"e{number}")
                    number += 1
                    self.sent += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measure(ground: Ground, name: str, given: argparse.Namespace, epoch: float, master: str) -> Found:
    """One run."""
    ground.topics(name, PARTITIONS)
    history = ground.folder / f"{name}.history"
    module = f"paused_{re.sub('[^a-z0-9]', '_', name)}"
    (ground.folder / f"{module}.py").write_text(
        _APP.format(
            name=name,
            delivery=given.delivery,
            history=str(history),
            slow_key=SLOW_KEY,
            slow_seconds=SLOW_SECONDS,
            quick_seconds=QUICK_SECONDS,
        )
    )
    command = [
        *(sys.executable, "-m", "keylane", "run", f"{module}:app", "--bootstrap", ground.bootstrap),
        *("--master", master, "--py-files", f"{module}.py"),
        *("--epoch", str(epoch), "-o", f"keepAlive={given.keep_alive:g}"),
    ]
    with Process(command, ground.folder / f"{name}.log") as process:
        with Load(ground.bootstrap, f"{name}.in", given.rate) as load:
            _await_app(ground, name, process, history, given.executors)
            load.ready.set()
            _await_even(ground, name, process, given.rate)
            time.sleep(_WARM_SECONDS)
            began = time.time()
            time.sleep(given.seconds)
            ended = time.time()
        process.must_run()
        time.sleep(1.0)
        text = process.log.read_text() + _executors_said(ground.folder, process.started)
    if given.verbose:
        print(text)
    reader = ground.reader(name, PARTITIONS, f"{name}.in")
    messages: list[Any] = []
    while len(messages) < load.sent:
        came = reader.consume(1000, 10.0)
        if not came:
            raise BenchError(f"{name}.in has {len(messages)} messages of {load.sent}")
        messages += [m for m in came if m.key() != SLOW_KEY]
        load.sent -= sum(m.key() == SLOW_KEY for m in came)
    found = read_history(history)
    # Those of the slow key that have not run are not lost.
    sent = [Sent(key=m.key(), partition=m.partition(), offset=m.offset()) for m in messages]
    quick = replace(found, events=tuple(e for e in found.events if e.key != SLOW_KEY))
    check(quick, sent=sent).raise_if_bad()
    due = {(m.partition(), m.offset()): float(m.value()) for m in messages}
    starts = [e for e in found.events if e.kind is EventKind.START and (e.partition, e.offset) in due]
    starts = [e for e in starts if began < e.at < ended]
    gap = 0.0
    for partition in range(PARTITIONS):
        gap = max(gap, *(b.at - a.at for a, b in pairwise(e for e in starts if e.partition == partition)))
    late = sorted(e.at - due[e.partition, e.offset] for e in starts)
    return Found(
        epochs=len(set(re.findall(r"epoch (\d+) began", text))),
        gap=1e3 * gap,
        p50=1e3 * late[len(late) // 2],
        p99=1e3 * late[int(len(late) * 0.99)],
        worst=1e3 * late[-1],
    )


def _await_app(ground: Ground, name: str, process: Process, history: Path, executors: int | None) -> None:
    """Wait until the app runs a message, and its plan is for all executors.

    A cluster needs half a minute for its executors and their Python workers, and they do not come at the same time: the
    first epoch may be for one of them, and the plan changes when the other is there.
    """
    deadline = time.monotonic() + _START_SECONDS_MAX

    def await_(ready: Callable[[], bool], what: str) -> None:
        while not ready():
            process.must_run()
            if time.monotonic() > deadline:
                raise BenchError(f"{what} within {_START_SECONDS_MAX:g} s; {process.last_words()}")
            time.sleep(0.2)

    await_(lambda: any(history.glob("*.history")), "no message ran")
    if executors is not None:
        with AdminClient(KafkaSettings(ground.bootstrap), name) as admin:
            await_(
                lambda: len((admin.plan() or {"tasks": []})["tasks"]) == executors,
                "no plan for all executors",
            )


def _await_even(ground: Ground, name: str, process: Process, rate: float) -> None:
    """Wait until every partition keeps up, but that of the slow key: lanes may still move to another executor."""
    deadline, partitions = time.monotonic() + _START_SECONDS_MAX, range(PARTITIONS)
    while True:
        at = ground.cluster.committed(name, f"{name}.in", partitions)
        ends = ground.cluster.ends(f"{name}.in", partitions)
        behind = [
            p
            for p, end in ends.items()
            if end - at.get(p, (0, None))[0] > _BEHIND_SECONDS * rate / PARTITIONS * 2
        ]
        if len(behind) <= 1:
            return
        process.must_run()
        if time.monotonic() > deadline:
            raise BenchError(f"partitions {behind} did not keep up; {process.last_words()}")
        time.sleep(0.5)


def _executors_said(folder: Path, since: float) -> str:
    """What tasks logged on a cluster since then: not in the driver's output, but in their executors'."""
    logs = folder.glob("cluster/work-*/app-*/*/stderr")
    return "".join(log.read_text(errors="replace") for log in logs if log.stat().st_mtime > since)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epoch", type=float, default=15.0, help="seconds of an epoch (15)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run (60)")
    parser.add_argument("--rate", type=float, default=500.0, help="messages per second (500)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--master", default="local[2,4]", help="Spark's master (local[2,4])")
    parser.add_argument(
        "--executors",
        type=int,
        help="instead: a standalone cluster on this machine with so many executors of one core",
    )
    parser.add_argument("--only", choices=["one", "many"], help="only the run with one epoch, or with many")
    parser.add_argument("--keep-alive", type=float, default=10.0, help="0: every epoch ends with a drain")
    parser.add_argument("--delivery", choices=["at_least_once", "exactly_once"], default="at_least_once")
    parser.add_argument("--verbose", action="store_true", help="print the app's log")
    given = parser.parse_args()
    print("| | epochs | gap ms | p50 ms | p99 ms | worst ms |\n|---|---|---|---|---|---|")
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder,
        Broker() as broker,
        contextlib.ExitStack() as stack,
    ):
        ground = Ground(broker.bootstrap, Path(folder))
        master = given.master
        if given.executors is not None:
            master = stack.enter_context(Standalone(Path(folder) / "cluster", given.executors)).url
        for number in range(given.rounds):
            kinds = {"one": ("one epoch", 3600.0), "many": (f"every {given.epoch:g} s", given.epoch)}
            for kind, epoch in [kinds[given.only]] if given.only else kinds.values():
                found = measure(ground, f"p{number}-{epoch:g}", given, epoch, master)
                rows.append({"kind": kind, **asdict(found)})
                print(
                    f"| {kind} | {found.epochs} | {found.gap:.0f} | {found.p50:.1f} | {found.p99:.1f} "
                    f"| {found.worst:.0f} |",
                    flush=True,
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
