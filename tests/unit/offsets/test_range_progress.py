"""A partition that tasks share, while the group is moved or deleted, or the topic created again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from keylane.offsets.offset_set import OffsetSet
from keylane.offsets.range_progress import (
    Generation,
    RangeProgress,
    RangeSegment,
    RangeWatermark,
    SharedPartition,
)
from keylane.offsets.slots import ALL, SLOTS, Slots, slot_of
from keylane.offsets.watermark import PartitionProgress
from keylane.worker.progress import ProgressTracker

LOW, HIGH = Slots(0, SLOTS // 2 - 1), Slots(SLOTS // 2, SLOTS - 1)


def at(offset: int) -> PartitionProgress:
    return PartitionProgress(watermark=offset, position=offset)


NEVER, FIRST, SECOND = Generation(0, None), Generation(1, 100), Generation(2, 100)


def standing(slots: Slots, offset: int, generation: Generation = NEVER) -> RangeProgress:
    return RangeProgress(slots, 1, (RangeSegment(slots, at(offset)),), generation)


def begins(slots: Slots, range_progresses: list[RangeProgress], grouped: Generation, moved_to: int) -> int:
    sharing = SharedPartition.begin(slots, range_progresses, grouped, ours=False, offset=moved_to)
    return min(segment.progress.watermark for segment in sharing.inherit(range_progresses, at(moved_to)))


def test_sharing_follows_a_rewind_after_others_have() -> None:
    before = [standing(LOW, 1000), standing(HIGH, 1000)]
    assert begins(LOW, before, NEVER, 100) == 100
    first_is_on = [standing(LOW, 150, FIRST), standing(HIGH, 1000)]
    assert SharedPartition(LOW, FIRST, 1).group_watermark(first_is_on) is None
    assert begins(HIGH, first_is_on, NEVER, 100) == 100


def test_sharing_follows_a_second_rewind_to_the_same_offset() -> None:
    followed = [standing(LOW, 1000, FIRST), standing(HIGH, 1000, FIRST)]
    assert begins(LOW, followed, NEVER, 100) == 1000
    assert begins(LOW, followed, FIRST, 100) == 100


def test_sharing_follows_a_rewind_that_replaces_another() -> None:
    """Only the owner of the lower half had followed the first one."""
    assert begins(LOW, [standing(LOW, 1000, FIRST), standing(HIGH, 1000)], NEVER, 70) == 70


def test_sharing_ignores_records_of_earlier_generations() -> None:
    sharing = SharedPartition.begin(LOW, [], SECOND, ours=True, offset=50)
    old, new = standing(LOW, 1000, FIRST), [standing(LOW, 200, SECOND), standing(HIGH, 300, SECOND)]
    assert sharing.group_watermark([old, *new]) == 200
    assert sharing.superseded([old, *new]) == [old]


@pytest.mark.parametrize("position", [501, 1000])
def test_progress_beyond_the_end_of_the_log_is_refused(position: int) -> None:
    """A lane was stuck at 5 when the rest was read; what the log has now may be something else."""
    old = PartitionProgress(watermark=5, position=position, pending=OffsetSet.of([5]))
    assert ProgressTracker._fit_to_log("orders/0", old, begin=3, end=500) == at(3)
    assert ProgressTracker._fit_to_log("orders/0", old, begin=3, end=position) == old


@dataclass
class Sent:
    at: int
    name: bytes

    def key(self) -> bytes:
        return self.name

    def offset(self) -> int:
        return self.at


@dataclass
class World:
    """A partition, the group's offset and the state topic, as tasks find them."""

    rng: random.Random
    log: list[Sent] = field(default_factory=list)
    range_progresses: dict[Slots, RangeProgress] = field(default_factory=dict)
    grouped: Generation = NEVER
    group: tuple[PartitionProgress, bool] | None = None
    """And whether the app wrote it."""
    start: int = 0
    """Where reading begins without an offset of the group."""
    base: int = 0
    """The offset of the group's last move."""
    owners: list[Task] = field(default_factory=list)
    ran: dict[int, int] = field(default_factory=dict)
    """Since then: how often each offset ran."""
    written: set[int] = field(default_factory=set)
    """Since then: done and recorded."""

    def create(self) -> None:
        """A new topic: nothing that was written is about this one."""
        self.range_progresses, self.grouped, self.group = {}, NEVER, None
        self.log = [
            Sent(offset, b"k%d" % self.rng.randrange(30)) for offset in range(120) if self.rng.random() < 0.9
        ]
        self.start = 0
        self._begin(0)

    def move(self, offset: int) -> None:
        if self.group == (at(offset), False):
            return  # nothing has changed
        self.group = at(offset), False
        self._begin(offset)

    def delete_group(self) -> None:
        if self.group is None:
            return
        self.group, self.start = None, self.rng.randrange(120)
        self._begin(self.start)

    def _begin(self, offset: int) -> None:
        self.base = offset
        self.ran, self.written = dict.fromkeys((sent.at for sent in self.log), 0), set()


