"""``order="global"``: one message in flight in the whole app, also when two are started at the same moment."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Message  # noqa: TC001 - stages are looked at when the app is built
from keylane.errors import FencedError, KeylaneError, TakenOverError
from keylane.kafka.cluster import Cluster
from keylane.state.ownership import take_over
from keylane.testing import check, read_history
from support.adjust import adjust
from support.tasks import Runner

if TYPE_CHECKING:
    from pathlib import Path

    from support.topics import Log

RACES = int(os.environ.get("KEYLANE_RACES", "3"))


def messages(count: int) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % (n % 7), "value": b"%d" % n} for n in range(count)]


class Starter:
    """Starts the app once, as a process of its own would: takes it over, and runs its one task."""

    def __init__(self, log: Log, name: str, folder: Path, run: str) -> None:
        self.runner = Runner(log, name, folder, order="global", on_failure="block")
        self.run = run
        self.ended = ""
        stage = self.runner.app.spec.stages[0].function

        async def slow(msg: Message) -> bytes:
            await asyncio.sleep(0.01)
            return bytes(await stage(msg))

        adjust(self.runner.app, stages=())
        self.runner.app.stage(slow)
        Cluster(log.settings).prepare(self.runner.app.spec)

    def start(self, barrier: threading.Barrier, seconds: float | None) -> threading.Thread:
        thread = threading.Thread(target=self._main, args=(barrier, seconds))
        thread.start()
        return thread

    def _main(self, barrier: threading.Barrier, seconds: float | None) -> None:
        app, log = self.runner.app, self.runner.log
        barrier.wait()
        try:
            take_over(log.settings, app.name, app.spec.state, 2, self.run)
            self.runner.run(run=self.run, seconds=seconds)
        except (TakenOverError, FencedError) as error:
            self.ended = type(error).__name__
        except KeylaneError as error:
            self.ended = str(error)
        else:
            self.ended = "done"


@pytest.mark.timeout(60 + 8 * RACES)
def test_simultaneous_starts_leave_one_run(log: Log, name: str, tmp_path: Path) -> None:
    """Whatever the first to begin has in flight is finished before the other begins."""
    log.create(f"{name}.in", partitions=2)
    sent = []
    ends = []
    for race in range(RACES):
        sent += log.send(f"{name}.in", messages(60))
        barrier = threading.Barrier(2)
        starters = [Starter(log, name, tmp_path, f"r{race}-{number}") for number in range(2)]
        threads = [starter.start(barrier, seconds=2) for starter in starters]
        for thread in threads:
            thread.join()
        ends.append(sorted(starter.ended for starter in starters))
        assert set(ends[-1]) <= {"done", "TakenOverError", "FencedError"}, ends[-1]
        assert "done" in ends[-1], ends[-1]
    last = Starter(log, name, tmp_path, "last")
    last.start(threading.Barrier(1), seconds=None).join()
    verdict = check(read_history(tmp_path / "history"), sent=sent, order="global")
    verdict.raise_if_bad()
    assert verdict.repeats == 0
    assert any(end != ["done", "done"] for end in ends), "nobody was ever too late: it proves little"
