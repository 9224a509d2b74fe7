from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane import App, Message, Poison, Retry, Transient
from keylane.engine.delivery import FailureState
from keylane.engine.engine import Engine
from keylane.engine.redrive import RedriveItem, Redriver
from keylane.engine.stages import open_pipeline
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.lanes.redrive import LaneRedrive, RedriveState
from keylane.offsets.watermark import PartitionProgress
from keylane.outcome import Outcome
from keylane.policies.failure_info import FailureInfo
from keylane.testing import Crash, Harness, Redrive, Refuse
from keylane.testing.clock import run_virtual
from keylane.testing.log import MemoryLog
from keylane.testing.sink import MemorySink

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery
    from keylane.message import Record
    from keylane.testing.faults import Fault

pytestmark = pytest.mark.timeout(30)


class SlowResults(MemorySink):
    """Results take five seconds at first; letters are quick."""

    def _hand_over(self, place: Any, handed_over: Any, latency: Any = None) -> None:
        slow = place[0] == "out" and asyncio.get_running_loop().time() < 1
        super()._hand_over(place, handed_over, (5.0, 5.0) if slow else latency)


@pytest.mark.parametrize("policy", ["park", "skip"])
def test_a_letter_runs_behind_the_older_message_read_again(policy: Any) -> None:
    app = App("a", source="in", sink="out", on_failure=policy)

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"m2" and asyncio.get_running_loop().time() < 1:
            raise Poison("the cause is not removed yet")
        return bytes(msg.value)

    run = Harness(app, partitions=1, seed=3, faults=[Crash(at=1.0), Redrive(at=1.0, key=b"k")])
    run._sink.__class__ = SlowResults
    for value in (b"m1", b"m2", b"m3"):
        run.send(key=b"k", value=value)
    result = run.run()
    assert result.verdict.ok, str(result.verdict)
    written = [each.value for each in result.results]
    assert written[-3:] == [b"m1", b"m2", b"m3"]


def test_a_parked_message_with_attempts_waits_for_the_redrive() -> None:
    retry = Retry(attempts=2, wait_initial=3.0, wait_max=3.0)
    app = App(
        "a", source="in", sink="out", on_failure="park", retry=retry, commit_interval=1.0, drain_timeout=2
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"1" and asyncio.get_running_loop().time() < 8:
            raise Transient("no", retry_after=3.0 if msg.attempt == 1 else None)
        return bytes(msg.value)

    faults: list[Fault] = [
        Refuse(at=0, for_=3.3),
        Crash(at=3.4),
        Redrive(at=3.41, key=b"k"),
        Redrive(at=20, key=b"k"),
    ]
    run = Harness(app, partitions=1, faults=faults, limit=400, reading=0.3)
    run.send(key=b"k", value=b"1")
    run.send(key=b"other", value=b"o", at=1.5)  # something is done, so attempts are committed
    run.send(key=b"k", value=b"2", at=2)
    run.send(key=b"k", value=b"3", at=12)
    result = run.run()
    assert [each.value for each in result.results if each.key == b"k"] == [b"1", b"2", b"3"]
    assert result.verdict.ok, str(result.verdict)


def test_a_parked_message_read_again_runs_out_of_attempts() -> None:
    """Its letter was refused and a newer one was not, so the redrive runs it from the log."""
    retry = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)
    app = App("a", source="in", sink="out", on_failure="park", retry=retry)
    attempts: list[int] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        now = asyncio.get_running_loop().time()
        if msg.value == b"1" and now < 1:
            raise Poison("no")
        if msg.value == b"1" and now < 10:
            attempts.append(msg.attempt)
            raise Transient("not yet")
        return bytes(msg.value)

    faults: list[Fault] = [
        Refuse(at=0, for_=1),
        Crash(at=2),
        Redrive(at=2, key=b"k"),
        Redrive(at=20, key=b"k"),
    ]
    run = Harness(app, partitions=1, faults=faults, limit=100)
    run.send(key=b"k", value=b"1")
    run.send(key=b"k", value=b"2", at=1.5)
    result = run.run()
    result.verdict.raise_if_bad()
    assert attempts == [1, 2, 3]
    assert [each.value for each in result.results] == [b"1", b"2"]


