"""Topics that are deleted and created again, and apps that change their source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keylane import App, Message, Poison
from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.slots import SLOTS, Slots, slot_of
from keylane.spark.source import LaneReader
from keylane.state.admin import AdminClient
from keylane.worker import session as worker_session
from keylane.worker.task import Task
from support.adjust import adjust
from support.planned import run_plan
from support.tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.topics import Log

pytestmark = pytest.mark.timeout(60)

LOW, HIGH = Slots(0, SLOTS // 2 - 1), Slots(SLOTS // 2, SLOTS - 1)
HALVES = Assignment(((AssignedRange(0, LOW),), (AssignedRange(0, HIGH),)))
STUCK = [next(b"s%d" % n for n in range(99) if slot_of(b"s%d" % n, 0) in half) for half in (LOW, HIGH)]
"""A key in each half."""


def messages(count: int, stuck: Iterable[bytes] = ()) -> list[dict[str, bytes]]:
    """Some lanes are blocked at once, so that progress ends far below the reading position."""
    return [{"key": key, "value": b"!"} for key in stuck] + [
        {"key": b"k%d" % (n % 50), "value": b"%d" % n} for n in range(count)
    ]


def test_letters_of_a_recreated_dlq_are_redriven(log: Log, name: str, tmp_path: Path) -> None:
    """The first letter of the new topic has the offset of a letter of the old one, which was redriven."""
    log.create(f"{name}.in", partitions=1)
    app = App(name, source=f"{name}.in")
    broken = True
    through: list[bytes] = []

    @app.stage
    async def work(msg: Message) -> None:
        if broken:
            raise Poison("broken")
        through.append(msg.value)

    runner = Runner(log, name, tmp_path, app)

    def fail_and_redrive(value: bytes) -> None:
        nonlocal broken
        broken = True
        log.send(f"{name}.in", [{"key": b"k", "value": value}])
        runner.run()
        broken = False
        with AdminClient(log.settings, name) as operator:
            assert not operator.redriven()
            operator.command("redrive", partition=0, key=b"k")
        runner.run()
        with AdminClient(log.settings, name) as operator:
            assert operator.redriven()

    fail_and_redrive(b"old")
    log.delete(f"{name}.dlq")
    fail_and_redrive(b"new")
    assert through == [b"old", b"new"]


def test_a_new_source_is_read_whole_where_tasks_share_it(log: Log, name: str, tmp_path: Path) -> None:
    old, new = f"{name}.v1", f"{name}.v2"
    log.create(old, new, partitions=1)
    log.send(old, messages(200))
    log.send(new, messages(300))
    assert len(Runner(log, name, tmp_path / "old", source=old).run_plan(HALVES)) == 200
    runner = Runner(log, name, tmp_path / "new", source=new)
    assert len(runner.run_plan(HALVES, "r2", starts={0: 0})) == 300
    assert log.lag(name, new) == 0


@pytest.mark.parametrize("plan", [Assignment(((AssignedRange(0),),)), HALVES], ids=["whole", "shared"])
def test_a_recreated_source_is_read_from_its_start(
    log: Log, name: str, tmp_path: Path, plan: Assignment
) -> None:
    """With fewer messages than were read of the old one, and more than its progress had reached."""
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(200, STUCK))
    runner = Runner(log, name, tmp_path, on_failure="block")
    assert len(runner.run_plan(plan)) == 200
    adjust(runner.app, observer=None)  # the history knows the old topic's offsets
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(100))
    assert sorted(runner.run_plan(plan, "r2", starts={0: 0})) == [(0, offset) for offset in range(100)]
    assert runner.committed()[0] == 100


def test_results_of_a_recreated_source_have_ids_of_their_own(log: Log, name: str, tmp_path: Path) -> None:
    """Else the next app takes them for repeats: they have the keys and the positions of the results before."""
    log.create(f"{name}.in", f"{name}.out", partitions=1)
    runner = Runner(log, name, tmp_path, sink=f"{name}.out")
    log.send(f"{name}.in", messages(20))
    runner.run()
    adjust(runner.app, observer=None)  # the history knows the old topic's offsets
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(20))
    runner.run(run="r2")
    assert len({row.header("event-id") for row in log.read(f"{name}.out")}) == 40


def test_an_offset_of_the_topic_before_is_not_followed(log: Log, name: str, tmp_path: Path) -> None:
    """A task that still runs when its source is deleted and created again commits to the new topic."""
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(100))
    runner = Runner(log, name, tmp_path)
    runner.run()
    offset, metadata = runner.committed()
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(150))
    runner.move(offset, metadata or "")
    adjust(runner.app, observer=None)
    worker_session._sessions.clear()
    assert len(runner.run(run="r2")) == 150


def test_the_planner_reads_a_recreated_source_from_its_start(log: Log, name: str) -> None:
    """Also when it plans an epoch again that a crash cut off, and although Spark knows offsets of the old topic."""
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(100))
    app = App(name, source=f"{name}.in")
    app.stage(idle)
    plan = run_plan(log, app)
    reader = LaneReader(plan)
    first = reader.initialOffset()
    before = reader.latestOffset(first, None)
    assert sum(len(list(Task(app.spec, one.plan).outcomes())) for one in reader.partitions(first, before))
    last = reader.latestOffset(before, None)
    assert last["starts"] == {"0": 100}
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(150))
    for again in (reader, LaneReader(plan)):
        (one,) = again.partitions(before, last)
        assert (one.plan.starts, one.plan.identity.source) == (
            {0: 0},
            log.cluster.identity(app.source).source,
        )
        assert again.latestOffset(last, None)["starts"] == {"0": 0}


def test_a_task_ends_when_its_source_is_not_the_planned_one(log: Log, name: str) -> None:
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(10))
    app = App(name, source=f"{name}.in")
    app.stage(idle)
    reader = LaneReader(run_plan(log, app, epoch=2))
    first = reader.initialOffset()
    (one,) = reader.partitions(first, reader.latestOffset(first, None))
    log.delete(f"{name}.in")
    log.create(f"{name}.in", partitions=1)
    log.send(f"{name}.in", messages(20))
    assert list(Task(app.spec, one.plan).outcomes()) == []
    assert not log.cluster.committed(name, app.source, [0])


async def idle(_msg: Message) -> None:
    pass
