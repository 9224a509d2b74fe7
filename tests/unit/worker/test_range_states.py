"""The states of ranges that move between workers: alone, and as a model of several workers and their claims."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from keylane.offsets.assignment import AssignedRange, make_plan
from keylane.offsets.slots import ALL, SLOTS, Slots
from keylane.state import records
from keylane.state.ownership import Claimant, Ownership, Turn
from keylane.state.topic import OWNER, Claim
from keylane.worker.range_states import RangeState, RangeStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from keylane.kafka.transactional_writer import StateRecord

LOW, HIGH = Slots(0, SLOTS // 2 - 1), Slots(SLOTS // 2, SLOTS - 1)


def test_ranges_that_stay_are_not_touched() -> None:
    ranges = RangeStates({0: ALL, 1: ALL}, {})
    ranges.plan({0: ALL, 2: ALL}, epoch=2)
    assert ranges.to_release == [AssignedRange(1)]
    assert ranges.to_take == [AssignedRange(2)]
    assert ranges[0] is RangeState.RUNNING


def test_a_range_that_is_cut_is_released_and_taken() -> None:
    ranges = RangeStates({0: ALL}, {})
    ranges.plan({0: LOW}, epoch=2)
    assert ranges.to_release == [AssignedRange(0)]
    assert ranges.to_take == []
    ranges.enter(0, RangeState.RELEASING)
    assert ranges.to_release == []
    ranges.enter(0, None)
    assert ranges.to_take == [AssignedRange(0, LOW)]


def test_a_range_that_is_left_to_another_is_wanted_in_the_next_epoch() -> None:
    ranges = RangeStates({0: ALL}, {})
    ranges.plan({0: ALL}, epoch=2)
    ranges.leave(0, [LOW], epoch=2)
    assert not ranges.has_left({0: HIGH}, epoch=2)
    assert ranges.to_release == [AssignedRange(0)]
    assert ranges.has_left({0: ALL}, epoch=2)
    ranges.plan({0: ALL}, epoch=3)
    assert ranges.to_release == []
    assert not ranges.has_left({0: ALL}, epoch=3)


def test_a_worker_with_nothing_to_have_is_over() -> None:
    ranges = RangeStates({0: ALL}, {1: ALL})
    ranges.plan({}, epoch=2)
    assert not ranges.over
    ranges.enter(0, RangeState.RELEASING)
    ranges.enter(0, None)
    assert not ranges.over
    assert not ranges.is_wanted(1)
    ranges.enter(1, None)
    assert ranges.over


@pytest.mark.parametrize(
    "state", [RangeState.RESTORING, RangeState.RUNNING, RangeState.RELEASING, None], ids=str
)
def test_a_range_begins_with_waiting(state: RangeState | None) -> None:
    ranges = RangeStates({}, {})
    with pytest.raises(ValueError, match="cannot be"):
        ranges.enter(0, state)
    ranges.enter(0, RangeState.WAITING, ALL)
    with pytest.raises(ValueError, match="cannot be"):
        ranges.enter(0, RangeState.RELEASING)


# A model: the real claims of several workers, over a log that each reads in its own time.


class Topic:
    """Committed records of the state topic, as far as they are about claims."""

    def __init__(self) -> None:
        self.records: list[StateRecord] = []


class View:
    """What one worker has read of it."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._read = 0
        self.owners: dict[int, dict[str, Claim]] = {}
        self.successor: dict[str, Any] | None = None

    def poll(self, most: int) -> None:
        for partition, name, value in self._topic.records[self._read : self._read + most]:
            owner, found = name.removeprefix(OWNER).decode(), self.owners.setdefault(partition, {})
            if value is None:
                found.pop(owner, None)
            else:
                claim, place = records.decode_claim(value), self._read
                if owner in found and found[owner].number == claim.number:
                    place = found[owner].place
                found[owner] = Claim(
                    *(place, claim.slots, claim.run, claim.who, claim.leaving, 1e12),
                    *(claim.epoch, claim.task, claim.number),
                )
            self._read += 1


class Writer:
    """What one worker has written. A commit takes time; what is put meanwhile is in the next one."""

    def __init__(self, topic: Topic, owner: str) -> None:
        self._topic, self.id, self._open = topic, owner, list[Any]()
        self._committing: list[Any] | None = None
        self._then: Callable[[], None] | None = None

    def put_state(self, partition: int, name: bytes, value: bytes | None) -> None:
        self._open.append((partition, name, value))

    @property
    def busy(self) -> bool:
        return self._committing is not None

    def begin(self, also: Iterable[StateRecord] = (), then: Callable[[], None] | None = None) -> None:
        self._committing, self._open, self._then = [*self._open, *also], [], then

    def end(self) -> None:
        self._topic.records += self._committing or []
        self._committing = None
        if self._then is not None:
            self._then()