@pytest.mark.parametrize("seed", range(5))
def test_only_the_newest_letter_of_a_message_runs(seed: int) -> None:
    """The crash may come when the new letter is written, and nothing yet says that the old one was redriven."""
    app = App("a", source="in", sink="out", on_failure="skip", commit_interval=0.01)

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"1" and asyncio.get_running_loop().time() < 1.5:
            raise Poison("the cause is not removed yet")
        return bytes(msg.value)

    faults: list[Fault] = [Redrive(at=1, key=b"k"), Crash(at=2), Redrive(at=10, key=b"k")]
    run = Harness(app, partitions=1, seed=seed, faults=faults, commits=1.5, letters=0.01)
    for value in (b"1", b"2"):
        run.send(key=b"k", value=value)
    result = run.run()
    assert [each.redrives for each in result.dead] == [0, 1]
    assert [each.value for each in result.results] == [b"2", b"1"]
    result.verdict.raise_if_bad()


@pytest.mark.parametrize("also", [5.0, 5.1])
def test_a_redrive_does_not_fill_the_task_with_waiting_lanes(also: float) -> None:
    """After the crash its second letter waits until reading has come to it, behind messages of two other lanes."""
    app = App("a", source="in", sink="out", on_failure="park", commit_interval=100, max_buffered=2)

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value == b"1" and asyncio.get_running_loop().time() < 1:
            raise Poison("the cause is not removed yet")
        return bytes(msg.value)

    faults: list[Fault] = [Crash(at=5), Redrive(at=5, key=b"k")]
    faults += [Redrive(at=also, key=b"x"), Redrive(at=also, key=b"y")]
    run = Harness(app, partitions=1, faults=faults, reading=0.5, limit=100)
    for key, value in ((b"k", b"1"), (b"x", b"x"), (b"y", b"y"), (b"k", b"2"), (b"k", b"3")):
        run.send(key=key, value=value)
    result = run.run()
    result.verdict.raise_if_bad()
    assert [each.value for each in result.results if each.key == b"k"] == [b"1", b"2", b"3"]


# -- with an engine ------------------------------------------------------------------------------------------------


PARKED = LaneRecord(
    stop=LaneStatus.PARKED,
    key=b"k",
    partition=0,
    offset=0,
    since=0.0,
    letter=FailureInfo(stage="s", error="E", message="m", traceback="", attempts=1, failed_at=0.0),
)


class Bench:
    """An engine, and how far its log was read."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.done: list[Delivery] = []
        self.read_to = 0
        self.log = MemoryLog(partitions=1)
        self.engine: Engine
        self.redriver: Redriver

    def append(self, *values: bytes, key: bytes = b"k") -> list[Record]:
        return [
            self.log.append("in", key=key, value=value, headers=[], timestamp=1, partition=0)
            for value in values
        ]

    def accept(self, records: list[Record]) -> None:
        self.read_to = records[-1].offset() + 1
        self.engine.accept(records)


def bench(app: App, scenario: Any) -> list[Delivery]:
    made = Bench(app)

    def on_done(deliveries: list[Delivery]) -> None:
        made.done += deliveries
        for delivery in deliveries:
            if delivery.redriven:
                made.redriver.done(delivery)

    async def main() -> None:
        sink = MemorySink(app.spec, made.log, rng=Random(1), latency=(0.001, 0.001))
        async with open_pipeline(app.spec) as steps:
            made.engine = Engine(
                app.spec,
                steps,
                sink,
                on_done=on_done,
                progress=lambda _partition: PartitionProgress(watermark=0, position=0),
                read_to=lambda _partition: made.read_to,
                wall=asyncio.get_running_loop().time,
            )
            made.redriver = Redriver(made.engine)
            await scenario(made, sink)
            await made.engine.drain(1.0)

    run_virtual(main(), start=0.0, limit=1000.0)
    return made.done


def plain(**options: Any) -> App:
    app = App("a", source="in", sink="out", **options)

    @app.stage
    async def work(msg: Message) -> bytes:
        return bytes(msg.value)

    return app


async def redrive(made: Bench, *found: RedriveItem) -> None:
    made.engine.stopped_lanes.begin_redrive(b"k")
    await made.redriver.wait_until_quiet([b"k"])
    await made.redriver.run(found, lambda _lanes: None)
    made.engine.stopped_lanes.end_redrive(b"k")


def test_a_letter_waits_until_reading_has_come_to_its_place() -> None:
    async def scenario(made: Bench, _sink: MemorySink) -> None:
        records = made.append(b"0", b"1", b"2")
        redriving = asyncio.create_task(redrive(made, RedriveItem(letter=9, record=records[1], redrives=0)))
        await asyncio.sleep(0.1)
        assert made.done == []
        made.accept(records)
        await redriving
        await made.engine.finish()

    done = bench(plain(), scenario)
    assert [(each.offset, each.redriven, each.outcome) for each in done] == [
        (0, False, Outcome.OK),
        (1, True, Outcome.OK),
        (1, False, Outcome.DUPLICATE),
        (2, False, Outcome.OK),
    ]


def test_a_message_is_passed_over_as_soon_as_its_letter_ran() -> None:
    """Not only when the lane's redrive ends: a crash between the two would run it a second time."""

    async def scenario(made: Bench, _sink: MemorySink) -> None:
        records = made.append(b"0", b"1")
        made.engine.stopped_lanes.begin_redrive(b"k")
        await made.redriver.wait_until_quiet([b"k"])
        made.accept(records)
        await made.redriver.run([RedriveItem(letter=9, record=records[0], redrives=0)], lambda _lanes: None)
        await asyncio.sleep(0.1)
        assert [(each.offset, each.outcome) for each in made.done] == [
            (0, Outcome.OK),
            (0, Outcome.DUPLICATE),
        ]
        made.engine.stopped_lanes.end_redrive(b"k")
        await made.engine.finish()

    assert [each.value for each in bench(plain(), scenario)] == [b"0", b"0", b"1"]


