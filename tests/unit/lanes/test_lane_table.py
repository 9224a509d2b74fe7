from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.lanes import lane_table as lanes
from keylane.lanes.lane_table import Entry, Lane, LaneState, LaneTable

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = st.sampled_from([b"a", b"b", b"c", None])


class Item:
    """An entry; ``number`` is its place in the order of arrival, ``group`` the lane it must be in."""

    def __init__(self, number: int, group: object) -> None:
        self.number = number
        self.group = group
        self.next: Entry | None = None
        self.lane: Lane[Entry] | None = None
        self.settled = False
        self.key: object = group
        self.partition = 0
        self.offset = number
        self.failure_state = "redriven" if number < 0 else None
        self.begun = False

    def __repr__(self) -> str:
        return f"{self.group}#{self.number}"


Table = LaneTable[Item]


class LanesAgainstLists(RuleBasedStateMachine):
    """The table against lists: the arrived, passed and finished entries of each lane."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(retry_share=0.4)
        self.numbers = count()
        self.now = 0.0
        self.arrived: dict[object, list[Item]] = {}
        self.passed: dict[object, int] = {}
        self.settled: set[Item] = set()
        self.done: dict[object, list[Item]] = {}
        self.running: list[Lane[Item]] = []
        self.sleeping: dict[object, float] = {}
        self.woken: set[object] = set()
        self.started: set[Item] = set()

    def head(self, group: object) -> Item | None:
        items, passed = self.arrived[group], self.passed[group]
        return items[passed] if passed < len(items) else None

    @property
    def runnable(self) -> set[object]:
        """Lanes that may run now, as the model has it."""
        busy = {lane.head.group for lane in self.running if lane.head} | self.sleeping.keys()
        return {
            group
            for group in self.arrived
            if group not in busy
            and (head := self.head(group)) is not None
            and (not self.table.closed or head in self.started)
        }

    @property
    def waiting(self) -> list[Item]:
        return [
            item
            for group, items in self.arrived.items()
            for item in items[: self.passed[group]]
            if item not in self.settled
        ]

    @precondition(lambda self: not self.table.closed)
    @rule(key=KEYS)
    def arrive(self, key: bytes | None) -> None:
        number = next(self.numbers)
        item = Item(number, f"keyless-{number}" if key is None else key)
        self.arrived.setdefault(item.group, []).append(item)
        self.passed.setdefault(item.group, 0)
        self.done.setdefault(item.group, [])
        self.table.arrive(key, item)

    @rule()
    def take(self) -> None:
        runnable = self.runnable
        self._took(self.table.take(), runnable)

    def _took(self, lane: Lane[Item] | None, runnable: set[object]) -> None:
        if lane is None:
            assert not runnable
            return
        assert lane.state is LaneState.RUNNING
        assert lane.head is not None
        group = lane.head.group
        assert group in runnable, "at most one of a lane, none of a lane that waits"
        assert lane.head is self.head(group), "strictly in the order of arrival"
        self.running.append(lane)
        self.started.add(lane.head)
        self.woken.discard(group)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), on=st.booleans())
    def passes(self, data: st.DataObject, on: bool) -> None:
        lane = self._pick_running(data)
        assert lane.head is not None
        self.passed[lane.head.group] += 1
        if on:
            runnable = self.runnable
            self._took(self.table.turn(lane), runnable)
        else:
            self.table.passed(lane)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wait=st.integers(0, 5))
    def fails(self, data: st.DataObject, wait: int) -> None:
        lane = self._pick_running(data)
        assert lane.head is not None
        self.sleeping[lane.head.group] = self.now + wait
        self.table.retry(lane, self.now + wait)
        assert lane.state is LaneState.RETRYING

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        awake = {group for group, due in self.sleeping.items() if due <= self.now}
        assert self.table.wake(self.now) == len(awake)
        for group in awake:
            del self.sleeping[group]
            self.woken.add(group)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        self.settled.add(item)
        done = self.table.settle([item])
        items = self.arrived[item.group]
        already = self.done[item.group]
        expected = []
        for candidate in items[len(already) : self.passed[item.group]]:
            if candidate not in self.settled:
                break
            expected.append(candidate)
        assert done == expected, "done in lane order, as far as it has no gap"
        already.extend(done)

    @precondition(lambda self: not self.table.closed and len(self.started) > 5)
    @rule()
    def close(self) -> None:
        self.table.close()

    def _pick_running(self, data: st.DataObject) -> Lane[Item]:
        return self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @invariant()
    def the_counts_agree(self) -> None:
        table = self.table
        busy = [group for group in self.arrived if len(self.done[group]) < len(self.arrived[group])]
        assert table.statistics().lanes == len(busy), "a lane with nothing left to do is gone"
        assert table.lanes.keys() == {group for group in busy if isinstance(group, bytes)}
        assert table.running == len(self.running)
        assert table.unsettled == len(self.waiting)
        assert table.next_due() == min(self.sleeping.values(), default=None)
        ready = [lane.head.group for lane in (*table.ready, *table.again) if lane.head]
        assert len(ready) == table.statistics().ready == len(set(ready))
        assert set(ready) == self.runnable
        assert table.quiet == (not self.running and not ready and not self.sleeping)

    def teardown(self) -> None:
        """Nothing is lost: everything that has arrived finishes once everything that can happen has happened."""
        while not self.table.quiet:
            self.now += 10
            self.table.wake(self.now)
            self.sleeping.clear()
            while (lane := self.table.take()) is not None:
                assert lane.head is not None
                assert lane.head is self.head(lane.head.group)
                self.started.add(lane.head)
                self.running.append(lane)
            for lane in self.running:
                assert lane.head is not None
                self.passed[lane.head.group] += 1
                self.table.passed(lane)
            self.running.clear()
        for item in reversed(self.waiting):
            self.done[item.group] += self.table.settle([item])
        for group, items in self.arrived.items():
            wanted = [item for item in items if not self.table.closed or item in self.started]
            assert self.done[group] == wanted
        if not self.table.closed:
            assert self.table.statistics().lanes == 0


class StuckLanesAgainstLists(RuleBasedStateMachine):
    """Lanes that stop, wait, evict their entries and get them back, and redriven entries put before the rest.

    The model keeps, per lane, the numbers that have to pass, in order; and how many have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants = (
            lanes.STUCK_LANE_ENTRIES_MAX,
            lanes.LANE_STUCK_AFTER_SECONDS,
            lanes.REFETCH_ENTRIES_MAX,
        )
        lanes.STUCK_LANE_ENTRIES_MAX, lanes.LANE_STUCK_AFTER_SECONDS, lanes.REFETCH_ENTRIES_MAX = 2, 2.0, 3
        self.held: dict[int, int] = {}
        self.asked: list[tuple[Lane[Item], list[int]]] = []
        self.table: Table = LaneTable(on_evicted=self.evicted, fetch=self.fetch, **self.room())
        self.numbers = count()
        self.redriven = count(-1, -1)
        self.now = 1.0
        self.order: dict[bytes, list[int]] = {}
        self.passed: dict[bytes, int] = {}
        self.running: list[Lane[Item]] = []
        self.idle: list[Lane[Item]] = []  # stopped or waiting
        self.through: list[Item] = []
        self.let_go_of = 0

    def room(self) -> dict[str, Any]:
        return {}

    def evicted(self, item: Item) -> None:
        assert item.partition == 0
        self.let_go_of += 1

    def fetch(self, lane: Lane[Item], partition: int, offsets: Sequence[int]) -> None:
        assert partition == 0
        assert 0 < len(offsets) <= lanes.REFETCH_ENTRIES_MAX
        assert list(offsets) == sorted(offsets)
        self.asked.append((lane, list(offsets)))

    @rule(key=st.sampled_from([b"a", b"b"]), number=st.integers(1, 4))
    def arrive(self, key: bytes, number: int) -> None:
        for _ in range(number):
            item = Item(next(self.numbers), key)
            self.order.setdefault(key, []).append(item.number)
            self.passed.setdefault(key, 0)
            self.table.arrive(key, item, self.now)

    @rule()
    def take(self) -> None:
        lane = self.table.take()
        if lane is None:
            return
        assert lane.head is not None
        key = lane.head.group
        assert isinstance(key, bytes)
        assert lane.head.number == self.order[key][self.passed[key]], "in order, whatever was away"
        assert all(other.head.group != key for other in self.running if other.head), "one of a lane at a time"
        lane.head.begun = True
        self.running.append(lane)

    def _running(self, data: st.DataObject) -> Lane[Item]:
        return self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def passes(self, data: st.DataObject) -> None:
        self._pass(self._running(data))

    def _pass(self, lane: Lane[Item]) -> None:
        assert lane.head is not None
        assert isinstance(lane.head.group, bytes)
        self.passed[lane.head.group] += 1
        self.through.append(lane.head)
        self.table.passed(lane)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wait=st.integers(0, 5))
    def fails(self, data: st.DataObject, wait: int) -> None:
        self.table.retry(self._running(data), self.now + wait, self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), stop=st.booleans())
    def halts(self, data: st.DataObject, stop: bool) -> None:
        lane = self._running(data)
        (self.table.stop if stop else self.table.suspend)(lane, self.now)
        self.idle.append(lane)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def resumes(self, data: st.DataObject) -> None:
        self.table.resume(self.idle.pop(data.draw(st.integers(0, len(self.idle) - 1))))

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.table.wake(self.now)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def comes_back(self, data: st.DataObject) -> None:
        lane, offsets = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        key = lane.key
        assert isinstance(key, bytes)
        gone = [number for number in offsets if data.draw(st.integers(0, 9)) == 0]
        self.order[key] = [number for number in self.order[key] if number not in gone]
        back = [Item(number, key) for number in offsets if number not in gone]
        self.table.returned(lane, back, len(gone))
        self.let_go_of -= len(offsets)

    @rule(key=st.sampled_from([b"a", b"b"]), keep=st.integers(1, 4), portion=st.integers(1, 3))
    def has_too_many(self, key: bytes, keep: int, portion: int) -> None:
        lane = self.table.lanes.get(key)
        if lane is not None and lane.head is not None and lane.state is not LaneState.RETURNING:
            self.table.evict(lane, keep, portion)

    @rule(key=st.sampled_from([b"a", b"b"]), number=st.integers(1, 3))
    def redrive(self, key: bytes, number: int) -> None:
        lane = self.table.lanes.get(key)
        place = self.passed.setdefault(key, 0)
        order = self.order.setdefault(key, [])
        if lane is not None and lane.head is not None and lane.head.begun:
            place += lane.state is not LaneState.STOPPED
        items = [Item(next(self.redriven), key) for _ in range(number)]
        order[place:place] = [item.number for item in items]
        self.table.insert(key, items)

    @precondition(lambda self: self.through)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.table.settle([self.through.pop(data.draw(st.integers(0, len(self.through) - 1)))])

    @invariant()
    def the_counts_agree(self) -> None:
        table = self.table
        assert table.away == self.let_go_of
        assert table.running == len(self.running)
        assert table.waiting + table.stopped == len(self.idle)
        assert table.returning - len(table._queue) == len(self.asked)
        assert len(table._queue) == 0 or table.back > 0, "nobody waits for nothing"
        assert table.back == sum(table._back.values())
        assert table._far == sum(bool(lane.away) for lane in table.lanes.values())
        assert table.unsettled == len(self.through)

    def teardown(self) -> None:
        try:
            for _ in range(500):
                self.now += 10
                self.table.wake(self.now)
                for lane in self.idle:
                    self.table.resume(lane)
                self.idle.clear()
                for lane, offsets in self.asked:
                    self.let_go_of -= len(offsets)
                    self.table.returned(lane, [Item(number, lane.key) for number in offsets], 0)
                    self.asked = [one for one in self.asked if one[0] is not lane]
                    break
                self.take()
                for lane in self.running:
                    self._pass(lane)
                self.running.clear()
                while self.through:
                    self.table.settle([self.through.pop()])
                if self.table.quiet:
                    break
            assert self.passed == {key: len(order) for key, order in self.order.items()}, "nothing is lost"
            assert self.table.lanes == {}
            assert self.table.away == 0
        finally:
            lanes.STUCK_LANE_ENTRIES_MAX, lanes.LANE_STUCK_AFTER_SECONDS, lanes.REFETCH_ENTRIES_MAX = (
                self.constants
            )


