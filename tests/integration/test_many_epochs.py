"""Many short epochs leave nothing behind in an app's processes. More of them: ``python -m bench.many_epochs``."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from keylane import App, Message
from keylane.testing import HistoryWriter, check_results, read_history
from support.topics import below, ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Verdict
    from support.topics import Log

_PLANNER = "python_streaming_source_runner"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What processes hold together."""

    memory: int
    threads: int
    files: int

    @classmethod
    def by(cls, pids: set[int]) -> Self:
        memory = threads = files = 0
        for pid in pids:
            proc = Path(f"/proc/{pid}")
            memory += int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            threads += len(list((proc / "task").iterdir()))
            files += len(list((proc / "fd").iterdir()))
        return cls(memory, threads, files)


_POOL_THREADS_MAX = 32
"""At least as many as asyncio's pool may have on any machine."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.timeout(120)
def test_thirty_epochs_leave_nothing_behind(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.offset < 3:  # the loop's pool of threads grows to its size with use: fill it now
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(_POOL_THREADS_MAX)))
        return bytes(msg.value)

    sent: list[Any] = []
    query = app.start(spark, bootstrap=broker.bootstrap, epoch=0.5)

    def epochs() -> int:
        return -1 if query.lastProgress is None else int(query.lastProgress["batchId"])

    def until(number: int) -> None:
        deadline = time.monotonic() + 60
        while epochs() < number:
            assert time.monotonic() < deadline, f"epoch {epochs()} of {number}"
            sent.extend(
                log.send(
                    f"{name}.in",
                    [
                        {
                            "key": b"k%d" % key,
                            "value": b"v",
                            "headers": [("event-id", b"%d-%d" % (len(sent), key))],
                        }
                        for key in range(20)
                    ],
                )
            )
            time.sleep(0.1)

    until(10)  # everything is warm
    before = {pid for pid, line in below(os.getpid()).items() if _PLANNER in line}
    planners = {pid for pid in before if Path(f"/proc/{pid}/comm").read_text().startswith("python")}
    workers = {int(e.owner.partition("+")[0]) for e in read_history(tmp_path / "history").events}
    first = {"workers": Held.by(workers), "planner": Held.by(planners)}
    until(40)
    last = {"workers": Held.by(workers), "planner": Held.by(planners)}
    wait_until(lambda: not log.lag(name, f"{name}.in"), 30, "everything is done")
    query.stop()
    assert query.exception() is None
    assert planners
    assert {int(e.owner.partition("+")[0]) for e in read_history(tmp_path / "history").events} == workers
    for kind, held in last.items():
        was = first[kind]
        assert held.threads <= was.threads + 1, (kind, was, held)
        assert held.files <= was.files + 2, (kind, was, held)
        assert held.memory < was.memory + 8 * _MIB, (kind, was, held)
    assert judge(sent).repeats == 0
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
