"""Random schedules of failures and faults in virtual time, by seed; and breakages that they must notice.

`make soak` runs thousands of seeds (``python -m schedules``), `make replay SEED=7` one of them with its log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

import schedules
from keylane import State
from keylane.engine.lane_state import LaneStates, StoredValue
from keylane.engine.stopped_lanes import StoppedLanes
from keylane.lanes.redrive import LaneRedrive
from keylane.offsets.range_progress import RangeWatermark
from keylane.offsets.watermark import Watermark
from keylane.testing import MemorySink
from keylane.testing.durable import DurableState
from keylane.testing.life import CommandClerk, TaskLife

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.engine.redrive import Redriver
    from keylane.testing import Dead

SEEDS = range(int(os.environ.get("KEYLANE_SEEDS", "70")))
ONE = os.environ.get("KEYLANE_SEED")


@pytest.mark.parametrize("seed", SEEDS if ONE is None else [int(ONE)])
def test_any_schedule_keeps_order_and_loses_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL if ONE is None else logging.INFO, "keylane")
    schedules.run(seed)


# Breakages. Each is noticed by one of the first seeds.


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def breakage(function: Callable[[pytest.MonkeyPatch], None]) -> None:
    """One more breakage."""
    BREAKAGES[function.__name__] = function


@breakage
def result_counts_before_it_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    hand_over = MemorySink._hand_over

    def early(self: MemorySink, place: Any, handed_over: Any, *latency: Any) -> None:
        if place[0] == "out" and not self._exact:
            asyncio.get_running_loop().call_soon(handed_over.tell)
            handed_over = type(handed_over)(write=handed_over.write, tell=lambda: None)
        hand_over(self, place, handed_over, *latency)

    patch.setattr(MemorySink, "_hand_over", early)


@breakage
def letter_counts_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    hand_over = MemorySink._hand_over

    def early(self: MemorySink, place: Any, handed_over: Any, *latency: Any) -> None:
        if place[0] == "schedule.dlq" and not self._exact:
            asyncio.get_running_loop().call_soon(handed_over.tell)
            handed_over = type(handed_over)(write=handed_over.write, tell=lambda: None)
        hand_over(self, place, handed_over, *latency)

    patch.setattr(MemorySink, "_hand_over", early)


@breakage
def redrive_overlooks_letters_of_open_transactions(patch: pytest.MonkeyPatch) -> None:
    redrive = CommandClerk._redrive

    async def at_once(self: CommandClerk, redriver: Redriver, partition: int, commands: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._app, "delivery", "at_least_once")
            await redrive(self, redriver, partition, commands)

    patch.setattr(CommandClerk, "_redrive", at_once)


@breakage
def aborted_transaction_is_visible(patch: pytest.MonkeyPatch) -> None:
    crash = MemorySink.crash

    def visible(self: MemorySink) -> None:
        for write in self._open:
            write()
        crash(self)

    patch.setattr(MemorySink, "crash", visible)


@breakage
def restart_passes_over_by_offset_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watermark, "wanted", lambda self, offset: offset >= self._restored.position)


@breakage
def held_lanes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneRedrive, "may_pass", property(lambda _self: True))


@breakage
def redriven_letters_come_first_wherever_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoppedLanes, "_comes_next", lambda _self, _lane, _letter: True)


@breakage
def stopped_lanes_are_forgotten_in_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TaskLife, "_lanes", lambda _self: [])


@breakage
def ring_filter_is_skipped(patch: pytest.MonkeyPatch) -> None:
    def everything(self: RangeWatermark, records: Any) -> Any:
        found = list(records)
        self._batch = {r.offset(): self.slots.first for r in found}
        return found

    patch.setattr(RangeWatermark, "own", everything)


@breakage
def progress_of_a_deleted_source_applies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DurableState, "of_new_source", lambda self: self)


@breakage
def stopped_lanes_of_a_deleted_source_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemorySink, "recreated", lambda self, first: setattr(self, "first", first))


@breakage
def redriven_letters_are_known_by_offset_only(patch: pytest.MonkeyPatch) -> None:
    wanted = CommandClerk._wanted

    def by_offset(self: CommandClerk, redriver: Redriver, letters: list[Dead], *place: Any) -> Any:
        count, first = self._world.log.partitions, self._world.first
        marked = [letters[mark] for mark in self._world.durable.redriven]
        at = {(dead.partition % count, dead.offset) for dead in marked if dead.partition < first}
        self.redriven.update(
            number
            for number, dead in enumerate(letters)
            if dead.partition >= first and (dead.partition % count, dead.offset) in at
        )
        return wanted(self, redriver, letters, *place)

    patch.setattr(CommandClerk, "_wanted", by_offset)


@breakage
def letter_is_redriven_as_the_message_at_its_offset(patch: pytest.MonkeyPatch) -> None:
    def by_offset(self: CommandClerk, partition: int, dead: Dead) -> bool:
        world = self._world
        found = world.log.records("in", partition, start=dead.offset)[:1]
        same = [record for record in found if (record.offset(), record.key()) == (dead.offset, dead.key)]
        return dead.partition % world.log.partitions == partition and bool(same)

    patch.setattr(CommandClerk, "_is_in", by_offset)


@breakage
def letter_of_a_deleted_source_hides_a_message(patch: pytest.MonkeyPatch) -> None:
    accept = TaskLife._accept

    def by_offset(self: TaskLife, part: Any, records: list[Any]) -> None:
        world = self._world
        former = [dead for dead in world.sink.dead_letters if dead.partition < world.first]
        at = {(dead.partition % world.log.partitions, dead.offset) for dead in former}
        hidden = [record for record in records if (record.partition(), record.offset()) in at]
        if hidden:
            part.mark.deliver([record.offset() for record in hidden])
            part.mark.done([record.offset() for record in hidden])
        accept(self, part, [record for record in records if record not in hidden])

    patch.setattr(TaskLife, "_accept", by_offset)


@breakage
def state_is_committed_before_its_message_is_done(patch: pytest.MonkeyPatch) -> None:
    passed = LaneStates.passed

    def early(self: LaneStates, delivery: Any) -> None:
        passed(self, delivery)
        if delivery.state is not None:
            for tag, value in delivery.state.changes.items():
                self._done[delivery.state.partition, delivery.state.lane, tag] = value

    patch.setattr(LaneStates, "passed", early)


@breakage
def change_of_a_failed_attempt_is_kept(patch: pytest.MonkeyPatch) -> None:
    def kept(state: Any) -> None:
        if state.attempt is not None:
            for argument in state.attempt.arguments.values():
                content = argument.close() if isinstance(argument, State) else False
                if isinstance(content, bytes):
                    state.changes[f"s/{argument.name}"] = StoredValue(content, 0, 0)
            state.attempt = None

    patch.setattr("keylane.engine.lane_state._discard", kept)


@breakage
def timer_is_not_removed_when_it_has_fired(patch: pytest.MonkeyPatch) -> None:
    def stays(self: LaneStates, delivery: Any) -> None:
        value = delivery.stored
        self._passed[delivery.name] = self._done[delivery.name] = StoredValue(value.content, value.due + 1, 0)

    patch.setattr(LaneStates, "_remove", stays)


@pytest.mark.parametrize("name", BREAKAGES)
def test_schedules_notice_the_breakage(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    BREAKAGES[name](monkeypatch)
    recreated = (seed for seed in range(200, 10_000) if schedules.recreates_of(seed))
    assert any(schedules.problem_of(seed)[1] for seed in itertools.chain(range(200), recreated))