class Task:
    """As books.py does it."""

    def __init__(self, world: World, slots: Slots) -> None:
        self.world, self.slots = world, slots
        known = world.range_progresses.values()
        progress, ours = world.group or (at(world.start), False)
        offset = None if world.group is None else progress.watermark
        self.sharing = SharedPartition.begin(slots, known, world.grouped, ours=ours, offset=offset)
        self.mark = RangeWatermark(slots, self.sharing.inherit(known, progress))
        self.at = self.mark.value
        self.held: list[int] = []
        self.done: list[int] = []
        world.owners.append(self)

    def work(self, *, all_of_it: bool = False) -> None:
        world, rng = self.world, self.world.rng
        end = 1000 if all_of_it else self.at + rng.randrange(1, 60)
        batch = [sent for sent in world.log if self.at <= sent.at < end]
        self.at = batch[-1].at + 1 if batch else self.at
        own = self.mark.own(batch)  # type: ignore[arg-type]
        if wanted := [s.offset() for s in own if not self.mark.restoring or self.mark.wanted(s.offset())]:
            self.mark.deliver(wanted)
            self.held += wanted
        self.mark.reach(self.at)
        rng.shuffle(self.held)
        left = 0 if all_of_it else rng.choice([0, 2])
        done, self.held = self.held[left:], self.held[:left]
        for offset in done:
            assert offset >= world.base, f"{offset} is below {world.base}, where the group was moved to"
            assert offset not in world.written, f"{offset} was done, and written down"
            world.ran[offset] += 1
        self.done += done
        self.mark.done(done)

    def commit(self) -> None:
        world, sharing, segments = self.world, self.sharing, self.mark.segments()
        world.written.update(self.done)
        if self.slots == ALL and len(segments) == 1:
            if world.range_progresses:
                world.grouped = sharing.generation
            world.range_progresses = {}
            world.group = segments[0].progress, True
            return
        world.range_progresses[self.slots] = sharing.range_progress(segments)
        if min(owner.slots.first for owner in world.owners) < self.slots.first:
            return
        watermark = sharing.group_watermark(world.range_progresses.values())
        if watermark is not None:
            world.group, world.grouped = (at(watermark), True), sharing.generation
            for useless in sharing.superseded(world.range_progresses.values()):
                del world.range_progresses[useless.slots]


def cut(rng: random.Random) -> list[Slots]:
    edges = sorted({0, *(rng.randrange(1, SLOTS) for _ in range(rng.randrange(4)))})
    return [Slots(one, other - 1) for one, other in pairwise([*edges, SLOTS])]


def run_epoch(world: World, *, last: bool) -> None:
    """Tasks begin one after another, some never; they commit now and then, and some crash."""
    rng = world.rng
    waiting = cut(rng)
    rng.shuffle(waiting)
    if not last and rng.random() < 0.3:
        waiting.pop()
    while waiting or world.owners:
        if waiting and (not world.owners or rng.random() < 0.3):
            Task(world, waiting.pop())
            continue
        task = rng.choice(world.owners)
        done = rng.random() < 0.2
        task.work(all_of_it=last and done)
        if rng.random() < 0.5 or (last and done):
            task.commit()
        if done:
            if rng.random() < 0.7 and not last:
                task.commit()
            world.owners.remove(task)


@pytest.mark.parametrize("seed", range(150))
def test_sharing_runs_all_from_the_last_move_on_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    world.create()
    for _ in range(12):
        for _ in range(rng.randrange(1, 4)):
            run_epoch(world, last=False)
        happens = rng.choice([world.create, world.delete_group, lambda: world.move(rng.randrange(120)), None])
        if happens is not None:
            happens()
            if rng.random() < 0.2 and world.group is not None:
                world.move(world.group[0].watermark)  # again to where it is
    for _ in range(2):
        run_epoch(world, last=True)
    missing = [offset for offset, times in world.ran.items() if offset >= world.base and not times]
    assert not missing
    assert world.group == (at(world.log[-1].at + 1), True)


def test_slots_of_keys_are_on_both_sides() -> None:
    """Else the runs above prove little."""
    assert {slot_of(b"k%d" % n, 0) in LOW for n in range(30)} == {True, False}
