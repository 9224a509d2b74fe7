from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message
from keylane.dlq.record import DeadLetter, DeadLetterKind
from keylane.engine import engine as real
from keylane.engine.stages import open_pipeline
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.offsets.offset_runs import OffsetRuns
from keylane.policies.failure_info import FailureInfo
from keylane.state.admin import new_command
from keylane.state.commands import COMMAND
from keylane.testing import run_virtual
from keylane.testing.log import MemoryLog
from keylane.testing.sink import MemorySink
from keylane.worker import commands
from keylane.worker.commands import CommandExecutor
from keylane.worker.task_plan import TaskPlan

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery
    from keylane.state.commands import Command

SETTINGS = KafkaSettings("nowhere:1")
SOURCE = TopicIdentity(cluster="c", topic="in", id="1")


class Output:
    """The records that are noted, as the state topic keeps them."""

    def __init__(self, *commands: Command) -> None:
        self.records: dict[bytes, bytes | None] = {one.name: one.encode() for one in commands}

    def note(self, _partition: int, name: bytes, value: bytes | None, _then: object) -> None:
        self.records[name] = value

    def commands(self) -> set[bytes]:
        return {name for name, value in self.records.items() if name.startswith(COMMAND) and value}


class Engine:
    """Of an app without versions: it refuses every reset."""

    versions = None


def executor(
    output: Any, engine: Any = None, redriven: dict[int, OffsetRuns] | None = None
) -> CommandExecutor:
    plan = TaskPlan(
        run="r",
        epoch=1,
        task=0,
        settings=SETTINGS,
        identity=AppIdentity(source=SOURCE, dlq=SOURCE),
        starts={0: 0},
        until=None,
        seconds=1,
        sink_limit=0,
        partitions=1,
    )
    app = App("app", source="in").spec

    async def commit() -> None:
        return

    given: Any = (engine or Engine(), output, SETTINGS, app, "task", redriven or {}, {}, lambda: 0.0)
    return CommandExecutor(*given, source=SOURCE, commit=commit, plan=plan)


def test_an_answer_removes_no_newer_command_of_its_lane() -> None:
    """The newer one is in the topic, and the task has not read it yet."""
    first, newer = (new_command("reset", partition=0, key=b"k") for _ in range(2))
    output = Output(first, newer)
    executor(output).carry_out([first])
    assert output.commands() == {newer.name}


def parked(
    offset: int, event_id: bytes, *, position: int | None = None, source: TopicIdentity = SOURCE
) -> DeadLetter:
    """Behind the one that failed; its place among the letters is its message's in the source, if not given."""
    return letter(offset if position is None else position, offset, event_id, source=source)


def letter(
    offset: int,
    source_offset: int,
    event_id: bytes,
    *,
    kind: str = "parked",
    redrives: int = 0,
    source: TopicIdentity = SOURCE,
) -> DeadLetter:
    return DeadLetter(
        partition=0,
        offset=offset,
        key=b"k",
        value=b"%d" % source_offset,
        headers=(("event-id", event_id),),
        headers_unreadable=None,
        topic=source.topic,
        topic_id=source.id,
        cluster=source.cluster,
        source_partition=0,
        source_offset=source_offset,
        timestamp=None,
        kind=DeadLetterKind(kind),
        stage=None,
        error=None,
        message=None,
        traceback=None,
        attempts=0,
        failures=(),
        failed_at=None,
        park=0 if kind == "parked" else None,
        redrives=redrives,
        app="app",
        app_version=None,
    )


PARKED = LaneRecord(
    stop=LaneStatus.PARKED,
    key=b"k",
    partition=0,
    offset=0,
    since=0.0,
    letter=FailureInfo(stage="s", error="E", message="m", traceback="", attempts=1, failed_at=0.0),
)