class CrowdedLanesAgainstLists(StuckLanesAgainstLists):
    """The same with little room: an entry or two at a time are read again, and lanes wait for each other."""

    def room(self) -> dict[str, Any]:
        return {"room": lambda: 16, "used": lambda: 16 + self.table.back}

    @invariant()
    def few_come_back_at_once(self) -> None:
        assert self.table.back <= 2


TestCrowdedLanesAgainstLists = CrowdedLanesAgainstLists.TestCase
TestCrowdedLanesAgainstLists.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)

TestStuckLanesAgainstLists = StuckLanesAgainstLists.TestCase
TestStuckLanesAgainstLists.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)

TestLanesAgainstLists = LanesAgainstLists.TestCase
TestLanesAgainstLists.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(*keys: bytes | None) -> tuple[Table, list[Item]]:
    table, items = Table(), []
    for number, key in enumerate(keys):
        items.append(Item(number, key))
        table.arrive(key, items[-1])
    return table, items


def take(table: Table) -> Lane[Item]:
    lane = table.take()
    assert lane is not None
    return lane


def test_a_retrying_lane_holds_back_no_other() -> None:
    table, (first, _, other) = filled(b"a", b"a", b"b")
    table.retry(take(table), due=10.0)
    assert take(table).head is other
    assert table.take() is None
    assert table.wake(9.9) == 0
    assert table.wake(10.0) == 1
    assert take(table).head is first


