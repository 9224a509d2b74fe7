from __future__ import annotations

import random
import tracemalloc
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane.offsets import metadata as metadata_module
from keylane.offsets import offset_set as offset_set_module
from keylane.offsets import watermark as watermark_module
from keylane.offsets.metadata import decode, encode
from keylane.offsets.offset_set import BLOCK_OFFSETS, OffsetBlock, OffsetSet
from keylane.offsets.watermark import PartitionProgress, Watermark

FRESH = PartitionProgress(watermark=0, position=0)


class WatermarkAgainstSets(RuleBasedStateMachine):
    """One partition through any number of lives, against the set of offsets that are done."""

    gaps = st.sampled_from([1, 1, 1, 2, 5])
    firsts = st.integers(0, 9)

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.log = [data.draw(self.firsts)]
        for gap in data.draw(st.lists(self.gaps, min_size=1, max_size=40)):
            self.log.append(self.log[-1] + gap)
        self.committed = PartitionProgress(watermark=self.log[0], position=self.log[0])
        self.committed_done: set[int] = set()
        self.live()

    def live(self) -> None:
        """A new task: it knows only what was committed, and reads from the watermark."""
        self.mark = Watermark(self.committed)
        self.done = set(self.committed_done)
        self.unread = [offset for offset in self.log if offset >= self.committed.watermark]
        self.running: list[int] = []
        self.known = self.committed.position  # below this everything is done or known to be pending

    @precondition(lambda self: self.unread)
    @rule(count=st.integers(1, 8))
    def fetch(self, count: int) -> None:
        batch, self.unread = self.unread[:count], self.unread[count:]
        wanted = [o for o in batch if self.mark.wanted(o)] if self.mark.restoring else batch
        assert wanted == [o for o in batch if o not in self.done], "exactly what is not done runs again"
        if wanted:
            self.mark.deliver(wanted)
            self.running += wanted
        self.mark.reach(batch[-1] + 1)
        assert self.mark.position == batch[-1] + 1
        self.known = max(self.known, batch[-1] + 1)

    @precondition(lambda self: not self.unread)
    @rule(hole=st.integers(0, 5))
    def come_to_the_end_past_a_hole(self, hole: int) -> None:
        end = max(self.mark.position, self.log[-1] + 1 + hole)
        self.mark.reach(end)
        self.mark.reach(end - 3)
        assert self.mark.position == end
        self.known = max(self.known, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def some_are_done(self, data: st.DataObject) -> None:
        done = set(data.draw(st.lists(st.sampled_from(self.running), min_size=1)))
        self.running = [o for o in self.running if o not in done]
        self.done |= done
        self.mark.done(done)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def some_are_done_once_more(self, data: st.DataObject) -> None:
        self.mark.done(data.draw(st.lists(st.sampled_from(sorted(self.done)), min_size=1)))

    @rule()
    def commit(self) -> None:
        progress = self.mark.progress()
        restored = decode(progress.watermark, encode(progress))
        assert restored.problem is None
        assert restored.progress == progress
        self.committed = restored.progress
        self.committed_done = set(self.done)

    @rule()
    def crash(self) -> None:
        self.live()

    @rule(count=st.integers(2, 5))
    def crash_again_and_again_in_the_middle_of_the_restore(self, count: int) -> None:
        for _ in range(count):
            self.live()
            if self.unread:
                self.fetch(2)
            self.commit()

    @invariant()
    def progress_says_what_the_sets_say(self) -> None:
        progress = self.mark.progress()
        left = [o for o in self.log if o < self.known and o not in self.done]
        assert list(progress.pending) == left
        assert progress.pending == OffsetSet.of(left)
        assert progress.position == self.known
        assert progress.watermark == self.mark.value == (left[0] if left else self.known)
        assert self.mark.pending == len(self.running)
        for offset in self.log:
            assert progress.is_done(offset) == (offset in self.done)

    def teardown(self) -> None:
        """Whatever happened: one more life does exactly the rest."""
        if not hasattr(self, "log"):
            return
        self.live()
        ran: list[int] = []
        while self.unread:
            self.fetch(7)
            ran += self.running
            self.done |= set(self.running)
            self.mark.done(self.running)
            self.running = []
        assert ran == [o for o in self.log if o not in self.committed_done]
        assert self.mark.value == self.known
        assert not self.mark.progress().pending


class StuckWatermarkAgainstSets(WatermarkAgainstSets):
    """The same when everything is soon taken for stuck, over the edges of blocks, over holes of any size."""

    gaps = st.one_of(
        st.sampled_from([1, 1, 1, 2, BLOCK_OFFSETS - 1, BLOCK_OFFSETS, BLOCK_OFFSETS + 1, 2**40]),
        st.integers(1, 3 * BLOCK_OFFSETS),
    )
    firsts = st.sampled_from([0, BLOCK_OFFSETS - 2, BLOCK_OFFSETS - 1, BLOCK_OFFSETS, 2**40 - 1])

    def __init__(self) -> None:
        self.patches = [
            mock.patch.object(watermark_module, "_RECENT_OFFSETS_MIN", 2),
            mock.patch.object(offset_set_module, "_LIST_OFFSETS_MAX", 2),
            mock.patch.object(metadata_module, "_GAP_OFFSETS_MAX", 3),
        ]
        for patch in self.patches:
            patch.start()
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for patch in self.patches:
                patch.stop()


TestWatermarkAgainstSets = WatermarkAgainstSets.TestCase
TestWatermarkAgainstSets.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestStuckWatermarkAgainstSets = StuckWatermarkAgainstSets.TestCase
TestStuckWatermarkAgainstSets.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(st.permutations(range(12)))
def test_watermark_is_the_lowest_offset_not_done(order: list[int]) -> None:
    mark = Watermark(FRESH)
    offsets = [10 * n for n in range(12)]
    mark.deliver(offsets)
    left = set(offsets)
    for place in order:
        assert mark.value == min(left)
        left.discard(10 * place)
        mark.done([10 * place])
    assert mark.value == mark.position == 111


def test_a_fresh_partition_is_where_reading_begins() -> None:
    mark = Watermark(PartitionProgress(watermark=7, position=7))
    assert (mark.value, mark.position, mark.pending, mark.restoring) == (7, 7, 0, False)
    assert mark.progress() == PartitionProgress(watermark=7, position=7)


def test_watermark_ignores_repeated_and_unknown_offsets() -> None:
    mark = Watermark(FRESH)
    mark.deliver([1, 2])
    mark.done([1])
    mark.done([1, 99])
    assert mark.progress() == PartitionProgress(watermark=2, position=3, pending=OffsetSet.of([2]))


def test_watermark_forgets_restored_offsets_gone_from_the_log() -> None:
    mark = Watermark(PartitionProgress(watermark=3, position=20, pending=OffsetSet.of([3, 9])))
    mark.deliver([9])  # retention has taken offset 3 in the meantime
    assert mark.value == 9
    mark.done([9])
    assert mark.value == 20


def test_offsets_as_far_apart_as_kafka_has_them() -> None:
    mark = Watermark(FRESH)
    mark.deliver([0])
    mark.deliver([2**40])
    mark.deliver([2**63 - 2])
    assert list(mark.progress().pending) == [0, 2**40, 2**63 - 2]
    mark.done([0])
    assert mark.value == 2**40


def stick(mark: Watermark, count: int, every: int, *, start: int = 0) -> tuple[list[int], int]:
    """Deliver; one in this many offsets is stuck, the others are soon done. Returns the stuck ones and the end."""
    stuck: list[int] = []
    at = start
    while len(stuck) < count:
        batch = range(at, at + 1000)
        held = set(batch[:: min(every, 1000)])
        mark.deliver(batch)
        mark.done([offset for offset in batch if offset not in held])
        stuck += sorted(held)
        at += 1000
    return stuck, at


@pytest.mark.parametrize("every", [1, 2, 11, 1000])
def test_watermark_memory_is_bounded_behind_stuck_lanes(every: int) -> None:
    mark = Watermark(FRESH)
    stuck, end = stick(mark, 200_000 // every, every)
    assert len(mark._recent) < 4 * watermark_module._RECENT_OFFSETS_MIN
    assert mark.pending == len(stuck)
    assert mark.progress() == PartitionProgress(watermark=0, position=end, pending=OffsetSet.of(stuck))
    left = set(stuck)
    rng = random.Random(every)
    while left:
        gone = set(rng.sample(sorted(left), min(len(left), 40_000))) | {min(left)}
        mark.done(gone)
        left -= gone
        assert mark.value == min(left, default=end)
        assert mark.progress().pending == OffsetSet.of(left)
    assert mark.pending == 0
    assert not mark._stuck


def test_watermark_does_not_take_in_flight_for_stuck() -> None:
    mark = Watermark(FRESH)
    flight: list[int] = []
    for start in range(0, 500_000, 1000):
        mark.deliver(range(start, start + 1000))
        flight += range(start, start + 1000)
        if len(flight) > 30_000:
            mark.done(flight[:1000])
            del flight[:1000]
        assert start < 200_000 or not mark._stuck, "a mistake is not made again"
    assert mark.pending == len(flight)


@pytest.mark.parametrize(("every", "bytes_each"), [(11, 16), (1000, 48)])
def test_stuck_offsets_take_few_bytes(every: int, bytes_each: int) -> None:
    count = 100_000
    mark = Watermark(FRESH)
    tracemalloc.start()
    try:
        for start in range(0, count * every, 1000 * every):
            mark.deliver(range(start, start + 1000 * every, every))
        text = encode(mark.progress())
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert mark.pending == count
    recent = 100 * len(mark._recent)
    assert held - len(text) - recent < bytes_each * count


def test_watermark_restores_stuck_offsets() -> None:
    before = Watermark(FRESH)
    stuck, end = stick(before, 8000, 11)
    mark = Watermark(before.progress())
    offsets = [o for o in range(end // 2) if mark.wanted(o)]
    mark.deliver(offsets)
    mark.done(offsets[::2])
    again = Watermark(mark.progress())  # a crash in the middle of the restore
    assert again.value == offsets[1]
    wanted = [o for o in range(offsets[1], end) if again.wanted(o)]
    assert wanted == [o for o in stuck if o not in set(offsets[::2])]
    for place in range(0, len(wanted), 1000):
        again.deliver(wanted[place : place + 1000])
    again.reach(end)
    assert not again.restoring
    assert again.progress() == PartitionProgress(
        watermark=wanted[0], position=end, pending=OffsetSet.of(wanted)
    )
    assert not again._restored.pending, "what was restored is let go of"


# Blocks and sets of them.

SIZES = st.sampled_from([1, 2, 511, 512, 513, 700, BLOCK_OFFSETS - 1, BLOCK_OFFSETS])


@given(SIZES, st.integers(0, 9), st.integers())
@settings(max_examples=40, deadline=None)
def test_block_equals_a_set(size: int, number: int, seed: int) -> None:
    rng = random.Random(seed)
    base = number * BLOCK_OFFSETS
    model = set(rng.sample(range(base, base + BLOCK_OFFSETS), size))
    block = OffsetBlock.of(number, sorted(model))
    for offset in (*rng.sample(sorted(model), min(size, 5)), base, base + BLOCK_OFFSETS - 1):
        assert block.holds(offset - base) == (offset in model)
    gone = {*rng.sample(sorted(model), rng.choice([0, size // 2, size - 1])), *range(base, base + 9)}
    smaller = block.without([*gone, *gone])
    left = model - gone
    assert (smaller is None) == (not left)
    for held, one in ((model, block), (left, smaller)):
        if one is not None:
            assert [base + low for low in one.lows()] == sorted(held)
            assert (one.count, one.first, one.last) == (len(held), min(held), max(held))
            same = OffsetBlock.of(number, sorted(held))
            assert one == same
            assert hash(one) == hash(same)
            assert (
                (one.bits is None)
                == (same.bits is None)
                == (one.count <= offset_set_module._LIST_OFFSETS_MAX)
            )
    if smaller is not None:
        assert smaller.plus(sorted(gone & model)) == block


@given(
    st.sets(
        st.one_of(
            st.integers(0, 40), st.integers(BLOCK_OFFSETS - 3, BLOCK_OFFSETS + 3), st.integers(0, 2**62)
        ),
        max_size=60,
    ),
    st.one_of(st.integers(0, 50), st.integers(BLOCK_OFFSETS - 4, BLOCK_OFFSETS + 4), st.integers(0, 2**62)),
)
@example(set(range(0, 10_000, 3)), 5000)
@example(set(range(1000)), 1000)
def test_pending_is_a_set(offsets: set[int], at: int) -> None:
    pending = OffsetSet.of(offsets)
    assert list(pending) == sorted(offsets)
    assert len(pending) == len(offsets)
    assert bool(pending) == bool(offsets)
    assert (at in pending) == (at in offsets)
    assert all(offset in pending for offset in offsets)
    assert list(OffsetSet(pending.since(at))) == sorted(o for o in offsets if o >= at)
    same = OffsetSet.of(sorted(offsets, reverse=True))
    assert pending == same
    assert hash(pending) == hash(same)
    assert pending != OffsetSet.of(offsets ^ {at})


def test_pending_is_shown_short() -> None:
    assert repr(OffsetSet.of([3, 1])) == "OffsetSet.of([1, 3])"
    assert repr(OffsetSet.of(range(5, 900_000))) == "<899995 pending from 5 to 899999>"
    assert OffsetSet.of([1]) != (1,)
    assert OffsetBlock.of(0, [1]) != 1