@dataclass
class Worker:
    number: int
    topic: Topic
    calls: dict[int, int] = field(default_factory=dict)
    """By partition that is being released: steps until what runs there has ended."""

    def __post_init__(self) -> None:
        self.view, self.writer = View(self.topic), Writer(self.topic, f"app.{self.number}")
        settings: Any = None  # nothing is fenced
        view: Any = self.view
        writer: Any = self.writer
        who, claimant = f"elsewhere:{self.number}/0", Claimant(0, self.number)
        self.ownership = Ownership(settings, "app", view, writer, "run", who, patience=1e9, claimant=claimant)
        self.ranges = RangeStates({}, {})
        self.epoch = 0

    def attach(self, wanted: Mapping[int, Slots], epoch: int, task: int) -> None:
        self.epoch = epoch
        self.ranges.plan(wanted, epoch)
        self.release_due()
        self.ownership.attached(Claimant(epoch, task), wanted)

    def release_due(self) -> None:
        for one in self.ranges.to_release:
            self.ranges.enter(one.partition, RangeState.RELEASING)
            self.ownership.leaving(one.partition)
            self.calls[one.partition] = 0

    def step(self, rng: random.Random) -> None:
        """Something that the worker does by itself."""
        ranges, ownership = self.ranges, self.ownership
        self.view.poll(rng.randint(0, 8))
        if rng.random() < 0.5:
            if self.writer.busy:
                self.writer.end()
            else:
                self.writer.begin()
        for partition, claims in ownership.requested.items():
            if ranges[partition] is RangeState.RUNNING and ranges.is_wanted(partition):
                for claim in claims:
                    ranges.leave(partition, [claim.slots], claim.epoch)
        assert not ownership.overruled
        self.release_due()
        for one in ranges.to_take:
            ranges.enter(one.partition, RangeState.WAITING, one.slots)
            ownership.ask({one.partition: one.slots})
        for partition in list(ownership.waiting):
            turn = ownership.turn(partition, 0.5)  # owners that live are never fenced
            assert turn is not Turn.DEAD
            if turn is Turn.TAKEN or not ranges.is_wanted(partition):
                if turn is Turn.TAKEN:
                    ranges.leave(partition, [ranges.slots(partition)], self.epoch)
                ownership.withdraw(partition)
                ranges.enter(partition, None)
            elif turn is Turn.FREE:
                ownership.own(partition)
                ranges.enter(partition, RangeState.RESTORING)
        for partition in list(ownership.owned):
            if ranges[partition] is RangeState.RESTORING and rng.random() < 0.5:
                ranges.enter(partition, RangeState.RUNNING)
            elif ranges[partition] is RangeState.RELEASING:
                self.calls[partition] += 1
                if self.calls[partition] > rng.randint(1, 6) and not self.writer.busy:
                    self.writer.begin(ownership.release(partition), partial(self.released, partition))

    def released(self, partition: int) -> None:
        self.ownership.released(partition)
        self.ranges.enter(partition, None)


def owned_twice(workers: list[Worker]) -> list[tuple[int, Slots, Slots]]:
    """Slots that two workers own."""
    found = [(p, slots) for worker in workers for p, slots in worker.ranges.owned.items()]
    return [
        (p, slots, other)
        for n, (p, slots) in enumerate(found)
        for q, other in found[n + 1 :]
        if p == q and slots.overlaps(other)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_no_slot_is_ever_owned_twice_and_plans_are_reached(seed: int) -> None:
    rng = random.Random(seed)
    topic, partitions = Topic(), rng.randint(1, 5)
    workers = [Worker(n, topic) for n in range(rng.randint(1, 4))]
    plan = None
    for epoch in range(1, rng.randint(1, 6) + 1):
        plan = make_plan(
            range(partitions), rng.randint(1, len(workers)), before=plan, split=rng.random() < 0.5
        )
        given = list(plan.tasks) + [()] * (len(workers) - len(plan.tasks))
        rng.shuffle(given)
        late = rng.sample(workers, rng.randint(0, len(workers)))  # they attach when the epoch has begun
        for n, worker in enumerate(workers):
            if worker not in late:
                worker.attach({one.partition: one.slots for one in given[n]}, epoch, n)
        for step in range(rng.randint(0, 120)):
            if step == 10:
                for n, worker in enumerate(workers):
                    if worker in late:
                        worker.attach({one.partition: one.slots for one in given[n]}, epoch, n)
            rng.choice(workers).step(rng)
            assert owned_twice(workers) == []
        for n, worker in enumerate(workers):
            if worker.epoch != epoch:
                worker.attach({one.partition: one.slots for one in given[n]}, epoch, n)
    for _ in range(400):
        for worker in rng.sample(workers, len(workers)):
            worker.step(rng)
            assert owned_twice(workers) == []
    assert not any(worker.ranges.moving for worker in workers)
    for partition in range(partitions):
        owners = [worker.ranges.owned[partition] for worker in workers if partition in worker.ranges.owned]
        assert ALL.without(owners) == [], f"partition {partition} has owners of {owners} only"