def test_keyless_entries_wait_for_no_other() -> None:
    table, items = filled(None, None, None)
    assert [take(table).head for _ in items] == items


def test_lanes_wake_in_the_order_of_their_backoffs() -> None:
    table, items = filled(b"a", b"b", b"c")
    for due in (3.0, 1.0, 2.0):
        table.retry(take(table), due=due)
    table.wake(5.0)
    assert [take(table).head for _ in items] == [items[1], items[2], items[0]]


def test_lane_table_closing_finishes_retries_only() -> None:
    table, (failed, behind, fresh) = filled(b"a", b"a", b"b")
    lane = take(table)
    table.retry(lane, due=1.0)
    table.close()
    assert table.take() is None
    assert table.next_due() == 1.0
    table.wake(1.0)
    assert take(table).head is failed
    table.passed(lane)
    assert table.quiet
    assert lane.head is behind
    assert lane.state is LaneState.IDLE
    done: list[Item] = []
    done += table.settle([failed])
    assert done == [failed]
    assert table.lanes.keys() == {b"a", b"b"}, f"{behind} and {fresh} are left for the next epoch"


def test_closing_leaves_a_lane_that_has_just_woken() -> None:
    table, (failed, fresh) = filled(b"a", b"b")
    table.retry(take(table), due=0.0)
    table.wake(0.0)
    table.close()
    assert take(table).head is failed
    assert table.take() is None, f"{fresh} was never started"


