"""Results of handlers that compute are gathered: fewer requests, the same results in the same order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message
from keylane.testing import HistoryWriter, check_results
from keylane.worker.output import KafkaOutput
from support.tasks import Runner
from support.topics import Log, ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.testing import Verdict


# The handlers compute, so that the loop and not the fetcher is the bottleneck on any machine: lanes queue all the time.
@pytest.mark.parametrize(("seconds", "count", "together"), [(0.001, 3_000, 20), (0.0001, 20_000, 200)])
def test_trickling_results_are_gathered_in_order(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    count: int,
    together: int,
) -> None:
    sizes: list[int] = []
    let_go: Any = KafkaOutput._flush_gathered

    def counting(output: KafkaOutput, *args: Any) -> None:
        sizes.append(len(output._gathered))
        let_go(output, *args)

    monkeypatch.setattr(KafkaOutput, "_flush_gathered", counting)
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    sent = log.send(
        f"{name}.in",
        [
            {"key": b"k%d" % (n % 150), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}
            for n in range(count)
        ],
    )
    app = App(name, source=f"{name}.in", sink=f"{name}.out", observer=HistoryWriter(tmp_path / "history"))

    @app.stage
    async def compute(msg: Message) -> bytes:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return bytes(msg.value)

    assert len(Runner(log, name, tmp_path, app=app).run()) == count
    judge(sent)
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    assert max(sizes) > together, sizes