def test_an_ended_engine_sends_no_refused_letter_again() -> None:
    """The answer may come when the engine has ended. The message runs again, in a task that writes its own letter."""
    called: list[float] = []

    async def scenario(made: Bench, _sink: MemorySink) -> None:
        await made.engine.drain(0.1)
        made.engine.clock.after(5.0, lambda: called.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(10)

    bench(plain(), scenario)
    assert called == []


def test_a_message_in_front_of_letters_is_not_kept_back() -> None:
    """Version ordering puts a message there when the letters behind it wait for its version."""

    async def scenario(made: Bench, _sink: MemorySink) -> None:
        first, second = made.append(b"0", b"1")
        engine = made.engine
        engine.stopped_lanes.begin_redrive(b"k")
        made.accept([first])
        await asyncio.sleep(0.1)
        assert made.done == []
        letter = engine.make(second)
        letter.failure_state = FailureState()
        letter.failure_state.letter = 9
        engine.stopped_lanes.redriving[b"k"].give([])
        engine.table.arrive(b"k", letter)
        engine.counters.accepted += 1
        engine._lanes.resume(engine.table.lanes[b"k"])
        await asyncio.sleep(0.1)
        assert [each.value for each in made.done] == [b"0", b"1"]
        engine.stopped_lanes.end_redrive(b"k")

    bench(plain(), scenario)


@pytest.mark.parametrize("later", [0.0, 0.01])
def test_redrive_begins_while_the_one_before_it_is_recorded(later: float) -> None:
    """The record of a parked lane is being removed: what follows must not end the newer redrive."""

    async def scenario(made: Bench, _sink: MemorySink) -> None:
        stopped_lanes = made.engine.stopped_lanes
        stopped_lanes.restore([PARKED])
        old, new = made.append(b"0", b"1")
        stopped_lanes.begin_redrive(b"k")
        await made.redriver.wait_until_quiet([b"k"])
        stopped_lanes.end_redrive(b"k")
        made.accept([new])
        stopped_lanes.begin_redrive(b"k")
        await asyncio.sleep(later)
        await made.redriver.wait_until_quiet([b"k"])
        await asyncio.sleep(0.01)
        await made.redriver.run([RedriveItem(letter=9, record=old, redrives=0)], lambda _lanes: None)
        stopped_lanes.end_redrive(b"k")
        await made.engine.finish()

    assert [each.value for each in bench(plain(on_failure="park"), scenario)] == [b"0", b"1"]


def test_another_message_at_the_offset_of_a_letter_runs() -> None:
    """The source was deleted and created again since the letter was written."""

    async def scenario(made: Bench, _sink: MemorySink) -> None:
        old = MemoryLog(partitions=1).append(
            "in", key=b"k", value=b"old", headers=[], timestamp=7, partition=0
        )
        await redrive(made, RedriveItem(letter=9, record=old, redrives=0))
        made.accept(made.append(b"new"))
        await made.engine.finish()

    done = bench(plain(), scenario)
    assert [(each.value, each.outcome) for each in done] == [(b"old", Outcome.OK), (b"new", Outcome.OK)]


def test_letter_of_another_topic_runs_first() -> None:
    async def scenario(made: Bench, _sink: MemorySink) -> None:
        old = MemoryLog(partitions=1)
        *_, letter = [
            old.append("old", key=b"k", value=b"old", headers=[], timestamp=7, partition=0) for _ in range(5)
        ]
        made.engine.stopped_lanes.begin_redrive(b"k")
        made.accept(made.append(b"new"))
        await redrive(made, RedriveItem(letter=9, record=letter, redrives=0, in_source=False))
        await made.engine.finish()

    assert [each.value for each in bench(plain(), scenario)] == [b"old", b"new"]


def test_a_redrive_waits_for_the_record_of_a_lane_being_parked() -> None:
    class SlowRecords(MemorySink):
        def _hand_over(self, place: Any, handed_over: Any, latency: Any = None) -> None:
            super()._hand_over(place, handed_over, (2.0, 2.0) if place[0] == "state" else latency)

    ran: list[bytes] = []
    app = App("a", source="in", sink="out", on_failure="park")

    @app.stage
    async def work(msg: Message) -> bytes:
        ran.append(bytes(msg.value))
        if len(ran) == 1:
            raise Poison("no")
        return bytes(msg.value)

    async def scenario(made: Bench, sink: MemorySink) -> None:
        sink.__class__ = SlowRecords
        records = made.append(b"0", b"1")
        made.accept(records)
        await asyncio.sleep(0.1)  # 0 failed, and the record of its lane is on its way
        made.engine.stopped_lanes.begin_redrive(b"k")
        await made.redriver.wait_until_quiet([b"k"])
        assert list(sink.notes) == [(0, b"lane/k")]
        assert sink.dead_letters == []
        made.engine.stopped_lanes.end_redrive(b"k")
        await made.engine.finish()
        assert sink.notes == {}

    bench(app, scenario)
    assert ran == [b"0", b"0", b"1"]


# -- the order of one lane, whatever happens -----------------------------------------------------------------------


class OneLane(RuleBasedStateMachine):
    """A lane after a crash: the log brings some messages again, others have letters, some have both.

    Letters become known in two parts, at any time. Every message has to run once, in the order of the log.
    """

    @initialize(
        where=st.lists(st.sampled_from(["log", "letter", "both"]), min_size=1, max_size=8),
        part=st.integers(0, 8),
    )
    def begin(self, where: list[str], part: int) -> None:
        letters = [offset for offset, found in enumerate(where) if found != "log"]
        self.parts = [letters[:part], letters[part:]]
        self.log = deque((offset, False) for offset, found in enumerate(where) if found != "letter")
        self.size = len(where)
        self.letters = set(letters)
        self.lane: deque[tuple[int, bool]] = deque()
        self.read_to = 0
        self.ran: list[int] = []
        self.redrive: LaneRedrive[int] | None = LaneRedrive(parked=False)

    def comes_next(self, letter: int) -> bool:
        return self.read_to >= letter and not any(not redriven and at < letter for at, redriven in self.lane)

    @precondition(lambda self: self.read_to < self.size)
    @rule()
    def read(self) -> None:
        if self.log and self.log[0][0] == self.read_to:
            self.lane.append(self.log.popleft())
        self.read_to += 1

    @precondition(lambda self: self.parts)
    @rule()
    def find_letters(self) -> None:
        assert self.redrive is not None
        self.redrive.give(self.parts.pop(0))

    @rule()
    def take_a_turn(self) -> None:
        if self.lane and self.lane[0][1]:
            self.ran.append(self.lane.popleft()[0])
            return
        if self.redrive is not None:
            if due := self.redrive.due(self.comes_next):
                self.lane.extendleft((letter, True) for letter in reversed(due))
                return
            if self.lane and not self.redrive.may_pass:
                return
        if self.lane:
            offset, _ = self.lane.popleft()
            if offset not in self.letters:  # else it repeats its letter
                self.ran.append(offset)

    @precondition(lambda self: not self.parts and self.redrive is not None)
    @rule()
    def end(self) -> None:
        redriven = any(redriven for _, redriven in self.lane)
        if self.redrive is not None and not self.redrive.waits and not redriven:
            self.redrive = None

    @invariant()
    def in_order(self) -> None:
        assert self.ran == sorted(set(self.ran))

    def teardown(self) -> None:
        if not hasattr(self, "parts"):
            return
        while self.parts:
            self.find_letters()
        for _ in range(4 * self.size):
            self.take_a_turn()
            if self.read_to < self.size:
                self.read()
        if self.redrive is not None:
            self.end()
        for _ in range(4 * self.size):
            self.take_a_turn()
        assert self.ran == list(range(self.size)), "every message ran once"


TestOneLane = OneLane.TestCase
TestOneLane.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_a_redrive_that_is_given_up_lets_all_letters_in_at_once() -> None:
    redrive: LaneRedrive[int] = LaneRedrive(parked=True)
    redrive.give([1, 2])
    redrive.give_up()
    assert redrive.due(lambda _letter: False) == [1, 2]
    assert (redrive.state, redrive.parked, redrive.may_pass) == (RedriveState.OVER, False, False)