def redrive(
    monkeypatch: pytest.MonkeyPatch,
    letters: list[DeadLetter],
    *,
    before: OffsetRuns | None = None,
    lanes: tuple[LaneRecord, ...] = (PARKED,),
    named: list[int] | None = None,
    marked: OffsetRuns | None = None,
) -> list[bytes]:
    """Redrive lane k of an app that parks, which is parked; the values of what ran, in their order.

    Those that are recorded as redriven are added to ``marked``.
    """
    at = {letter.offset: letter for letter in letters}
    monkeypatch.setattr(commands, "read_all_dead_letters", lambda *_: iter(letters))
    monkeypatch.setattr(commands, "read_dead_letters_at", lambda *given: [at[each] for each in given[-1]])
    command = new_command("redrive", partition=0, key=b"k", letters=named)
    app = App("app", source="in", sink="out", on_failure="park")
    ran: list[bytes] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        ran.append(bytes(msg.value))
        return bytes(msg.value)

    async def main() -> None:
        sink = MemorySink(app.spec, MemoryLog(partitions=1), rng=Random(1), latency=(0.001, 0.001))

        def on_done(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                made.done(delivery)

        async with open_pipeline(app.spec) as steps:
            engine = real.Engine(app.spec, steps, sink, on_done=on_done)
            made = executor(sink, engine, {0: before or OffsetRuns()})
            engine.restore({}, lanes)
            made.carry_out([command])
            job = asyncio.create_task(made.run())
            while not made.idle:  # noqa: ASYNC110 - as a task that drains waits for it
                await asyncio.sleep(0.01)
            job.cancel()
            await engine.drain(1.0)
            if marked is not None:
                found = OffsetRuns.decode(made.redriven(0).encode())
                for letter in letters:
                    if letter.offset in found:
                        marked.add(letter.offset)

    run_virtual(main(), start=0.0, limit=100.0)
    return ran


def test_a_resumed_redrive_runs_an_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [parked(0, b"1"), parked(1, b"1"), parked(2, b"2")]
    before = OffsetRuns()
    before.add(0)
    assert redrive(monkeypatch, letters, before=before) == [b"2"]


@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_letter_with_a_newer_one_does_not_run(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A task ended between writing the newer one and recording that the older one was redriven."""
    letters = [
        letter(0, 5, b"1", kind="dead"),
        letter(1, 7, b"2", kind="dead"),
        letter(2, 5, b"1", kind="dead", redrives=1),
        letter(3, 5, b"1", kind="dead", redrives=2),
    ]
    monkeypatch.setattr(commands, "_REDRIVEN_AT_ONCE_MESSAGES", at_once)
    assert redrive(monkeypatch, letters, lanes=()) == [b"5", b"7"]


def test_copies_of_a_letter_count_as_redriven(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [parked(0, b"1"), parked(0, b"1", position=1), parked(1, b"2", position=2)]
    marked = OffsetRuns()
    assert redrive(monkeypatch, letters, marked=marked) == [b"0", b"1"]
    assert marked == OffsetRuns([0, 1, 2])


def test_a_late_letter_runs_before_newer_ones_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message's letter came from the spool, behind more letters than a redrive has in memory."""
    count = commands._REDRIVEN_AT_ONCE_MESSAGES + 500
    order = [*range(1, count), 0]
    letters = [parked(each, b"%d" % each, position=position) for position, each in enumerate(order)]
    assert redrive(monkeypatch, letters) == [b"%d" % each for each in range(count)]


def test_letters_of_a_former_source_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those at the offset of a letter of the source as it is now: they are not copies of it."""
    former = TopicIdentity(cluster="c", topic="in", id="0")
    letters = [
        parked(1, b"new 1", position=0),
        parked(7, b"old 7", position=1, source=former),
        parked(7, b"new 7", position=2),
    ]
    letters = [replace(letter, value=letter.headers[0][1]) for letter in letters]
    assert redrive(monkeypatch, letters, named=[0, 1, 2]) == [b"old 7", b"new 1", b"new 7"]


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_a_redrive_ends_while_another_waits_for_reading(
    monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    """Waiting lanes fill the task, and then nothing would be read: neither in one round nor with a later command."""
    letter = parked(5, b"1")
    monkeypatch.setattr(commands, "read_all_dead_letters", lambda *_: iter([letter]))
    monkeypatch.setattr(commands, "read_dead_letters_at", lambda *_: [letter])
    app = App("app", source="in", sink="out", on_failure="park")
    read_to = 0

    @app.stage
    async def work(msg: Message) -> bytes:
        return bytes(msg.value)

    async def main() -> None:
        nonlocal read_to
        sink = MemorySink(app.spec, MemoryLog(partitions=1), rng=Random(1), latency=(0.001, 0.001))

        def on_done(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                made.done(delivery)

        async with open_pipeline(app.spec) as steps:
            engine = real.Engine(app.spec, steps, sink, on_done=on_done, read_to=lambda _partition: read_to)
            made = executor(sink, engine, {0: OffsetRuns()})
            job = asyncio.create_task(made.run())
            made.carry_out([new_command("redrive", partition=0, key=b"k")])
            await asyncio.sleep(later)
            made.carry_out([new_command("redrive", partition=0, key=b"x")])
            await asyncio.sleep(5)
            assert list(engine.stopped_lanes.redriving) == [b"k"]
            read_to = 6
            await asyncio.sleep(5)
            assert made.idle
            assert not engine.stopped_lanes.redriving
            job.cancel()
            await engine.drain(1.0)

    run_virtual(main(), start=0.0, limit=100.0)
