"""One key with most of the messages, through a real broker: the others are not held up, and it keeps its order."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from keylane import App, HotKey, Message
from keylane.engine import hot_keys as skew
from keylane.kafka.cluster import Cluster
from keylane.spark.outcomes import to_arrow
from keylane.testing import HistoryWriter, Verdict
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from support.topics import Log


def test_hot_key_delays_no_other_and_is_named(
    log: Log,
    name: str,
    tmp_path: Path,
    judge: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All in one partition, four times as many as there is room for: cold ones are behind a wall of hot ones."""
    monkeypatch.setattr(skew, "LOOK_SECONDS", 0.5)
    caplog.set_level(logging.INFO, "keylane")
    source = f"{name}.in"
    log.create(source, partitions=1)
    sent = log.send(
        source,
        [
            {"key": b"hot" if number % 10 else b"cold-%d" % (number % 170), "value": b"%d" % number}
            for number in range(2500)
        ],
    )
    ended: dict[str, float] = {}
    told: list[HotKey] = []
    app = App(name, source=source, max_buffered=600, observer=HistoryWriter(tmp_path / "history"))
    app.on_hot(told.append)

    @app.stage
    async def work(msg: Message) -> None:
        await asyncio.sleep(0.002)
        ended["hot" if msg.key == b"hot" else "cold"] = time.monotonic()

    plan = TaskPlan(
        run="r",
        epoch=1,
        task=0,
        settings=log.settings,
        identity=log.cluster.identity(app.source, app.dlq),
        starts={0: 0},
        until=log.cluster.ends(source, [0]),
        seconds=50,
        sink_limit=Cluster(log.settings).prepare(app.spec).sink_limit,
        partitions=1,
    )
    began = time.monotonic()
    task = Task(app.spec, plan)
    rows: list[Any] = [
        row
        for batch in task.outcomes()
        for row in to_arrow(batch, task.owner, 1, results=False, hot=task.hot).to_pylist()
    ]
    judge(sent)
    assert len(rows) == 2500
    assert sum(row["hot"] for row in rows if row["key"] == b"hot") > 1000, "after the first look"
    assert sum(row["hot"] for row in rows if row["key"] != b"hot") < 50
    hot, cold = ended["hot"] - began, ended["cold"] - began
    assert hot > 2250 * 0.002
    assert cold < hot / 2, "the cold ones did not wait for the hot one"
    assert log.lag(name, source) == 0
    assert {one.key for one in told} == {b"hot"}
    assert told[0].partition == 0
    assert told[0].share > 0.8
    assert "key b'hot' of partition 0 is hot" in caplog.text
    assert "paused partition" not in caplog.text