def test_emptied_lane_starts_afresh() -> None:
    table, (first,) = filled(b"a")
    table.passed(take(table))
    done: list[Item] = []
    done += table.settle([first])
    assert not table.lanes
    again = Item(1, b"a")
    table.arrive(b"a", again)
    assert take(table).head is again


def test_lane_table_entry_joins_a_lane_awaiting_delivery() -> None:
    table, (first,) = filled(b"a")
    table.passed(take(table))
    second = Item(1, b"a")
    table.arrive(b"a", second)
    lane = take(table)
    assert lane.head is second
    table.passed(lane)
    done: list[Item] = []
    done += table.settle([second])
    assert done == []
    done += table.settle([first])
    assert done == [first, second]
    assert table.statistics().lanes == 0


def test_lane_table_entry_before_refetched_ones_becomes_done() -> None:
    asked: list[tuple[Lane[Item], list[int]]] = []
    table: Table = LaneTable(fetch=lambda lane, _partition, offsets: asked.append((lane, list(offsets))))
    done: list[Item] = []

    def run() -> None:
        while (lane := table.take()) is not None:
            assert lane.head is not None
            entry = lane.head
            table.passed(lane)
            done.extend(table.settle([entry]))

    for number in range(200):
        table.arrive(b"a", Item(number, b"a"), 0.0)
    stopped = table.take()
    assert stopped is not None
    table.stop(stopped, 5.0)
    table.resume(stopped)
    run()
    ((lane, offsets),) = asked
    table.insert(b"a", [Item(-1, b"a"), Item(-2, b"a")])
    table.returned(lane, [Item(number, b"a") for number in offsets], 0)
    run()
    assert sorted(item.number for item in done) == [-2, -1, *range(200)]
    assert table.lanes == {}


