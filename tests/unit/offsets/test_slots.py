from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.offset_set import OffsetSet
from keylane.offsets.range_progress import (
    Generation,
    RangeProgress,
    RangeSegment,
    RangeWatermark,
    group_watermark,
    inherit,
    level,
    next_version,
    outdated,
)
from keylane.offsets.slots import ALL, SLOTS, Slots, slot_of
from keylane.offsets.watermark import PartitionProgress


def progress(position: int, *pending: int) -> PartitionProgress:
    return PartitionProgress(
        watermark=min(pending, default=position), position=position, pending=OffsetSet.of(pending)
    )


def test_a_keys_slot_is_the_first_two_bytes_of_its_hash() -> None:
    # blake3 of the empty input begins with af 13 49 b9, that of "abc" with 64 37 b3 ac: from its published vectors.
    assert slot_of(b"", 0) == 0x13AF
    assert slot_of(b"abc", 7) == 0x3764


def test_messages_without_a_key_are_spread() -> None:
    slots = [slot_of(None, offset) for offset in range(1000)]
    for first in range(0, SLOTS, SLOTS // 8):
        assert 100 < sum(slot in Slots(first, first + SLOTS // 8 - 1) for slot in slots) < 150


@pytest.mark.parametrize(("first", "last"), [(-1, 5), (5, 4), (0, SLOTS)])
def test_slots_that_there_are_not(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="expected slots between 0 and 65535"):
        Slots(first, last)


stretches = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)).map(
    lambda ends: Slots(min(ends), max(ends))
)


@given(stretches, st.lists(stretches, max_size=5), st.integers(0, SLOTS - 1))
def test_slots_without_others(slots: Slots, others: list[Slots], slot: int) -> None:
    inside = slot in slots and not any(slot in other for other in others)
    assert any(slot in stretch for stretch in slots.without(others)) == inside
    for one, other in pairwise(slots.without(others)):
        assert one.last + 1 < other.first
    assert Slots.parse(str(slots)) == slots


def test_a_range_that_was_cut_out_of_two_has_the_strips_of_both() -> None:
    low, high = Slots(0, 999), Slots(1000, SLOTS - 1)
    range_progresses = [
        RangeProgress(low, 1, (RangeSegment(low, progress(50, 7)),)),
        RangeProgress(high, 1, (RangeSegment(high, progress(30)),)),
    ]
    assert inherit(Slots(500, 2000), range_progresses, progress(0)) == (
        RangeSegment(Slots(500, 999), progress(50, 7), cut=True),
        RangeSegment(Slots(1000, 2000), progress(30)),
    )
    assert group_watermark(range_progresses) == 7
    assert group_watermark(range_progresses[:1]) is None
    assert not outdated(range_progresses)


def test_newer_progress_replaces_covered_slots() -> None:
    old = RangeProgress(ALL, 1, (RangeSegment(ALL, progress(10)),))
    halves = [
        RangeProgress(slots, 2, (RangeSegment(slots, progress(20)),))
        for slots in (Slots(0, 99), Slots(100, SLOTS - 1))
    ]
    assert inherit(ALL, [old, *halves], progress(0)) == (RangeSegment(ALL, progress(20)),)
    assert outdated([old, *halves]) == [old]
    assert outdated([old, halves[0]]) == []
    assert inherit(Slots(50, 150), [old, halves[0]], progress(0)) == (
        RangeSegment(Slots(50, 99), progress(20)),
        RangeSegment(Slots(100, 150), progress(10)),
    )


def test_strips_at_the_same_position_are_one() -> None:
    low, high = Slots(0, 9), Slots(10, SLOTS - 1)
    assert level([RangeSegment(high, progress(50, 20, 30)), RangeSegment(low, progress(50, 7))]) == (
        RangeSegment(ALL, progress(50, 7, 20, 30)),
    )


def test_slots_pending_of_a_cut_segment_may_be_done_elsewhere() -> None:
    """Offset 9 was the upper half's, which has done it since."""
    low, high = Slots(0, 9), Slots(10, SLOTS - 1)
    segments = [RangeSegment(low, progress(50, 7, 9), cut=True), RangeSegment(high, progress(50))]
    assert level(segments) == tuple(segments)


def test_range_progress_round_trips() -> None:
    low, high = Slots(0, 9), Slots(10, SLOTS - 1)
    standing = RangeProgress(
        ALL,
        3,
        (RangeSegment(low, progress(50, 7)), RangeSegment(high, progress(70, 20, 30))),
        generation=Generation(3, 12),
    )
    assert RangeProgress.decode(str(ALL), standing.encode(900_000)) == standing


@dataclass
class Sent:
    """A record, as much of it as a mark looks at."""

    at: int
    name: bytes | None

    def key(self) -> bytes | None:
        return self.name

    def offset(self) -> int:
        return self.at


def cut(rng: random.Random) -> list[Slots]:
    edges = sorted({0, *(rng.randrange(1, SLOTS) for _ in range(rng.randrange(4)))})
    return [Slots(one, other - 1) for one, other in pairwise([*edges, SLOTS])]


@pytest.mark.parametrize("seed", range(60))
def test_slots_recut_repeatedly_lose_nothing(
    seed: int,
) -> None:
    """Owners that read at their own pace, finish in any order, and record progress at intervals; some crash."""
    rng = random.Random(seed)
    log = [
        Sent(at, None if rng.random() < 0.1 else b"k%d" % rng.randrange(30))
        for at in range(400)
        if rng.random() < 0.9
    ]
    ran: dict[int, int] = dict.fromkeys((sent.at for sent in log), 0)
    unwritten: dict[int, int] = dict.fromkeys(ran, 0)
    range_progresses: dict[Slots, RangeProgress] = {}
    for epoch in range(30):
        for slots in cut(rng):
            segments = inherit(slots, range_progresses.values(), progress(0))
            version = next_version(slots, range_progresses.values())
            mark = RangeWatermark(slots, segments)
            held: list[int] = []
            since: list[int] = []
            at = min(segment.progress.watermark for segment in segments)
            whole = epoch > 25
            left = 0 if whole else rng.choice([0, 3])
            for _ in range(100 if whole else rng.randrange(12)):
                end = at + rng.randrange(1, 40)
                batch = [sent for sent in log if at <= sent.at < end]
                at = batch[-1].at + 1 if batch else at
                own = mark.own(batch)  # type: ignore[arg-type]
                assert all(slot_of(sent.key(), sent.offset()) in slots for sent in own)
                if fresh := [s.offset() for s in own if not mark.restoring or mark.wanted(s.offset())]:
                    mark.deliver(fresh)
                    held += fresh
                mark.reach(at)
                rng.shuffle(held)
                done, held = held[left:], held[:left]
                for offset in done:
                    ran[offset] += 1
                    assert ran[offset] <= 1 + unwritten[offset], f"{offset} was done, and written down"
                since += done
                mark.done(done)
                if whole or rng.random() < 0.5:
                    range_progresses[slots] = RangeProgress(slots, version, mark.segments())
                    since = []
            for offset in since:
                unwritten[offset] += 1
        for standing in outdated(range_progresses.values()):
            if rng.random() < 0.5:
                del range_progresses[standing.slots]
        known = group_watermark(range_progresses.values())
        if known is not None:
            assert all(ran[offset] for offset in ran if offset < known)
    assert all(ran.values())
    assert group_watermark(range_progresses.values()) == log[-1].at + 1
