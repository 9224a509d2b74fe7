"""Run by a test, as a process of its own: an app over messages that are small in the topic and large in memory."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

from keylane import App, Message
from keylane.kafka import fetcher
from keylane.kafka.cluster import Cluster
from keylane.kafka.settings import KafkaSettings
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(bootstrap: str, name: str, most: str) -> None:
    """Print how many messages ran, and how many bytes the process grew by."""
    app = App(name, source=f"{name}.in")
    ran = []

    @app.stage
    async def work(msg: Message) -> None:
        ran.append(len(msg.value))
        await asyncio.sleep(0.05)

    limits = (("max.partition.fetch.bytes", "15000"), ("queued.max.messages.kbytes", "8192"))
    settings = KafkaSettings(bootstrap, limits)
    fetcher.BUFFERED_BYTES_MAX = int(most)
    cluster = Cluster(settings)
    cluster.prepare(app.spec)
    plan = TaskPlan(
        run="r1",
        epoch=1,
        task=0,
        settings=settings,
        identity=cluster.identity(app.source, app.dlq),
        starts={0: 0},
        until=cluster.ends(app.source, [0]),
        seconds=100,
        sink_limit=0,
        partitions=1,
        outcomes="none",  # a sink that keeps the messages would be measured, too
    )
    before, peak = resident(), [0]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], resident())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    list(Task(app.spec, plan).outcomes())
    os.write(1, b"%d %d" % (len(ran), peak[0] - before))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
