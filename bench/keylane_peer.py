"""Keylane as a peer: an app on given topics, told and read like the others.

``python -m bench.keylane_peer brokers=… topic=… out=… group=… [n=…] [stages=5,20,65,10] [fail=10] [stuck=1]
[delivery=exactly_once] [lanes=<folder>]`` and ``kafka.*`` options.

Prints "P <unix time> <done>" lines; done is the number of acknowledged results in the output topic. Ends after ``n``,
or on SIGTERM; both drain. Everything else is as a user gets it: options, retry, outcomes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from keylane import App, Message, Retry, Transient
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.spark import session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

REPORT_INTERVAL_SECONDS = 0.1
FAIL_UNTIL = "fail-until"
"""A header of the load generator's stuck key: unix time in microseconds until which its messages fail."""
STUCK_RETRY = Retry(attempts=1000, wait_initial=0.1, wait_max=2.0)
"""For the stuck key, which is to come through in the end."""


def fnv32a(data: bytes) -> int:
    """The hash by which all peers choose what fails."""
    found = 0x811C9DC5
    for byte in data:
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return found


def make_app(opt: dict[str, str]) -> App:
    """A stage for every sleep, or one that returns its message.

    The longest stage is the one that fails, after its sleep, as a model call would.
    """
    app = App(
        opt["group"],
        source=opt["topic"],
        sink=opt["out"],
        delivery="exactly_once" if opt.get("delivery") == "exactly_once" else "at_least_once",
        retry=STUCK_RETRY if opt.get("stuck") else None,
    )
    sleeps = [float(ms) / 1000 for ms in opt.get("stages", "").split(",") if ms]
    fail = int(opt.get("fail", "0"))
    for number, seconds in enumerate(sleeps):
        failing = fail if seconds == max(sleeps) else 0
        app.stage(_sleeper(f"stage{number + 1}", seconds, failing, stuck=bool(opt.get("stuck"))))
    if not sleeps:
        app.stage(hand_on)
    if "lanes" in opt:
        app.resource(_census(opt["lanes"]))
    return app


def _census(folder: str) -> Callable[[], AsyncIterator[None]]:
    """A resource that writes the number of the task's lanes to a file of its process, again and again."""

    async def census() -> AsyncIterator[None]:
        own = Path(folder) / f"lanes-{os.getpid()}"
        counting = asyncio.get_running_loop().create_task(_count(own))
        yield
        counting.cancel()
        own.unlink(missing_ok=True)  # the next task may be another process

    return census


async def _count(to: Path) -> None:
    from keylane.lanes.lane_table import LaneTable  # noqa: PLC0415 - internal to the engine

    await asyncio.sleep(1)  # until the task is made
    tables = [found for found in gc.get_objects() if isinstance(found, LaneTable) and not found.closed]
    while True:
        await asyncio.to_thread(to.write_text, str(sum(len(found.lanes) for found in tables)))
        await asyncio.sleep(2)


async def hand_on(msg: Message) -> bytes:
    """The handler that does nothing."""
    return msg.value  # type: ignore[no-any-return]


def _sleeper(name: str, seconds: float, fail: int, *, stuck: bool) -> Callable[[Message], Awaitable[bytes]]:
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(seconds)
        if fail and msg.attempt == 1 and fnv32a(msg.event_id.encode()) % 100 < fail:
            raise Transient("failed")
        if stuck and (until := msg.header(FAIL_UNTIL)) and time.time() * 1e6 < int(until):
            raise Transient("stuck")
        return msg.value  # type: ignore[no-any-return]

    stage.__name__ = name
    return stage


def main() -> None:
    """Run it."""
    opt = dict(a.split("=", 1) for a in sys.argv[1:])
    n = int(opt.get("n", "0"))
    cluster = Cluster(KafkaSettings(opt["brokers"]))
    partitions = range(cluster.partitions(opt["out"]))

    def report() -> int:
        done = sum(cluster.ends(opt["out"], partitions).values())
        print(f"P {time.time():.3f} {done}", flush=True)
        return done

    asked: list[int] = []
    parent = os.getppid()
    report()
    with tempfile.TemporaryDirectory(prefix="keylane-bench-") as folder:
        spark = session(opt.get("master", "local[2]"), "keylane bench", lanes_only=True)
        try:
            for number in (signal.SIGTERM, signal.SIGINT):  # after Spark has put its own handlers in place
                signal.signal(number, lambda got, _frame: asked.append(got))
            client = {name[6:]: value for name, value in opt.items() if name.startswith("kafka.")}
            query = make_app(opt).start(
                spark, bootstrap=opt["brokers"], checkpoint_location=folder, kafka=client
            )
            while query.isActive and not asked and os.getppid() == parent:
                if report() >= n > 0:
                    break
                time.sleep(REPORT_INTERVAL_SECONDS)
            failure = query.exception()
            query.stop()
        finally:
            spark.stop()
    if failure is not None:
        raise SystemExit(str(failure))


if __name__ == "__main__":
    main()