# Entries that are set aside.


def through(table: Table) -> list[int]:
    """Run everything that is ready; the order, as done."""
    done: list[Item] = []
    while (lane := table.take()) is not None:
        head = lane.head
        assert head is not None
        table.passed(lane)
        done += table.settle([head])
    return [item.number for item in done]


def test_lane_table_entry_set_aside_returns_before_unstarted() -> None:
    table, items = filled(*[b"a"] * 4)
    lane = table.take()
    assert lane is not None
    table.set_aside(lane)
    assert (table.running, lane.state, lane.head) == (0, LaneState.READY, items[1])
    done: list[Item] = []
    assert table.take() is lane
    table.passed(lane)
    done += table.settle([items[1]])
    table.insert(b"a", [items[0]])
    assert done == [items[1]]
    assert through(table) == [0, 2, 3]
    assert table.lanes == {}


def test_lane_table_entry_set_aside_is_done_behind_its_blocker() -> None:
    table, items = filled(*[b"a"] * 3)
    done: list[Item] = []
    lane = table.take()
    assert lane is not None
    table.passed(lane)  # 0 waits for its acknowledgement
    table.take()
    table.set_aside(lane)  # 1
    table.take()
    table.passed(lane)  # 2
    table.insert(b"a", [items[1]])
    table.take()
    table.passed(lane)
    done += table.settle([items[1]])
    done += table.settle([items[2]])
    assert done == []
    done += table.settle([items[0]])
    assert [item.number for item in done] == [0, 2, 1]
    assert table.lanes == {}


def test_lane_table_lane_with_only_set_aside_entry_is_gone() -> None:
    table, items = filled(*[b"a"] * 1)
    lane = table.take()
    assert lane is not None
    table.set_aside(lane)
    assert table.lanes == {}
    assert table.quiet
    table.arrive(b"a", later := Item(1, b"a"))
    table.insert(b"a", [items[0]])
    assert later.lane is not None
    assert through(table) == [0, 1]


def test_lane_table_last_entry_set_aside_during_a_delivery() -> None:
    table, items = filled(*[b"a"] * 2)
    done: list[Item] = []
    lane = table.take()
    assert lane is not None
    table.passed(lane)
    table.take()
    table.set_aside(lane)
    assert (lane.state, lane.head, lane.tail) == (LaneState.IDLE, None, items[0])
    table.arrive(b"a", Item(2, b"a"))
    assert lane.state is LaneState.READY
    table.insert(b"a", [items[1]])
    done += table.settle([items[0]])
    assert through(table) == [1, 2]
    assert table.lanes == {}


def test_lane_table_refetches_when_last_entry_is_set_aside() -> None:
    asked: list[Sequence[int]] = []
    table = Table(fetch=lambda _lane, _partition, offsets: asked.append(list(offsets)))
    for number in range(lanes.STUCK_LANE_ENTRIES_MAX + 3):
        table.arrive(b"a", Item(number, b"a"))
    lane = table.take()
    assert lane is not None
    table.stop(lane, 0.0)
    table.resume(lane)
    aside = []
    while (running := table.take()) is not None:
        aside.append(running.head)
        table.set_aside(running)
    assert asked == [[lanes.STUCK_LANE_ENTRIES_MAX + 1, lanes.STUCK_LANE_ENTRIES_MAX + 2]]
    assert lane.state is LaneState.RETURNING
    table.returned(
        lane, [Item(lanes.STUCK_LANE_ENTRIES_MAX + 1, b"a"), Item(lanes.STUCK_LANE_ENTRIES_MAX + 2, b"a")], 0
    )
    assert through(table) == [lanes.STUCK_LANE_ENTRIES_MAX + 1, lanes.STUCK_LANE_ENTRIES_MAX + 2]
    assert table.lanes == {}
