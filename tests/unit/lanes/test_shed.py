"""Lanes of a range that is released, in random schedules, against plain lists."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from keylane.lanes.lane_table import Lane, LaneState, LaneTable

LEAVES = 1
"""The partition that is released."""


class Item:
    """An entry."""

    def __init__(self, number: int, key: bytes | None, partition: int) -> None:
        self.key, self.partition, self.offset = key, partition, number
        self.next: Any = None
        self.lane: Any = None
        self.settled = False
        self.failure_state = None
        self.begun = False


def holds(partition: int, _key: Any, _offset: int) -> bool:
    return partition == LEAVES


class Schedule:
    """Random events of a table. ``mixed``: keys are in both partitions."""

    def __init__(self, seed: int, *, mixed: bool) -> None:
        self.rng, self.mixed, self.now = random.Random(seed), mixed, 0.0
        self.fetches: list[tuple[Lane[Item], int, list[int]]] = []
        self.table = LaneTable[Item](
            retry_share=0.5,
            fetch=lambda lane, partition, offsets: self.fetches.append((lane, partition, list(offsets))),
            room=lambda: 64,
        )
        self.items: dict[int, Item] = {}
        self.running: list[Lane[Item]] = []
        self.halted: list[Lane[Item]] = []  # stopped, or waiting for a breaker
        self.unsettled: list[Item] = []
        self.ran: defaultdict[bytes | None, list[int]] = defaultdict(list)
        self.done: set[int] = set()
        self.leaving = False

    def arrive(self) -> None:
        number = len(self.items)
        key = self.rng.choice([None, *(b"%d" % n for n in range(6))])
        partition = 0 if key is None else int(key) % 2
        if self.mixed or key is None:
            partition = self.rng.randrange(2)
        if self.leaving and partition == LEAVES:
            return
        item = self.items[number] = Item(number, key, partition)
        self.table.arrive(key, item, self.now)

    def take(self) -> None:
        lane = self.table.take()
        if lane is not None:
            assert lane.head is not None
            if self.leaving:
                assert lane.head.partition != LEAVES, "nothing of it starts"
            self.running.append(lane)

    def end(self) -> None:
        if not self.running:
            return
        lane = self.running.pop(self.rng.randrange(len(self.running)))
        assert lane.head is not None
        item, how = lane.head, self.rng.random()
        item.begun = True
        if how < 0.5:
            self.ran[item.key].append(item.offset)
            self.unsettled.append(item)
            self.table.passed(lane)
        elif how < 0.7:
            self.table.retry(lane, self.now + self.rng.choice([0.1, 2.0]), self.now)
        elif how < 0.85:
            self.table.stop(lane, self.now)
            self.halted.append(lane)
        else:
            self.table.suspend(lane, self.now)
            self.halted.append(lane)

    def resume(self) -> None:
        if self.halted:
            self.table.resume(self.halted.pop(self.rng.randrange(len(self.halted))))

    def settle(self) -> None:
        items = [item for item in self.unsettled if self.rng.random() < 0.6]
        self.unsettled = [item for item in self.unsettled if item not in items]
        self.done |= {item.offset for item in self.table.settle(items)}

    def evict(self) -> None:
        lanes = [lane for lane in self.table.lanes.values() if lane.head is not None]
        if lanes:
            self.table.evict(self.rng.choice(lanes), self.rng.randrange(3), 4)

    def come_back(self) -> None:
        if self.fetches:
            lane, partition, offsets = self.fetches.pop(0)
            back = [Item(offset, lane.key, partition) for offset in offsets]  # type: ignore[arg-type]
            self.items |= {item.offset: item for item in back}
            self.table.returned(lane, back, 0)

    def step(self) -> None:
        self.now += self.rng.choice([0.0, 0.3])
        self.table.wake(self.now)
        for step in self.rng.choices(
            [self.arrive, self.take, self.end, self.resume, self.settle, self.evict, self.come_back],
            weights=[6, 5, 4, 1, 3, 1, 1],
            k=1,
        ):
            step()

    def finish(self) -> None:
        """Run everything that is left to its end."""
        for _ in range(10_000):
            self.now += 1.0
            self.table.wake(self.now)
            self.come_back()
            for lane in self.halted:
                self.table.resume(lane)
            self.halted = []
            self.take()
            for lane in self.running:
                assert lane.head is not None
                self.ran[lane.head.key].append(lane.head.offset)
                self.unsettled.append(lane.head)
                self.table.passed(lane)
            self.running = []
            items, self.unsettled = self.unsettled, []
            self.done |= {item.offset for item in self.table.settle(items)}
            if self.table.quiet and not self.table.unsettled:
                return


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_a_released_range_leaves_and_all_others_run_in_order(seed: int, *, mixed: bool) -> None:
    schedule = Schedule(seed, mixed=mixed)
    for _ in range(schedule.rng.randrange(200)):
        schedule.step()
    table, pinned = schedule.table, {b"1", b"3"} if seed % 3 == 0 else set()
    schedule.leaving = True
    removed, left = table.shed(holds, pinned.__contains__)
    for _ in range(2000):
        if not left and not schedule.fetches:
            break
        schedule.step()
        pinned.discard(schedule.rng.choice([b"1", b"2", b"3"]))  # its record is written: the lane resumes
        if schedule.fetches:
            schedule.come_back()
            more, left = table.shed(holds, pinned.__contains__)
        else:
            more, left = table.shed(holds, pinned.__contains__, left)
        removed += more
    assert not left
    leaving = {n for n, item in schedule.items.items() if item.partition == LEAVES}
    assert len(leaving - schedule.done) == removed
    for _ in range(schedule.rng.randrange(50)):
        schedule.step()
    schedule.finish()
    assert schedule.done == schedule.items.keys() - (leaving - schedule.done)
    assert schedule.done >= schedule.items.keys() - leaving, "the rest runs"
    for key, ran in schedule.ran.items():
        assert key is None or ran == sorted(ran)
    figures = table.statistics()
    assert (figures.lanes, figures.away, table.back, table.returning) == (0, 0, 0, 0)
    assert (figures.running, figures.retrying, figures.waiting, figures.stopped) == (0, 0, 0, 0)


def test_a_lane_without_entries_left_is_no_longer_there() -> None:
    table = LaneTable[Item]()
    table.arrive(b"k", Item(0, b"k", LEAVES))
    assert table.shed(holds, lambda _key: False) == (1, [])
    assert not table.lanes
    assert not table.startable


def test_what_runs_stays_until_it_is_done() -> None:
    table = LaneTable[Item]()
    first, second = Item(0, b"k", LEAVES), Item(1, b"k", LEAVES)
    table.arrive_all((b"k", b"k"), (first, second))
    lane = table.take()
    assert lane is not None
    assert table.shed(holds, lambda _key: False) == (1, [lane])
    table.passed(lane)
    assert lane.state is LaneState.IDLE
    assert table.shed(holds, lambda _key: False, [lane]) == (0, [lane])
    assert table.settle([first]) == [first]
    assert table.shed(holds, lambda _key: False, [lane]) == (0, [])
    assert not table.lanes
